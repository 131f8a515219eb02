"""Tells the user's code from torch's, ampgraph's and Python's; finds its lines on the stack."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ..own_files import AMPGRAPH, TORCH, is_users

_LAYERS = os.path.join(TORCH, "nn", "")
_HOOKS = os.path.join(_LAYERS, "utils", "")
_BETWEEN = ("__torch_function__", "handle_torch_function")
# Python's modules with classes of settings: SimpleNamespace, argparse.Namespace, UserDict.
_OF_SETTINGS = ("types", "argparse", "collections")


def user_line(error: BaseException) -> str:
    """Returns ``file:line (code)`` of the innermost frame outside torch, ampgraph and Python, or ``""``."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}" + (f" ({frame.line})" if frame.line else "")
    return ""


def frames() -> Iterator[FrameType]:
    """Yields the frames around the caller of this, innermost first."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_foreign(cls: type) -> bool:
    """Whether a class is Python's or torch's, or compiled: its behaviour is not a setting of a model."""
    module: object = cls.__module__  # a descriptor, of Cython's functions
    return not isinstance(module, str) or is_foreign_module(module)


def is_foreign_module(module: str) -> bool:
    """Whether a Python module is Python's, torch's or ampgraph's; those with classes of settings left out."""
    root = module.partition(".")[0]
    if root in _OF_SETTINGS:
        return False
    return root in ("torch", "ampgraph") or root in sys.stdlib_module_names


def is_asked_by_model(frame: FrameType, function: Any = None) -> bool:
    """Whether the code that asks through torch's modes is neither torch's nor ampgraph's."""
    own = getattr(function, "__code__", None)  # of methods of tensors that are written in Python
    while (frame.f_code.co_name in _BETWEEN or frame.f_code is own) and frame.f_back:
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith((TORCH, AMPGRAPH))


def is_set_by_torch(frame: FrameType) -> bool:
    """Whether torch's layers set an attribute, such as the flat weights of ``nn.LSTM``.

    The hooks of torch.nn.utils do not count: pruning reads the weights that they set.
    """
    while frame.f_code.co_name == "__setattr__" and frame.f_back:
        frame = frame.f_back
    file = frame.f_code.co_filename
    return file.startswith(_LAYERS) and not file.startswith(_HOOKS)
