"""Runs a graph node by node, lets callers read or replace each value, and frees values after use."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from .._compat import HigherOrderOperator, OpOverload, flat_inputs
from ..passes.analysis.alias import SOURCES, written_args, written_memory
from ..passes.analysis.arguments import argument
from ..passes.analysis.ranges import is_table
from ..passes.analysis.unwritten import unwritten

__all__ = ["Draws", "GraphRun", "flat_inputs", "floats", "is_meant"]

# Batch norms write these, and their schemas do not say so.
_RUNNING = ("running_mean", "running_var")
# Arguments of norms that say whether they take the statistics of the batch.
_USES_BATCH = ("training", "train", "use_input_stats")


class GraphRun:
    """One run of a graph; iterating runs it, and yields each node with its value.

    While a node is yielded, `values` holds its value and those of its inputs. What is written there is what
    later nodes read. A value is dropped after its last use. The inputs, parameters and buffers that the graph
    writes are copies, so a run leaves no trace in the model.

        run = GraphRun(graph_module, flat_inputs(graph_module, args, kwargs))
        for node, value in run:
            ...
        result = run.result()

    Args:
        graph_module: The graph.
        inputs: One value for each placeholder.
        draws: Makes several runs draw the same random numbers; None: drawn as they come.
        is_real: Whether the run is the model's own, which writes buffers and inputs for real.

    Attributes:
        values: The values that later nodes read, by node.
        outputs: What the graph returns, flat; after the last node.
        unwritten: The nodes whose values are memory that nothing has written yet (``torch.empty``). They are
            no evidence of anything: who judges values leaves them out.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        inputs: Sequence[Any],
        draws: Draws | None = None,
        is_real: bool = False,
    ):
        self.graph_module = graph_module
        self.values: dict[Node, Any] = {}
        self.outputs: Sequence[Any] = ()
        self.unwritten = unwritten(graph_module.graph)
        self._inputs, self._draws = iter(inputs), draws
        self._written = set() if is_real else _written_sources(graph_module)
        self._copies: dict[int, Tensor] = {}
        self._dropped = _last_uses(graph_module)

    def __iter__(self) -> Iterator[tuple[Node, Any]]:
        gradients = torch.is_grad_enabled()
        for node in self.graph_module.graph.nodes:
            if node.op == "output":
                self.outputs = map_arg(node.args[0], self.values.__getitem__)
                self.values.clear()
                return
            # The graph may switch gradients on and off; the caller's code between two nodes must not notice.
            with torch.set_grad_enabled(gradients):
                self.values[node] = self._value(node)
                gradients = torch.is_grad_enabled()
            yield node, self.values[node]
            for used in self._dropped.get(node, ()):
                del self.values[used]

    def result(self) -> Any:
        """Returns what calling the graph module would: the outputs in the model's own structure."""
        return self.graph_module.graph.process_outputs(self.outputs)

    def _value(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self._source(node, next(self._inputs))
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(self.graph_module)
            return self._source(node, _as_planned(node, value))
        args, kwargs = map_arg((node.args, node.kwargs), self.values.__getitem__)
        return self._call(node, args, kwargs)

    def _call(self, node: Node, args: tuple, kwargs: dict[str, Any]) -> Any:
        assert callable(node.target)
        if self._draws is not None and is_random(node):
            self._draws.start(node.name)
        return node.target(*args, **kwargs)

    def _source(self, node: Node, value: Any) -> Any:
        if node not in self._written or not isinstance(value, Tensor):
            return value
        # A tensor under two names stays one tensor.
        return self._copies.setdefault(id(value), value.clone())


class Draws:
    """Lets several runs draw the same random numbers: each node starts from the state that it had first.

    Nodes are known by name; so runs of a graph with casts and of one without agree.
    """

    def __init__(self) -> None:
        self._states: dict[str, list[Tensor]] = {}

    def start(self, name: str) -> None:
        """Brings the generators to where they were when a node of this name was run first."""
        known = self._states.get(name)
        if known is None:
            self._states[name] = _generator_states()
            return
        torch.random.set_rng_state(known[0])
        for device, state in enumerate(known[1:]):
            torch.cuda.set_rng_state(state, device)

    def moved(self, name: str) -> bool:
        """Whether random numbers have been drawn since `start` for this name."""
        states = zip(self._states[name], _generator_states(), strict=True)
        return any(not torch.equal(before, now) for before, now in states)


def _generator_states() -> list[Tensor]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return [torch.random.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def floats(value: Any) -> list[Tensor]:
    """Returns the floating-point tensors in what a node produces."""
    leaves = pytree.tree_leaves(value) if isinstance(value, (list, tuple, dict)) else (value,)
    return [v for v in leaves if isinstance(v, Tensor) and v.is_floating_point()]


def _written_sources(graph_module: GraphModule) -> set[Node]:
    """Returns the inputs, parameters and buffers that the graph writes."""
    found = {node for node in written_memory(graph_module.graph) if node.op in SOURCES}
    for node in graph_module.graph.nodes:
        found.update(source for source in _running(node) if source.op in SOURCES)
    return found


def written_by(node: Node) -> list[Node]:
    """Returns the arguments that a node writes to, running statistics of batch norms among them."""
    return [*written_args(node), *_running(node)]


def updated_statistics(node: Node) -> list[Node]:
    """Returns the running statistics of a norm that takes those of the batch: it updates them alone."""
    statistics = list(_running(node))
    return statistics if statistics and any(argument(node, name) for name in _USES_BATCH) else []


def _running(node: Node) -> Iterator[Node]:
    if not isinstance(node.target, OpOverload):
        return
    for value in (argument(node, name) for name in _RUNNING):
        if isinstance(value, Node):
            yield value


def _as_planned(node: Node, value: Any) -> Any:
    """Widens a parameter that is stored low, for a graph that reads it in float32."""
    planned = node.meta.get("val")
    if not (isinstance(planned, Tensor) and isinstance(value, Tensor) and value.is_floating_point()):
        return value
    return value.to(planned.dtype)


def _last_uses(graph_module: GraphModule) -> dict[Node, list[Node]]:
    """Returns what nobody reads after each node; a node that nobody reads at all is dropped after itself."""
    found: dict[Node, list[Node]] = defaultdict(list)
    seen: set[Node] = set()
    for node in reversed(graph_module.graph.nodes):
        for used in dict.fromkeys((node, *node.all_input_nodes)):
            if used not in seen and node.op != "output":
                found[node].append(used)
        seen.update(node.all_input_nodes)
        seen.add(node)
    return found


def is_random(node: Node) -> bool:
    """Whether a node may draw random numbers."""
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    return isinstance(node.target, HigherOrderOperator)


def is_meant(node: Node) -> bool:
    """Whether infinities are the model's intent: written as such in the code, or kept in a buffer."""
    numbers = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, float)]
    owner = node.graph.owning_module
    is_kept = node.op in SOURCES and owner is not None and is_table(owner, node)
    return is_kept or any(map(math.isinf, numbers))
