"""Traces a training step into one graph over the live tensors of model, optimizer and scaler."""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from .._compat import (
    FakeTensor,
    KernelLayouts,
    compiled_calls,
    distributions_unchecked,
    storage_key,
)
from ..capture.capture_mode import capturing
from ..errors import AmpGraphError, NoStateError
from ..module import AmpModule
from ..passes.analysis.alias import written_memory
from ..policy.loss_scale import DynamicLossScale, adapted, adapted_by_kernel
from ..training.compiler_traces import traced_for_a_compiler
from ..training.gradient_boundary import non_finite
from ..training.optimizer_step import makes_buffers, parameters_of
from ..training.overflow import largest
from ..training.scale_state import CHECKED
from ..training.weight_gradient import low_weight_gradients
from .effects import RefusedOutside, without_effects, without_saved_tensor_hooks
from .equal_calls import merge_equal_calls
from .fake_optimizer import optimizer_on
from .fewer_calls import share_views, shorten_calls
from .fit import PLAIN, is_size, loss_of
from .grad_mode import keep_workspaces
from .live_graph import has_generator, hold_live, live_tensors
from .optimizer_math import can_update, update
from .reasons import reason_of
from .state import Refused
from .surroundings import Surroundings
from .traced_model import TracedModel
from .whole_step import Rates, Traced, WholeStep, scale_inputs, take

# Backends that compile nothing, and those that fuse an update in ops with the backward before it.
EAGER, FUSING = ("eager", "aot_eager"), ("inductor",)


class _Inputs(NamedTuple):
    """The inputs of a step: live tensors, learning rates, the state of the loss scale, the arguments."""

    live: Sequence[Tensor]
    rates: Sequence[Tensor]
    scale: Sequence[Tensor]
    arguments: Sequence[Tensor]

    def split(self, tensors: Sequence[Tensor]) -> _Inputs:
        """Returns a row of other tensors in four parts of the same lengths."""
        rest = iter(tensors)
        return _Inputs(*([*itertools.islice(rest, len(part))] for part in self))


def trace_step(
    amp: AmpModule,
    optimizer: Optimizer,
    loss_fn: Callable,
    clip_norm: float | None,
    args: tuple,
    kwargs: dict[str, Any],
) -> WholeStep | Refused:
    """Traces a step into one graph. The model and the optimizer are as before when it returns.

    Returns:
        The graph; or why the step cannot be one with the Python values of now.

    Raises:
        NoStateError: The optimizer creates state in this step.
    """
    surroundings = Surroundings(loss_fn, amp)
    tracer = _Tracer(amp, optimizer, loss_fn, clip_norm)
    try:
        graph_module = _graph_of(tracer, surroundings, args, kwargs)
        return WholeStep(amp, optimizer, tracer.traced, graph_module, surroundings)
    except NoStateError:
        raise
    except Exception as error:  # user code and torch's tracing may raise anything; the loop is as right
        return Refused(amp, surroundings, tracer.traced.used, reason_of(error))


def _graph_of(
    tracer: _Tracer, surroundings: Surroundings, args: tuple, kwargs: dict[str, Any]
) -> fx.GraphModule:
    """Returns the graph of a step over live tensors.

    Raises:
        AmpGraphError: The step cannot be one graph.
    """
    if surroundings.reason is not None:
        raise AmpGraphError(surroundings.reason)
    amp = tracer.amp
    flat, spec = pytree.tree_flatten((args, kwargs))
    for captured in amp._graphs:
        captured.make_graphs()  # before the trace, which would see it
    inputs = _Inputs(
        [*live_tensors(amp, tracer.optimizer).values()],
        Rates(tracer.optimizer)(),
        scale_inputs(amp),
        [x for x in flat if isinstance(x, Tensor)],
    )

    def whole(*tensors: Tensor) -> list[Tensor]:
        given = inputs.split(tensors)
        arguments = iter(given.arguments)
        leaves = [next(arguments) if isinstance(x, Tensor) else x for x in flat]
        fakes = {id(real): fake for real, fake in zip(inputs.live, given.live, strict=True)}
        return tracer.trace(fakes, given.rates, given.scale, leaves, spec)

    amp.scaler.guard.overflows.looks = False  # a trace has no values
    # A trace replaces functions as a capture does, those of `torch.fx.wrap` among them.
    with (
        amp._graphs.lock.alone(),
        compiled_calls.kept_out(),
        without_effects(surroundings) as effects,
        capturing(),
    ):
        graph_module = make_fx(whole, tracing_mode="fake", _allow_non_fake_inputs=True)(
            *_with_layouts_of_kernels([*itertools.chain(*inputs)], tracer.traced)
        )
    _check_traced(tracer.traced, graph_module, effects)
    if tracer.traced.is_compiled:
        _check_arguments(graph_module.graph, inputs.arguments)
    _tidy(graph_module.graph, tracer.traced.is_compiled)
    hold_live(graph_module, inputs.live, surroundings)
    return graph_module


