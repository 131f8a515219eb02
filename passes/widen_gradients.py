"""Makes the kernels of matrix products give the gradients of weights in float32, instead of a cast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from ampgraph._compat import FakeTensorMode, evaluate, fake_mode_of
from ampgraph.marks import drop_mark
from ampgraph.training.weight_gradient import weight_gradient

from .analysis.weight_products import WeightProduct, weight_product_at
from .base import Pass
from .insert_casts import inherit_metadata, is_inserted_cast

aten = torch.ops.aten


@dataclass(frozen=True)
class WidenGradients(Pass):
    """Computes each product without gradients, and passes the result through its gradient alone.

    Attributes:
        names: The nodes that return the products; those whose weight is no cast parameter any more stay.
    """

    names: tuple[str, ...]
    name: ClassVar[str] = "widen_gradients"

    def run(self, graph_module: GraphModule) -> bool:
        graph = graph_module.graph
        products = [p for node in graph.nodes if node.name in self.names and (p := weight_product_at(node))]
        found = [p for p in products if is_inserted_cast(p.weight) and len(p.weight.users) == 1]
        mode = fake_mode_of(graph)
        for product in found:
            _widen(graph, product, mode)
        return bool(found)


def _widen(graph: Graph, product: WeightProduct, mode: FakeTensorMode | None) -> None:
    output, low = product.output, product.weight

    def call(target: Any, *args: Any) -> Node:
        with graph.inserting_before(output):
            node = graph.call_function(target, args)
        node.meta["val"] = evaluate(node, mode)
        inherit_metadata(node, output)
        return node

    read = {node: call(aten.detach.default, node) for node in output.all_input_nodes}
    # The backward saves the rows that the product reads: flattening them again could be another copy.
    flat = call(aten.reshape.default, read[product.rows], [-1, product.size])
    read[product.rows] = flat
    with graph.inserting_before(output):
        result = graph.node_copy(output, read.__getitem__)
    drop_mark(result)
    result.meta["val"] = evaluate(result, mode)
    output.target = weight_gradient
    output.args = (product.rows, low.args[0], product.bias, result, flat, read[low], product.is_transposed)
    output.kwargs = {}
