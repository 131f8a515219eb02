"""Detects torch's own loss scaler from outside. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from .cuda_streams import is_recording
from .statements import passes_result_of

_FACTORS = {"MulBackward0", "DivBackward0"}
_MOST_FACTORS = 4


def is_scaled_by_grad_scaler() -> bool:
    """Whether the current backward begins at the result of ``GradScaler.scale``.

    The result is a product that has already freed its factors. So this inspects the callers' frames: one of
    them holds a ``GradScaler`` that has scaled something. If a frame also holds the loss, the quotient
    decides. Otherwise the nearest frame that calls something named ``scale`` must hold the scaler, and the
    statement that it runs must pass on such a result: the loss of another model may be scaled beside it.
    """
    for frame in _frames_of_threads():
        backward = _frame_of_backward(frame)
        if backward is None:
            continue
        products = [t for t in _roots(backward) if _factors_of(t)]
        if not products or _is_capturing(products):
            return False
        scalers = [s for s in _scalers_in_sight(backward) if s.is_enabled() and s._scale is not None]
        return any(_has_scaled(s, t, backward) for s in scalers for t in products)
    return False


def _frames_of_threads() -> list[FrameType]:
    """Returns the frames of all threads, this one first: one calls backward, others may work for it."""
    this = threading.get_ident()
    frames = sys._current_frames()
    return [frames[i] for i in sorted(frames, key=lambda i: i != this)]


def _frame_of_backward(frame: FrameType | None) -> FrameType | None:
    """Returns the call of ``torch.autograd.backward`` that a thread is in; it waits while others work."""
    while frame is not None and frame.f_code is not torch.autograd.backward.__code__:
        frame = frame.f_back
    return frame


def _roots(backward: FrameType) -> list[Tensor]:
    tensors = backward.f_locals["tensors"]
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _is_capturing(tensors: list[Tensor]) -> bool:
    return any(is_recording(t.device) for t in tensors)


def _factors_of(product: Tensor) -> list[Any]:
    """Returns the autograd nodes of the factors of a tensor, the nearest first."""
    found: list[Any] = []
    node: Any = product.grad_fn
    while node is not None and type(node).__name__ in _FACTORS and len(found) < _MOST_FACTORS:
        inputs = [n for n, _ in node.next_functions if n is not None]
        if len(inputs) != 1:
            break
        node = inputs[0]
        found.append(node)
    return found


def _has_scaled(scaler: GradScaler, product: Tensor, backward: FrameType) -> bool:
    nodes, scale = _factors_of(product), scaler.get_scale()
    # The loss, or a multiple of it.
    held = [t for t in _in_sight(backward, Tensor) if any(t.grad_fn is node for node in nodes)]
    quotients = [float(product.detach()) / float(t.detach()) for t in held if _is_number(t)]
    if any(abs(q / scale - 1) < 0.01 for q in quotients):
        return True
    if quotients and len(nodes) == 1 and _is_number(product):
        return False  # the only factor is another number
    nearest = next((f for f in _callers(backward) if "scale" in f.f_code.co_names), None)
    if nearest is None or not any(scaler is held for held in _held(nearest, GradScaler)):
        return False
    return passes_result_of(nearest, "scale") is not False


def _is_number(tensor: Tensor) -> bool:
    return tensor.numel() == 1 and bool(tensor.isfinite()) and bool(tensor != 0)


def _callers(frame: FrameType) -> Iterator[FrameType]:
    """Yields the callers of a backward outside torch."""
    caller = frame.f_back
    while caller is not None:
        if not caller.f_globals.get("__name__", "").startswith("torch."):
            yield caller
        caller = caller.f_back


def _scalers_in_sight(backward: FrameType) -> Iterator[GradScaler]:
    yield from dict.fromkeys(_in_sight(backward, GradScaler))


def _in_sight(backward: FrameType, kind: type) -> Iterator[Any]:
    for caller in _callers(backward):
        yield from _held(caller, kind)


def _held(frame: FrameType, kind: type) -> Iterator[Any]:
    """Yields the values of a frame's names and of its objects' attributes."""
    for value in itertools.chain(list(frame.f_locals.values()), list(frame.f_globals.values())):
        if issubclass(type(value), kind):
            yield value
        else:
            yield from (v for v in _attributes(value) if issubclass(type(v), kind))


def _attributes(value: Any) -> list[Any]:
    try:
        return list(object.__getattribute__(value, "__dict__").values())
    except AttributeError:
        return []
