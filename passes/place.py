"""Chooses the dtype of every free node so that the fewest bytes move: an exact minimum cut.

Each variable is a vertex that ends low (source side) or float32 (sink side). Arcs:

- the traffic of an op in either dtype: an arc from the source or to the sink;
- a tensor with producer p and cast cost w gets one auxiliary vertex per direction, so that a cast
  is paid once however many consumers share it: ``p -w-> a -inf-> c`` for every consumer c that,
  being float32, needs a float32 operand (p low and some c float32 costs w), and
  ``c -inf-> b -w-> p`` for every c that, being low, needs a low one;
- "gray follows its inputs" is an infinite arc from the node to each floating producer.

One thing is not an arc: a float32 op that promotes (``add``, ``where``, ``cat``) widens its low operands
inside the kernel as long as one operand, its *anchor*, is float32. Which one, is a choice. The cut is
solved with the choice left out (a lower bound); where an op then lacks an anchor, each operand is tried
(branch and bound), so the result is the minimum over all choices.

Source of the shared-cost construction: the "cover" gadgets of energy minimisation by graph cuts
(Kolmogorov and Zabih, 2004; robust P^n potentials, Kohli et al., 2008).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from ampgraph.oplists import OpClass
from ampgraph.plan import Cost, Plan
from ampgraph.policy import Policy

from .base import Pass, workspace
from .build_plan import build_plan
from .classify import SlotKind
from .costs import (
    CAST_BYTES,
    FP32_BYTES,
    LOW_BYTES,
    Anchors,
    complete_anchors,
    cost_of,
    needs_anchor,
    node_terms,
    required,
)
from .mincut import SINK, SOURCE, CutNetwork, Vertex
from .propagate import Problem

Weigher = Callable[[Cost], int]

# Price of an activation cast byte in traffic bytes, tried in turn until a plan casts no more than autocast.
CAST_PRICES = (0, 1, 3, 9)
# Work spent on proving a minimum where ops lack anchors: cuts times nodes, and cuts at least.
MAX_NODE_SOLVES, MIN_SOLVES = 20_000, 12


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
            placement = place_within(problem, baseline.activation_cast_bytes)
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
    return Placement(labels, complete_anchors(problem, labels, {}), optimal=False)


def place_within(problem: Problem, cast_bytes: int) -> Placement:
    """Returns a labelling of least traffic among those that cast no more activation bytes than it does.

    The price of a cast byte rises until the plan keeps to ``cast_bytes``, which the labelling that the
    bound was taken from meets, so the last price (casts before traffic) always does.
    """
    for price in (*CAST_PRICES, _scale(problem)):
        placement = place_optimally(problem, lambda cost, price=price: cost.traffic + price * cost.activation_cast_bytes)
        if cost_of(problem, placement.labels, placement.anchors).activation_cast_bytes <= cast_bytes:
            break
    return placement


def place_optimally(problem: Problem, weigh: Weigher) -> Placement:
    """Returns a labelling of least weight.

    Args:
        problem: The pinned graph.
        weigh: The number to minimise, linear in the fields of `Cost`.
    """
    best: tuple[int, Placement] | None = None
    open_choices: list[dict[Node, Node]] = [{}]
    budget = max(MIN_SOLVES, MAX_NODE_SOLVES // len(problem.facts))
    for solved in count():
        if not open_choices:
            break
        anchors = open_choices.pop()
        if solved >= budget and best:
            return Placement(best[1].labels, best[1].anchors, optimal=False)
        labels = _cut(problem, anchors, weigh)
        bound = weigh(cost_of(problem, labels, {n: t for n, t in anchors.items() if needs_anchor(problem, labels, n)}))
        if best and bound >= best[0]:
            continue
        complete = complete_anchors(problem, labels, anchors)
        value = weigh(cost_of(problem, labels, complete))
        if best is None or value < best[0]:
            best = value, Placement(labels, complete)
        if value > bound:
            node = next(n for n in complete if n not in anchors)
            operands = dict.fromkeys(s.tensor for s in problem.facts[node].slots if s.kind is SlotKind.PROMOTED)
            open_choices += [{**anchors, node: tensor} for tensor in operands]
    assert best is not None
    return best[1]


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


def _cut(problem: Problem, anchors: Anchors, weigh: Weigher) -> dict[Node, bool]:
    network = CutNetwork()
    infinite = 1 + weigh(Cost(*[_scale(problem)] * 5))

    def vertex(node: Node) -> Vertex:
        pinned = problem.variables[node].pinned
        return node if pinned is None else SOURCE if pinned else SINK

    for node, variable in problem.variables.items():
        if variable.pinned is None:
            network.add_vertex(node)
            _add_constraints(network, problem, node, vertex, infinite)
    for node in problem.facts:
        for owner, elements in node_terms(problem, node):
            if not isinstance(owner, bool):
                network.add_arc(vertex(owner), SINK, weigh(Cost(traffic=LOW_BYTES * elements)))
                network.add_arc(SOURCE, vertex(owner), weigh(Cost(traffic=FP32_BYTES * elements)))
    for tensor in problem.uses:
        _add_casts(network, problem, tensor, anchors, vertex, weigh, infinite)
    sides = network.minimum_cut()
    return {n: sides[n] if v.pinned is None else v.pinned for n, v in problem.variables.items()}


def _add_constraints(
    network: CutNetwork, problem: Problem, node: Node, vertex: Callable[[Node], Vertex], infinite: int
) -> None:
    variable = problem.variables[node]
    if variable.follows:
        for slot in problem.facts[node].slots:
            if slot.follow:
                network.add_arc(node, vertex(problem.facts[slot.tensor].owner), infinite)


def _add_casts(
    network: CutNetwork,
    problem: Problem,
    tensor: Node,
    anchors: Anchors,
    vertex: Callable[[Node], Vertex],
    weigh: Weigher,
    infinite: int,
) -> None:
    """Adds the cost of casting one tensor, once per direction (once per use if its memory is written)."""
    fact = problem.facts[tensor]
    moved = CAST_BYTES * fact.elements
    activation = 0 if fact.is_parameter else 1
    weight = weigh(Cost(moved, moved, 1, moved * activation, activation))
    producer = vertex(fact.owner)
    widening: list[Vertex] = []
    narrowing: list[Vertex] = []
    for user, index in problem.uses[tensor]:
        slot = problem.facts[user].slots[index]
        at = vertex(user) if user in problem.variables else SINK
        if slot.kind is SlotKind.KEEP:
            side = fact.dtype == problem.low_dtype
            (narrowing if side else widening).append(SOURCE if side else SINK)
            continue
        if required(problem, user, slot, False, anchors.get(user)) is False:
            widening.append(at)
        if required(problem, user, slot, True, None):
            narrowing.append(at)
    groups = [[c] for c in widening] if fact.written else [widening] if widening else []
    for group in groups:
        _pay_once(group, SINK, (tensor, "widen"), lambda a: network.add_arc(producer, a, weight),
                  lambda a, c: network.add_arc(a, c, infinite))
    groups = [[c] for c in narrowing] if fact.written else [narrowing] if narrowing else []
    for group in groups:
        _pay_once(group, SOURCE, (tensor, "narrow"), lambda b: network.add_arc(b, producer, weight),
                  lambda b, c: network.add_arc(c, b, infinite))


def _pay_once(
    group: list[Vertex],
    terminal: str,
    auxiliary: Vertex,
    pay: Callable[[Vertex], None],
    join: Callable[[Vertex, Vertex], None],
) -> None:
    members = set(group)
    if terminal in members:
        pay(terminal)
        return
    members -= {SOURCE, SINK}
    if len(members) == 1:
        pay(members.pop())
        return
    if members:
        pay(auxiliary)
        for member in members:
            join(auxiliary, member)


def _fp32_cost(problem: Problem) -> Cost:
    traffic = sum(FP32_BYTES * e for n in problem.facts for _, e in node_terms(problem, n))
    return Cost(traffic=traffic)
