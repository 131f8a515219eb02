"""`WholeStep`: one training step as one graph over the live tensors of model, optimizer and scaler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from .._compat import compiled_by_dynamo, compiling_lists_soundly, note_step
from ..module import AmpModule
from ..passes.analysis.alias import written_memory
from ..runtime.backends import next_backend
from ..runtime.captured_graph import CapturedGraph
from ..runtime.eager_program import flat_program
from ..training.nested_optimizers import Inside
from ..training.optimizer_steps import tell_of_step
from .state import State
from .surroundings import Surroundings

# The number of tensors that `LossScaler.take_step` takes.
SCALED = 6


@dataclass
class Traced:
    """The findings of a trace.

    Attributes:
        is_compiled: Whether a backend compiles the graph.
        updates: Whether the graph updates the parameters too.
        used: The captured graphs that ran.
        spec: The structure of the result of ``loss_fn``.
        parts: Its number of tensors.
        plain: Its other leaves, by position.
        trained: The parameters whose gradients the graph returns, if it does not update them.
        asks_for_offsets: Whether model or loss asked where an argument begins in its memory.
    """

    is_compiled: bool
    updates: bool
    used: list[CapturedGraph] = field(default_factory=list)
    spec: Any = None
    parts: int = 0
    plain: dict[int, Any] = field(default_factory=dict)
    trained: list[Tensor] = field(default_factory=list)
    asks_for_offsets: bool = False

    @property
    def fuses(self) -> bool:
        """Whether the update is in ops, which a compiler fuses."""
        return self.is_compiled and self.updates


class WholeStep(State):
    """A graph that takes a step, and its surroundings.

    Attributes:
        graph_module: Inputs: learning rates, loss scale, its inverse, counters, and the step's arguments.
            All other tensors are its attributes: parameters, the optimizer's state, low copies. Compilers do
            not take the optimizer's fused kernels. A graph for Inductor has ops in their place; for another
            compiler it ends with the gradients, and the kernels run after it.
        asks_for_offsets: Whether it holds only for arguments that begin at the same places of their memory.
    """

    def __init__(
        self,
        amp: AmpModule,
        optimizer: Optimizer,
        traced: Traced,
        graph_module: fx.GraphModule,
        surroundings: Surroundings,
    ) -> None:
        super().__init__(amp, surroundings, traced.used)
        self.graph_module, self.asks_for_offsets = graph_module, traced.asks_for_offsets
        self._optimizer, self._spec, self._parts = optimizer, traced.spec, traced.parts
        self._plain, self._trained = traced.plain, traced.trained
        self._is_compiled = traced.is_compiled
        self._rates = Rates(optimizer)
        shadows = amp._graphs.shadows
        # Those of now. A later graph of another mode may add copies, which this one does not write.
        self._pairs = [] if shadows is None else shadows.pairs()
        self._copies = {id(copy) for copy, _ in self._pairs}
        written = _written(graph_module) if traced.updates else set()
        self._fresh = {id(c) for c, m in self._pairs if id(c) in written or id(m) not in written}
        if traced.is_compiled:
            given = amp.options.backend
            backend = next_backend(given, amp.options.mode)
            if given == "inductor" or callable(given):  # which may call it
                backend = compiling_lists_soundly(backend)
            self._run = compiled_by_dynamo(graph_module, backend, fullgraph=True)
        else:
            self._run = flat_program(graph_module)

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Takes the step."""
        amp, scaler = self._amp, self._amp.scaler
        shadows = amp._graphs.shadows
        if shadows is not None:
            shadows.refresh(self._copies)
        scaler.check_loop()
        inputs = [*self._rates(), *scale_inputs(amp), *pytree.tree_leaves((args, kwargs))]
        inputs = [x for x in inputs if isinstance(x, Tensor)]
        try:
            with torch.no_grad(), amp._graphs.lock:
                outputs = self._run(*inputs)
                if self._trained:
                    end = len(outputs) - len(self._trained)
                    self._update(outputs[end:], outputs[:end])
        finally:  # an interrupted graph may have written parameters, too
            with Inside(self._optimizer):  # the scaler knows of this step
                tell_of_step(self._optimizer)
        note_step(self._optimizer)
        if shadows is not None:
            shadows.note_fresh(self._fresh)
        if scaler.is_enabled():
            scaler.take_step(outputs[self._parts :][:SCALED])
        results = [*outputs[: self._parts]]
        for position, value in self._plain.items():
            results.insert(position, value)
        return pytree.tree_unflatten(results, self._spec)

    def _update(self, gradients: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Runs the optimizer's fused kernels, and copies the weights."""
        scaler, optimizer = self._amp.scaler, self._optimizer
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = gradient
        found = others[self._parts + 1] if scaler.is_enabled() and scaler.skips() else None
        take(optimizer, found)
        optimizer.zero_grad(set_to_none=True)
        if self._pairs:
            torch._foreach_copy_([copy for copy, _ in self._pairs], [master for _, master in self._pairs])


def _written(graph_module: fx.GraphModule) -> set[int]:
    """Returns the ids of the tensors that a graph holds and writes."""
    written = written_memory(graph_module.graph)
    held = (node for node in graph_module.graph.find_nodes(op="get_attr") if node in written)
    return {id(getattr(graph_module, str(node.target))) for node in held}


class Rates:
    """Learning rates as tensors, which are written only when a scheduler has changed them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._seen: list[float] = []
        self._tensors: list[Tensor] = []

    def __call__(self) -> list[Tensor]:
        groups = [g for g in self._optimizer.param_groups if not isinstance(g["lr"], Tensor)]
        now = [float(group["lr"]) for group in groups]
        if now != self._seen:
            self._seen, self._tensors = now, [_rate(group) for group in groups]
        return self._tensors


def _rate(group: dict[str, Any]) -> Tensor:
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    # The kernels of a CPU read it exactly, those of other devices as float32.
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    return torch.full((), group["lr"], dtype=dtype, device=device)  # does not wait, as a copy would


def scale_inputs(amp: AmpModule) -> list[Tensor]:
    scaler = amp.scaler
    return [scaler.state.scale, scaler.state.inverse, scaler.counters] if scaler.is_enabled() else []


def awaits_backward(amp: AmpModule) -> bool:
    """Whether an earlier call's backward may still read the low copies, which a graph writes in place."""
    shadows = amp._graphs.shadows
    return shadows is not None and shadows.are_awaited()


def take(optimizer: Optimizer, found: Tensor | None) -> None:
    """Steps a fused optimizer, which skips on the device where ``found`` is 1."""
    if found is not None:
        optimizer.grad_scale, optimizer.found_inf = None, found  # type: ignore[attr-defined]
    try:
        with Inside(optimizer):
            type(optimizer).step(optimizer)
    finally:
        vars(optimizer).pop("grad_scale", None)
        vars(optimizer).pop("found_inf", None)
