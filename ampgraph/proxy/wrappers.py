"""Finds what a function wraps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn

_MOST = 1_000


def wraps(function: Any, inner: Callable) -> bool:
    """Whether a function is ``inner``, or calls it as decorators do.

    Args:
        function: A function, bound method, ``functools.partial`` or callable object.
        inner: The function to look for. The search ends after 1,000 callables.
    """
    seen: set[int] = set()
    waiting = [function]
    while waiting and len(seen) < _MOST:
        held = waiting.pop(0)
        if held is inner or (isinstance(held, FunctionType) and _names(held, inner)):
            return True
        if id(held) not in seen:
            seen.add(id(held))
            waiting += [other for other in _held(held) if callable(other)]
    return False


def _names(function: FunctionType, inner: Callable) -> bool:
    """Whether a function reads a global that is ``inner``."""
    return any(function.__globals__.get(name) is inner for name in function.__code__.co_names)


def _held(function: Any) -> Iterator[Any]:
    """Yields what a wrapper may call: what it names as wrapped, closes over, or has as an attribute."""
    yield getattr(function, "__wrapped__", None)
    if isinstance(function, MethodType):
        yield from (function.__func__, function.__self__)
    elif isinstance(function, functools.partial):
        yield from (function.func, *function.args, *function.keywords.values())
    elif isinstance(function, FunctionType):
        yield from _closed_over(function)
    elif not isinstance(function, (type, nn.Module)):
        yield from getattr(function, "__dict__", {}).values()


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            continue
