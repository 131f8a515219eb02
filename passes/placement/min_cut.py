"""Exact minimum s-t cut with choices: presolve in linear time, the hard core by `choices` and networkx.

Every vertex ends on the source side (low) or the sink side (float32). An arc (u, v) with capacity c costs
c when u ends on the source side and v on the sink side. A *choice* (head, options) demands that, if its
head ends on the sink side, at least one of its options does too; an option heads no choice itself.

Presolve fixes a vertex v if the fix has no cost for any sides of the other vertices (persistency):

- v to the source side, if its arc from the source outweighs all its arcs to others and to the sink. The
  worst case has all others on the sink side, and even then the move does not cost more. The move meets a
  choice that v heads. An option of an open choice may not move, because the choice could break.
- v to the sink side, if its arc to the sink outweighs all incoming arcs (the mirror image). This may break a
  choice that v heads; moving its cheapest option too repairs the choice. The *slack* of v is the upper bound
  of that cost. An option needs no slack: its move repairs choices and breaks none.

Fixing a vertex never invalidates the condition of another, and it may satisfy one: arcs become arcs of the
terminals, choices are met and slacks fall.

Without choices, the result is the minimum cut with the largest source side, which is unique. Ties go to the
source side in presolve, and the core's cut has the smallest sink side. With choices, several minima may be
equal, and an option's ties go to the sink side while one of its choices is open. So vertices are visited in
the order of their ``repr``, not in the order of insertion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping

SOURCE, SINK = "source", "sink"
INFINITE = 1 << 200
Vertex = Hashable
Sides = dict[Vertex, bool]


class _Vertex:
    """The capacities of a vertex's arcs, their sums, and the choices that it heads or is an option of."""

    __slots__ = ("from_source", "heads", "in_sum", "into", "options", "out", "out_sum", "to_sink")

    def __init__(self) -> None:
        self.out: dict[Vertex, int] = {}
        self.into: dict[Vertex, int] = {}
        self.out_sum = self.in_sum = self.from_source = self.to_sink = 0
        self.heads: set[Hashable] = set()
        self.options: set[Hashable] = set()