def _check_traced(traced: Traced, graph_module: fx.GraphModule, effects: Sequence[str]) -> None:
    """Raises `AmpGraphError` if a trace does not hold for later steps."""
    if effects:
        raise AmpGraphError(f"loss_fn {', '.join(effects)}")
    if not all(captured.state is None or captured.state.is_same() for captured in traced.used):
        raise AmpGraphError("the model reads other Python values than at its capture")
    if traced.is_compiled and has_generator(graph_module):
        raise AmpGraphError("loss_fn draws from a torch.Generator, which torch.compile does not take")


def _check_arguments(graph: fx.Graph, arguments: Sequence[Tensor]) -> None:
    """Raises `AmpGraphError` if a step writes to an argument that shares memory with another.

    A compiled graph computes the one from the other, and does not look how far apart they begin (torch 2.13).
    """
    inputs = graph.find_nodes(op="placeholder")
    given = inputs[len(inputs) - len(arguments) :]
    memory = Counter(map(storage_key, arguments))
    written = written_memory(graph)
    if any(n in written and memory[storage_key(x)] > 1 for n, x in zip(given, arguments, strict=True)):
        raise AmpGraphError("loss_fn writes to an argument that shares memory with another one")


def _tidy(graph: fx.Graph, is_compiled: bool) -> None:
    """Merges and shortens calls; a compiler does most of that itself."""
    share_views(graph)
    if is_compiled:
        merge_equal_calls(graph)
        return
    shorten_calls(graph)
    keep_workspaces(graph)


def _with_layouts_of_kernels(tensors: list[Tensor], traced: Traced) -> list[Tensor]:
    """Returns fake tensors for a trace, which then suits the results of kernels; compilers have their own."""
    if traced.is_compiled:
        return tensors
    mode = KernelLayouts()
    return [mode.from_tensor(tensor) for tensor in tensors]


