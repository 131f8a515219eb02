"""Puts the loss-scaling boundary around a graph: unscale at parameters and inputs, scale at outputs."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from ampgraph.marks import BoundaryMark, mark_of, set_mark
from ampgraph.training.gradient_boundary import scale_gradients, unscale_gradients

from .analysis.gradient_flow import (
    Entrances,
    differentiable_outputs,
    groups,
    is_differentiable,
    reached_by_gradients,
    swaps_memory,
)
from .base import Pass
from .written_memory import WrittenMemory


@dataclass(frozen=True)
class ScaleLoss(Pass):
    """Inserts `ampgraph.training.gradient_boundary` nodes.

    Attributes:
        slots: Parameter node name to its slot in the probe; all other differentiable inputs use the last.
        size: Length of the probe.
        state: Names of the nodes that give scale, inverse scale and probe: attributes, or placeholders.
        apart: Whether inputs that are alike get calls of their own: a caller may pass one tensor twice, and
            Dynamo takes no tensor twice in a call.
        part: The attribute that selects the part of the probe that the slots count in; empty for all of it.
            Graphs of blocks that are alike then have the same slots, and the same code.
    """

    slots: tuple[tuple[str, int], ...]
    size: int
    state: tuple[str, str, str] = ("_amp.scale", "_amp.inverse", "_amp.probe")
    part: str = ""
    apart: bool = False
    name: ClassVar[str] = "scale_loss"

    def run(self, graph_module: GraphModule) -> bool:
        graph, slots = graph_module.graph, dict(self.slots)
        memory = WrittenMemory(graph, slots)
        written = memory.sources
        outputs = [n for n in differentiable_outputs(graph) if n not in memory.returned]
        reached = reached_by_gradients(graph, outputs)
        parameters = [n for n in _parameters(graph, slots, reached) if n not in written]
        inputs = [n for n in self._inputs(graph, slots, reached) if n not in written] + written
        if not (outputs or written) or not (parameters or inputs):
            return False
        scale, inverse, probe = self._state_nodes(graph)
        entrances = Entrances(graph)
        slots |= dict.fromkeys((n.name for n in inputs), self.size - 1)
        swapped = {
            new: n for n in (*parameters, *inputs) for new in _swapped(n) if new in reached and new.users
        }
        slots |= {new.name: slots[n.name] for new, n in swapped.items()}
        kept = [[n for n in nodes if not all(map(swaps_memory, n.users))] for nodes in (parameters, inputs)]
        alone = [[new] for new in swapped]
        inside: dict[Node, Node] = {}
        entering = [part for group in groups(kept[1], reached) for part in self._split(group)]
        for group in (*groups(kept[0], reached), *entering, *alone):
            arguments = probe, inverse, _text(slots[n.name] for n in group)
            inside |= _wrap(graph, unscale_gradients, arguments, group, entrances.of(group))
        for node in written:
            last = memory.last(memory.inside(node, inside[node]))
            memory.write_back(
                node, _wrap(graph, scale_gradients, (scale,), [last], graph.output_node())[last]
            )
        for node in memory.siblings:
            if node in inside and node not in written:
                memory.inside(node, inside[node])
        memory.return_own()
        for node in outputs:  # one by one: a backward from one output must not run the branches of the others
            _wrap(graph, scale_gradients, (scale,), [memory.last(node)], graph.output_node())
        return True

    def _inputs(self, graph: Graph, slots: Mapping[str, int], reached: Container[Node]) -> list[Node]:
        found = [n for n in graph.find_nodes(op="placeholder") if n.name not in slots and n in reached]
        return [n for n in found if is_differentiable(n) and not self._is_added(n)]

    def _split(self, inputs: list[Node]) -> list[list[Node]]:
        """Returns the inputs in lists that have no two of one shape and dtype, where these must be apart."""
        if not self.apart:
            return [inputs]
        alike: dict[object, list[Node]] = {}
        for node in inputs:
            value = node.meta["val"]
            alike.setdefault((str(value.shape), value.dtype), []).append(node)
        return [[n for n in row if n is not None] for row in itertools.zip_longest(*alike.values())]

    def _is_added(self, placeholder: Node) -> bool:
        """Whether a placeholder is the loss scale or the low copy of a weight, not an input."""
        return placeholder.name in self.state or is_boundary(placeholder)

    def _state_nodes(self, graph: Graph) -> list[Node]:
        by_name = {n.name: n for n in graph.find_nodes(op="placeholder")}
        if self.state[0] in by_name:
            return [by_name[name] for name in self.state]
        first = next(iter(graph.nodes))
        with graph.inserting_before(first):
            nodes = [graph.create_node("get_attr", target) for target in self.state]
            if self.part:
                part = graph.create_node("get_attr", self.part)
                nodes[2] = graph.call_function(torch.ops.aten.index_select.default, (nodes[2], 0, part))
                set_mark(nodes[2], BoundaryMark("unscale"))
            return nodes


def _parameters(graph: Graph, slots: Mapping[str, int], reached: Container[Node]) -> list[Node]:
    """Returns the parameters that a gradient reaches, by slot."""
    found = [n for n in graph.nodes if n.name in slots and n in reached]
    return sorted(found, key=lambda node: slots[node.name])


def _swapped(node: Node) -> list[Node]:
    """Returns what stands for an input after each change of its memory, which must not reach a copy of it."""
    found = [user for user in node.users if swaps_memory(user) and user.args[0] is node]
    return [new for user in found for new in (user, *_swapped(user))]


def _text(slots: Iterable[int]) -> str:
    return " ".join(map(str, slots))


def _wrap(
    graph: Graph, function: Callable, arguments: tuple, nodes: list[Node], at: Node
) -> dict[Node, Node]:
    """Passes ``nodes`` through a boundary function before ``at``; their users read its results.

    At the output, only the output reads the results.

    Returns:
        The result for each node.
    """
    # A node that is also an output passes unchanged, because nothing was scaled on that path.
    is_output = at.op == "output"
    inside = {n: [u for u in n.users if u.op != "output" and not swaps_memory(u)] for n in nodes}
    users = {n: [at] if is_output else inside[n] for n in nodes}
    with graph.inserting_before(at):
        call = graph.call_function(function, (*arguments, *nodes))
        mark = BoundaryMark("scale" if function is scale_gradients else "unscale")
        call.meta["val"] = tuple(n.meta["val"] for n in nodes)
        set_mark(call, mark)
        results = {}
        for index, node in enumerate(nodes):
            result = graph.call_function(operator.getitem, (call, index))
            result.meta["val"] = node.meta["val"]
            set_mark(result, mark)
            results[node] = result
            for user in users[node]:
                user.replace_input_with(node, result)
    return results


def is_boundary(node: Node) -> bool:
    """Whether the node belongs to the loss-scaling boundary."""
    return mark_of(node, BoundaryMark) is not None
