"""Puts the loss-scaling boundary around a graph: unscale at parameters and inputs, scale at outputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from ampgraph._compat import fake_mode_of, size_hint
from ampgraph.marks import BoundaryMark, mark_of, set_mark
from ampgraph.training.gradient_boundary import scale_gradients, trace_of, unscale_gradients

from .analysis.alias import returns_its_input, written_args
from .analysis.facts import tensors
from .analysis.grad_modes import without_gradients
from .base import Pass

# Parameters are unscaled in groups of about this many bytes, the size of DistributedDataParallel's buckets.
# So gradients leave the backward, and a wrapper can all-reduce them, while the backward still runs.
GROUP_BYTES = 25 * 2**20


@dataclass(frozen=True)
class ScaleLoss(Pass):
    """Inserts `ampgraph.training.gradient_boundary` nodes.

    Attributes:
        slots: Parameter node name to its slot in the probe; all other differentiable inputs use the last.
        size: Length of the probe.
        state: Names of the nodes that give scale, inverse scale and probe: attributes, or placeholders.
    """

    slots: tuple[tuple[str, int], ...]
    size: int
    state: tuple[str, str, str] = ("_amp.scale", "_amp.inverse", "_amp.probe")
    name: ClassVar[str] = "scale_loss"

    def run(self, graph_module: GraphModule) -> bool:
        graph = graph_module.graph
        slots = dict(self.slots)
        output = next(n for n in reversed(graph.nodes) if n.op == "output")
        outputs = [n for n in output.all_input_nodes if n.op == "call_function" and _is_differentiable(n)]
        reached = _reached_by_gradients(graph, outputs)
        parameters = [n for n in graph.nodes if n.name in slots and n in reached]
        parameters.sort(key=lambda node: slots[node.name])
        inputs = [n for n in graph.find_nodes(op="placeholder") if n.name not in slots and n in reached]
        inputs = [n for n in inputs if n.name not in self.state and _is_differentiable(n)]
        if not outputs or not (parameters or inputs):
            return False
        scale, inverse, probe = self._state_nodes(graph)
        for group in _groups(parameters):
            _wrap(graph, unscale_gradients, (probe, inverse, _text(slots[n.name] for n in group)), group)
        if inputs:
            last = _text(self.size - 1 for _ in inputs)
            _wrap(graph, unscale_gradients, (probe, inverse, last), inputs)
        for node in outputs:  # one by one: a backward from one output must not run the branches of the others
            _wrap(graph, scale_gradients, (scale,), [node], only=output)
        return True

    def _state_nodes(self, graph: Graph) -> list[Node]:
        by_name = {n.name: n for n in graph.find_nodes(op="placeholder")}
        if self.state[0] in by_name:
            return [by_name[name] for name in self.state]
        first = next(iter(graph.nodes))
        with graph.inserting_before(first):
            return [graph.create_node("get_attr", target) for target in self.state]


def _text(slots: Iterable[int]) -> str:
    return " ".join(map(str, slots))


def _wrap(
    graph: Graph, function: Callable, arguments: tuple, nodes: list[Node], only: Node | None = None
) -> None:
    """Passes ``nodes`` through a boundary function; their users (or ``only`` one) read its results."""
    at = only or next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
    # A node that is also an output passes unchanged, because nothing was scaled on that path.
    users = {n: [only] if only else [u for u in n.users if u.op != "output"] for n in nodes}
    with graph.inserting_before(at):
        call = graph.call_function(function, (*arguments, *nodes))
        call.meta["val"] = tuple(n.meta["val"] for n in nodes)
        set_mark(call, BoundaryMark(ScaleLoss.name))
        call.meta["stack_trace"] = trace_of(function)
        for index, node in enumerate(nodes):
            result = graph.call_function(operator.getitem, (call, index))
            result.meta["val"] = node.meta["val"]
            set_mark(result, BoundaryMark(ScaleLoss.name))
            for user in users[node]:
                user.replace_input_with(node, result)


def _groups(nodes: list[Node]) -> list[list[Node]]:
    groups: list[list[Node]] = []
    size = GROUP_BYTES
    for node in nodes:
        if size >= GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(node)
        size += sum(size_hint(t.numel()) * t.element_size() for t in tensors(node))
    return groups


def _reached_by_gradients(graph: Graph, outputs: list[Node]) -> set[Node]:
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
    cut = {n for n in without_gradients(graph) if not written_args(n) and not returns_its_input(n, mode)}
    cut.update(graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default))
    return {n for n in graph.nodes if n.op == "call_function"} - cut


def _is_differentiable(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


def is_boundary(node: Node) -> bool:
    """Whether the node belongs to the loss-scaling boundary."""
    return mark_of(node, BoundaryMark) is not None
