"""Tells a library's wrapper around an optimizer whether its step was skipped."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch.optim import Optimizer

_MOST_FRAMES = 32
_WRAPPER = "_amp_wrapper"


def note_wrapper_of(optimizer: Optimizer, wrapper: Optimizer) -> None:
    """Remembers the wrapper that the loop sees in place of the optimizer."""
    if wrapper is not optimizer:
        setattr(optimizer, _WRAPPER, weakref.ref(wrapper))


def tell_wrapper(optimizer: Optimizer, skipped: bool) -> None:
    """Sets what ``step_was_skipped`` of Accelerate's wrapper returns; schedulers and Trainers ask it."""
    known = vars(optimizer).get(_WRAPPER)
    wrapper = known() if known is not None else None
    if wrapper is None and skipped and "accelerate" in sys.modules:
        wrapper = _calling_wrapper(optimizer)
        if wrapper is not None:
            note_wrapper_of(optimizer, wrapper)
    if wrapper is not None:
        wrapper._is_overflow = skipped


def _calling_wrapper(optimizer: Optimizer) -> Any:
    """Returns the wrapper whose ``step`` called that of the optimizer; only the wrapper knows of the two."""
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        this = frame.f_locals.get("self")
        if type(this).__name__ == "AcceleratedOptimizer" and this.optimizer is optimizer:
            return this
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
