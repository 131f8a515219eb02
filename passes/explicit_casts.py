"""Writes conversions inside kernels as casts, for runtimes whose operators take operands of one dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from ampgraph._compat import OpOverload
from ampgraph.ops import kernels
from ampgraph.plan import Cast, Use

from .analysis.alias import written_args
from .analysis.arguments import argument, tensor_arguments
from .analysis.facts import element_count, is_cast
from .base import Pass
from .insert_casts import after, insert_cast, is_inserted_cast, refresh_metadata, set_argument
from .placement.cost_model import CAST_BYTES


@dataclass(frozen=True)
class ExplicitCasts(Pass):
    """Casts the operands of every op that reads both dtypes, or widens by a ``dtype`` argument, to float32.

    Such ops (additions of both widths, a softmax in float32 of low values, a norm with float32 weights)
    already compute in float32, so values do not change. A low result is cast back. Ops that return several
    tensors, or write into a low one, do not change.

    Attributes:
        low_dtype: The low dtype.
    """

    low_dtype: torch.dtype
    name: ClassVar[str] = "explicit_casts"

    def run(self, graph_module: GraphModule) -> bool:
        graph = graph_module.graph
        wide: dict[Node, Node] = {}
        edited: list[Node] = []
        for node in list(graph.nodes):
            if not self._converts(node):
                continue
            for path, tensor in self._low_operands(node):
                if tensor not in wide:
                    wide[tensor] = self._cast(graph, tensor, torch.float32, after(graph, tensor), node)
                set_argument(node, path, wide[tensor])
            edited += [node, *(wide[t] for t in node.all_input_nodes if t in wide)]
            if node.meta["val"].dtype == self.low_dtype:
                edited.append(self._narrow(graph, node))
        refresh_metadata(graph, [*edited, *wide.values()])
        return bool(edited)

    def _converts(self, node: Node) -> bool:
        if not isinstance(node.target, OpOverload) or is_cast(node) or not _yields_one_tensor(node):
            return False
        low = self._low_operands(node)
        if not low or any(tensor in written_args(node) for _, tensor in low):
            return False
        name = kernels.dtype_arg(node.target)
        by_argument = name is not None and argument(node, name) == torch.float32
        return by_argument or any(self._is(t, torch.float32) for _, t in tensor_arguments(node))

    def _low_operands(self, node: Node) -> list[tuple[tuple[int | str, ...], Node]]:
        return [(path, t) for path, t in tensor_arguments(node) if self._is(t, self.low_dtype)]

    def _is(self, node: Node, dtype: torch.dtype) -> bool:
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and value.dtype == dtype and value.dim() > 0

    def _narrow(self, graph: Graph, node: Node) -> Node:
        users = list(node.users)
        cast = self._cast(graph, node, self.low_dtype, node.next, node)
        cast.meta["val"] = node.meta["val"]
        for user in users:
            user.replace_input_with(node, cast)
        return cast

    def _cast(self, graph: Graph, tensor: Node, dtype: torch.dtype, before: Node, user: Node) -> Node:
        source = tensor.meta["val"].dtype if dtype == torch.float32 else torch.float32
        moved = CAST_BYTES * element_count(tensor.meta["val"])
        uses = (Use(user.name, ()),)
        reason = f"{user.name} converts by itself"
        cast = Cast(tensor.name, source, dtype, uses, moved, False, reason)
        return insert_cast(graph, tensor, cast, before, user, self.name)


def _yields_one_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) and not is_inserted_cast(node)
