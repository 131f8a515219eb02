"""Which threads trace, and which run what Dynamo compiled. Tried on torch 2.11, 2.13 and 2.15.

``torch.export`` and ``make_fx`` replace ``nn.Module.__call__``, set flags and push modes of the whole process
while they trace. If another thread runs compiled code at that time, the code fails or loses its casts.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from .forked import after_fork, renew_lock

# A thread inside a compiled call may itself wait for the one that captures: for a worker that it started.
LONGEST_WAIT = 10.0
# And a forward that is captured for a call of another thread. A capture of a large model takes minutes.
LONGEST_WAIT_FOR_CAPTURE = 300.0


def tracing_lock() -> Any:
    """Returns the re-entrant lock under which Dynamo compiles; everything that traces holds it.

    A thread takes the locks of models before it, and those of captured graphs after it.
    """
    from torch._dynamo import convert_frame

    return convert_frame.compile_lock


class CompiledCalls:
    """Calls of what Dynamo compiled. They run at once, but not while another thread captures.

    Attributes:
        mutex: Guards the numbers. Who calls `begin` or `end` holds it.
    """

    def __init__(self) -> None:
        self._inside: dict[int, int] = {}  # the number of calls, by thread
        self._captures: list[int] = []  # threads that capture, or will once the calls have ended
        self._make_locks()

    def _make_locks(self) -> None:
        self.mutex = threading.Lock()
        self._changed = threading.Condition(self.mutex)

    def begin(self) -> None:
        """Begins a call of this thread."""
        thread = threading.get_ident()
        if self._captures:
            self._wait(thread)
        self._inside[thread] = self._inside.get(thread, 0) + 1

    def end(self) -> None:
        """Ends a call of this thread."""
        thread = threading.get_ident()
        if (left := self._inside[thread] - 1) > 0:
            self._inside[thread] = left
            return
        del self._inside[thread]
        if self._captures:
            self._changed.notify_all()

    def _wait(self, thread: int) -> None:
        # A capture waits for the calls that have begun, with all that they call.
        if thread not in self._captures and thread not in self._inside:
            self._changed.wait_for(lambda: not self._captures, LONGEST_WAIT_FOR_CAPTURE)

    @contextlib.contextmanager
    def kept_out(self) -> Iterator[None]:
        """Captures under `tracing_lock`, once the calls of other threads have ended; further ones wait."""
        thread = threading.get_ident()
        with self.resting():
            with self.mutex:
                self._captures.append(thread)
            try:
                self._wait_for_calls()
                with tracing_lock():
                    yield
            finally:
                with self.mutex:
                    self._captures.remove(thread)
                    self._changed.notify_all()

    def _wait_for_calls(self) -> None:
        while not self._have_ended(LONGEST_WAIT):
            lock = tracing_lock()
            if lock.acquire(blocking=False):  # nobody compiles: perhaps the calls wait for this thread
                lock.release()
                return

    def _have_ended(self, seconds: float) -> bool:
        with self.mutex:
            return self._changed.wait_for(lambda: not self._inside, seconds)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Lets other threads capture while this one waits in the middle of its calls."""
        thread = threading.get_ident()
        with self.mutex:
            calls = self._inside.pop(thread, 0)
            self._changed.notify_all()
        try:
            yield
        finally:
            if calls:
                self._go_on(thread, calls)

    def _go_on(self, thread: int, calls: int) -> None:
        with self.mutex:
            self._changed.wait_for(lambda: {*self._captures} <= {thread}, LONGEST_WAIT_FOR_CAPTURE)
            self._inside[thread] = calls

    def renew(self) -> None:
        """Forgets the threads that a forked process does not have."""
        thread = threading.get_ident()
        self._make_locks()
        self._inside = {other: calls for other, calls in self._inside.items() if other == thread}
        self._captures = [other for other in self._captures if other == thread]


compiled_calls = CompiledCalls()


def _after_fork() -> None:
    compiled_calls.renew()
    lock = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    if lock is not None:
        renew_lock(lock)


after_fork(_after_fork)
