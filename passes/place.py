"""Chooses the dtype of every free node so that the fewest bytes move: an exact minimum cut.

`cut_network` says what becomes a vertex, an arc and a choice, `CutNetwork` cuts, and `Search` decides the
few choices that a cut leaves open. Here the objective is chosen and the result frozen into a `Plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from ampgraph.oplists import OpClass
from ampgraph.plan import META_KEY, Cost
from ampgraph.policy import Policy

from .base import Pass, workspace
from .branch import Search
from .build_plan import build_plan
from .costs import (
    CAST_BYTES,
    FP32_BYTES,
    cost_of,
    greedy_anchors,
    needs_anchor,
    node_terms,
    promoted_operands,
)
from .cut_network import Weigher, cut_network
from .insert_casts import is_inserted_cast
from .propagate import Problem

# Table entries that may be spent on proving a minimum where ops lack anchors.
MAX_WORK = 200_000


@dataclass(frozen=True)
class Placement:
    """A labelling, its anchors, and whether it is proven minimal."""

    labels: dict[Node, bool]
    anchors: dict[Node, Node]
    optimal: bool = True


@dataclass(frozen=True)
class PlaceCasts(Pass):
    """Solves the placement and freezes the `Plan`.

    Attributes:
        policy: Placement strategy and objective.
        low_dtype: The policy's low dtype.
    """

    policy: Policy
    low_dtype: torch.dtype
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
            placement = place_optimally(problem, _weigher(problem, self.policy.objective))
        space.plan = build_plan(problem, placement.labels, placement.anchors, baselines, placement.optimal)
        return False


def autocast_rule(problem: Problem) -> Placement:
    """Labels the graph as ``torch.autocast`` does: lists decide, the rest runs low if all its inputs are."""
    labels: dict[Node, bool] = {}
    for node, variable in problem.variables.items():
        if variable.pinned is not None:
            labels[node] = variable.pinned
        elif problem.facts[node].op_class is OpClass.BLACK:
            labels[node] = False
        else:
            slots = [s for s in problem.facts[node].slots if s.follow]
            labels[node] = all(labels[problem.facts[s.tensor].owner] for s in slots)
    return Placement(labels, greedy_anchors(problem, labels), optimal=False)


def _cast_before(problem: Problem) -> int:
    """Returns the activation bytes that ampgraph's own casts move already, in a graph that it rewrote before.

    The bound is for all that it inserts: rewriting again must not spend it once more.
    """
    casts = [node.meta[META_KEY] for node in problem.facts if is_inserted_cast(node)]
    return sum(cast["bytes"] for cast in casts if not cast["is_parameter"])


def place_within(problem: Problem, cast_bytes: int) -> Placement:
    """Returns a labelling of little traffic that casts no more activation bytes than it may.

    A cut minimises traffic plus a price for every cast byte, so it finds the corners of the lower convex
    hull of all (cast bytes, traffic). The two ends come first; then each price is the slope between the
    last corner above the bound and the last below, until no corner lies between them. The corner of least
    traffic within the bound is returned; one right on the bound is the least of all (Lagrangian duality).

    Args:
        problem: The pinned graph.
        cast_bytes: The bound. Where none meets it, the labelling of fewest cast bytes is returned.
    """
    over = _corner(problem, 1, 0)
    if over.cast_bytes <= cast_bytes:
        return over.placement
    within = _corner(problem, 1, _scale(problem))
    while within.cast_bytes < cast_bytes:
        run, rise = over.cast_bytes - within.cast_bytes, within.traffic - over.traffic
        between = _corner(problem, run, rise)
        if run * between.traffic + rise * between.cast_bytes >= run * over.traffic + rise * over.cast_bytes:
            break
        if between.cast_bytes <= cast_bytes:
            within = between
        else:
            over = between
    return within.placement


@dataclass(frozen=True)
class _Corner:
    """A placement and what it costs."""

    placement: Placement
    traffic: int
    cast_bytes: int


def _corner(problem: Problem, traffic: int, cast_bytes: int) -> _Corner:
    """Returns a placement of least weight; the weights of a byte of either kind are given."""
    placement = place_optimally(
        problem, lambda cost: traffic * cost.traffic + cast_bytes * cost.activation_cast_bytes
    )
    cost = cost_of(problem, placement.labels, placement.anchors)
    return _Corner(placement, cost.traffic, cost.activation_cast_bytes)


def place_optimally(problem: Problem, weigh: Weigher) -> Placement:
    """Returns a labelling of least weight.

    Args:
        problem: The pinned graph.
        weigh: The number to minimise, linear in the fields of `Cost`.
    """
    network, widened = cut_network(problem, weigh)
    search = Search(MAX_WORK)
    sides = search.solve(network)
    labels = {n: sides[n] if v.pinned is None else v.pinned for n, v in problem.variables.items()}
    anchors = {}
    for node in problem.variables:
        if needs_anchor(problem, labels, node):
            anchors[node] = min(
                promoted_operands(problem, node),
                key=lambda t: (sides.get(widened[t, node], False), problem.facts[t].elements, t.name),
            )
    return Placement(labels, anchors, search.optimal)


def _weigher(problem: Problem, objective: str) -> Weigher:
    """Returns the number to minimise for ``"cast_bytes"`` or ``"casts"``, ties broken by traffic."""
    scale = _scale(problem)
    if objective == "cast_bytes":
        return lambda cost: cost.cast_bytes * scale + cost.traffic
    return lambda cost: cost.casts * scale + cost.traffic


def _scale(problem: Problem) -> int:
    """A factor larger than any traffic, so that ties alone are decided by traffic."""
    elements = sum(e for n in problem.facts for _, e in node_terms(problem, n))
    casts = sum(problem.facts[t].elements * len(u) for t, u in problem.uses.items())
    return 1 + FP32_BYTES * elements + 2 * CAST_BYTES * casts


def _fp32_cost(problem: Problem) -> Cost:
    traffic = sum(FP32_BYTES * e for n in problem.facts for _, e in node_terms(problem, n))
    return Cost(traffic=traffic)
