"""Warnings that point at the user's own line."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

import torch

_INSIDE = (str(Path(__file__).parent), str(Path(torch.__file__).parent), contextlib.__file__)


def warn_user(message: str) -> None:
    """Issues a `UserWarning` at the innermost line that is neither ampgraph's nor torch's."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
