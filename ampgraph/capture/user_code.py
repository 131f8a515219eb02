"""Finds lines of the user's code: the origin of an error or a call."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from types import FrameType

from ..own_files import is_users


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
