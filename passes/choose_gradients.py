"""Chooses the matrix products whose kernels give the gradients of weights in float32."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from ampgraph._compat import size_hint
from ampgraph.ops.kernels import writes_wide_products
from ampgraph.plan import Cast, Plan
from ampgraph.policy.policy import Policy

from .analysis.facts import element_count
from .analysis.grad_modes import without_gradients
from .analysis.weight_products import WeightProduct, weight_product_at
from .base import Pass, workspace
from .placement.fused_kernels import FusedKernels

# A kernel writes 4 bytes an element. Otherwise it writes 2, and a cast reads 2 and writes 4.
SAVED_BYTES = 4
# Libraries read rows of this many bytes fast. Inductor pads others, which it does not do for these products.
ALIGNMENT = 16
# In eager mode such a product takes the host about 30 microseconds more. Kernels of this many multiplications
# run longer than that (2**35: 50 microseconds on an H200 at 700 TFLOP/s, three kernels a step).
EAGER_MULTIPLICATIONS = 2**35


@dataclass(frozen=True)
class ChooseGradients(Pass):
    """Adds the products to the `Plan`, with their reasons and the cost of the step with them.

    Only kernels for CUDA write float32 for low factors. A sum with another gradient of the weight reads less
    of a low gradient. So does a loss scale in a compiled graph, where one kernel unscales and casts.

    Attributes:
        policy: Its objective, its loss scale, and whether it allows this.
    """

    policy: Policy
    name: ClassVar[str] = "choose_gradients"
    edits: ClassVar[bool] = False

    def run(self, graph_module: GraphModule) -> bool:
        if not self.policy.widens_gradients:
            return False
        space = workspace(graph_module)
        plan, costs = space.plan, space.costs
        assert plan is not None
        assert costs is not None
        found = _products(graph_module, plan, costs.kernels)
        if not self.policy.is_for_fused_kernels:
            found = [product for product in found if _multiplications(product) >= EAGER_MULTIPLICATIONS]
        if found:
            less = SAVED_BYTES * sum(costs.kernels.sizes[product.weight] for product in found)
            names = tuple(product.output.name for product in found)
            decisions = plan.explained(names, "its kernel gives the gradient of the weight in float32")
            cost = plan.cost
            cost = replace(cost, backward=cost.backward - less, fused_backward=cost.fused_backward - less)
            space.plan = replace(plan, cost=cost, decisions=decisions, wide_gradients=names)
        return False


def _products(graph_module: GraphModule, plan: Plan, kernels: FusedKernels) -> list[WeightProduct]:
    without = without_gradients(graph_module.graph).keys()
    casts = {cast.tensor: cast for cast in plan.casts if cast.is_parameter and cast.dst == plan.low_dtype}
    found = (weight_product_at(node) for node in graph_module.graph.nodes)
    return [p for p in found if p and _is_chosen(p, casts, kernels, without)]


def _is_chosen(
    product: WeightProduct, casts: dict[str, Cast], kernels: FusedKernels, without: Set[Node]
) -> bool:
    weight, cast = product.weight, casts.get(product.weight.name)
    if cast is None or len(weight.users) != 1 or weight.op == "call_function":
        return False
    if not kernels.has_gradient[weight] or product.output in without:
        return False
    return writes_wide_products(weight.meta["val"].device) and _is_aligned(weight, cast.dst)


def _is_aligned(weight: Node, low_dtype: torch.dtype) -> bool:
    elements = ALIGNMENT // low_dtype.itemsize
    return all(isinstance(size, int) and size % elements == 0 for size in weight.meta["val"].shape)


def _multiplications(product: WeightProduct) -> int:
    return element_count(product.output.meta["val"]) * size_hint(product.size)
