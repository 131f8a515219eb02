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

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping

SOURCE, SINK = "source", "sink"
INFINITE = 1 << 200
Vertex = Hashable
Sides = dict[Vertex, bool]


class CutNetwork:
    """A flow network with integer capacities, and choices over its vertices.

    Attributes:
        fixed_cost: The cost of the fixed vertices.
        choices: The open choices: name to (head, options); a head may be `SINK`.
    """

    def __init__(self) -> None:
        self.fixed_cost = 0
        self.choices: dict[Hashable, tuple[Vertex, dict[Vertex, None]]] = {}
        self._out: dict[Vertex, dict[Vertex, int]] = {}
        self._in: dict[Vertex, dict[Vertex, int]] = {}
        self._out_sum: dict[Vertex, int] = defaultdict(int)
        self._in_sum: dict[Vertex, int] = defaultdict(int)
        self._from_source: dict[Vertex, int] = defaultdict(int)
        self._to_sink: dict[Vertex, int] = defaultdict(int)
        self._heads: dict[Vertex, set[Hashable]] = defaultdict(set)
        self._options: dict[Vertex, set[Hashable]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._out)

    def add_vertex(self, vertex: Vertex) -> None:
        """Adds the vertex if it is not in the network."""
        if vertex not in self._out:
            self._out[vertex] = {}
            self._in[vertex] = {}

    def add_arc(self, u: Vertex, v: Vertex, capacity: int) -> None:
        """Adds ``capacity`` to the arc from u to v; either may be `SOURCE` or `SINK`."""
        if capacity == 0 or u in (v, SINK) or v == SOURCE:
            return
        if u == SOURCE and v == SINK:
            self.fixed_cost += capacity
        elif u == SOURCE:
            self.add_vertex(v)
            self._from_source[v] += capacity
        elif v == SINK:
            self.add_vertex(u)
            self._to_sink[u] += capacity
        else:
            self.add_vertex(u)
            self.add_vertex(v)
            self._out[u][v] = self._out[u].get(v, 0) + capacity
            self._in[v][u] = self._in[v].get(u, 0) + capacity
            self._out_sum[u] += capacity
            self._in_sum[v] += capacity

    def add_choice(self, name: Hashable, head: Vertex, options: Iterable[Vertex]) -> None:
        """Demands that one of ``options`` ends on the sink side if ``head`` (or `SINK`) does."""
        left = dict.fromkeys(option for option in options if option != SOURCE)
        if head == SOURCE or SINK in left:
            return
        if len(left) < 2:
            self.add_arc(next(iter(left), SOURCE), head, INFINITE)
            return
        self.choices[name] = head, left
        for vertex in (*left, *(() if head == SINK else (head,))):
            self.add_vertex(vertex)
            (self._heads if vertex == head else self._options)[vertex].add(name)

    def vertices(self) -> Iterable[Vertex]:
        """Returns the vertices that are not fixed."""
        return self._out.keys()

    def terminal_arcs(self) -> Iterator[tuple[Vertex, int, int]]:
        """Yields (vertex, cost on the source side, cost on the sink side)."""
        for v in self._out:
            yield v, self._to_sink[v], self._from_source[v]

    def arcs(self) -> Iterator[tuple[Vertex, Vertex, int]]:
        """Yields the arcs between vertices with their capacities."""
        for u, outs in self._out.items():
            for v, capacity in outs.items():
                yield u, v, capacity

    def minimum_cut(self) -> Sides:
        """Returns the sides of the minimum cut without choices; consumes the network."""
        sides = self.presolve()
        for part in self.split():
            sides.update(part.cut())
        return sides

    def fix(self, v: Vertex, on_source: bool) -> list[Vertex]:
        """Merges ``v`` into a terminal and returns the vertices that may now be fixed."""
        from_source, to_sink = self._from_source.pop(v, 0), self._to_sink.pop(v, 0)
        self.fixed_cost += to_sink if on_source else from_source
        outs, ins = self._out.pop(v), self._in.pop(v)
        for u, capacity in outs.items():
            del self._in[u][v]
            self._in_sum[u] -= capacity
            if on_source:
                self._from_source[u] += capacity
        for u, capacity in ins.items():
            del self._out[u][v]
            self._out_sum[u] -= capacity
            if not on_source:
                self._to_sink[u] += capacity
        touched = [*outs, *ins]
        for name in [*self._heads.pop(v, ())]:
            touched += self._drop_choice(name) if on_source else self._keep_choice(name, SINK, v)
        for name in [*self._options.pop(v, ())]:
            head = self.choices[name][0]
            touched += self._keep_choice(name, head, v) if on_source else self._drop_choice(name)
        return touched

    def presolve(self) -> Sides:
        """Fixes vertices until no side is certain; see the module docstring."""
        sides: Sides = {}
        queue = deque(sorted(self._out, key=repr) if self.choices else self._out)
        queued = set(queue)
        while queue:
            v = queue.popleft()
            queued.discard(v)
            if v not in self._out or (side := self._clear_side(v)) is None:
                continue
            sides[v] = side
            touched = self.fix(v, side)
            if self.choices:
                touched += [self.choices[c][0] for u in touched for c in self._options.get(u, ())]
                touched = sorted(set(touched), key=repr)
            for u in touched:
                if u in self._out and u not in queued:
                    queued.add(u)
                    queue.append(u)
        return sides

    def split(self) -> list[CutNetwork]:
        """Returns the components that are connected by arcs and choices."""
        parts, seen = [], set[Vertex]()
        for start in self._out:
            if start in seen:
                continue
            members, stack = [], [start]
            seen.add(start)
            while stack:
                v = stack.pop()
                members.append(v)
                near = [*self._out[v], *self._in[v]]
                for name in (*self._heads.get(v, ()), *self._options.get(v, ())):
                    near += [self.choices[name][0], *self.choices[name][1]]
                for u in near:
                    if u not in seen and u != SINK:
                        seen.add(u)
                        stack.append(u)
            parts.append(self.part(members))
        return parts

    def part(self, members: Iterable[Vertex]) -> CutNetwork:
        """Returns some vertices with their choices and arcs, which it shares; ``fixed_cost`` starts at 0."""
        part = CutNetwork()
        for v in members:
            part._out[v], part._in[v] = self._out[v], self._in[v]
            part._out_sum[v], part._in_sum[v] = self._out_sum[v], self._in_sum[v]
            part._from_source[v], part._to_sink[v] = self._from_source[v], self._to_sink[v]
            for name in (*self._heads.get(v, ()), *self._options.get(v, ())):
                head, options = self.choices[name]
                part.choices[name] = head, {**options}
                (part._heads if v == head else part._options)[v].add(name)
        return part

    def cut(self) -> Sides:
        """Returns the minimum cut with the largest source side, without choices."""
        if not self._out:
            return {}
        import networkx as nx

        graph = nx.DiGraph()
        graph.add_nodes_from([SOURCE, SINK, *self._out])
        for v in self._out:
            pull = self._from_source[v] - self._to_sink[v]
            if pull > 0:
                graph.add_edge(SOURCE, v, capacity=pull)
            elif pull < 0:
                graph.add_edge(v, SINK, capacity=-pull)
            graph.add_edges_from((v, u, {"capacity": c}) for u, c in self._out[v].items())
        # networkx gives the smallest sink side: the vertices that still reach the sink.
        _, (source_side, _) = nx.minimum_cut(graph, SOURCE, SINK)
        return {v: v in source_side for v in self._out}

    def cost(self, sides: Mapping[Vertex, bool]) -> int:
        """Returns the cost of the arcs for the given sides, including ``fixed_cost``."""
        total = self.fixed_cost
        for v, outs in self._out.items():
            if sides[v]:
                total += self._to_sink[v] + sum(c for u, c in outs.items() if not sides[u])
            else:
                total += self._from_source[v]
        return total

    def price(self, v: Vertex) -> int:
        """Returns an upper bound of the cost of moving ``v`` to the sink side."""
        return max(0, self._from_source[v] + self._in_sum[v] - self._to_sink[v])

    def _clear_side(self, v: Vertex) -> bool | None:
        from_source, to_sink = self._from_source[v], self._to_sink[v]
        if v in self._options:
            return False if to_sink >= from_source + self._in_sum[v] else None
        if from_source >= min(to_sink + self._out_sum[v], INFINITE):
            return True
        lead = to_sink - from_source - self._in_sum[v]
        if lead > 0 and v in self._heads:
            lead -= sum(min(map(self.price, self.choices[name][1])) for name in self._heads[v])
        return False if lead > 0 or to_sink >= INFINITE else None

    def _drop_choice(self, name: Hashable) -> list[Vertex]:
        head, options = self.choices.pop(name)
        for index, vertex in ((self._heads, head), *((self._options, o) for o in options)):
            if vertex in index:
                index[vertex].discard(name)
                if not index[vertex]:
                    del index[vertex]
        return [head, *options]

    def _keep_choice(self, name: Hashable, head: Vertex, fixed: Vertex) -> list[Vertex]:
        """Replaces the head of a choice by ``head`` and removes ``fixed`` from its options."""
        _, options = self.choices[name]
        touched = self._drop_choice(name)
        self.add_choice(name, head, [option for option in options if option != fixed])
        return touched
