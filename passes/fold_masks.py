"""Replaces masks of attention that are the same in each call by what kernels know without reading a mask.

Models leave such masks out when they run eagerly, and make them in a capture, where they cannot look at
values: transformers tells by the position ids whether several sequences are packed into one. Kernels skip the
hidden half of the scores only for ``is_causal``.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ampgraph._compat import OpOverload
from ampgraph.ops import kernels

from .analysis.alias import written_memory
from .analysis.arguments import argument
from .analysis.constants import computed, constant_nodes, expression_of
from .base import Pass
from .insert_casts import set_named_argument

# What a mask hides.
_Kind = Literal["nothing", "the future"]
# A smaller number that is added to a score makes the probability zero: float32's least number, -inf.
_HIDES = -1e30


@dataclass(frozen=True)
class FoldMasks(Pass):
    """Drops constant masks that hide nothing; ``is_causal`` replaces those that hide the future."""

    name: ClassVar[str] = "fold_masks"

    def run(self, graph_module: GraphModule) -> bool:
        masked = {n: mask for n in graph_module.graph.nodes if isinstance(mask := _mask(n), Node)}
        kinds = _kinds(graph_module.graph, [*masked.values()])
        folded = [node for node, mask in masked.items() if mask in kinds and _can_fold(node, kinds[mask])]
        for node in folded:
            set_named_argument(node, "attn_mask", None)
            if kinds[masked[node]] == "the future":
                set_named_argument(node, "is_causal", True)
        _erase_unread([masked[node] for node in folded])
        return bool(folded)


def _mask(node: Node) -> object:
    """Returns the mask of a call of attention that can do without one."""
    if not isinstance(node.target, OpOverload) or not kernels.has_causal_flag(node.target):
        return None
    return None if argument(node, "is_causal") else argument(node, "attn_mask")


def _can_fold(node: Node, kind: _Kind) -> bool:
    """Whether a call can do without a mask of this kind.

    Kernels hide the future by -inf, which some of them add before they scale: 0 and negative factors give
    NaN there.
    """
    scale = argument(node, "scale")
    return kind == "nothing" or scale is None or (isinstance(scale, (int, float)) and scale > 0)


def _kinds(graph: Graph, masks: list[Node]) -> dict[Node, _Kind]:
    """Returns what the masks hide, if that is known."""
    written = written_memory(graph) if masks else ()
    kinds: dict[Hashable, _Kind | None] = {}  # layers that make a mask each make equal ones
    found: dict[Node, _Kind] = {}
    for mask in dict.fromkeys(masks):
        if not (needed := constant_nodes(mask, written)):
            continue
        expression = expression_of(needed)
        if expression not in kinds:
            value = computed(needed)
            kinds[expression] = None if value is None else _kind(value)
        if (kind := kinds[expression]) is not None:
            found[mask] = kind
    return found


def _kind(mask: Tensor) -> _Kind | None:
    """Returns what a mask hides; ``is_causal`` is the lower triangle of a square."""
    if mask.dtype == torch.bool:
        seen = mask
    elif bool(((mask == 0) | (mask < _HIDES)).all()):
        seen = mask == 0
    else:
        return None
    if bool(seen.all()):
        return "nothing"
    if seen.dim() < 2 or seen.shape[-1] != seen.shape[-2]:
        return None
    past = torch.ones(seen.shape[-2:], dtype=torch.bool, device=seen.device).tril()
    return "the future" if torch.equal(seen, past.expand_as(seen)) else None


def _erase_unread(waiting: list[Node]) -> None:
    """Erases nodes that nobody reads any more, and what only they read."""
    erased: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node.users or node in erased:
            continue
        waiting += node.all_input_nodes
        node.graph.erase_node(node)
        erased.add(node)
