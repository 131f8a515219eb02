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

from .analysis.problem import Problem
from .base import Pass, workspace
from .placement.build_network import Weigher
from .placement.build_plan import build_plan
from .placement.cost_model import FP32_BYTES, cost_of, node_terms, scale_above_traffic
from .placement.labelling import Placement, autocast_rule, place_optimally
from .placement.within import place_within


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
        autocast = autocast_rule(problem)
        baseline = cost_of(problem, autocast.labels, autocast.anchors, shared=False)
        baselines = {"fp32": _fp32_cost(problem), "autocast": baseline}
        if self.policy.placement == "autocast":
            placement = autocast
        elif self.policy.objective == "traffic":
            placement = place_within(problem, baseline.activation_cast_bytes - _cast_before(problem))
        else:
            placement = _place_few(problem, self.policy.objective)
        space.plan = build_plan(problem, placement.labels, placement.anchors, baselines, placement.gap)
        return False


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


def _fp32_cost(problem: Problem) -> Cost:
    traffic = sum(FP32_BYTES * e for n in problem.facts for _, e in node_terms(problem, n))
    return Cost(traffic=traffic)
