"""Minimum cuts under choices, component by component.

A choice ("if the head ends float32, one of the options must too") is not submodular, so one cut cannot
decide it. After presolve, the remaining vertices form connected components. Each component is solved
separately in the first of these ways that applies:

1. The cut without the choices is a lower bound. It is a minimum if it breaks no choice, or if repairing
   each broken choice with its cheapest option costs nothing.
2. If the budget of work allows, vertices are eliminated one after the other, which is exact; see `eliminate`.
3. The repaired cut stays. Its distance to the lower bound is the gap.

Every rule uses the network as a set or in the order of the vertices' ``repr``, so the order in which the
network was built does not matter.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import NamedTuple

from .min_cut import SINK, CutNetwork, Sides
from .variable_elimination import eliminate, elimination_order

# Up to so many table entries a vertex, elimination takes less time than a maximum flow.
NARROW = 16


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
        sides = network.presolve()
        total = lower = network.fixed_cost
        open_parts = []
        for part in network.split():
            relaxed = _relaxed(part)
            bound = part.cost(relaxed)
            if part.choices:
                open_parts.append((part, relaxed, bound))
                continue
            total, lower = total + bound, lower + bound
            sides.update(relaxed)
        for part, relaxed, bound in sorted(open_parts, key=_size_and_name):
            found = self._component(part, relaxed, bound)
            total, lower = total + found.cost, lower + found.lower
            sides.update(found.sides)
        return Found(total, lower, sides)

    def _component(self, part: CutNetwork, relaxed: Sides, bound: int) -> Found:
        """Solves one component whose cut without choices is known."""
        broken = [name for name in sorted(part.choices, key=repr) if _breaks(part, name, relaxed)]
        if not broken:
            return Found(bound, bound, relaxed)
        repaired = _repaired(part, relaxed, broken)
        value = part.cost(repaired)
        if value == bound:
            return Found(value, bound, repaired)
        if (plan := elimination_order(part, self.budget)) is None:
            return Found(value, bound, repaired)
        order, entries = plan
        self.budget -= entries
        best = eliminate(part, order)
        return Found(value := part.cost(best), value, best)


def _relaxed(part: CutNetwork) -> Sides:
    """Returns the cut without the choices with the largest source side; elimination finds the same one."""
    bare = copy.copy(part)
    bare.choices = {}
    plan = elimination_order(bare, NARROW * len(bare))
    return part.cut() if plan is None else eliminate(bare, plan[0])


def _size_and_name(open_part: tuple[CutNetwork, Sides, int]) -> tuple[int, str]:
    return len(open_part[0]), min(map(repr, open_part[0].vertices()))


def _breaks(part: CutNetwork, name: Hashable, sides: Sides) -> bool:
    head, options = part.choices[name]
    return not (head != SINK and sides[head]) and all(sides[o] for o in options)


def _repaired(part: CutNetwork, relaxed: Sides, broken: list[Hashable]) -> Sides:
    """Moves the cheapest option of every broken choice to the sink side."""
    sides = dict(relaxed)
    for name in broken:
        if _breaks(part, name, sides):
            sides[min(part.choices[name][1], key=lambda o: (part.price(o), repr(o)))] = False
    return sides
