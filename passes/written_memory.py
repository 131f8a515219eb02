"""Inputs and buffers that a graph with a loss scale writes in place, and that its caller reads afterwards.

Gradients of the caller's tensor enter the graph through the write. They must be scaled there, as those of an
output are. So the graph writes a copy of the tensor behind the boundary; at its end the copy passes the
boundary to the outside and goes to the tensor's own memory.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ampgraph._compat import OpOverload
from ampgraph.marks import BoundaryMark, BoundaryRole, set_mark

from .analysis.alias import SOURCES, AliasSets, owners_of, written_args

aten = torch.ops.aten


class WrittenMemory:
    """The memory of some sources of a graph, for `ScaleLoss`.

    Args:
        graph: The graph, before it has boundaries.
        sources: Inputs and attributes that it writes.

    Attributes:
        returned: The outputs that are views of the sources, or these themselves after a write.
    """

    def __init__(self, graph: Graph, sources: list[Node]) -> None:
        self._graph, self.returned = graph, set[Node]()
        self._shared: set[Node] = set()
        aliases = AliasSets(graph) if sources else None
        outputs = graph.output_node().all_input_nodes
        for source in sources:
            assert aliases is not None
            alike = aliases.of(source)
            if any(n.op in SOURCES and n is not source for n in alike):
                self._shared.add(source)
            else:
                self.returned |= {n for n in outputs if n in alike and _begins_at(n, source)} - {source}
        self._views = sorted(_between(self.returned))
        self._own: dict[Node, Node] = {}  # what stands for the memory of a source inside, with the source

    def inside(self, source: Node, result: Node) -> Node:
        """Returns what the graph writes in place of a source, whose boundary has this result.

        Values that the backward reads must not change any more, so it is a copy. Memory that other sources
        share, or whose layout a copy does not have, is written as it is.
        """
        value = source.meta["val"]
        copied = value.clone()
        if source in self._shared or copied.stride() != value.stride():
            self._own[result] = source
            return result
        with self._graph.inserting_after(result):
            copy = self._call("unscale", aten.clone.default, (result,), copied)
        result.replace_all_uses_with(copy, lambda user: user is not copy)
        self._own[copy] = source
        return copy

    def written(self, inside: Node) -> Node:
        """Returns what was written, at the end of the graph."""
        with self._graph.inserting_before(self._graph.output_node()):
            # Dynamo knows of a tensor whether it had gradients when it was made, before the writes.
            return self._call("scale", aten.alias.default, (inside,), inside.meta["val"])

    def write_back(self, source: Node, scaled: Node) -> None:
        """Writes what left the boundary to the memory of a source, at the end of the graph."""
        with self._graph.inserting_before(self._graph.output_node()):
            self._call("scale", aten.copy_.default, (source, scaled), source.meta["val"])

    def return_own(self) -> None:
        """Lets the graph return views of the sources themselves, as the model does."""
        output = self._graph.output_node()
        with self._graph.inserting_before(output):
            for node in self._views:
                self._own[node] = self._viewed_again(node)
        for node in self.returned:
            output.replace_input_with(node, self._own[node])

    def _call(self, role: BoundaryRole, op: OpOverload, args: tuple[Node, ...], value: torch.Tensor) -> Node:
        call = self._graph.call_function(op, args)
        call.meta["val"] = value
        set_mark(call, BoundaryMark(role))
        return call

    def _viewed_again(self, node: Node) -> Node:
        """Returns the node's view of the source's memory, after all writes."""
        if written := written_args(node):
            return self._own[written[0]]
        again = self._graph.node_copy(node, lambda n: self._own.get(n, n))
        again.meta = dict(node.meta)
        return again


def _between(nodes: set[Node]) -> set[Node]:
    """Returns the views and their owners, up to the sources."""
    found, waiting = set[Node](), [*nodes]
    while waiting:
        node = waiting.pop()
        if node.op not in SOURCES and node not in found:
            found.add(node)
            waiting += owners_of(node)[:1]
    return found


def _begins_at(node: Node, source: Node) -> bool:
    """Whether a node is a view of a source, or of such a view, along the first argument of each."""
    while node.op not in SOURCES:
        if node.target is aten.detach.default or not (owners := owners_of(node)):
            return False
        node = owners[0]
    return node is source