class _Tracer:
    """Runs the loop on fake tensors in the places of the real ones; ``traced`` holds the findings."""

    def __init__(
        self, amp: AmpModule, optimizer: Optimizer, loss_fn: Callable, clip_norm: float | None
    ) -> None:
        self.amp, self.optimizer, self._loss_fn, self._clip_norm = amp, optimizer, loss_fn, clip_norm
        self._fakes: dict[int, Tensor] = {}
        backend = amp.options.backend
        is_compiled = backend not in EAGER
        # Eager backends run the optimizer's fused kernels inside the graph.
        updates = not is_compiled or (backend in FUSING and can_update(optimizer))
        self.traced = Traced(is_compiled, updates)

    def trace(
        self,
        fakes: dict[int, Tensor],
        rates: Sequence[Tensor],
        scale: Sequence[Tensor],
        leaves: list[Any],
        spec: Any,
    ) -> list[Tensor]:
        self._fakes = fakes
        model = TracedModel(self.amp, fakes)
        self.traced.used = model.used
        checked = _Checked()
        if scale:
            state = self.amp.scaler.state
            fakes[id(state.scale)], fakes[id(state.inverse)] = scale[0], scale[1]
            setattr(fakes[id(state.probe)], CHECKED, checked)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        with model.in_place(), self._for_the_backend():
            thread = threading.get_ident()
            unchecked = distributions_unchecked(lambda: threading.get_ident() == thread)
            with RefusedOutside(leaves) as outside, without_saved_tensor_hooks(), unchecked:
                result = self._loss_fn(self.amp, *args, **kwargs)
            self.traced.asks_for_offsets = outside.asks_for_offsets
            if any(fake.grad is not None for fake in fakes.values()):
                raise AmpGraphError("loss_fn calls backward or sets gradients")
            gradients, flags = self._gradients(loss_of(result), checked, bool(scale))
            # The plain loop may have gradients of zeros for these parameters, or none.
            if model.shares_memory and len(gradients) < len(_trained(self.optimizer)):
                raise AmpGraphError(
                    "the model returns tensors that share memory, and the loss leaves out some parameters"
                )
            with torch.no_grad():
                if self._clip_norm is not None:
                    held = [*fakes.values(), *pytree.tree_leaves((leaves, result, model.outputs))]
                    gradients = _apart(gradients, held)
                found = None if flags is None else (flags > 0).any().to(torch.float32)
                kept = self._update(gradients, found, rates)
        results = self._results(result)
        if flags is not None and found is not None:
            results += self._scaled(flags, found, largest(model.outputs, found), scale)
        return [*results, *kept]

    def _results(self, result: Any) -> list[Tensor]:
        """Returns the tensors that ``loss_fn`` returned; records its other values and the structure."""
        parts, self.traced.spec = pytree.tree_flatten(result, is_leaf=is_size)
        self.traced.plain = {i: x for i, x in enumerate(parts) if not isinstance(x, Tensor)}
        for other in self.traced.plain.values():
            if not isinstance(other, PLAIN):
                raise AmpGraphError(f"loss_fn returns a value of the type {type(other).__name__}")
        results = [x.detach() for x in parts if isinstance(x, Tensor)]
        self.traced.parts = len(results)
        return results

    @contextlib.contextmanager
    def _for_the_backend(self) -> Iterator[None]:
        """Lets the trace have the arithmetic that the backend fuses: with an update, casts of gradients."""
        with contextlib.ExitStack() as stack:
            if self.traced.is_compiled:
                stack.enter_context(traced_for_a_compiler())
            if self.traced.fuses:
                stack.enter_context(low_weight_gradients())
            yield

    def _gradients(
        self, loss: Tensor, checked: _Checked, is_scaled: bool
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
        """Returns the gradient of each parameter that has one, and the flags of the finite check."""
        if not all(isinstance(leaf, FakeTensor) for leaf in _leaves(loss)):
            raise AmpGraphError(
                "loss_fn reads a tensor that requires gradients and is not a parameter of the optimizer; "
                "torch.no_grad around what reads it spares these gradients"
            )
        state, slots = self.amp.scaler.state, self.amp.scaler.guard.slots
        reals = _trained(self.optimizer)
        wanted = [self._fakes[id(p)] for p in reals]
        probe = [self._fakes[id(state.probe)]] if is_scaled else []
        found = torch.autograd.grad(loss, [*wanted, *probe], allow_unused=True)
        all_pairs = zip(wanted, found, strict=False)
        pairs = [(p, g if self.traced.fuses else _laid_out(g, p)) for p, g in all_pairs if g is not None]
        if not is_scaled:
            return pairs, None
        size = probe[0].shape[0]
        both = zip(slots.of(reals), found, strict=False)
        given = [(size - 1 if s is None else s, g) for s, g in both if g is not None]
        others = [(s, g) for s, g in given if checked.by_slot.get(s) is not g]
        others.sort(key=operator.itemgetter(0))
        flags = [] if found[-1] is None else [found[-1]]
        if others:
            flags.append(
                non_finite([g for _, g in others], [s for s, _ in others], size, self.traced.is_compiled)
            )
        if not flags:
            raise AmpGraphError("the loss has no gradients")
        return pairs, torch.stack(flags).amax(0) if len(flags) > 1 else flags[0]

    def _update(
        self, gradients: list[tuple[Tensor, Tensor]], found: Tensor | None, rates: Sequence[Tensor]
    ) -> list[Tensor]:
        """Updates the parameters and their copies; a graph that ends before that returns the gradients."""
        for parameter, gradient in gradients:
            parameter.grad = gradient
        real = {id(self._fakes[id(p)]): p for p in parameters_of(self.optimizer)}
        trained = [real[id(p)] for p, _ in gradients]
        ids = {*map(id, trained)}
        if makes_buffers(self.optimizer, lambda p: id(p) in ids):
            raise NoStateError
        held = [self._fakes[id(p)] for p in parameters_of(self.optimizer)]
        if self._clip_norm is not None:
            # A compiler would copy the scalars of foreach norms with one kernel each.
            foreach = False if self.traced.is_compiled else None
            torch.nn.utils.clip_grad_norm_(held, self._clip_norm, foreach=foreach)
        if not self.traced.updates:
            self.traced.trained = trained
            return [p.grad for p, _ in gradients]  # type: ignore[misc]
        with optimizer_on(self.optimizer, self._fakes, rates):
            step = update if self.traced.fuses else take
            step(self.optimizer, found if self.amp.scaler.skips() else None)
        self._refresh()
        return []

    def _refresh(self) -> None:
        shadows = self.amp._graphs.shadows
        pairs = shadows.pairs() if shadows is not None else []
        known = [(self._fakes[id(c)], self._fakes[id(m)]) for c, m in pairs if id(m) in self._fakes]
        known = [(copy, master) for copy, master in known if master.grad is not None]
        if self.traced.fuses:  # compilers for GPUs turn a list into a separate kernel
            for copy, master in known:
                copy.copy_(master)
        elif known:
            torch._foreach_copy_([copy for copy, _ in known], [master for _, master in known])

    def _scaled(self, flags: Tensor, found: Tensor, outputs: Tensor, scale: Sequence[Tensor]) -> list[Tensor]:
        """Returns what `LossScaler.take_step` takes."""
        config, (now, inverse, counters) = self.amp.scaler.config, scale
        if isinstance(config, DynamicLossScale):
            rule = adapted if self.traced.is_compiled else adapted_by_kernel
            now, counters = rule(config, now, counters, found)
            inverse = now.reciprocal()
        return [flags, found, outputs, now, inverse, counters]


def _trained(optimizer: Optimizer) -> list[Tensor]:
    return [p for p in parameters_of(optimizer) if p.requires_grad]


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yields the tensors to which the backward of a loss gives gradients."""
    nodes = [node for node in (loss.grad_fn,) if node is not None]
    seen = {*nodes}
    for node in nodes:  # grows
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        inputs = {inner for inner, _ in node.next_functions if inner is not None} - seen
        seen |= inputs
        nodes += inputs


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Returns a gradient in the layout of its parameter, as ``backward`` does; fused kernels need it."""
    if gradient.stride() == parameter.stride() or not _is_dense(parameter):
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def _apart(gradients: list[tuple[Tensor, Tensor]], others: Sequence[object]) -> list[tuple[Tensor, Tensor]]:
    """Returns gradients in memory of their own, which clipping writes; ``backward`` copies the same ones."""
    taken = {storage_key(t) for t in others if isinstance(t, Tensor)} - {None}
    found = []
    for parameter, gradient in gradients:
        key = storage_key(gradient)
        found.append((parameter, gradient.clone() if key in taken else gradient))
        taken |= {key} - {None}
    return found


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory, none of it twice."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


class _Checked:
    """The gradients that left boundaries, by slot."""

    def __init__(self) -> None:
        self.by_slot: dict[int, Tensor] = {}

    def note(self, slots: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Records gradients that leave a boundary now."""
        self.by_slot.update(zip(slots, gradients, strict=True))
