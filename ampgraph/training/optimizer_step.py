"""The optimizer's step under a loss scale: run, or skipped after an overflow."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Adagrad, Adam, Optimizer

from .._compat import apart_from_dynamo, note_step, takes_found_inf
from ..errors import LoopError
from ..own_files import TORCH
from .judging import Numbers, Share, verdicts
from .nested_optimizers import Inside, is_inside
from .parameter_index import Slotted
from .step_guard import StepGuard, Verdict
from .step_undo import Undo
from .step_wrappers import tell_wrapper


class Scaler(Numbers, Protocol):
    """The interface of a loss scaler that a step uses."""

    guard: StepGuard

    def skips(self) -> bool:
        """Whether a step with non-finite gradients is skipped."""

    def update(self) -> None:
        """Ends the round."""


S = TypeVar("S", bound=Scaler)


def stepping(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that is called only for real steps.

    Accelerate calls its wrapper after each micro-batch and the wrapped optimizer only for real steps.
    """
    is_wrapper = type(optimizer).__name__ == "AcceleratedOptimizer"
    return optimizer.optimizer if is_wrapper else optimizer  # type: ignore[attr-defined]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def closure_of(args: tuple, kwargs: dict[str, Any]) -> Callable | None:
    """Returns the closure among the arguments of a step."""
    closure = args[0] if args else kwargs.get("closure")
    return closure if callable(closure) else None


