"""Inputs and buffers that a graph with a loss scale writes in place, and that its caller reads afterwards.

Gradients of the caller's tensor enter the graph through the write. They must be scaled there, as those of an
output are. So the graph writes a copy of the tensor behind the boundary; at its end the copy passes the
boundary to the outside and goes to the tensor's own memory.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from ampgraph._compat import OpOverload
from ampgraph.errors import PassError
from ampgraph.marks import BoundaryMark, BoundaryRole, input_mark, set_mark

from .analysis.alias import (
    DETACH,
    SOURCES,
    AliasSets,
    owners_of,
    source_of,
    strided_memory,
    written_args,
    written_memory,
)
from .analysis.gradient_flow import carrying_gradients, writes_to_sources

aten = torch.ops.aten


class WrittenMemory:
    """The memory that a graph writes, for `ScaleLoss`.

    Args:
        graph: The graph, before it has boundaries.
        trained: Names of the sources that are parameters or have gradients.

    Attributes:
        sources: Inputs and attributes that get other gradients by a write.
        siblings: Other inputs and attributes with a part of the same storage: the write of a source at the
            end of the graph counts as one of theirs.
        returned: The outputs that are views of the sources, or these themselves after a write.

    Raises:
        PassError: Another source has elements of one of them, so that no boundary of one holds for both; or
            ``as_strided`` reads beyond one.
    """

    def __init__(self, graph: Graph, trained: Container[str]) -> None:
        self._graph = graph
        written = _rewritten(graph, trained)
        aliases = AliasSets(graph) if written else None
        beyond = strided_memory(graph) if written else set()
        self.sources: list[Node] = []
        self.siblings: dict[Node, None] = {}
        for source, carries in written.items():
            assert aliases is not None
            others = [n for n in aliases.of(source) if n.op in SOURCES and n is not source]
            unclear = [n for n in others if _overlap(n.meta["val"], source.meta["val"])]
            if carries and (unclear or source in beyond):
                raise PassError(_refusal(source, unclear))
            if not unclear and source not in beyond:
                self.sources.append(source)
                self.siblings |= dict.fromkeys(others)
        outputs = graph.output_node().all_input_nodes
        self.returned = {n for n in outputs if source_of(n) in self.sources} - {*self.sources}
        self._views = sorted(_between(self.returned))
        self._own: dict[Node, Node] = {}  # what stands for the memory of a source inside, with the source
        self._detached = {source_of(n.args[0]) for n in graph.nodes if n.target is DETACH}
        self._written = written_memory(graph)

    def inside(self, source: Node, result: Node) -> Node:
        """Returns what the graph reads and writes in place of a source, whose boundary has this result.

        It is a copy of the same layout: values that the backward reads must not change any more.
        """
        readers, value = [*result.users], source.meta["val"]
        copied = value.clone()
        with self._graph.inserting_before(result.next):
            if copied.stride() == value.stride():
                copy = self._call("unscale", aten.clone.default, (result,), copied)
            else:
                copy = self._laid_out_copy(result, value)
        for reader in readers:
            reader.replace_input_with(result, copy)
        self._own[copy] = source
        return copy

    def _laid_out_copy(self, result: Node, value: torch.Tensor) -> Node:
        """Returns a copy with the strides of a tensor with gaps, which ``clone`` would close."""
        sizes = self._numbers(aten.sym_size.int, result, value.shape)
        steps = self._numbers(aten.sym_stride.int, result, value.stride())
        empty = value.new_empty_strided(value.shape, value.stride())
        copy = self._call("unscale", aten.new_empty_strided.default, (result, sizes, steps), empty)
        self._call("unscale", aten.copy_.default, (copy, result), empty)
        return copy

    def _numbers(self, op: OpOverload, result: Node, numbers: Iterable[Any]) -> list[int | Node]:
        """Returns sizes or strides; those that are symbols as calls, by which the graph asks for them."""
        return [
            n if isinstance(n, int) else self._call("unscale", op, (result, i), n)
            for i, n in enumerate(numbers)
        ]

    def last(self, node: Node) -> Node:
        """Returns what an output, or the inside of a source, is at the end of the graph."""
        if node not in self._written and node not in self._own:
            return node
        with self._graph.inserting_before(self._graph.output_node()):
            # Dynamo knows of a tensor whether it had gradients when it was made, before the writes.
            last = self._call("scale", aten.alias.default, (node,), node.meta["val"])
        self._graph.output_node().replace_input_with(node, last)
        return last

    def write_back(self, source: Node, scaled: Node) -> None:
        """Writes what left the boundary to the memory of a source, at the end of the graph."""
        with self._graph.inserting_before(self._graph.output_node()):
            if source in self._detached:
                self._call("scale", DETACH, (source,), source.meta["val"])
            self._call("scale", aten.copy_.default, (source, scaled), source.meta["val"])

    def return_own(self) -> None:
        """Lets the graph return views of the sources themselves, as the model does."""
        output = self._graph.output_node()
        with self._graph.inserting_before(output):
            for node in self._views:
                self._own[node] = self._viewed_again(node)
        for node in self.returned:
            output.replace_input_with(node, self._own[node])

    def _call(self, role: BoundaryRole, op: OpOverload, args: tuple, value: Any) -> Node:
        call = self._graph.call_function(op, args)
        call.meta["val"] = value
        set_mark(call, BoundaryMark(role))
        return call

    def _viewed_again(self, node: Node) -> Node:
        """Returns the node's view of the source's memory, after all writes."""
        if (written := written_args(node)) and written[0] in self._own:
            return self._own[written[0]]
        again = self._graph.node_copy(node, lambda n: self._own.get(n, n))
        again.meta = dict(node.meta)
        return again


def _rewritten(graph: Graph, trained: Container[str]) -> dict[Node, bool]:
    """Returns the sources whose gradients a write may change, and whether it writes values with gradients.

    What a caller passes may have gradients, which a write of any values ends.
    """
    writes = writes_to_sources(graph)
    carrying = carrying_gradients(graph, trained) if writes else set()
    found = {}
    for source, calls in writes.items():
        given = [n for call in calls for n in call.all_input_nodes if n not in written_args(call)]
        carries = not carrying.isdisjoint(given)
        is_passed = source.op == "placeholder" and not input_mark(source).is_table
        if carries or is_passed or source.name in trained:
            found[source] = carries
    return found


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage may have an element in common."""
    spans = []
    for tensor in (a, b):
        reach = [(n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
        ends = tensor.storage_offset(), tensor.storage_offset() + sum(reach) + 1
        if not all(isinstance(end, int) for end in ends):
            return True
        spans.append([end * tensor.itemsize for end in ends])
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]


def _refusal(source: Node, others: list[Node]) -> str:
    what = f"it shares memory with {others[0].name!r}" if others else "it is a part of other memory"
    return (
        f"{source.name!r} is written with values that have gradients, and {what}: a loss scale cannot tell "
        "whose gradients these are. Pass separate tensors, or convert without a loss scale (bfloat16, "
        "NoLossScale)."
    )


def _between(nodes: set[Node]) -> set[Node]:
    """Returns the views and their owners, up to the sources."""
    found, waiting = set[Node](), [*nodes]
    while waiting:
        node = waiting.pop()
        if node.op not in SOURCES and node not in found:
            found.add(node)
            # One of several results needs their call, too.
            waiting += node.all_input_nodes if node.target is operator.getitem else owners_of(node)[:1]
    return found
