"""Minimum cuts under choices, component by component.

A choice ("if the head ends float32, one of the options must too") is not submodular, so one cut cannot
decide it. After presolve, the remaining vertices form connected components. Each component is solved
separately in the first of these ways that applies:

1. The cut without the choices is a lower bound. It is a minimum if it breaks no choice, or if repairing
   each broken choice with its cheapest option costs nothing.
2. If few vertices depend on each other, they are eliminated one after the other; see `eliminate`.
3. The vertex with the most neighbours is tried on both sides, followed by presolve and splitting. The
   lower bound prunes cases that cannot win. Past the limit of work, the search returns the best sides so
   far and their distance to the lower bound.

Every rule uses the network as a set or in the order of the vertices' ``repr``, so the order in which the
network was built does not matter.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from .min_cut import INFINITE, SINK, CutNetwork, Sides
from .variable_elimination import eliminate, elimination_order

# The cost of cutting one vertex once, in table entries of an elimination.
CUT_STEPS = 10


class Found(NamedTuple):
    """The cost of sides, a lower bound of all sides' cost, and the sides."""

    cost: int
    lower: int
    sides: Sides


class Search:
    """Minimises networks, all within one budget of work.

    Attributes:
        budget: Table entries that may still be spent on proving minima.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def solve(self, network: CutNetwork) -> Found:
        """Returns a cut that meets all choices; consumes the network."""
        return self._solve(network, None)

    def _solve(self, network: CutNetwork, cutoff: int | None) -> Found:
        """Returns the least cost found; at or above ``cutoff`` the sides are not meaningful."""
        sides = network.presolve()
        total = lower = network.fixed_cost
        open_parts = []
        for part in network.split():
            relaxed = part.cut()
            bound = part.cost(relaxed)
            total, lower = total + bound, lower + bound
            if part.choices:
                open_parts.append((part, relaxed, bound))
            else:
                sides.update(relaxed)
        for part, relaxed, bound in sorted(open_parts, key=_size_and_name):
            if cutoff is not None and total >= cutoff:
                return Found(total, lower, {})
            found = self._component(part, relaxed, bound, None if cutoff is None else cutoff - total + bound)
            total, lower = total + found.cost - bound, lower + found.lower - bound
            sides.update(found.sides)
        return Found(total, lower, sides)

    def _component(self, part: CutNetwork, relaxed: Sides, bound: int, cutoff: int | None) -> Found:
        """Solves one component whose cut without choices is known."""
        broken = [name for name in sorted(part.choices, key=repr) if _breaks(part, name, relaxed)]
        if not broken:
            return Found(bound, bound, relaxed)
        best = _mended(part, relaxed, broken)
        value = part.cost(best)
        if value == bound:
            return Found(value, bound, best)
        if (plan := elimination_order(part, self.budget)) is not None:
            order, entries = plan
            self.budget -= entries
            best = eliminate(part, order)
            return Found(value := part.cost(best), value, best)
        if self.budget <= 0:
            return Found(value, bound, best)
        return self._branch(part, Found(value, bound, best), cutoff)

    def _branch(self, part: CutNetwork, best: Found, cutoff: int | None) -> Found:
        """Tries the vertex with the most neighbours on both sides, to improve ``best``."""
        self.budget -= CUT_STEPS * len(part)
        hub = min(part.vertices(), key=lambda v: (-part.degree(v), repr(v)))
        bound, lower = best.lower, INFINITE
        for side in (best.sides[hub], not best.sides[hub]):
            case = part.copy()
            case.fix(hub, side)
            limit = best.cost if cutoff is None else min(best.cost, cutoff)
            found = self._solve(case, limit)
            lower = min(lower, found.lower)
            if found.cost < limit:
                best = Found(found.cost, bound, {hub: side, **found.sides})
            if best.cost == bound:
                return best
        return best._replace(lower=max(bound, min(lower, best.cost)))


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