class CutNetwork:
    """A flow network with integer capacities, and choices over its vertices.

    Attributes:
        fixed_cost: The cost of the fixed vertices.
        choices: The open choices: name to (head, options); a head may be `SINK`.
    """

    def __init__(self) -> None:
        self.fixed_cost = 0
        self.choices: dict[Hashable, tuple[Vertex, dict[Vertex, None]]] = {}
        self._vertices: dict[Vertex, _Vertex] = {}

    def __len__(self) -> int:
        return len(self._vertices)

    def add_vertex(self, vertex: Vertex) -> None:
        """Adds the vertex if it is not in the network."""
        self._made(vertex)

    def add_arc(self, u: Vertex, v: Vertex, capacity: int) -> None:
        """Adds ``capacity`` to the arc from u to v; either may be `SOURCE` or `SINK`."""
        if capacity == 0 or u in (v, SINK) or v == SOURCE:
            return
        if u == SOURCE and v == SINK:
            self.fixed_cost += capacity
        elif u == SOURCE:
            self._made(v).from_source += capacity
        elif v == SINK:
            self._made(u).to_sink += capacity
        else:
            tail, head = self._made(u), self._made(v)
            tail.out[v] = tail.out.get(v, 0) + capacity
            head.into[u] = head.into.get(u, 0) + capacity
            tail.out_sum += capacity
            head.in_sum += capacity

    def add_choice(self, name: Hashable, head: Vertex, options: Iterable[Vertex]) -> None:
        """Demands that one of ``options`` ends on the sink side if ``head`` (or `SINK`) does."""
        left = dict.fromkeys(option for option in options if option != SOURCE)
        if head == SOURCE or SINK in left:
            return
        if len(left) < 2:
            self.add_arc(next(iter(left), SOURCE), head, INFINITE)
            return
        self.choices[name] = head, left
        for option in left:
            self._made(option).options.add(name)
        if head != SINK:
            self._made(head).heads.add(name)

    def vertices(self) -> Iterable[Vertex]:
        """Returns the vertices that are not fixed."""
        return self._vertices.keys()

    def terminal_arcs(self) -> Iterator[tuple[Vertex, int, int]]:
        """Yields (vertex, cost on the source side, cost on the sink side)."""
        for v, vertex in self._vertices.items():
            yield v, vertex.to_sink, vertex.from_source

    def arcs(self) -> Iterator[tuple[Vertex, Vertex, int]]:
        """Yields the arcs between vertices with their capacities."""
        for u, vertex in self._vertices.items():
            for v, capacity in vertex.out.items():
                yield u, v, capacity

    def minimum_cut(self) -> Sides:
        """Returns the sides of the minimum cut without choices; consumes the network."""
        sides = self.presolve()
        for part in self.split():
            sides.update(part.cut())
        return sides

    def fix(self, v: Vertex, on_source: bool) -> list[Vertex]:
        """Merges ``v`` into a terminal and returns the vertices that may now be fixed."""
        vertex = self._vertices.pop(v)
        self.fixed_cost += vertex.to_sink if on_source else vertex.from_source
        for u, capacity in vertex.out.items():
            head = self._vertices[u]
            del head.into[v]
            head.in_sum -= capacity
            if on_source:
                head.from_source += capacity
        for u, capacity in vertex.into.items():
            tail = self._vertices[u]
            del tail.out[v]
            tail.out_sum -= capacity
            if not on_source:
                tail.to_sink += capacity
        touched = [*vertex.out, *vertex.into]
        for name in vertex.heads:
            touched += self._drop_choice(name) if on_source else self._keep_choice(name, SINK, v)
        for name in vertex.options:
            head_of = self.choices[name][0]
            touched += self._keep_choice(name, head_of, v) if on_source else self._drop_choice(name)
        return touched

    def presolve(self) -> Sides:
        """Fixes vertices until no side is certain; see the module docstring."""
        sides: Sides = {}
        names = {v: repr(v) for v in self._vertices} if self.choices else {}
        queue = deque(sorted(names, key=names.__getitem__) if names else self._vertices)
        queued = set(queue)
        while queue:
            v = queue.popleft()
            queued.discard(v)
            if v not in self._vertices or (side := self._clear_side(v)) is None:
                continue
            sides[v] = side
            touched = [u for u in self.fix(v, side) if u in self._vertices]
            if self.choices:
                touched += [self.choices[c][0] for u in touched for c in self._vertices[u].options]
                touched = sorted({u for u in touched if u != SINK}, key=names.__getitem__)
            for u in touched:
                if u not in queued:
                    queued.add(u)
                    queue.append(u)
        return sides

    def split(self) -> list[CutNetwork]:
        """Returns the components that are connected by arcs and choices."""
        parts, seen = [], set[Vertex]()
        for start in self._vertices:
            if start in seen:
                continue
            members, stack = [], [start]
            seen.add(start)
            while stack:
                members.append(stack.pop())
                near = [u for u in dict.fromkeys(self._near(members[-1])) if u not in seen and u != SINK]
                seen.update(near)
                stack += near
            parts.append(self.part(members))
        return parts

    def part(self, members: Iterable[Vertex]) -> CutNetwork:
        """Returns some vertices with their choices and arcs, which it shares; ``fixed_cost`` starts at 0."""
        part = CutNetwork()
        for v in members:
            vertex = part._vertices[v] = self._vertices[v]
            for name in (*vertex.heads, *vertex.options):
                head, options = self.choices[name]
                part.choices[name] = head, {**options}
        return part

    def cut(self) -> Sides:
        """Returns the minimum cut with the largest source side, without choices."""
        import networkx as nx

        graph = nx.DiGraph()
        graph.add_nodes_from([SOURCE, SINK, *self._vertices])
        for v, vertex in self._vertices.items():
            pull = vertex.from_source - vertex.to_sink
            if pull > 0:
                graph.add_edge(SOURCE, v, capacity=pull)
            elif pull < 0:
                graph.add_edge(v, SINK, capacity=-pull)
            graph.add_edges_from((v, u, {"capacity": c}) for u, c in vertex.out.items())
        # networkx gives the smallest sink side: the vertices that still reach the sink.
        _, (source_side, _) = nx.minimum_cut(graph, SOURCE, SINK)
        return {v: v in source_side for v in self._vertices}

    def cost(self, sides: Mapping[Vertex, bool]) -> int:
        """Returns the cost of the arcs for the given sides, including ``fixed_cost``."""
        total = self.fixed_cost
        for v, vertex in self._vertices.items():
            if sides[v]:
                total += vertex.to_sink + sum([c for u, c in vertex.out.items() if not sides[u]])
            else:
                total += vertex.from_source
        return total

    def price(self, v: Vertex) -> int:
        """Returns an upper bound of the cost of moving ``v`` to the sink side."""
        vertex = self._vertices[v]
        return max(0, vertex.from_source + vertex.in_sum - vertex.to_sink)

    def _made(self, v: Vertex) -> _Vertex:
        if (vertex := self._vertices.get(v)) is None:
            vertex = self._vertices[v] = _Vertex()
        return vertex

    def _near(self, v: Vertex) -> list[Vertex]:
        """Returns the vertices that arcs and choices connect with ``v``; `SINK` may be among them."""
        vertex = self._vertices[v]
        near = [*vertex.out, *vertex.into]
        for name in (*vertex.heads, *vertex.options):
            head, options = self.choices[name]
            near += [head, *options]
        return near

    def _clear_side(self, v: Vertex) -> bool | None:
        vertex = self._vertices[v]
        from_source, to_sink = vertex.from_source, vertex.to_sink
        if vertex.options:
            return False if to_sink >= from_source + vertex.in_sum else None
        if from_source >= min(to_sink + vertex.out_sum, INFINITE):
            return True
        lead = to_sink - from_source - vertex.in_sum
        if lead > 0 and vertex.heads:
            lead -= sum(min(map(self.price, self.choices[name][1])) for name in vertex.heads)
        return False if lead > 0 or to_sink >= INFINITE else None

    def _drop_choice(self, name: Hashable) -> list[Vertex]:
        head, options = self.choices.pop(name)
        for v in (head, *options):
            if v in self._vertices:
                vertex = self._vertices[v]
                (vertex.heads if v == head else vertex.options).discard(name)
        return [head, *options]

    def _keep_choice(self, name: Hashable, head: Vertex, fixed: Vertex) -> list[Vertex]:
        """Replaces the head of a choice by ``head`` and removes ``fixed`` from its options."""
        _, options = self.choices[name]
        touched = self._drop_choice(name)
        self.add_choice(name, head, [option for option in options if option != fixed])
        return touched
