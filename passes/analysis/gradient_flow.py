"""Where gradients go in a graph: the nodes that they reach, and groups of tensors that pass them together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from ampgraph._compat import fake_mode_of, size_hint

from .alias import returned_input, written_args
from .facts import tensors
from .grad_modes import without_gradients

# Parameters pass a boundary in groups of about these bytes, the size of DistributedDataParallel's buckets.
# So gradients leave the backward, and a wrapper can all-reduce them, while the backward still runs.
GROUP_BYTES = 25 * 2**20


def groups(nodes: Sequence[Node], most: float = math.inf) -> list[list[Node]]:
    """Splits nodes into groups of about `GROUP_BYTES` with at most ``most`` nodes each, in order."""
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


def reached_by_gradients(graph: Graph, outputs: list[Node]) -> set[Node]:
    """Returns the nodes that a gradient of the outputs may reach.

    Other nodes stay outside the boundary. If some tensors have gradients, a compiler fills in zeros for all
    others. An optimizer decays a parameter with a zero gradient, but not a parameter without a gradient.
    """
    reached = set(outputs)
    passing = _passing(graph)
    for node in reversed(graph.nodes):
        # Written memory may be read through another node.
        if node in passing and (node in reached or written_args(node)):
            reached.update(node.all_input_nodes)
    return reached


def _passing(graph: Graph) -> set[Node]:
    """Returns the calls that pass gradients, according to grad modes and ``detach``.

    A tensor that is written without gradients keeps its earlier gradients, and so does an op's input that is
    returned unchanged.
    """
    mode = fake_mode_of(graph)
    cut = {n for n in without_gradients(graph) if not written_args(n) and returned_input(n, mode) is None}
    cut.update(graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default))
    return {n for n in graph.nodes if n.op == "call_function"} - cut


def is_differentiable(node: Node) -> bool:
    """Whether the node is one tensor of a dtype that has gradients."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)
