"""Finds lines of the user's code: the origin of an error or a call."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_PYTHON = sysconfig.get_path("stdlib")


def user_line(error: BaseException) -> str:
    """Returns ``file:line (code)`` of the innermost frame outside torch, ampgraph and Python, or ``""``."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}" + (f" ({frame.line})" if frame.line else "")
    return ""


def is_users(filename: str) -> bool:
    """Whether a file belongs to the user, not to torch, ampgraph or Python."""
    if not filename.endswith(".py") or filename.startswith((f"{_TORCH}/", f"{_OURS}/")):
        return False
    return not filename.startswith(f"{_PYTHON}/") or "-packages/" in filename.replace("\\", "/")


def frames() -> Iterator[FrameType]:
    """Yields the frames around the caller of this, innermost first."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back
