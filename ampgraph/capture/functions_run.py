"""Which functions ran during a capture, also those that no code names: they were found in a table."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import nn

from .user_code import is_asked_by_model

# A forward begins here; the code of modules is known.
_BEGINS = nn.Module._call_impl.__code__
_MOST = 16  # frames between a forward and a call of torch


class FunctionsRun:
    """The functions of Python modules that called torch inside a forward."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[CodeType, Any]] = {}

    def found(self) -> Iterator[FunctionType]:
        """Yields the functions that their Python modules have under their own names."""
        for code, value in self._seen.values():
            while value is not None and getattr(value, "__code__", None) is not code:
                value = getattr(value, "__wrapped__", None)
            if isinstance(value, FunctionType):
                yield value

    def note(self, frame: FrameType | None) -> None:
        """Records the functions from a call of torch out to the forward around it."""
        for _ in range(_MOST):
            if frame is None or frame.f_code is _BEGINS:
                return
            code = frame.f_code
            if id(code) not in self._seen:
                own = frame.f_globals.get(code.co_name) if is_asked_by_model(frame) else None
                self._seen[id(code)] = code, own
            frame = frame.f_back
