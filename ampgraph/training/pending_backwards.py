"""`PendingBackwards`: the compiled calls of one model whose backward has yet to read what the forward saved.

Autograd frees what a node has saved when the node's backward has run, unless ``retain_graph`` keeps it.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from .._compat import has_freed, is_compiling

# So many nodes of autograd may stand between an output and its compiled graph.
_NEAR = 5


class PendingBackwards:
    """Nodes of autograd, each of which is the whole backward of a compiled graph."""

    def __init__(self) -> None:
        self._nodes: set[weakref.ref[BackwardCFunction]] = set()

    def note_outputs(self, outputs: Any) -> None:
        """Follows the backward of a compiled call, by its outputs."""
        for node in () if is_compiling() else compiled_nodes(outputs):
            self._nodes.add(weakref.ref(node, self._nodes.discard))

    def are_there(self) -> bool:
        """Whether the backward of a call may still run."""
        for reference in self._nodes.copy():
            node = reference()
            if node is not None and not has_freed(node):
                return True
            self._nodes.discard(reference)
        return False


def compiled_nodes(outputs: Any) -> list[BackwardCFunction]:
    """Returns the nodes of the compiled graphs that made some outputs."""
    found = [_compiled_node(t.grad_fn) for t in tree_leaves(outputs) if isinstance(t, Tensor)]
    return [*{id(node): node for node in found if node is not None}.values()]


def _compiled_node(node: Any) -> Any:
    """Returns the node of the compiled graph that made a tensor; None if it is not within `_NEAR` nodes.

    An output that is a view of an argument, which the graph has written, has nodes of autograd before it.
    """
    for _ in range(_NEAR):
        if node is None or isinstance(node, BackwardCFunction):
            return node
        node = node.next_functions[-1][0] if node.next_functions else None
    return None
