"""Runs a rewritten graph beside its source, node by node, and measures the error of each node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from .._compat import HigherOrderOperator
from ..passes.analysis.alias import SOURCES
from ..passes.analysis.facts import is_cast
from ..passes.insert_casts import is_inserted
from ..plan import Plan
from ..report import graph_view as view
from ..report.replan import without_casts
from ..runtime.run_graph import Draws, floats, written_by
from .gradient_tape import OUTPUT, GradientTape, Key
from .side_run import SideRun, in_dtypes_of
from .statistics import Deviation, ValueStatistics

Gradients = Mapping[Key, Tensor]


@dataclass
class Measured:
    """The error of one node: in its values, or in the gradients of its results.

    Attributes:
        node: The node of the rewritten graph.
        is_gradient: Whether this is about the gradient.
        exact: Statistics of the float32 values; gradients as they are in training, scaled.
        accumulated: The rewritten graph's values against float32's.
        own: The same where the node, or what reads it in a backward, is given float32's values; None where
            that is not known.
    """

    node: Node
    is_gradient: bool
    exact: ValueStatistics
    accumulated: Deviation = field(default_factory=Deviation)
    own: Deviation | None = field(default_factory=Deviation)


class Lockstep:
    """Runs a rewritten graph beside its float32 source: `forward`, and, where it is recorded, `backward`.

    Both runs draw the same random numbers, and neither leaves a trace in the model.

    Args:
        graph_module: A rewritten graph.
        plan: Its plan.
        inputs: One value for each placeholder.
        note: Called with each measurement.
        records: Whether to record what a backward needs.
        scale: What gradients are multiplied by in training.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        plan: Plan,
        inputs: Sequence[Any],
        note: Callable[[Measured], None],
        records: bool = False,
        scale: float = 1.0,
    ):
        self._low_dtype, self._note, self._scale, self._records = plan.low_dtype, note, scale, records
        self._moves = {name for name, decision in plan.decisions.items() if decision.op_class == "clear"}
        source, draws = without_casts(graph_module, plan), Draws()
        self._sources = {node.name: node for node in source.graph.nodes}
        self.exact = SideRun(source, inputs, draws, GradientTape() if records else None)
        self.low = SideRun(graph_module, inputs, draws, GradientTape() if records else None)
        self._own_tape = GradientTape()
        self._dtypes: dict[Key, torch.dtype] = {}  # of the rewritten graph's tensors

    # -- forward ---------------------------------------------------------------------------------

    def forward(self) -> tuple[Any, Any]:
        """Runs both; returns what the source returns, and what the rewritten graph returns."""
        exact, low = iter(self.exact), iter(self.low)
        for node in self.low.graph_module.graph.nodes:
            if node.op == "output":
                break
            own = None
            if not is_inserted(node):
                own = self._own(node)  # first: the source's node may write to what it reads
                next(exact)
            self.low.wide = lambda node=node: self._wide(node)  # type: ignore[misc]
            next(low)
            self._note_dtypes(node)
            if view.kind_of(node) in ("op", "cast", "clamp") and not view.is_item(node):
                self._measure(node, own)
        for run in (exact, low):
            next(run, None)
        return self.exact.finish(), self.low.finish()

    def _measure(self, node: Node, own: Any) -> None:
        exact = floats(self._exact_value(node))
        if not exact or node in self.low.unwritten:
            return
        own_deviation = Deviation()
        measured = Measured(node, False, ValueStatistics(self._low_dtype), own=own_deviation)
        found = floats(self.low.values[node])
        if is_inserted(node):
            own = in_dtypes_of(exact, found)
        owns = exact if own is None else floats(own)
        for value, alone, theirs in zip(found, owns, exact, strict=True):
            measured.exact.add(theirs)
            measured.accumulated.add(value, theirs)
            own_deviation.add(alone, theirs)
        self._note(measured)

    def _note_dtypes(self, node: Node) -> None:
        if self._records:
            for index, leaf in enumerate(pytree.tree_leaves(self.low.values[node])):
                if isinstance(leaf, Tensor):
                    self._dtypes[Key(node.name, index)] = leaf.dtype

    def _exact_value(self, node: Node, values: Callable[[Node], Any] | None = None) -> Any:
        """Returns the source's value of a node; of a cast, what it casts; of a clamp, what it gives."""
        values = values or self.exact.values.__getitem__
        if not is_inserted(node):
            return values(self._sources[node.name])
        read = map_arg(node.args, lambda n: self._exact_value(n, values))
        return node.target(*read) if view.kind_of(node) == "clamp" else read[0]  # type: ignore[operator]

    def _wide(self, node: Node) -> Any:
        """Does in the source's dtypes, with the rewritten graph's values, what a node does."""
        source = self._sources[node.name]

        def argument(read: Node) -> Any:
            return in_dtypes_of(self.low.values[read], self._source_of(read).meta.get("val"))

        args, kwargs = map_arg((node.args, node.kwargs), argument)
        if "dtype" in source.kwargs:
            kwargs = {**kwargs, "dtype": source.kwargs["dtype"]}
        return source.target(*args, **kwargs)  # type: ignore[operator]

    def _source_of(self, node: Node) -> Node:
        while is_inserted(node):
            node = node.args[0]  # type: ignore[assignment]
        return self._sources[node.name]

    # -- what a node does by itself --------------------------------------------------------------

    def _own(self, node: Node) -> Any:
        """Runs a node of the rewritten graph on the source's values, rounded to the dtypes that it reads.

        Returns None where that is what the source's node does.
        """
        if node.op != "call_function" or view.is_item(node) or not self._may_round(node):
            return None
        source, written = self._sources[node.name], set(written_by(node))
        given = {read: self._own_input(read) for read in source.all_input_nodes}

        def argument(read: Node) -> Any:
            held = self.low.values[read]
            if isinstance(held, GraphModule):  # the body of a higher-order op
                return held
            exact = self._exact_value(read, lambda origin: given[_read_for(origin, given)])
            value = in_dtypes_of(exact, held)
            return pytree.tree_map_only(Tensor, Tensor.clone, value) if read in written else value

        args, kwargs = map_arg((node.args, node.kwargs), argument)
        wide_args, wide_kwargs = map_arg((source.args, source.kwargs), given.__getitem__)
        self.low.wide = lambda: source.target(*wide_args, **wide_kwargs)  # type: ignore[operator]
        result = self.low.call(node, args, kwargs)
        if not self._records or not self._is_attributable(source):
            return result
        read, _ = self._own_tape.edges(list(given.values()))
        return self._own_tape.record(node.name, read, result)

    def _may_round(self, node: Node) -> bool:
        if isinstance(node.target, HigherOrderOperator):
            return True
        # A float32 node that reads low values rounds nothing: what made them did.
        same = view.dtype_of(node) == view.dtype_of(self._sources[node.name])
        return not same and node.name not in self._moves

    def _own_input(self, source: Node) -> Any:
        value = self.exact.values[source]
        if not self._records:
            return value
        return pytree.tree_map_only(Tensor, self._cut_for_own, value)

    def _cut_for_own(self, tensor: Tensor) -> Tensor:
        assert self.exact.tape is not None
        key = self.exact.tape.key_of(tensor)
        return tensor.detach() if key is None else self._own_tape.cut(key, tensor)

    def _is_attributable(self, source: Node) -> bool:
        """Whether the tape knows all that a node reads: not so of memory that is written in place."""
        assert self.exact.tape is not None
        return self.exact.tape.edges([self.exact.values[n] for n in source.all_input_nodes])[1]

    # -- backward --------------------------------------------------------------------------------

    def backward(self, exact: Gradients, low: Gradients) -> Gradients:
        """Runs both backwards and measures the gradient of each node's tensors.

        Args:
            exact: Gradients of what the source returned, by tensor.
            low: Gradients of what the rewritten graph returned, not scaled.

        Returns:
            The source's gradients of inputs and parameters.
        """
        ours, theirs = self.low.tape, self.exact.tape
        assert ours is not None
        assert theirs is not None
        nodes = {node.name: node for node in self.low.graph_module.graph.nodes}
        theirs.add(exact)
        ours.add({key: gradient * self._scale for key, gradient in low.items()})
        self._add_own({key: gradient * self._scale for key, gradient in exact.items()})
        ended: dict[Key, Tensor] = {}
        for name in (OUTPUT, *(n for n in reversed(nodes) if nodes[n].op != "output")):
            found, true, own = ours.take(name), theirs.take(name), self._own_tape.take(name)
            if name != OUTPUT and true:
                self._measure_gradients(nodes[name], true, found, own)
                if nodes[name].op in SOURCES:
                    ended |= true
            self._step_back(name, true)
            ours.add(ours.backward(name, found))
        return ended

    def _step_back(self, name: str, true: Gradients) -> None:
        tape = self.exact.tape
        assert tape is not None
        known = {key: gradient for key, gradient in true.items() if key in self._dtypes}
        if name in self._own_tape:
            scaled = {key: (g * self._scale).to(self._dtypes[key]) for key, g in known.items()}
            alone = self._own_tape.backward(name, scaled)
            tape.add(tape.backward(name, true))
        else:
            added = tape.backward(name, true)
            tape.add(added)
            alone = {key: gradient * self._scale for key, gradient in added.items()}
        self._add_own(alone)

    def _add_own(self, gradients: Gradients) -> None:
        """Adds scaled gradients, rounded to the dtype that the tensor has in the rewritten graph."""
        rounded = {key: g.to(self._dtypes.get(key, g.dtype)).to(g.dtype) for key, g in gradients.items()}
        self._own_tape.add(rounded)

    def _measure_gradients(self, node: Node, true: Gradients, found: Gradients, own: Gradients) -> None:
        keys = [key for key in true if key in found and true[key].is_floating_point()]
        if not keys:
            return
        measured = Measured(node, True, ValueStatistics(self._low_dtype))
        if not all(key in own for key in keys):
            measured.own = None
        for key in keys:
            measured.exact.add(true[key] * self._scale)
            measured.accumulated.add(found[key], true[key], 1 / self._scale)
            if measured.own is not None:
                measured.own.add(own[key], true[key], 1 / self._scale)
        self._note(measured)


def _read_for(origin: Node, reads: Iterable[Node]) -> Node:
    """Returns the node that the source reads where the rewritten graph reads ``origin``.

    That is ``origin``, or a cast of the model's own that widens it and that the rewritten graph reads past.
    """
    for read in reads:
        at = read
        while at is not origin and is_cast(at):
            at = at.args[0]  # type: ignore[assignment]
        if at is origin:
            return read
    raise AssertionError(f"the source reads nothing for {origin.name!r}")
