"""Minimises the traffic of labellings within a bound on a second amount: cast bytes, or rounding error.

A cut minimises traffic plus a price for every unit of the amount. Each cut gives two results (Lagrangian
duality):

- its labelling is a corner of the lower convex hull of all (amount, traffic), and a candidate if it
  meets the bound;
- no labelling within the bound moves less than the least weight minus the price of the whole bound.

The search starts with the two ends of the hull. Each further price is the slope between the last corner above
the bound and the last corner below it, until no corner lies between them. A corner exactly on the bound is
optimal. No price finds labellings between two corners. So the search tries a node on which the two corners
disagree in both dtypes, the most promising case first, until the proof is complete or the budget is spent.
The gap is the distance between the best labelling and the lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from math import inf

from torch.fx import Node

from ..analysis.facts import followed
from ..analysis.precision import FP32, LOW, Precision
from ..analysis.problem import Problem, force_followers
from .amounts import Amount, CastBytes
from .choices import Search
from .cost_model import cost_of, scale_above_traffic
from .labelling import MAX_WORK, Placement, autocast_rule

# The cost of a cut per free node while branching, in steps of `Search.budget`.
CUT_STEPS = 20


def place_within(problem: Problem, cast_bytes: int) -> Placement:
    """Returns a labelling of low traffic within a bound, and an upper bound of its distance to the minimum.

    It moves no more than the rule of ``torch.autocast`` and the choice of level O1 for the same pins, if
    these meet the bound.

    Args:
        problem: The pinned graph.
        cast_bytes: The bound. If no labelling meets it, one of the fewest cast bytes is returned.
    """
    found = Bounded(problem, CastBytes(), cast_bytes)
    found.solve()
    if found.gap == 0 or (following := _following(problem)) is None:
        return found.placement()
    other = Bounded(following, CastBytes(), cast_bytes)
    other.solve()
    found.consider(other.best)
    return found.placement()


def _following(problem: Problem) -> Problem | None:
    """Returns the problem with gray ops that follow their inputs, as at O1; None if they already do."""
    if all(v.follows or v.narrowable for v in problem.variables.values() if v.pinned is None):
        return None
    variables = {n: replace(v, follows=v.follows or not v.narrowable) for n, v in problem.variables.items()}
    following = replace(problem, variables=variables)
    force_followers(following)
    return following


@dataclass(frozen=True)
class Point:
    """A labelling, its traffic, and the amount that is bounded."""

    placement: Placement
    traffic: int
    amount: int


@dataclass(frozen=True, order=True)
class _Case:
    """Some nodes pinned to one dtype each. The case with the least lower bound is first, then the deepest.

    Attributes:
        lower: Lower bound of the traffic of this case's labellings within the bound.
        over: The corner of the hull just above the bound.
        within: The corner just below.
    """

    lower: float
    height: int
    number: int
    pins: dict[Node, Precision] = field(compare=False)
    over: Point | None = field(compare=False, default=None)
    within: Point | None = field(compare=False, default=None)


class Bounded:
    """Minimises the traffic of one problem within one bound.

    Args:
        problem: The pinned graph.
        amount: The bounded amount.
        bound: The bound.
        work: How much work it may do; default `MAX_WORK`.

    Attributes:
        best: The least point found within the bound.
        fewest: The point of the least amount, after its first use.
        lower: Lower bound of the traffic of labellings within the bound; infinite if there is none.
    """

    def __init__(self, problem: Problem, amount: Amount, bound: int, work: int | None = None) -> None:
        self.problem, self.amount, self.bound = problem, amount, bound
        self.search = Search(MAX_WORK if work is None else work)
        self.best: Point | None = None
        self.fewest: Point | None = None
        self.lower: float = -inf
        self.open: list[_Case] = []
        self.numbers = count()

    @property
    def gap(self) -> int | None:
        """Upper bound of the distance of `best` to the minimum."""
        if self.best is None:
            return 0 if self.lower == inf and self.fewest and self.fewest.placement.optimal else None
        return max(0, self.best.traffic - int(min(self.lower, self.best.traffic)))

    def placement(self) -> Placement:
        """Returns the best labelling found."""
        point = self.best or self.fewest
        assert point is not None
        return replace(point.placement, gap=self.gap)

    def consider(self, point: Point | None) -> None:
        """Keeps a point if it is within the bound and the best so far."""
        if point is None or point.amount > self.bound:
            return
        if self.best is None or point.traffic < self.best.traffic:
            self.best = point

    def solve(self) -> None:
        """Finds the least point and the lower bound."""
        root = self._closed_in(_Case(-inf, 0, next(self.numbers), {}))
        self.lower = root.lower
        if self.gap == 0:
            return
        rule = autocast_rule(self.problem)
        self.consider(self._point(self.problem, rule))
        heappush(self.open, root)
        stuck = inf
        while self.open and self.search.budget > 0:
            case = heappop(self.open)
            if self.best and case.lower >= self.best.traffic:
                break
            if (node := self._disputed(case)) is None:
                stuck = min(stuck, case.lower)
                continue
            for label in (LOW, FP32):
                heappush(self.open, self._tried(case, node, label))
        self.lower = min([stuck, *(case.lower for case in self.open)])

    def _disputed(self, case: _Case) -> Node | None:
        """Returns the largest node with different dtypes in the two corners of a case."""
        if case.over is None or case.within is None:
            return None
        over, within = case.over.placement.labels, case.within.placement.labels
        nodes = [n for n in over if over[n] is not within[n]]
        return max(nodes, key=lambda n: (self.problem.facts[n].elements, n.name), default=None)

    def _tried(self, case: _Case, node: Node, label: Precision) -> _Case:
        pins = {**case.pins, node: label}
        if label is LOW:
            _pin_followed(self.problem, node, pins)
        agrees = case.over and case.over.placement.labels[node] is label
        over, within = (case.over, None) if agrees else (None, case.within)
        return self._closed_in(_Case(case.lower, case.height - 1, next(self.numbers), pins, over, within))

    def _closed_in(self, case: _Case) -> _Case:
        """Finds the corners of a case next to the bound, and the lower bound of the case."""
        problem = self._pinned(case)
        lower, over, within = case.lower, case.over, case.within
        if case.pins:
            self.search.budget -= CUT_STEPS * sum(v.pinned is None for v in problem.variables.values())
        if over is None:
            over, least = self._corner(problem, 1, 0)
            lower = max(lower, least)
            if over.amount <= self.bound:
                return replace(case, lower=lower, over=None, within=over)
        if within is None:
            scale = scale_above_traffic(problem)
            within, least = self._corner(problem, 1, scale)
            self.fewest = self.fewest or within
            if (within.traffic + scale * within.amount - (within.placement.gap or 0)) // scale > self.bound:
                return replace(case, lower=inf, over=over, within=None)
            lower = max(lower, least)
        while within.amount < self.bound < over.amount and within.traffic > over.traffic:
            run, rise = over.amount - within.amount, within.traffic - over.traffic
            between, least = self._corner(problem, run, rise)
            lower = max(lower, least)
            if run * between.traffic + rise * between.amount >= run * over.traffic + rise * over.amount:
                break
            if between.amount <= self.bound:
                within = between
            else:
                over = between
        return replace(case, lower=lower, over=over, within=within)

    def _pinned(self, case: _Case) -> Problem:
        if not case.pins:
            return self.problem
        variables = {**self.problem.variables}
        for node, label in case.pins.items():
            variables[node] = replace(variables[node], pinned=label)
        return replace(self.problem, variables=variables)

    def _corner(self, problem: Problem, traffic: int, price: int) -> tuple[Point, float]:
        """Returns a point of least weight, and a lower bound of the traffic of points within the bound.

        Args:
            problem: The problem of a case.
            traffic: The weight of a byte of traffic.
            price: The weight of a unit of the amount.
        """
        placement = self.amount.cut(problem, traffic, price, self.search)
        point = self._point(problem, placement)
        self.consider(point)
        assert placement.gap is not None
        least = traffic * point.traffic + price * point.amount - placement.gap
        return point, -((price * self.bound - least) // traffic)

    def _point(self, problem: Problem, placement: Placement) -> Point:
        cost = cost_of(problem, placement.labels, placement.anchors)
        return Point(placement, self.amount.traffic(cost), self.amount.of(placement, cost))


def _pin_followed(problem: Problem, node: Node, pins: dict[Node, Precision]) -> None:
    """Pins low the producers that a node follows if the node is tried low."""
    stack = [node]
    while stack:
        reader = stack.pop()
        if not problem.variables[reader].follows:
            continue
        for source in followed(reader, problem.facts):
            if problem.variables[source].pinned is None and source not in pins:
                pins[source] = LOW
                stack.append(source)
