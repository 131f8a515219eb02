"""Merges equal calls in the graph of a step that a compiler takes.

AOTAutograd merges equal calls where it splits forward and backward. It does not look at a graph that holds
both, and a cast that both need would write its result twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from operator import getitem

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from .._compat import OpOverload, storage_key
from ..runtime.run_graph import written_by
from .fewer_calls import VIEWS

_CASTS = (torch.ops.aten._to_copy.default,)


def merge_equal_calls(graph: fx.Graph) -> None:
    """Lets the first of equal casts, views and elementwise calls serve the readers of the others.

    Calls that read or return memory which the graph writes stay, and those whose result leaves the graph. The
    nodes need their fake tensors in ``meta["val"]``.
    """
    written = _memory(argument for node in graph.nodes for argument in _may_be_written(node))
    first: dict[Hashable, fx.Node] = {}
    for node in graph.nodes:
        if not _is_function(node) or not written.isdisjoint(_memory((node, *node.all_input_nodes))):
            continue
        same = first.setdefault(_call(node), node)
        if same is not node and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _may_be_written(node: fx.Node) -> list[fx.Node]:
    """Returns what a call writes; of a call without a schema (a Triton kernel), all that it reads."""
    if node.op in ("placeholder", "get_attr", "output") or node.target is getitem:
        return []
    return written_by(node) if isinstance(node.target, OpOverload) else node.all_input_nodes


def _is_function(node: fx.Node) -> bool:
    """Whether a call is one of the kinds to merge, and equal arguments give equal results."""
    target = node.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    is_elementwise = torch.Tag.pointwise in target.tags
    return (is_elementwise and torch.Tag.nondeterministic_seeded not in target.tags) or (
        target in VIEWS or target in _CASTS
    )


def _memory(nodes: Iterable[fx.Node]) -> set[int | None]:
    values = (value for node in nodes for value in tree_leaves(node.meta.get("val")))
    return {storage_key(value) for value in values if isinstance(value, Tensor)}


def _call(node: fx.Node) -> Hashable:
    """Returns the op with its arguments; ``1`` and ``1.0`` differ."""
    return node.target, repr(node.args), repr(sorted(node.kwargs.items()))
