"""What can be seen of torch's own loss scaler from outside."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.amp import GradScaler


def is_scaled_by_grad_scaler() -> bool:
    """Whether the backward that runs now seems to begin at what ``GradScaler.scale`` returned.

    That is a product, called by code that holds a ``GradScaler`` which has scaled something. The product has
    freed its factors by now.
    """
    for frame in sys._current_frames().values():
        backward = _frame_of_backward(frame)
        if backward is None:
            continue
        tensors = backward.f_locals["tensors"]
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if any(type(t.grad_fn).__name__ == "MulBackward0" for t in tensors):
            return any(s.is_enabled() and s._scale is not None for s in _scalers_in_sight(backward))
    return False


def _frame_of_backward(frame: FrameType | None) -> FrameType | None:
    """Returns the call of ``torch.autograd.backward`` that a thread is in; it waits while others work."""
    while frame is not None and frame.f_code is not torch.autograd.backward.__code__:
        frame = frame.f_back
    return frame


def _scalers_in_sight(frame: FrameType | None) -> Iterator[GradScaler]:
    """Yields those that the callers hold by a name, or their objects by an attribute."""
    while frame is not None:
        for value in itertools.chain(list(frame.f_locals.values()), list(frame.f_globals.values())):
            if issubclass(type(value), GradScaler):
                yield value
            else:
                yield from (v for v in _attributes(value) if issubclass(type(v), GradScaler))
        frame = frame.f_back


def _attributes(value: Any) -> list[Any]:
    try:
        return list(object.__getattribute__(value, "__dict__").values())
    except AttributeError:
        return []
