"""Minimises a network of small width by eliminating one vertex after the other (dynamic programming).

The cost is a sum of terms over few vertices each: arcs over two, choices over their head and options.
Eliminating a vertex replaces all its terms by one term over its neighbours: the minimum over the vertex's
two sides, for each combination of the neighbours' sides. Each step is exact for any terms. Its cost is two
to the power of the number of neighbours. Networks of real models are chains of small gadgets. If the next
vertex has the fewest neighbours, tables stay at some tens of entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import product

from .min_cut import INFINITE, SINK, CutNetwork, Sides, Vertex

Table = dict[tuple[bool, ...], int]
Term = tuple[tuple[Vertex, ...], Table]


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
    decided: list[tuple[Vertex, tuple[Vertex, ...], dict[tuple[bool, ...], bool]]] = []
    for v in order:
        mine = list(terms.pop(v).values())
        scope = tuple(dict.fromkeys(u for others, _ in mine for u in others if u != v))
        places = {v: 0, **{u: i for i, u in enumerate(scope, 1)}}
        indexed = [([places[u] for u in others], table) for others, table in mine]
        least: Table = {}
        choice: dict[tuple[bool, ...], bool] = {}
        for sides in product((True, False), repeat=len(scope)):
            low, fp32 = (True, *sides), (False, *sides)
            if_low = sum([table[tuple([low[i] for i in at])] for at, table in indexed])
            if_fp32 = sum([table[tuple([fp32[i] for i in at])] for at, table in indexed])
            choice[sides] = if_low <= if_fp32
            least[sides] = min(if_low, if_fp32)
        for term in mine:
            for u in term[0]:
                if u != v:
                    del terms[u][id(term)]
        decided.append((v, scope, choice))
        if scope:
            _add(terms, (scope, least))
    found: Sides = {}
    for v, scope, choice in reversed(decided):
        found[v] = choice[tuple([found[u] for u in scope])]
    return {v: found[v] for v in network.vertices()}


def _add(terms: dict[Vertex, dict[int, Term]], term: Term) -> None:
    for v in term[0]:
        terms[v][id(term)] = term


def _terms(network: CutNetwork) -> Iterable[Term]:
    """Yields the terms; a choice among many options becomes a chain of choices between two."""
    for v, to_sink, from_source in network.terminal_arcs():
        yield (v,), {(True,): to_sink, (False,): from_source}
    for u, v, capacity in network.arcs():
        yield (u, v), {(True, True): 0, (True, False): capacity, (False, True): 0, (False, False): 0}
    for name, (head, options) in network.choices.items():
        *first, last = sorted(options, key=repr)
        for index, option in enumerate(first):
            rest = last if option is first[-1] else (name, "rest", index)
            scope = (option, rest) if head == SINK else (head, option, rest)
            broken = (True, True) if head == SINK else (False, True, True)
            yield (
                scope,
                {s: INFINITE if s == broken else 0 for s in product((True, False), repeat=len(scope))},
            )
            head = rest
