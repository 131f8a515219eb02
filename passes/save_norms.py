"""Makes the backward of norms read their normalized values in the low dtype, instead of float32 values."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from ampgraph._compat import evaluate, fake_mode_of
from ampgraph.marks import drop_mark
from ampgraph.training.norm_gradient import norm_gradient

from .analysis.arguments import argument
from .analysis.norms import Norm, norm_at
from .base import Pass
from .insert_casts import inherit_metadata

aten = torch.ops.aten


@dataclass(frozen=True)
class SaveNorms(Pass):
    """Computes each norm without gradients, and passes the result through its gradient alone.

    The forward runs the ops that it had, so its values do not change.

    Attributes:
        names: The nodes that return the norms' results; those that are no norms any more stay.
        low_dtype: The dtype of the saved values.
    """

    names: tuple[str, ...]
    low_dtype: torch.dtype
    name: ClassVar[str] = "save_norms"

    def run(self, graph_module: GraphModule) -> bool:
        graph = graph_module.graph
        found = [norm for node in graph.nodes if node.name in self.names and (norm := norm_at(node))]
        for norm in found:
            _Edit(graph, norm).run(self.low_dtype)
        return bool(found)


class _Edit:
    """The edit of one norm."""

    def __init__(self, graph: Graph, norm: Norm) -> None:
        self.graph, self.norm = graph, norm
        self.mode = fake_mode_of(graph)

    def run(self, low_dtype: torch.dtype) -> None:
        norm, output = self.norm, self.norm.output
        with self.graph.inserting_before((*norm.inside, output)[0]):
            x = self._call(aten.detach.default, norm.x)
        with self.graph.inserting_before(output):
            weight, bias = (n and self._call(aten.detach.default, n) for n in (norm.weight, norm.bias))
            result, normalized, inverse = self._computed(x, weight, bias)
            tensors = self._distinct(norm.x, norm.weight, norm.bias, result, normalized, inverse)
        output.args = (*tensors, norm.dims, norm.is_centered, low_dtype)
        output.target = norm_gradient
        output.kwargs = {}

    def _distinct(self, *nodes: Node | None) -> list[Node | None]:
        """Returns the nodes, with aliases for those that occurred before: Dynamo takes each tensor once."""
        return [
            self._call(aten.alias.default, node) if node is not None and node in nodes[:i] else node
            for i, node in enumerate(nodes)
        ]

    def _computed(self, x: Node, weight: Node | None, bias: Node | None) -> tuple[Node, Node, Node]:
        """Returns the result, the normalized values and 1/deviation, all without gradients."""
        output = self.norm.output
        if self.norm.inverse is not None:
            return self._written_out(x, weight)
        shape, eps = (argument(output, name) for name in ("normalized_shape", "eps"))
        if self.norm.is_centered:
            eps = 1e-5 if eps is None else eps
            norm = self._call(aten.native_layer_norm.default, x, shape, weight, bias, eps)
            result, mean, inverse = (self._call(operator.getitem, norm, i) for i in range(3))
            shifted = self._call(aten.sub.Tensor, x, mean)
            return result, self._call(aten.mul.Tensor, shifted, inverse), inverse
        result = self._call(aten.rms_norm.default, x, shape, weight, eps)
        # The ops of RMS norm itself, so that a compiler computes them once.
        square = self._call(aten.pow.Tensor_Scalar, x, 2)
        mean = self._call(aten.mean.dim, square, [-1 - i for i in range(self.norm.dims)], True)
        above = self._call(aten.add.Scalar, mean, torch.finfo(torch.float32).eps if eps is None else eps)
        inverse = self._call(aten.rsqrt.default, above)
        return result, self._call(aten.mul.Tensor, x, inverse), inverse

    def _written_out(self, x: Node, weight: Node | None) -> tuple[Node, Node, Node]:
        norm = self.norm
        assert norm.inverse is not None
        result = self.graph.node_copy(norm.output)
        drop_mark(result)
        for node in (*norm.inside, result):
            node.replace_input_with(norm.x, x)
        if norm.weight is not None and weight is not None:
            result.replace_input_with(norm.weight, weight)
        return result, norm.normalized or result, norm.inverse

    def _call(self, target: Any, *args: Any) -> Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = evaluate(node, self.mode)
        inherit_metadata(node, self.norm.output)
        return node
