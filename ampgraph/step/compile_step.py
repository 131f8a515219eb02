"""`compile_step`: forward, loss, backward, finite check, optimizer and scale update as one graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from .._compat import is_backend_error
from ..errors import AmpGraphError, NoStateError, PolicyError, warn_user
from ..module import AmpModule
from ..proxy.all_parameters import all_parameters
from ..training.distributed import is_distributed
from ..training.optimizer_step import parameters_of
from .fit import Fit, Key, is_size, loss_of, varying_settings
from .reasons import why
from .state import Refused
from .trace_step import trace_step
from .whole_step import WholeStep, awaits_backward

_AWAITED = (
    "the backward of an earlier call of the model may still run, with the weights of that call (drop its "
    "outputs, or make them under torch.no_grad)"
)

# Each kind of arguments and of settings has a graph, and a kind has one for each set of Python values.
MANY_GRAPHS = 8
# The kinds of which a step keeps graphs, and the number of steps after which an unused kind makes room. Sizes
# in cycles of up to so many steps use each kind before that: the graphs stay, and other sizes run the loop.
MOST_KINDS = 64
LONG_UNUSED = 16 * MOST_KINDS


def compile_step(
    amp: AmpModule,
    optimizer: Optimizer,
    loss_fn: Callable[..., Any],
    clip_norm: float | None = None,
) -> CompiledStep:
    """Makes one graph of a training step, ``step = ampgraph.compile_step(..)``; call ``step(x, y)``.

    A step computes ``loss_fn(amp, *args)``, its gradients, the finite check, the optimizer's update, the next
    loss scale and the low copies of weights. After an overflow the device skips the update; nothing waits for
    it. The results equal those of the plain loop: ``backward``, ``clip_grad_norm_``, ``scaler.step``,
    ``scaler.update``, ``zero_grad``. On Inductor the update consists of ops, which fuse with the backward and
    with the writes of the low copies, and rounds elsewhere than the optimizer's fused kernels. On another
    compiling backend the graph ends with the gradients and the next scale, and the kernels run after it.

    The first step with new sizes or settings runs the plain loop and captures the model. Learning rates may
    change at any time. A change of other settings of the optimizer, of sizes, or of the Python values that
    ``loss_fn`` refers to by name (variables, attributes of objects, and of modules such as a criterion or a
    teacher) creates another graph. Prints in ``loss_fn`` run only when a graph is created.

    An optimizer takes part if torch has a fused form: ``AdamW``, ``Adam``, ``SGD`` and ``Adagrad``
    with ``fused=True``. A step runs the plain loop with the converted model if the optimizer is another, if
    the model is captured just in time, with several processes, and if ``loss_fn`` changes variables, writes
    to tensors that are no arguments, or draws random numbers of Python or numpy. `CompiledStep.reason` holds
    the reason, and a warning states it once.

    Args:
        amp: A model that `ampgraph.convert` captured with example inputs.
        optimizer: The optimizer of its parameters, attached to ``amp.scaler`` or not.
        loss_fn: Takes ``amp`` and the arguments of a step; returns the loss, or a tuple that begins with it.
        clip_norm: The largest norm of all gradients together; None: gradients are not clipped.

    Returns:
        The step. It returns what ``loss_fn`` returns, without gradients, and leaves no ``.grad`` in the
        model, also where the optimizer holds only a part of its parameters.

    Raises:
        AmpGraphError: ``amp`` is not a converted model.
        PolicyError: Another argument is not legal.

    Example:
        >>> step = ampgraph.compile_step(amp, optimizer, lambda amp, x, y: F.cross_entropy(amp(x), y))
        >>> for x, y in loader:
        ...     loss = step(x, y)
        ...     scheduler.step()
    """
    if not isinstance(amp, AmpModule):
        raise AmpGraphError(
            f"compile_step: expected what ampgraph.convert returns; got a {type(amp).__name__}."
        )
    if not (hasattr(optimizer, "step") and hasattr(optimizer, "param_groups")):
        raise PolicyError(f"compile_step: expected an optimizer; got a {type(optimizer).__name__}.")
    _check_optimizer(amp, optimizer)
    if not callable(loss_fn):
        raise PolicyError(f"compile_step: loss_fn is a {type(loss_fn).__name__}; expected a function.")
    is_number = isinstance(clip_norm, (int, float)) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (is_number and clip_norm > 0):
        raise PolicyError(f"compile_step: clip_norm={clip_norm!r}; legal: None, or a positive number.")
    return CompiledStep(amp, optimizer, loss_fn, clip_norm)


def _check_optimizer(amp: AmpModule, optimizer: Optimizer) -> None:
    """Warns of an optimizer that holds no parameter of a model that has some to train."""
    held = {*map(id, parameters_of(optimizer))}
    own = [*all_parameters(amp.source)]
    is_frozen = not any(p.requires_grad for p in own)
    if is_frozen or is_distributed() or any(id(p) in held for p in own):
        return
    warn_user(
        f"compile_step: the {type(optimizer).__name__} holds none of the {len(own)} parameters of the "
        f"{type(amp.source).__name__}: no step trains it, unless the optimizer copies to them by itself. "
        "Expected: an optimizer of amp.parameters()."
    )


@dataclass
class _Kind:
    """The graphs of one kind of arguments and settings.

    Attributes:
        states: One for each set of Python values that model and loss have read: a graph, or why not.
        reason: Why other sets get no graph.
        has_run: Whether the last step of this kind ran the loop, so that this one may be traced.
        last_use: The number of the last step of this kind.
        is_extra: Whether it came when there were `MOST_KINDS` others.
    """

    states: list[WholeStep | Refused] = field(default_factory=list)
    reason: str | None = None
    has_run: bool = False
    last_use: int = 0
    is_extra: bool = False

    def forget_outdated(self) -> None:
        """Drops the states of parts, graphs and low copies that do not come back. Runs at every step."""
        if not all(state.is_current() for state in self.states):
            self.states = [state for state in self.states if state.is_current()]
            self.reason, self.has_run, self.is_extra = None, False, False


class CompiledStep:
    """A compiled training step; `compile_step` returns it.

    Attributes:
        reason: Why the last call ran the plain loop; None for a call that ran one graph.
    """

    def __init__(
        self, amp: AmpModule, optimizer: Optimizer, loss_fn: Callable[..., Any], clip_norm: float | None
    ) -> None:
        self.reason: str | None = None
        self._amp, self._optimizer, self._loss_fn, self._clip_norm = amp, optimizer, loss_fn, clip_norm
        self._fit = Fit(amp, optimizer)
        self._kinds: dict[Key, _Kind] = {}
        self._steps = 0
        self._told: set[str] = set()

    @property
    def graph_modules(self) -> list[torch.fx.GraphModule]:
        """The graphs so far, one for each kind of arguments and settings and each set of Python values."""
        states = [state for kind in self._kinds.values() for state in kind.states]
        return [state.graph_module for state in states if isinstance(state, WholeStep)]

    def __reduce__(self) -> NoReturn:
        raise AmpGraphError(
            "a compiled step cannot be copied or pickled: its graphs write to this model and this optimizer. "
            "Copy the model, make an optimizer for the copy, and call ampgraph.compile_step with both."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes a step."""
        reason = self._fit.reason_for_the_loop(args, kwargs)
        if reason is not None:
            self._tell(reason)
            return self._loop(reason, args, kwargs)
        if any(p.grad is not None for p in parameters_of(self._optimizer)):
            return self._loop("gradients are there already, which this step takes too", args, kwargs)
        if awaits_backward(self._amp):
            self._tell(_AWAITED)
            return self._loop(_AWAITED, args, kwargs)
        kind = self._kind(self._fit.key_of(args, kwargs))
        found = self._find(kind, args, kwargs)
        if isinstance(found, str):
            return self._loop(found, args, kwargs)
        if isinstance(found, Refused):
            return self._refused(kind, found, args, kwargs)
        self.reason = None
        try:
            return found(args, kwargs)
        except Exception as error:
            if not is_backend_error(error):
                raise
            refused = Refused.in_place_of(found, why("compiling", error))
            kind.states[kind.states.index(found)] = refused
            self._tell(refused.reason)
            return self._refused(kind, refused, args, kwargs)  # the graph has not run

    def _find(self, kind: _Kind, args: tuple, kwargs: dict[str, Any]) -> WholeStep | Refused | str:
        """Returns the graph of a call, or why the plain loop runs."""
        kind.forget_outdated()
        for state in kind.states:
            if state.is_valid():
                return state
        if kind.reason is None and len(kind.states) >= MANY_GRAPHS:
            kind.reason = (
                "the model or loss_fn reads Python values that change again and again "
                f"({kind.states[-1].changed()}); pass them as tensors"
            )
            self._tell(kind.reason)
        if kind.reason is not None:
            return kind.reason
        if not kind.has_run:
            kind.has_run = True
            return self._why_new(kind)
        kind.has_run = False
        try:
            found = trace_step(self._amp, self._optimizer, self._loss_fn, self._clip_norm, args, kwargs)
        except NoStateError as error:  # the loop will make the state, unless it leaves this step out too
            return str(error)
        except Exception as error:  # the user's objects may raise anything when somebody looks at them
            kind.reason = why("tracing", error)
            self._tell(kind.reason)
            return kind.reason
        if isinstance(found, WholeStep) and found.asks_for_offsets and not self._fit.asks_for_offsets:
            self._fit.asks_for_offsets = True
            kind = self._kind(self._fit.key_of(args, kwargs))
        kind.states.append(found)
        if isinstance(found, Refused):
            self._tell(found.reason)
        return found

    def _why_new(self, kind: _Kind) -> str:
        if kind.states:
            return f"the model or loss_fn reads other Python values now ({kind.states[-1].changed()})"
        if not kind.is_extra:
            return "the first step of its kind captures the model"
        reason = (
            f"a compiled step keeps the graphs of {MOST_KINDS} combinations of sizes, arguments and "
            "settings, and this is another one"
        )
        self._tell(reason)
        return reason

    def _refused(self, kind: _Kind, found: Refused, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Takes a step by the loop in a state that has no graph."""
        result = self._loop(found.reason, args, kwargs)
        if not found.is_valid():  # loss_fn changes what it reads: each step would have another state
            kind.reason = found.reason
        return result

    def _kind(self, key: Key) -> _Kind:
        self._steps += 1
        kind = self._kinds.get(key) or self._new_kind(key)
        kind.last_use = self._steps
        return kind

    def _new_kind(self, key: Key) -> _Kind:
        kind = _Kind(is_extra=len(self._kinds) >= MOST_KINDS and not self._has_dropped_an_unused())
        if kind.is_extra:
            newest = next((other for other in reversed(self._kinds) if not self._kinds[other].states), None)
            if newest is None:  # all have graphs, which run again
                return kind
            del self._kinds[newest]
        self._kinds[key] = kind
        self._warn_if_many()
        return kind

    def _has_dropped_an_unused(self) -> bool:
        """Forgets the kind whose last step is longest ago, if that is long."""
        oldest = min(self._kinds, key=lambda key: self._kinds[key].last_use)
        if self._steps - self._kinds[oldest].last_use <= LONG_UNUSED:
            return False
        del self._kinds[oldest]
        return True

    def _loop(self, reason: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.reason = reason
        amp, optimizer, scaler = self._amp, self._optimizer, self._amp.scaler
        try:
            result = self._loss_fn(amp, *args, **kwargs)
        except TypeError as error:
            self._check_call(error, args, kwargs)
            raise
        self._backward(loss_of(result))
        is_attached = scaler.is_enabled() and scaler.guard.is_attached(optimizer)
        if self._clip_norm is not None:
            scaler.unscale_(optimizer)
            held = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(held, self._clip_norm)
        if is_attached:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
        for parameter in all_parameters(amp.source):
            if parameter.requires_grad:  # the optimizer may hold a part of them
                parameter.grad = None
        return tree_map_only(Tensor, Tensor.detach, result, is_leaf=is_size)

    def _check_call(self, error: TypeError, args: tuple, kwargs: dict[str, Any]) -> None:
        """Raises a `PolicyError` if ``loss_fn`` does not take these arguments."""
        try:
            inspect.signature(self._loss_fn).bind(self._amp, *args, **kwargs)
        except TypeError as reason:
            raise PolicyError(
                "compile_step: a step calls loss_fn(amp, *args, **kwargs) with the arguments of the step: "
                f"{reason}."
            ) from error
        except ValueError:  # a function of C has no signature
            return

    def _backward(self, loss: Tensor) -> None:
        """Computes the gradients.

        Raises:
            PolicyError: The loss has no gradient, or ``loss_fn`` has called its backward.
        """
        if not (loss.requires_grad or torch.is_grad_enabled()):
            raise PolicyError(
                "compile_step: the step is called under torch.no_grad() or torch.inference_mode(), so the "
                "loss has no gradient: call it where gradients are enabled."
            )
        if not loss.requires_grad:
            raise PolicyError(
                "compile_step: the loss that loss_fn returned has no gradient: it does not depend on a "
                "parameter that requires gradients, or was detached."
            )
        try:
            loss.backward()
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise PolicyError(
                "compile_step: a step calls backward of the loss that loss_fn returns, whose graph is freed "
                "already: return the loss without calling backward on it."
            ) from error

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            warn_user(f"ampgraph.compile_step runs the plain loop: {reason}.")

    def _warn_if_many(self) -> None:
        if len(self._kinds) != MANY_GRAPHS:
            return
        names = varying_settings(self._kinds)
        advice = "keep sizes and settings constant, and pass numbers that change as tensors"
        if names:
            advice = f"keep {', '.join(names)} of the optimizer constant"
        if {"betas", "momentum"} & {*names}:
            advice += " (schedulers: cycle_momentum=False)"
        warn_user(
            f"ampgraph.compile_step has seen {MANY_GRAPHS} combinations of sizes, arguments and settings, "
            f"and runs the plain loop in the first step of each: {advice}."
        )
