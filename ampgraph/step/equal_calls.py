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


def merge_equal_calls(graph: fx.Graph) -> None:
    """Lets the first of equal calls serve the readers of the others.

    Calls that draw random numbers stay. So do calls that read or return memory which the graph writes, and
    those that return memory which leaves the graph: its owner may write it. The nodes need their fake tensors
    in ``meta["val"]``.
    """
    written = _memory(argument for node in graph.nodes for argument in _may_be_written(node))
    kept = written | _memory(graph.output_node().all_input_nodes)
    first: dict[Hashable, fx.Node] = {}
    for node in graph.nodes:
        if not _is_function(node) or not written.isdisjoint(_memory(node.all_input_nodes)):
            continue
        same = first.setdefault(_call(node), node)
        if same is not node and kept.isdisjoint(_memory((same, node))):
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _may_be_written(node: fx.Node) -> list[fx.Node]:
    """Returns what a call writes; of a call without a schema (a Triton kernel), all that it reads."""
    if node.op in ("placeholder", "get_attr", "output") or node.target is getitem:
        return []
    return written_by(node) if isinstance(node.target, OpOverload) else node.all_input_nodes


def _is_function(node: fx.Node) -> bool:
    """Whether a call is ATen's, and equal arguments give equal results."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _memory(nodes: Iterable[fx.Node]) -> set[int | None]:
    values = (value for node in nodes for value in tree_leaves(node.meta.get("val")))
    return {storage_key(value) for value in values if isinstance(value, Tensor)}


def _call(node: fx.Node) -> Hashable:
    """Returns the op with its arguments; ``1`` and ``1.0`` differ."""
    return node.target, repr(node.args), repr(sorted(node.kwargs.items()))
