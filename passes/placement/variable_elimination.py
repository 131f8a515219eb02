"""Minimises a network of small width by eliminating one vertex after the other (dynamic programming).

The cost is a sum of terms over few vertices each: arcs over two, choices over their head and options.
Eliminating a vertex replaces all its terms by one term over its neighbours: the minimum over the vertex's
two sides, for each combination of the neighbours' sides. Each step is exact for any terms. Its cost is two
to the power of the number of neighbours. Networks of real models are chains of small gadgets. If the next
vertex has the fewest neighbours, tables stay at some tens of entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import product

from .min_cut import INFINITE, SINK, CutNetwork, Sides, Vertex

# The values of a term: one for each combination of its vertices' sides, in the order of `product`.
Table = tuple[int, ...]
Term = tuple[tuple[Vertex, ...], Table]
# For each combination of the other vertices' sides: whether a vertex is better on the source side.
Choice = dict[tuple[bool, ...], bool]
_SIDES = (True, False)


def elimination_order(network: CutNetwork, most_entries: int) -> tuple[list[Vertex], int] | None:
    """Returns an order of elimination and its table entries; None if those exceed ``most_entries``."""
    scopes = [scope for scope, _ in _terms(network)]
    near: dict[Vertex, set[Vertex]] = {}
    for scope in scopes:
        for v in scope:
            near.setdefault(v, set()).update(scope)
    names = {v: repr(v) for v in near}
    heap = [(len(near[v]), names[v], v) for v in near]
    heapify(heap)
    order: list[Vertex] = []
    entries = 0
    while heap:
        size, _, v = heappop(heap)
        if v not in near or size != len(near[v]):
            continue
        entries += 1 << size
        if entries > most_entries:
            return None
        order.append(v)
        neighbours = near.pop(v) - {v}
        for u in neighbours:
            near[u] |= neighbours
            near[u].discard(v)
            heappush(heap, (len(near[u]), names[u], u))
    return order, entries


def eliminate(network: CutNetwork, order: list[Vertex]) -> Sides:
    """Returns sides of least cost that meet all choices; ties go to the source side, vertex by vertex."""
    terms: dict[Vertex, dict[int, Term]] = {v: {} for v in order}
    for term in _terms(network):
        _add(terms, term)
    decided: list[tuple[Vertex, tuple[Vertex, ...], Choice]] = []
    minimum = cache(_minimum)  # layers repeat
    for v in order:
        mine = list(terms.pop(v).values())
        scope = tuple(dict.fromkeys([u for others, _ in mine for u in others if u != v]))
        places = {v: 0, **{u: i for i, u in enumerate(scope, 1)}}
        least, choice = minimum(
            len(scope), tuple([(tuple([places[u] for u in others]), table) for others, table in mine])
        )
        for read, u in [(term, u) for term in mine for u in term[0] if u != v]:
            del terms[u][id(read)]
        decided.append((v, scope, choice))
        if scope:
            _add(terms, (scope, least))
    found: Sides = {}
    for v, scope, choice in reversed(decided):
        found[v] = choice[tuple([found[u] for u in scope])]
    return {v: found[v] for v in network.vertices()}


def _minimum(others: int, terms: tuple[tuple[tuple[int, ...], Table], ...]) -> tuple[Table, Choice]:
    """Returns the minimum over the sides of one vertex, and the side that gives it.

    The least value of the minimum is made zero, so that equal layers give equal terms.

    Args:
        others: How many other vertices there are.
        terms: The places of each term's vertices (the one vertex has the place 0), and its values.
    """
    tables = [(at, dict(zip(product(_SIDES, repeat=len(at)), table, strict=True))) for at, table in terms]
    found: list[int] = []
    choice: Choice = {}
    for sides in product(_SIDES, repeat=others):
        low, fp32 = (
            sum([table[tuple([all_sides[i] for i in at])] for at, table in tables])
            for all_sides in ((True, *sides), (False, *sides))
        )
        choice[sides] = low <= fp32
        found.append(min(low, fp32))
    least = min(found)
    return tuple([value - least for value in found]), choice


def _add(terms: dict[Vertex, dict[int, Term]], term: Term) -> None:
    for v in term[0]:
        terms[v][id(term)] = term


def _terms(network: CutNetwork) -> Iterable[Term]:
    """Yields the terms; a choice among many options becomes a chain of choices between two."""
    for v, to_sink, from_source in network.terminal_arcs():
        yield (v,), (to_sink, from_source)
    for u, v, capacity in network.arcs():
        yield (u, v), (0, capacity, 0, 0)
    for name, (head, options) in network.choices.items():
        *first, last = sorted(options, key=repr)
        for index, option in enumerate(first):
            rest = last if option is first[-1] else (name, "rest", index)
            if head == SINK:
                yield (option, rest), (INFINITE, 0, 0, 0)
            else:
                yield (head, option, rest), (0, 0, 0, 0, INFINITE, 0, 0, 0)
            head = rest
