"""Where gradients go in a graph: the nodes that they reach, and groups of tensors that pass them together."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Container, Mapping, Sequence

import torch
from torch.fx import Graph, Node

from ampgraph._compat import NUMBERS, OpOverload, fake_mode_of, size_hint
from ampgraph.ops.kernels import packet_name, reads_no_values, writes_state

from .alias import SOURCES, returned_input, source_of, written_args
from .facts import tensors
from .grad_modes import without_gradients

# Parameters pass a boundary in groups of about these bytes, the size of DistributedDataParallel's buckets.
# So gradients leave the backward, and a wrapper can all-reduce them, while the backward still runs.
GROUP_BYTES = 25 * 2**20
_SWAPS = ("aten.set_", "aten.shallow_copy_data_")  # the second on torch 2.15


def groups(nodes: Sequence[Node], reached: Mapping[Node, int], most: float = math.inf) -> list[list[Node]]:
    """Splits nodes into groups of about `GROUP_BYTES` with at most ``most`` nodes each, in order.

    The nodes of a group have gradients of the same outputs. Autograd runs what stands before a boundary call
    for all tensors of the call: hooks see None, and the graph before an input is freed.

    Args:
        nodes: The nodes.
        reached: The outputs whose gradients reach each, as by `reached_by_gradients`.
        most: The number of nodes.
    """
    alike: dict[int, list[Node]] = {}
    for node in nodes:
        alike.setdefault(reached[node], []).append(node)
    return [group for same in alike.values() for group in _by_size(same, most)]


def _by_size(nodes: Sequence[Node], most: float) -> list[list[Node]]:
    found: list[list[Node]] = []
    size = GROUP_BYTES
    for node in nodes:
        if size >= GROUP_BYTES or len(found[-1]) >= most:
            found.append([])
            size = 0
        found[-1].append(node)
        size += sum(size_hint(t.numel()) * t.element_size() for t in tensors(node))
    return found


class Entrances:
    """Finds where tensors enter a graph through a boundary.

    Autograd runs the backwards of late calls first. A boundary right before its first reader passes gradients
    on as soon as it has all of them; one at the start of the graph, at the end of the backward.
    """

    def __init__(self, graph: Graph) -> None:
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        self._without = without_gradients(graph)

    def of(self, nodes: Sequence[Node]) -> Node:
        """Returns the first call that reads one of them, or the start of its region without gradients."""
        first = min((user for node in nodes for user in node.users), key=self._order.__getitem__)
        return self._without.get(first, first)


def differentiable_outputs(graph: Graph) -> list[Node]:
    """Returns the outputs that the graph computes and that may have gradients."""
    outputs = graph.output_node().all_input_nodes
    return [n for n in outputs if n.op == "call_function" and is_differentiable(n)]


def reached_by_gradients(graph: Graph, outputs: list[Node]) -> dict[Node, int]:
    """Returns the nodes that a gradient of the outputs may reach, each with these outputs as bits.

    Other nodes stay outside the boundary. If some tensors have gradients, a compiler fills in zeros for all
    others. An optimizer decays a parameter with a zero gradient, but not a parameter without a gradient.
    """
    reached = {node: 1 << index for index, node in enumerate(outputs)}
    passing = _passing(graph)
    bit = len(outputs)
    for node in reversed(graph.nodes):
        if node not in passing:
            continue
        written = written_args(node)
        bits = functools.reduce(operator.or_, (reached.get(n, 0) for n in (node, *written)))
        if written and not bits:  # written memory may be read through another node, for any outputs
            bits, bit = 1 << bit, bit + 1
        if bits:
            reached.update((n, reached.get(n, 0) | bits) for n in node.all_input_nodes)
    return reached


def matter_to_gradients(graph: Graph) -> set[Node]:
    """Returns the calls that pass gradients, and those whose results such a call reads sooner or later."""
    reached = reached_by_gradients(graph, differentiable_outputs(graph))
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in reached or any(user in found for user in node.users):
            found.add(node)
    return found


def writes_to_sources(graph: Graph) -> dict[Node, list[Node]]:
    """Returns the inputs and attributes that calls write in place with gradients on, with these calls.

    Writes to what has no gradients of the source, such as ``x.data``, do not count.
    """
    cut, passing = without_gradients(graph), _passing(graph)
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node in cut or swaps_memory(node):
            continue
        for source in {source_of(written, passing) for written in _written_with_gradients(node)}:
            if source is not None and is_differentiable(source):
                found.setdefault(source, []).append(node)
    return found


def swaps_memory(node: Node) -> bool:
    """Whether a call gives its argument other memory: ``parameter.data = new``."""
    return isinstance(node.target, OpOverload) and packet_name(node.target) in _SWAPS


def carrying_gradients(graph: Graph, trained: Container[str]) -> set[Node]:
    """Returns the nodes whose values may have gradients of inputs or of the sources with these names."""
    passing = _passing(graph)
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op in SOURCES:
            carries = is_differentiable(node) and (node.op == "placeholder" or node.name in trained)
        else:
            carries = node in passing and not found.isdisjoint(node.all_input_nodes)
        if carries:
            found |= {node, *_written_with_gradients(node)}
    return found


def _written_with_gradients(node: Node) -> list[Node]:
    """Returns the arguments that a call writes, if their gradients then belong to its other arguments."""
    is_state = isinstance(node.target, OpOverload) and writes_state(node.target)
    return [] if is_state else [*written_args(node)]


def _passing(graph: Graph) -> set[Node]:
    """Returns the calls that pass gradients, according to grad modes, dtypes of results and ``detach``.

    A tensor that is written without gradients keeps its earlier gradients, and so does an op's input that is
    returned unchanged.
    """
    mode = fake_mode_of(graph)
    cut = {n for n in without_gradients(graph) if not written_args(n) and returned_input(n, mode) is None}
    calls = (n for n in graph.nodes if n.op == "call_function" and n not in cut)
    return {n for n in calls if written_args(n) or not _ends_gradients(n)}


def _ends_gradients(node: Node) -> bool:
    """Whether no result of the call has gradients: ``detach``, comparisons, indices, ``zeros_like``.

    Nor has a number that is read from a tensor. Dynamo passes a Python float that has changed as a tensor and
    reads it inside the graph; a boundary between both would hide the number from AOTAutograd.
    """
    if node.target is torch.ops.aten.detach.default:
        return True
    if isinstance(node.target, OpOverload) and reads_no_values(node.target):
        return True
    if isinstance(node.meta.get("val"), NUMBERS):
        return True
    found = tensors(node)
    return bool(found) and not any(_has_gradients(t.dtype) for t in found)


def _has_gradients(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def is_differentiable(node: Node) -> bool:
    """Whether the node is one tensor of a dtype that has gradients."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and _has_gradients(value.dtype)
