"""Minimum cuts under choices, component by component.

A choice ("if the head ends float32, one of the options must too") is not submodular, so one cut cannot
decide it. What presolve leaves falls into connected components, each solved by itself in the first of
these ways that applies:

1. The cut without the choices is a lower bound. If it breaks no choice, or mending each by its
   cheapest option costs nothing, it is a minimum.
2. If few vertices are tied to each other, they are eliminated one after the other; see `eliminate`.
3. The vertex with most neighbours is tried on either side; without it presolve and splitting go on.
   The lower bound cuts off what cannot win. Work is limited: past the limit the best sides so far are
   returned, and ``optimal`` turns False.

Every rule looks at the network as a set or in the order of the vertices' ``repr``: the order in which
the network was built does not matter.
"""

from __future__ import annotations

from collections.abc import Hashable

from .eliminate import eliminate, elimination_order
from .mincut import SINK, CutNetwork, Sides

# What cutting one vertex once costs, in table entries of an elimination.
CUT_STEPS = 10


class Search:
    """Minimises one network.

    Attributes:
        budget: Table entries that may still be spent on proving a minimum.
        optimal: Whether everything returned so far is proven minimal.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.optimal = True

    def solve(self, network: CutNetwork) -> Sides:
        """Returns the sides of a minimum cut that meets all choices; consumes the network."""
        return self._solve(network, None)[1]

    def _solve(self, network: CutNetwork, cutoff: int | None) -> tuple[int, Sides]:
        """Returns the least cost with its sides; from ``cutoff`` on the sides mean nothing."""
        sides = network.presolve()
        total = network.fixed_cost
        open_parts = []
        for part in network.split():
            relaxed = part.cut()
            bound = part.cost(relaxed)
            total += bound
            if part.choices:
                open_parts.append((part, relaxed, bound))
            else:
                sides.update(relaxed)
        for part, relaxed, bound in sorted(open_parts, key=_size_and_name):
            if cutoff is not None and total >= cutoff:
                return total, {}
            value, found = self._component(
                part, relaxed, bound, None if cutoff is None else cutoff - total + bound
            )
            total += value - bound
            sides.update(found)
        return total, sides

    def _component(
        self, part: CutNetwork, relaxed: Sides, bound: int, cutoff: int | None
    ) -> tuple[int, Sides]:
        """Solves one component, of which the cut without choices is known."""
        broken = [name for name in sorted(part.choices, key=repr) if _breaks(part, name, relaxed)]
        if not broken:
            return bound, relaxed
        best = _mended(part, relaxed, broken)
        value = part.cost(best)
        if value == bound:
            return value, best
        if (plan := elimination_order(part, self.budget)) is not None:
            order, entries = plan
            self.budget -= entries
            best = eliminate(part, order)
            return part.cost(best), best
        if self.budget <= 0:
            self.optimal = False
            return value, best
        return self._branch(part, best, value, bound, cutoff)

    def _branch(
        self, part: CutNetwork, best: Sides, value: int, bound: int, cutoff: int | None
    ) -> tuple[int, Sides]:
        """Tries the vertex with most neighbours on either side, to beat ``best`` with its ``value``."""
        self.budget -= CUT_STEPS * len(part)
        hub = min(part.vertices(), key=lambda v: (-part.degree(v), repr(v)))
        for side in (best[hub], not best[hub]):
            case = part.copy()
            case.fix(hub, side)
            limit = value if cutoff is None else min(value, cutoff)
            found, sides = self._solve(case, limit)
            if found < limit:
                value, best = found, {hub: side, **sides}
            if value == bound:
                break
        return value, best


def _size_and_name(open_part: tuple[CutNetwork, Sides, int]) -> tuple[int, str]:
    return len(open_part[0]), min(map(repr, open_part[0].vertices()))


def _breaks(part: CutNetwork, name: Hashable, sides: Sides) -> bool:
    head, options = part.choices[name]
    return not (head != SINK and sides[head]) and all(sides[o] for o in options)


def _mended(part: CutNetwork, relaxed: Sides, broken: list[Hashable]) -> Sides:
    """Moves the cheapest option of every broken choice to the sink side."""
    sides = dict(relaxed)
    for name in broken:
        if _breaks(part, name, sides):
            sides[min(part.choices[name][1], key=lambda o: (part.price(o), repr(o)))] = False
    return sides
