"""Chooses the dtype of every free node so that the fewest bytes move: an exact minimum cut.

`cut_network` builds the vertices, arcs and choices. `CutNetwork` cuts, and `Search` decides the few choices
that a cut leaves open. `place_within` respects a bound on cast bytes. This file selects the objective and
freezes the result into a `Plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch.fx import GraphModule

from ampgraph.marks import CastMark, mark_of
from ampgraph.plan import Cost
from ampgraph.policy.policy import Policy

from .analysis.precision import FP32
from .analysis.problem import Problem
from .base import Pass, workspace
from .placement.build_network import Weigher
from .placement.build_plan import build_plan
from .placement.cost_model import FP32_BYTES, scale_above_traffic
from .placement.labelling import (
    Placement,
    autocast_rule,
    place_low,
    place_optimally,
    with_wide_norms,
    without_idle_casts,
)
from .placement.step_cost import StepCost
from .placement.within import place_within

# The estimate of fused bytes errs by about half a percent; below that the autocast rule stays.
CERTAIN = 0.995


@dataclass(frozen=True)
class PlaceCasts(Pass):
    """Solves the placement and freezes the `Plan`.

    Attributes:
        policy: Placement strategy and objective.
    """

    policy: Policy
    name: ClassVar[str] = "place"
    edits: ClassVar[bool] = False

    def run(self, graph_module: GraphModule) -> bool:
        space = workspace(graph_module)
        problem = space.problem
        assert problem is not None
        costs, autocast = StepCost(problem), autocast_rule(problem)
        baseline = costs.complete(autocast, shared=False)
        baselines = {"fp32": _fp32_cost(problem, costs), "autocast": baseline}
        placement = place(problem, self.policy, costs, autocast)
        cost = costs.complete(placement)
        space.plan = build_plan(problem, placement, costs.demands(placement), cost, baselines)
        space.costs, space.placement = costs, placement
        return False


def place(
    problem: Problem, policy: Policy, costs: StepCost | None = None, autocast: Placement | None = None
) -> Placement:
    """Labels a problem by the policy's strategy and objective.

    Args:
        problem: The pinned graph.
        policy: The policy.
        costs: Its costs, where they are known.
        autocast: What the autocast rule gives, where it is known.
    """
    costs, autocast = costs or StepCost(problem), autocast or autocast_rule(problem)
    if policy.placement == "autocast":
        return autocast
    if policy.objective == "fused":
        return _place_fused(problem, costs, autocast)
    if policy.objective in ("auto", "traffic"):
        baseline = costs.eager(autocast, shared=False)
        bound = baseline.activation_cast_bytes - _cast_before(problem)
        return _within_step(costs, place_within(problem, bound), autocast, baseline)
    return _place_few(problem, policy.objective)


def _place_fused(problem: Problem, costs: StepCost, autocast: Placement) -> Placement:
    """Labels every free node low if that moves fewer bytes in fused kernels, else as the autocast rule does.

    Casts inside fused kernels are free, so that low operands can only make kernels move less; except that a
    float32 kernel may have to materialise a second copy. The estimate decides that.
    """
    low = place_low(problem)
    least = CERTAIN * costs.fused(autocast.labels).moved
    chosen = low if costs.fused(low.labels).moved < least else autocast
    chosen = without_idle_casts(problem, costs.kernels, costs.decides_bytes, chosen)
    return with_wide_norms(problem, costs.kernels, chosen)


def _within_step(costs: StepCost, placement: Placement, autocast: Placement, baseline: Cost) -> Placement:
    """Returns the placement unless its forward and backward move more bytes than those of the autocast rule.

    To save casts in the forward it may leave values float32, whose gradients then are float32 too.
    """
    found = costs.eager(placement)
    is_more = found.traffic + found.backward > baseline.traffic + baseline.backward
    return autocast if is_more else placement


def _cast_before(problem: Problem) -> int:
    """Returns the activation bytes of ampgraph's casts in a graph that it rewrote before.

    The bound covers all inserted casts, so a second rewrite must count the casts of the first.
    """
    casts = (mark_of(node, CastMark) for node in problem.facts)
    return sum(cast.bytes for cast in casts if cast is not None and not cast.is_parameter)


def _place_few(problem: Problem, objective: str) -> Placement:
    """Minimises ``"cast_bytes"`` or ``"casts"``, ties broken by traffic; the gap is in bytes."""
    placement = place_optimally(problem, _weigher(problem, objective))
    if placement.optimal:
        return placement
    # The gap counts bytes of the objective; the quality of a tie-break does not matter.
    above = -(-(placement.gap or 0) // scale_above_traffic(problem))
    return replace(placement, gap=above if objective == "cast_bytes" else None)


def _weigher(problem: Problem, objective: str) -> Weigher:
    """Returns the number to minimise for ``"cast_bytes"`` or ``"casts"``, ties broken by traffic."""
    scale = scale_above_traffic(problem)
    if objective == "cast_bytes":
        return lambda cost: cost.cast_bytes * scale + cost.traffic
    return lambda cost: cost.casts * scale + cost.traffic


def _fp32_cost(problem: Problem, costs: StepCost) -> Cost:
    """Returns the cost if everything were float32, and so without casts; also what is low in the source."""
    cost = costs.complete(Placement(dict.fromkeys(problem.variables, FP32), {}))
    traffic = FP32_BYTES * sum(problem.moved.values())
    return replace(cost, traffic=traffic, cast_bytes=0, casts=0, activation_cast_bytes=0, activation_casts=0)
