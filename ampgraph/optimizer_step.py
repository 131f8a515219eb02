"""The optimizer's step under a loss scale: taken, or left out after an overflow."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from .scaler import LossScaler


def stepping(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that is called for real steps only.

    That is what Accelerate's wrapper wraps: the wrapper itself is called after each micro-batch.
    """
    is_wrapper = type(optimizer).__name__ == "AcceleratedOptimizer"
    return optimizer.optimizer if is_wrapper else optimizer  # type: ignore[attr-defined]


def attached_step(optimizer: Optimizer) -> Callable:
    """Returns a ``step`` for the optimizer that asks its scalers first, and updates them after a round."""
    original = optimizer.step

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        scalers = self._amp_scalers  # type: ignore[attr-defined]
        result = step_unless_bad(scalers, self, original, *args, **kwargs)
        for scaler in scalers:
            if scaler.is_end_of_round():
                scaler.update()
        return result

    # A bound method, with the marks of what it wraps: learning rate schedulers look for both.
    step.__dict__.update(getattr(original, "__dict__", {}))
    return types.MethodType(step, optimizer)


def step_unless_bad(
    scalers: list[LossScaler], optimizer: Optimizer, take: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Steps the optimizer unless a scaler that skips found an overflow.

    Args:
        scalers: The scalers of the models that the optimizer's parameters belong to.
        optimizer: The optimizer.
        take: Its own ``step``.
        args: Arguments of that step, a closure perhaps.
        kwargs: Keyword arguments of that step.

    Returns:
        What ``take`` returned, or None for a skipped step.
    """
    closure = args[0] if args else kwargs.get("closure")
    if closure is not None:
        closure = _evaluated(closure)
        args, kwargs = (closure, *args[1:]), {k: v for k, v in kwargs.items() if k != "closure"}
    on_device = getattr(optimizer, "_step_supports_amp_scaling", False)
    bad = None
    unseen = []
    for scaler in scalers:
        flags, found = scaler.begin_step(optimizer)
        if scaler.skips():
            bad = found if bad is None else torch.maximum(bad, found.to(bad.device))
        if on_device or not scaler.skips():
            scaler.note(flags, found)
        else:
            unseen.append((scaler, flags, found))
    if bad is not None and not on_device and float(bad) > 0:
        for scaler, flags, found in unseen:
            scaler.note(flags, found)
            scaler.report()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn of a step left out
        return None
    if on_device and bad is not None:
        result = _gated(optimizer, bad, take, args, kwargs)
    else:
        result = take(*args, **kwargs)
    if closure is not None:
        for scaler in scalers:
            scaler.count_rest(optimizer)
    return result


def _evaluated(closure: Callable) -> Callable:
    """Calls the closure now, since its gradients decide on the step; the next call returns the same."""
    with torch.enable_grad():
        first = [closure()]

    def again() -> Any:
        return first.pop() if first else closure()

    return again


def _gated(optimizer: Optimizer, found: Tensor, take: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    optimizer.grad_scale, optimizer.found_inf = None, found  # type: ignore[attr-defined]
    try:
        return take(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
