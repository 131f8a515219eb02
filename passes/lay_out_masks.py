"""Lays out the masks of attention as kernels for GPUs want them.

Those kernels read rows of a mask whose elements lie next to each other. For an expanded or transposed mask
torch takes the formula in place of a kernel, and writes all scores to memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from ampgraph._compat import OpOverload, evaluate, fake_mode_of
from ampgraph.ops import kernels

from .analysis.alias import written_memory
from .analysis.arguments import argument
from .analysis.facts import is_dense
from .base import Pass
from .insert_casts import after, inherit_metadata, set_named_argument

aten = torch.ops.aten


@dataclass(frozen=True)
class LayOutMasks(Pass):
    """Copies masks whose rows are not contiguous: once, or before each reader if the mask is written."""

    name: ClassVar[str] = "lay_out_masks"

    def run(self, graph_module: GraphModule) -> bool:
        graph = graph_module.graph
        written, copies = written_memory(graph), dict[Node, Node]()
        for node in list(graph.nodes):
            for slot in _mask_slots(node):
                mask = argument(node, slot)
                if not isinstance(mask, Node) or not _is_read_by_formula(mask):
                    continue
                if mask in written:  # each reader needs the values of its time
                    copies[mask] = _copied(graph, mask, node)
                elif mask not in copies:
                    copies[mask] = _copied(graph, mask, after(graph, mask))
                set_named_argument(node, slot, copies[mask])
        return bool(copies)


def _mask_slots(node: Node) -> tuple[str, ...]:
    return kernels.mask_slots(node.target) if isinstance(node.target, OpOverload) else ()


def _is_read_by_formula(mask: Node) -> bool:
    value = mask.meta.get("val")
    if not isinstance(value, torch.Tensor) or not is_dense(value) or not value.dim():
        return False
    stride = value.stride(-1)
    return kernels.wants_contiguous_rows(value.device) and isinstance(stride, int) and stride != 1


def _copied(graph: Graph, mask: Node, before: Node) -> Node:
    with graph.inserting_before(before):
        node = graph.call_function(aten.contiguous.default, (mask,))
    inherit_metadata(node, mask)
    node.meta["val"] = evaluate(node, fake_mode_of(graph))
    return node
