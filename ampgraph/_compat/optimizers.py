"""What torch's optimizers keep to themselves. Tried on torch 2.11, 2.13, 2.14 and 2.15."""

from __future__ import annotations

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
