"""Reports a skipped step to a library's wrapper around an optimizer."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

from torch.optim import Optimizer

_WRAPPER = "_amp_wrapper"


def note_wrapper_of(optimizer: Optimizer, wrapper: Optimizer) -> None:
    """Stores the wrapper that the loop uses instead of the optimizer."""
    if wrapper is not optimizer:
        setattr(optimizer, _WRAPPER, weakref.ref(wrapper))


def tell_wrapper(optimizer: Optimizer, skipped: bool) -> None:
    """Sets ``step_was_skipped`` of Accelerate's wrapper, which schedulers and Trainers read.

    A wrapper created after `attach` is found when it calls a skipped step.
    """
    if skipped and (caller := _calling_wrapper(optimizer)) is not None:
        note_wrapper_of(optimizer, caller)
    known = vars(optimizer).get(_WRAPPER)
    wrapper = known() if known is not None else None
    if wrapper is not None:
        wrapper._is_overflow = skipped


def _calling_wrapper(optimizer: Optimizer) -> Any:
    """Returns the nearest of Accelerate's wrappers around this optimizer whose ``step`` runs now."""
    module = sys.modules.get("accelerate.optimizer")
    if module is None:
        return None
    code = module.AcceleratedOptimizer.step.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and frame.f_locals["self"].optimizer is optimizer:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
