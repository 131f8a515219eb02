"""What torch's optimizers keep to themselves. Tried on torch 2.11, 2.13, 2.14 and 2.15."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks run around the steps of this optimizer."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Whether the kernels of the optimizer read ``found_inf``, and then may leave the step out."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def note_step(optimizer: Optimizer) -> None:
    """Tells schedulers that the optimizer had its turn; they warn of one whose step was left out."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def update_scale(
    scale: Tensor, counters: Tensor, found: Tensor, growth: float, backoff: float, interval: int
) -> tuple[Tensor, Tensor]:
    """Returns the next scale and the next counters by the kernel of ``torch.amp.GradScaler``.

    Args:
        scale: The scale, 0-dim float32.
        counters: The first one counts the good steps in a row, int32; the kernel does not know the others.
        found: 1 if gradients of the step were not finite, else 0; 0-dim float32.
        growth: The factor after ``interval`` good steps.
        backoff: The factor after a bad step.
        interval: The number of good steps.
    """
    scale, counters = scale.clone(), counters.clone()
    torch._amp_update_scale_(scale, counters[0], found, growth, backoff, interval)
    return scale, counters


def flag_if_not_finite(tensor: Tensor, flag: Tensor, one: Tensor) -> None:
    """Sets a flag if a tensor is not finite, and writes each value of the tensor to where it was.

    Args:
        tensor: A dense tensor of real floating-point numbers on a CPU.
        flag: The flag, one element, float32.
        one: The number one, 0-dim float32: the kernel of ``torch.amp.GradScaler`` multiplies by it.
    """
    unscale_and_flag(tensor, flag, one)


def unscale_and_flag(tensor: Tensor, flag: Tensor, inverse: Tensor) -> None:
    """Multiplies a tensor in place, and sets a flag if a value was not finite before.

    Args:
        tensor: A dense tensor of real floating-point numbers.
        flag: The flag, one element, float32, on the same device.
        inverse: The factor, 0-dim float32, on the same device.
    """
    torch._amp_foreach_non_finite_check_and_unscale_([tensor], flag, inverse)