def attached_step(
    optimizer: Optimizer, scalers_of: Callable[[Optimizer, bool], Sequence[Scaler]]
) -> Callable:
    """Returns a ``step`` for the optimizer that checks its scalers first and updates them after a round.

    Args:
        optimizer: The optimizer.
        scalers_of: Returns the scalers of an optimizer, for a step with a closure or one without.
    """
    original = optimizer.step

    @apart_from_dynamo
    def guarded(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if is_inside(self):
            return original(*args, **kwargs)
        scalers = scalers_of(self, closure_of(args, kwargs) is not None)
        for scaler in scalers:
            if scaler.guard.has_stepped(self):
                scaler.update()  # another optimizer did not step: end the round
        result = step_unless_bad(scalers, self, original, *args, **kwargs)
        for scaler in scalers:
            if scaler.guard.is_end_of_round():
                scaler.update()
        return result

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return guarded(self, *args, **kwargs)

    # A bound method, with the marks of what it wraps: learning rate schedulers look for both.
    step.__dict__.update(getattr(original, "__dict__", {}), __wrapped__=original)
    return types.MethodType(step, optimizer)


def step_unless_bad(
    scalers: Sequence[Scaler], optimizer: Optimizer, take: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Steps the optimizer unless a scaler that skips found an overflow.

    Args:
        scalers: The scalers of the models that the optimizer's parameters belong to.
        optimizer: The optimizer.
        take: Its original ``step``.
        args: Arguments of that step, a closure perhaps.
        kwargs: Keyword arguments of that step.

    Returns:
        The result of ``take``; for a skipped step that of the closure's first evaluation, or None without a
        closure. A step that raises may be called again.
    """
    for scaler in scalers:
        scaler.guard.begin(optimizer, is_alone=len(scalers) == 1)
    try:
        return _step(scalers, optimizer, take, args, kwargs)
    except BaseException:
        for scaler in scalers:
            scaler.guard.cancel(optimizer)
        raise


def _step(
    scalers: Sequence[Scaler], optimizer: Optimizer, take: Callable, args: tuple, kwargs: dict[str, Any]
) -> Any:
    closure = closure_of(args, kwargs)
    if closure is None:
        return _step_once(scalers, optimizer, take, args, kwargs)
    args, kwargs = args[1:], {name: value for name, value in kwargs.items() if name != "closure"}
    if _calls_its_closure_first_and_once(optimizer):
        loss, closure = _evaluated(closure)
        return _step_once(scalers, optimizer, take, (closure, *args), kwargs, loss)
    return _step_or_undo(scalers, optimizer, take, closure, args, kwargs)


# -- existing gradients ------------------------------------------------------------------------


def _step_once(
    scalers: Sequence[Scaler],
    optimizer: Optimizer,
    take: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    loss: Any = None,
) -> Any:
    """Steps on existing gradients; returns ``loss`` for a skipped step."""
    on_device = _skips_on_device(optimizer)
    found = _verdicts(scalers, optimizer)
    for scaler, verdict in found:
        scaler.guard.count(verdict)
        if on_device or not scaler.skips():
            scaler.guard.note(verdict)
    bad = _any_bad(found)
    if bad is not None and not on_device and float(bad) > 0:
        _report(found)
        _leave_out(optimizer)
        return loss
    with Inside(optimizer):
        if on_device and bad is not None:
            return _gated(optimizer, bad, take, args, kwargs)
        result = take(*args, **kwargs)
    tell_wrapper(optimizer, skipped=False)
    return result


def _skips_on_device(optimizer: Optimizer) -> bool:
    """Whether a step takes ``found_inf`` and then changes nothing.

    Torch's fused kernels do. But a loaded state may have turned them off, a class that adds to their step
    changes more, and the first step of SGD makes momentum buffers that have no values if it is left out.
    """
    if not takes_found_inf(optimizer):
        return False
    is_plain = has_torchs_step(optimizer) and all(group.get("fused") for group in optimizer.param_groups)
    if isinstance(optimizer, (Adam, SGD, Adagrad)) and not is_plain:
        return False
    return not makes_buffers(optimizer, lambda parameter: parameter.grad is not None)


def has_torchs_step(optimizer: Optimizer) -> bool:
    """Whether the ``step`` of the class is a function of torch, which nobody has replaced."""
    return _is_torchs(type(optimizer).step)


@functools.lru_cache(maxsize=64)
def _is_torchs(function: Any) -> bool:
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(TORCH):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def makes_buffers(optimizer: Optimizer, has_gradient: Callable[[Tensor], bool]) -> bool:
    """Whether a step of SGD with these gradients makes momentum buffers."""
    if not isinstance(optimizer, SGD):
        return False
    for group in optimizer.param_groups:
        # Torch's kernel takes a group whose parameters have all buffers or none.
        first = next(filter(has_gradient, group["params"]), None) if group["momentum"] else None
        if first is not None and optimizer.state.get(first, {}).get("momentum_buffer") is None:
            return True
    return False


def _verdicts(scalers: Sequence[S], optimizer: Optimizer) -> list[tuple[S, Verdict]]:
    """Returns the verdict of each scaler whose parameters have gradients."""
    asked = [Share(scaler.guard, part, scaler) for scaler, part in shares(scalers, optimizer)]
    found = verdicts(optimizer, asked)
    return [(scaler, verdict) for scaler, verdict in zip(scalers, found, strict=True) if verdict is not None]


def shares(scalers: Sequence[S], optimizer: Optimizer) -> Iterator[tuple[S, Slotted]]:
    """Yields the parameters of each scaler's model; parameters of no model go to the first scaler.

    Parameters that two models share count for both, because either scale may have been too high.
    """
    parameters = parameters_of(optimizer)
    found = [scaler.guard.slots.slotted(parameters) for scaler in scalers]
    owned = {id(p) for slotted in found for p, slot in slotted if slot is not None}
    for index, (scaler, slotted) in enumerate(zip(scalers, found, strict=True)):
        yield scaler, [(p, s) for p, s in slotted if s is not None or (index == 0 and id(p) not in owned)]


def _any_bad(found: list[tuple[Scaler, Verdict]]) -> Tensor | None:
    bad = None
    for scaler, verdict in found:
        if scaler.skips():
            bad = verdict.found if bad is None else torch.maximum(bad, verdict.found.to(bad.device))
    return bad


def _report(found: list[tuple[Scaler, Verdict]]) -> None:
    for scaler, verdict in found:
        if scaler.skips():
            scaler.guard.note(verdict)
            scaler.guard.overflows.last()


def _leave_out(optimizer: Optimizer) -> None:
    note_step(optimizer)
    tell_wrapper(optimizer, skipped=True)


def _gated(optimizer: Optimizer, found: Tensor, take: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    if getattr(optimizer, "grad_scale", None) is not None:
        raise LoopError(
            f"a torch.amp.GradScaler steps this {type(optimizer).__name__}, which amp.scaler steps, too: the "
            "gradients are unscaled already. Put amp.scaler in the place of the GradScaler."
        )
    optimizer.grad_scale, optimizer.found_inf = None, found  # type: ignore[attr-defined]
    try:
        return take(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


# -- closures ----------------------------------------------------------------------------------------


def _calls_its_closure_first_and_once(optimizer: Optimizer) -> bool:
    """Whether the step calls its closure once, before it changes anything: torch's own except LBFGS."""
    return has_torchs_step(optimizer) and not isinstance(optimizer, LBFGS)


def _evaluated(closure: Callable) -> tuple[Any, Callable]:
    """Calls the closure now, because its gradients decide on the step.

    Returns:
        The closure's result, and a closure whose first call returns this result.
    """
    with torch.enable_grad():
        loss = closure()
    first = [loss]

    def again() -> Any:
        return first.pop() if first else closure()

    return loss, again


class _BadEvaluationError(Exception):
    """Aborts an optimizer's step at the first evaluation with non-finite gradients."""


class _Evaluations:
    """A closure that checks its gradients at each call."""

    def __init__(self, closure: Callable, scalers: Sequence[Scaler], optimizer: Optimizer):
        self._closure, self._scalers, self._optimizer = closure, scalers, optimizer
        self.calls, self.is_bad, self.first = 0, False, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._closure(*args, **kwargs)
        if self.calls == 0:
            self.first = result
        self.calls += 1
        self.judge()
        if self.is_bad:
            raise _BadEvaluationError
        return result

    def judge(self) -> None:
        """Checks the existing gradients."""
        found = _verdicts(self._scalers, self._optimizer)
        for scaler, verdict in found:
            scaler.guard.count(verdict)
            if not scaler.skips():
                scaler.guard.note(verdict)
        bad = _any_bad(found)
        if bad is not None and float(bad) > 0:
            self.is_bad = True
            _report(found)


def _step_or_undo(
    scalers: Sequence[Scaler],
    optimizer: Optimizer,
    take: Callable,
    closure: Callable,
    args: tuple,
    kwargs: dict[str, Any],
) -> Any:
    """Runs a step that may call its closure several times; undoes the whole step after an overflow."""
    undo = Undo(optimizer)
    evaluations = _Evaluations(closure, scalers, optimizer)
    result = None
    try:
        with Inside(optimizer):
            result = take(evaluations, *args, **kwargs)
    except _BadEvaluationError:
        pass  # reported below, even if the optimizer caught it
    if not evaluations.calls:
        evaluations.judge()  # the step used the existing gradients and did not change them
    if not evaluations.is_bad:
        tell_wrapper(optimizer, skipped=False)
        return result
    undo()
    _leave_out(optimizer)
    return evaluations.first
