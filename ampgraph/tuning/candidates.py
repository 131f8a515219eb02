"""Sets of nodes to keep float32, with the traffic and the error that planning with them predicts.

Nothing here runs the model. The sum of squares of the rounded tensors' sensitivities stands for the error.
Placement minimises traffic under a bound on this sum, exactly as it does under its bound on cast bytes.
Each set is then placed as under an ordinary policy, which gives its true traffic and the tensors that it
rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, sqrt
from typing import NamedTuple

from torch.fx import Node

from ..numerics.remedy import merged
from ..passes.analysis.precision import FP32, LOW, Precision
from ..passes.analysis.problem import Problem, Variable
from ..passes.placement.amounts import Rounding
from ..passes.placement.build_network import Price
from ..passes.placement.labelling import Placement
from ..passes.placement.within import Bounded, Point
from .planned_graph import PlannedGraph
from .sensitivity import Sensitivity

# Prices are whole numbers: shares of the largest possible error in these units.
_UNITS = 10**9
# Work of one search (see placement), and plans made to take pins back.
WORK, PLANS = 20_000, 24
# Charges that are tried for one step towards less error.
_TRIED = 8


@dataclass(frozen=True)
class Candidate:
    """A set of nodes to keep float32.

    Attributes:
        pins: Their names.
        traffic: The bytes that one forward moves.
        charged: The charges that count, by index.
    """

    pins: frozenset[str]
    traffic: int = field(compare=False)
    charged: frozenset[int] = field(compare=False)


class Charge(NamedTuple):
    """The squared error that rounding makes if any of these nodes runs low."""

    payers: frozenset[Node]
    square: float


def _charges(graph: PlannedGraph, sensitivity: Sensitivity) -> Iterator[Charge]:
    """Yields what each reader pays, and for each tensor what is left for its maker and the other readers."""
    left = {tensor: sensitivity.squares.get(tensor, 0.0) for tensor in graph.payers}
    payers = dict(graph.payers)
    for (tensor, reader), nodes in graph.reads.items():
        if (tensor, reader) in sensitivity.reads:
            square = sensitivity.reads[tensor, reader]
            yield Charge(nodes, square)
            left[tensor] -= square
            payers[tensor] -= {reader}
    for tensor, square in left.items():
        if square > 0 and payers[tensor]:
            yield Charge(payers[tensor], square)


def _in_order(graph: PlannedGraph, sensitivity: Sensitivity) -> list[Charge]:
    """Returns the charges of a graph in the order of execution."""
    place = {node: index for index, node in enumerate(graph.nodes.values())}
    return sorted(_charges(graph, sensitivity), key=lambda c: min((place[n] for n in c.payers), default=0))


class Candidates:
    """Makes candidates.

    Args:
        graphs: The model's graphs.
        sensitivity: What rounding each tensor does.

    Attributes:
        needed: Nodes that stay float32 in every candidate.
        squares: The squared error of each charge, as predicted first, in the order of execution.
        scatter: Standard deviation of a squared error that is measured, as a share of it.
    """

    def __init__(self, graphs: list[PlannedGraph], sensitivity: Sensitivity):
        self._graphs, self._policy = graphs, graphs[0].policy
        self._names = {name for graph in graphs for name in graph.nodes}
        self._known: dict[frozenset[str], Candidate] = {}
        self._charges = [charge for graph in graphs for charge in _in_order(graph, sensitivity)]
        self.needed = frozenset(
            n.name for graph in graphs for t in sensitivity.beyond for n in graph.payers.get(t, ())
        )
        self.scatter = sensitivity.scatter
        self._problem = self._relaxed()
        self._bounds: list[int] = []
        self.squares = [charge.square for charge in self._charges]
        self._unit = sum(self.squares) / _UNITS or 1.0

    def of(self, pins: Iterable[str]) -> Candidate:
        """Returns the candidate that keeps these nodes float32."""
        pins = frozenset(pins) | self.needed
        if pins not in self._known:
            placed = self._placed(pins)
            traffic = sum(g.traffic(p) for g, p in zip(self._graphs, placed, strict=True))
            low = {node for p in placed for node, label in p.labels.items() if label is LOW}
            charged = {i for i, c in enumerate(self._charges) if not low.isdisjoint(c.payers)}
            self._known[pins] = Candidate(pins, traffic, frozenset(charged))
        return self._known[pins]

    def predicted(self, candidate: Candidate) -> float:
        """Returns the error of a candidate, by the charges as they are now."""
        return sqrt(sum(self._charges[index].square for index in candidate.charged))

    def correct(self, squares: Sequence[float]) -> None:
        """Replaces the charges by better ones; every limit may be searched again."""
        self._charges = [c._replace(square=s) for c, s in zip(self._charges, squares, strict=True)]
        self._bounds, self._unit = [], sum(squares) / _UNITS or 1.0

    def rules(self, pins: Iterable[str]) -> dict[str, str]:
        """Returns the policy's rules and those for the nodes."""
        return merged(self._policy, sorted(pins), self._names, self._graphs[0].part.modules)

    @property
    def everything(self) -> Candidate:
        """All ops in float32."""
        return self.of(name for graph in self._graphs for name in graph.everything)

    def search(self, limit: float) -> list[Candidate]:
        """Returns candidates of a predicted error about ``limit``; none if that was searched."""
        bound = int(limit**2 / self._unit)
        if any(abs(bound - other) < 0.02 * bound for other in self._bounds):
            return []
        self._bounds.append(bound)
        search = _Recorded(self._problem, Rounding(self._prices(), self._graphs[0].stores_low), bound, WORK)
        search.solve()
        found = [candidate for point in search.points() for candidate in self._of_labels(point)]
        within = [c for c in found if self.predicted(c) <= limit]
        if within:
            found += self._reduced(min(within, key=self._order), limit)
        above = [c for c in found if self.predicted(c) > limit]
        if above:
            found += self._raised(min(above, key=self.predicted), limit)
        return found

    def pruned(self, candidate: Candidate) -> Candidate:
        """Returns a candidate of fewer pins that leads to the same plans."""
        pins, left = sorted(candidate.pins), 2 * PLANS
        wanted, size = self._labels(candidate.pins), max(1, len(pins) // 2)
        while pins and left > 0:
            for start in range(0, len(pins), size)[::-1]:
                fewer = pins[:start] + pins[start + size :]
                if left > 0 and self._labels(frozenset(fewer)) == wanted:
                    pins = fewer
                left -= 1
            if size == 1:
                break
            size //= 2
        return replace(candidate, pins=frozenset(pins))

    def given_back(self, candidate: Candidate) -> list[Candidate]:
        """Returns cheaper candidates of one pin less; those pins are tried that save the least error."""
        added = dict.fromkeys(self.pruned(candidate).pins - self.needed, 0.0)
        for index, charge in enumerate(self._charges):
            if index not in candidate.charged:
                for name in added.keys() & {node.name for node in charge.payers}:
                    added[name] += charge.square
        least = sorted(added, key=lambda name: (added[name], name))[:PLANS]
        fewer = [self.of(added.keys() - {name}) for name in least]
        return [other for other in fewer if other.traffic < candidate.traffic]

    def _labels(self, pins: frozenset[str]) -> list[tuple[dict[Node, Precision], dict[Node, Node]]]:
        """Returns what shapes the rewritten graphs: labels, and which operands are widened."""
        return [(placement.labels, placement.anchors) for placement in self._placed(pins)]

    def _placed(self, pins: frozenset[str]) -> list[Placement]:
        rules = self.rules(pins)
        return [graph.placed(rules) for graph in self._graphs]

    def _prices(self) -> tuple[Price, ...]:
        amounts = [round(charge.square / self._unit) for charge in self._charges]
        charges = enumerate(zip(self._charges, amounts, strict=True))
        return tuple(Price(index, charge.payers, amount) for index, (charge, amount) in charges if amount)

    def _relaxed(self) -> Problem:
        """Returns one problem for all graphs; in it the placement may also keep white ops in float32."""
        first, *others = [graph.problem for graph in self._graphs]
        variables = {**first.variables}
        facts, uses, beyond = {**first.facts}, {**first.uses}, {**first.out_of_range}
        for other in others:
            variables |= other.variables
            facts |= other.facts
            uses |= other.uses
            beyond |= other.out_of_range
        variables = {node: self._freed(node, variable) for node, variable in variables.items()}
        return Problem(variables, facts, first.low_dtype, uses, beyond)

    def _freed(self, node: Node, variable: Variable) -> Variable:
        if variable.pinned is FP32 or (variable.pinned is LOW and variable.by not in _LISTED):
            return variable
        if node.name in self.needed:
            return replace(variable, pinned=FP32)
        return replace(variable, pinned=None, follows=variable.follows and variable.pinned is None)

    def _of_labels(self, point: Point) -> Iterator[Candidate]:
        """Yields the sets of pins that lead to the labels of a point: that of white ops, and that of all."""
        labels = point.placement.labels
        free = {n for n, v in self._problem.variables.items() if v.pinned is None and labels[n] is FP32}
        problems = [graph.problem for graph in self._graphs]
        forced = {n.name for n in free for p in problems if n in p.variables and p.variables[n].pinned is LOW}
        yield self.of(forced)
        yield self.of({n.name for n in free})

    def _reduced(self, start: Candidate, limit: float) -> Iterator[Candidate]:
        """Yields ever cheaper candidates: pins go where that saves traffic and keeps the limit."""
        best = start
        for name in sorted(start.pins - self.needed)[:PLANS]:
            fewer = self.of(best.pins - {name})
            if self.predicted(fewer) <= limit and self._order(fewer) < self._order(best):
                best = fewer
                yield best

    def _raised(self, start: Candidate, limit: float) -> Iterator[Candidate]:
        """Yields candidates of less error: of the largest charges, those go first that cost least traffic."""
        best, left = start, PLANS
        while left > 0 and self.predicted(best) > limit:
            largest = sorted(best.charged, key=lambda i: -self._charges[i].square)[: min(left, _TRIED)]
            left -= _TRIED
            more = [self.of(best.pins | {n.name for n in self._charges[i].payers}) for i in largest]
            yield from more
            less = [c for c in more if self.predicted(c) < self.predicted(best)]
            if not less:
                return
            best = min(less, key=lambda c: self._price(best, c))

    def _price(self, start: Candidate, candidate: Candidate) -> float:
        """Returns the traffic that a candidate pays for each square of error that it saves."""
        saved = self.predicted(start) ** 2 - self.predicted(candidate) ** 2
        return (candidate.traffic - start.traffic) / saved

    def _order(self, candidate: Candidate) -> tuple[int, float, int]:
        return candidate.traffic, self.predicted(candidate), len(candidate.pins)


# Labels that come from lists, and that a rule can change.
_LISTED = ("list", "placement")


class _Recorded(Bounded):
    """Keeps every point that the search has seen."""

    def __init__(self, problem: Problem, amount: Rounding, bound: int, work: int):
        super().__init__(problem, amount, bound, work)
        self._seen: dict[tuple[int, int], Point] = {}

    def consider(self, point: Point | None) -> None:
        super().consider(point)
        if point is not None:
            self._seen.setdefault((point.traffic, point.amount), point)

    def points(self) -> list[Point]:
        """Returns the points that none beats in both traffic and amount, those nearest the bound."""
        front, least = [], inf
        for point in sorted(self._seen.values(), key=lambda p: (p.traffic, p.amount)):
            if point.amount < least:
                front.append(point)
                least = point.amount
        return sorted(front, key=lambda p: abs(p.amount - self.bound))[:_POINTS]


_POINTS = 8
