"""`compile_step`: forward, loss, backward, finite check, optimizer and scale update as one graph."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from .._compat import is_backend_error, is_untraced_generator
from ..errors import AmpGraphError, NoStateError, PolicyError, warn_user
from ..module import AmpModule
from ..proxy.all_parameters import all_parameters
from ..training.optimizer_step import parameters_of
from .fit import Fit, Key, is_size, loss_of, varying_settings
from .trace_step import trace_step
from .whole_step import WholeStep

log = logging.getLogger("ampgraph")

# Each kind of arguments and of settings has a graph, and a kind has one for each set of Python values.
MANY_GRAPHS = 8
# Settings that change from step to step make a kind a step: those before are forgotten.
MOST_KINDS = 64


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
    if not callable(loss_fn):
        raise PolicyError(f"compile_step: loss_fn is a {type(loss_fn).__name__}; expected a function.")
    is_number = isinstance(clip_norm, (int, float)) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (is_number and clip_norm > 0):
        raise PolicyError(f"compile_step: clip_norm={clip_norm!r}; legal: None, or a positive number.")
    return CompiledStep(amp, optimizer, loss_fn, clip_norm)


@dataclass
class _Kind:
    """The graphs of one kind of arguments and settings.

    Attributes:
        steps: One for each set of Python values that model and loss have read.
        reason: Why steps of this kind run the plain loop.
        has_run: Whether the last step of this kind ran the loop, so that this one may be traced.
    """

    steps: list[WholeStep] = field(default_factory=list)
    reason: str | None = None
    has_run: bool = False


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
        self._told: set[str] = set()

    @property
    def graph_modules(self) -> list[torch.fx.GraphModule]:
        """The graphs so far, one for each kind of arguments and settings and each set of Python values."""
        return [step.graph_module for kind in self._kinds.values() for step in kind.steps]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes a step."""
        reason = self._fit.reason_for_the_loop(args, kwargs)
        if reason is not None:
            self._tell(reason)
            return self._loop(reason, args, kwargs)
        if any(p.grad is not None for p in parameters_of(self._optimizer)):
            return self._loop("gradients are there already, which this step takes too", args, kwargs)
        found = self._find(args, kwargs)
        if isinstance(found, str):
            return self._loop(found, args, kwargs)
        self.reason = None
        try:
            return found(args, kwargs)
        except Exception as error:
            if not is_backend_error(error):
                raise
            return self._loop(self._give_up(found, error), args, kwargs)  # the graph has not run

    def _find(self, args: tuple, kwargs: dict[str, Any]) -> WholeStep | str:
        """Returns the graph of a call, or why the plain loop runs."""
        kind = self._kind(self._fit.key_of(args, kwargs))
        if kind.reason is not None:
            return kind.reason
        if not all(step.is_current() for step in kind.steps):
            kind.steps = [step for step in kind.steps if step.is_current()]
            kind.has_run = False
        for step in kind.steps:
            if step.is_valid():
                return step
        if not kind.has_run:
            kind.has_run = True
            return self._why_new(kind)
        kind.has_run = False
        try:
            found = self._trace(args, kwargs)
        except NoStateError as error:  # the loop will make the state, unless it leaves this step out too
            return str(error)
        if isinstance(found, str):
            kind.reason = found
            self._tell(found)
        else:
            kind.steps.append(found)
        return found

    def _kind(self, key: Key) -> _Kind:
        if key not in self._kinds:
            if len(self._kinds) >= MOST_KINDS:
                self._kinds.clear()
            self._kinds[key] = _Kind()
            self._warn_if_many()
        return self._kinds[key]

    def _why_new(self, kind: _Kind) -> str:
        if not kind.steps:
            return "the first step of its kind captures the model"
        changed = kind.steps[-1].changed()
        if len(kind.steps) < MANY_GRAPHS:
            return f"the model or loss_fn reads other Python values now ({changed})"
        kind.reason = (
            f"the model or loss_fn reads Python values that change again and again ({changed}); pass them as "
            "tensors"
        )
        self._tell(kind.reason)
        return kind.reason

    def _trace(self, args: tuple, kwargs: dict[str, Any]) -> WholeStep | str:
        try:
            return trace_step(self._amp, self._optimizer, self._loss_fn, self._clip_norm, args, kwargs)
        except NoStateError:
            raise
        except AmpGraphError as error:
            return str(error)
        except Exception as error:  # user code and torch's tracing may raise anything; the loop is as right
            if is_untraced_generator(error):
                return "loss_fn draws from a torch.Generator, which this version of torch does not trace"
            return _why("tracing", error)

    def _give_up(self, step: WholeStep, error: Exception) -> str:
        """Lets steps of a kind run the loop from now on, because the backend compiles no graph of theirs."""
        (kind,) = (kind for kind in self._kinds.values() if step in kind.steps)
        kind.steps, kind.reason = [], _why("compiling", error)
        self._tell(kind.reason)
        return kind.reason

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
        if not loss.requires_grad and torch.is_grad_enabled():
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


def _why(work: str, error: Exception) -> str:
    """Returns the first line of an error, and that of the C++ compiler if one speaks in it."""
    log.info("compile_step", exc_info=error)
    lines = str(error).strip().splitlines() or [""]
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    said = next((f": {line.partition(' error: ')[2]}" for line in lines[1:] if " error: " in line), "")
    return f"{work} fails with {type(error).__name__}: {first}{said}"
