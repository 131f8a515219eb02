"""Minimum cuts under choices: branch and bound inside connected components.

A choice ("if the head ends float32, one of the options must too") is not submodular, so one cut cannot
decide it. The cut without the choices is a lower bound. Where it breaks one, the choice's options are
tried in turn; the cases exclude each other and leave nothing out:

    1. option 1 goes to the sink side if the head does (one arc);
    2. the head and option 2 are on the sink side, option 1 on the source side;
    3. the head and option 3 are on the sink side, options 1 and 2 on the source side; and so on.

After each step presolve shrinks the network and what is left falls into components that are solved by
themselves, so a hundred independent choices cost a hundred small searches, not 2**100 cuts.

Every rule looks at the network as a set or in the order of the vertices' ``repr``: the order in which
the network was built does not matter.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from .mincut import SINK, CutNetwork, Sides, Vertex


class Search:
    """Minimises one network.

    Attributes:
        budget: Vertices times cuts that may still be spent on proving a minimum.
        optimal: Whether everything returned so far is proven minimal.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.optimal = True

    def solve(self, network: CutNetwork) -> Sides:
        """Returns the sides of a minimum cut that meets all choices; consumes the network."""
        return self._solve(network, None)[1]

    def _solve(self, network: CutNetwork, cutoff: int | None) -> tuple[int, Sides]:
        """Returns the least cost with its sides; if that is not below ``cutoff``, a lower bound and nothing."""
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
        for part, relaxed, bound in sorted(open_parts, key=lambda p: len(p[0])):
            if cutoff is not None and total >= cutoff:
                return total, {}
            value, found = self._branch(part, relaxed, bound, None if cutoff is None else cutoff - total + bound)
            total += value - bound
            sides.update(found)
        return total, sides

    def _branch(self, part: CutNetwork, relaxed: Sides, bound: int, cutoff: int | None) -> tuple[int, Sides]:
        """Solves one component, of which the cut without choices is known."""
        self.budget -= len(part)
        broken = [name for name in sorted(part.choices, key=repr) if _breaks(part, name, relaxed)]
        if not broken:
            return bound, relaxed
        best = _mended(part, relaxed, broken)
        value = part.cost(best)
        if value > bound and self.budget < 0:
            self.optimal = False
            return value, best
        if value > bound:
            name = max(broken, key=lambda c: min(map(part.price, part.choices[c][1])))
            for case, fixed in _cases(part, name):
                limit = value if cutoff is None else min(value, cutoff)
                found, sides = self._solve(case, limit)
                if found < limit:
                    value, best = found, {**fixed, **sides}
                if value == bound:
                    break
        return value, best


def _breaks(part: CutNetwork, name: Hashable, sides: Sides) -> bool:
    head, options = part.choices[name]
    return not (head != SINK and sides[head]) and all(sides[o] for o in options)


def _mended(part: CutNetwork, relaxed: Sides, broken: list[Hashable]) -> Sides:
    """Moves the cheapest option of every broken choice to the sink side."""
    sides = dict(relaxed)
    for name in broken:
        if _breaks(part, name, sides):
            sides[_by_price(part, name)[0]] = False
    return sides


def _by_price(part: CutNetwork, name: Hashable) -> list[Vertex]:
    return sorted(part.choices[name][1], key=lambda o: (part.price(o), repr(o)))


def _cases(part: CutNetwork, name: Hashable) -> Iterator[tuple[CutNetwork, Sides]]:
    """Yields the cases of the module docstring, cheapest option first, with the sides they fix."""
    head = part.choices[name][0]
    fixed: Sides = {} if head == SINK else {head: False}
    for index, option in enumerate(_by_price(part, name)):
        case = part.copy()
        if index == 0:
            case.choose(name, option)
            yield case, {}
        else:
            sides = {**fixed, option: False}
            for vertex, side in sides.items():
                case.fix(vertex, side)
            yield case, sides
        fixed[option] = True
