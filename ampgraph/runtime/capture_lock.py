"""`CaptureLock`: while a model is captured, no thread runs a graph that reads its parameters.

``torch.export`` replaces a model's parameters with fake tensors while it traces, and level O3 gives them
float32 values. A graph that ran at that time would compute with these values.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

from torch import nn

from .._compat import after_fork, compiled_calls, new_lock
from ..capture import is_capturing_here
from ..errors import CaptureError


class CaptureLock:
    """Calls of one model run concurrently; a capture runs alone and has priority over waiting calls.

    A thread that captures an outer model passes, because its capture already holds the lock.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()  # by itself it is faster than through the condition
        self._changed = threading.Condition(self._mutex)
        self._running = 0
        self._captures = 0
        self._is_captured = False
        self._thread: int | None = None

    def __enter__(self) -> None:
        """Begins a call."""
        with self._mutex:
            if not self._captures or is_capturing_here():
                self._running += 1
                return
        with compiled_calls.resting(), self._changed:
            self._changed.wait_for(lambda: not self._captures)
            self._running += 1

    def __exit__(self, *error: object) -> None:
        with self._mutex:
            self._running -= 1
            if self._captures:  # calls wait only for captures
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Begins a capture once every call and every other capture has ended."""
        if is_capturing_here():
            yield
            return
        if self._thread == threading.get_ident():
            raise CaptureError(
                "forward of the source calls the converted model, whose forward is that of the source: "
                "wrap the converted model, not a function that calls it."
            )
        with self._has_priority():
            with compiled_calls.resting(), self._changed:
                self._changed.wait_for(lambda: self._running <= 0 and not self._is_captured)
                self._is_captured, self._thread = True, threading.get_ident()
            try:
                yield
            finally:
                self._is_captured, self._thread = False, None

    @contextlib.contextmanager
    def _has_priority(self) -> Iterator[None]:
        """Makes further calls wait, until a capture has ended or was interrupted while it waited."""
        with self._mutex:
            self._captures += 1
        try:
            yield
        finally:
            with self._changed:
                self._captures -= 1
                self._changed.notify_all()

    def renew(self) -> None:
        """Forgets the threads that a forked process does not have."""
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._running = 0
        if self._thread != threading.get_ident():
            self._captures, self._is_captured, self._thread = 0, False, None


_locks: weakref.WeakKeyDictionary[nn.Module, CaptureLock] = weakref.WeakKeyDictionary()
_guard = new_lock()


def lock_of(source: nn.Module) -> CaptureLock:
    """Returns the lock that all conversions of one source model share."""
    with _guard:
        return _locks.setdefault(source, CaptureLock())


def _after_fork() -> None:
    for lock in [*_locks.values()]:
        lock.renew()


after_fork(_after_fork)
