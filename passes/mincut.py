"""Exact minimum s-t cut: presolve in linear time, the hard core by networkx.

Every vertex ends on the source side (low) or the sink side (float32). Among all minimum cuts the one
with the largest source side is returned, which is unique, so the order in which vertices and arcs were
added cannot change the answer.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable

import networkx as nx

SOURCE, SINK = "source", "sink"
Vertex = Hashable


class CutNetwork:
    """A flow network with integer capacities.

    An arc (u, v) with capacity c costs c when u ends on the source side and v on the sink side.
    """

    def __init__(self) -> None:
        self._out: dict[Vertex, dict[Vertex, int]] = defaultdict(dict)
        self._in: dict[Vertex, dict[Vertex, int]] = defaultdict(dict)
        self._from_source: dict[Vertex, int] = defaultdict(int)
        self._to_sink: dict[Vertex, int] = defaultdict(int)
        self._vertices: dict[Vertex, None] = {}

    def add_vertex(self, vertex: Vertex) -> None:
        """Makes sure that the vertex is in the network."""
        self._vertices.setdefault(vertex)

    def add_arc(self, u: Vertex, v: Vertex, capacity: int) -> None:
        """Adds ``capacity`` to the arc from u to v; either may be `SOURCE` or `SINK`."""
        if u == v or capacity == 0 or u == SINK or v == SOURCE:
            return
        for vertex in (u, v):
            if vertex not in (SOURCE, SINK):
                self.add_vertex(vertex)
        if u == SOURCE and v == SINK:
            return
        if u == SOURCE:
            self._from_source[v] += capacity
        elif v == SINK:
            self._to_sink[u] += capacity
        else:
            self._out[u][v] = self._out[u].get(v, 0) + capacity
            self._in[v][u] = self._in[v].get(u, 0) + capacity

    def minimum_cut(self) -> dict[Vertex, bool]:
        """Returns True (source side) or False (sink side) for every vertex; consumes the network."""
        sides = self._presolve()
        if self._vertices:
            sides.update(self._solve_core())
        return sides

    def _presolve(self) -> dict[Vertex, bool]:
        """Fixes every vertex whose side is clear from its own arcs, until none is left that is.

        With all its neighbours on the sink side, a vertex loses least from joining the source side; if
        even then it is no worse there, some minimum cut, and so the largest one, has it there. The
        mirror image holds for the sink side, strictly, to keep the source side largest.
        """
        sides: dict[Vertex, bool] = {}
        out_sum = {v: sum(self._out[v].values()) for v in self._vertices}
        in_sum = {v: sum(self._in[v].values()) for v in self._vertices}
        queue = deque(self._vertices)
        queued = set(queue)
        while queue:
            v = queue.popleft()
            queued.discard(v)
            from_source, to_sink = self._from_source[v], self._to_sink[v]
            if from_source >= to_sink + out_sum[v]:
                sides[v] = True
            elif to_sink > from_source + in_sum[v]:
                sides[v] = False
            else:
                continue
            for u in self._fix(v, sides[v], out_sum, in_sum):
                if u not in queued:
                    queued.add(u)
                    queue.append(u)
        return sides

    def _fix(self, v: Vertex, on_source: bool, out_sum: dict[Vertex, int], in_sum: dict[Vertex, int]) -> list[Vertex]:
        """Merges ``v`` into a terminal and returns the vertices that this may decide."""
        outs, ins = self._out.pop(v, {}), self._in.pop(v, {})
        for u, capacity in outs.items():
            del self._in[u][v]
            in_sum[u] -= capacity
            if on_source:
                self._from_source[u] += capacity
        for u, capacity in ins.items():
            del self._out[u][v]
            out_sum[u] -= capacity
            if not on_source:
                self._to_sink[u] += capacity
        del self._vertices[v]
        return [*outs, *ins]

    def _solve_core(self) -> dict[Vertex, bool]:
        graph = nx.DiGraph()
        graph.add_nodes_from([SOURCE, SINK])
        for v in self._vertices:
            if through := min(self._from_source[v], self._to_sink[v]):
                self._from_source[v] -= through
                self._to_sink[v] -= through
            graph.add_edge(SOURCE, v, capacity=self._from_source[v])
            graph.add_edge(v, SINK, capacity=self._to_sink[v])
            graph.add_edges_from((v, u, {"capacity": c}) for u, c in self._out[v].items())
        # networkx gives the smallest sink side: the vertices that still reach the sink.
        _, (source_side, _) = nx.minimum_cut(graph, SOURCE, SINK)
        return {v: v in source_side for v in self._vertices}
