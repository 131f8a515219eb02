"""`LocalSwitch`: what holds for the code inside a ``with``, in one thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class LocalSwitch(threading.local):
    """A switch of each thread, off outside of `on`.

    Attributes:
        is_on: Whether this thread is inside.
    """

    is_on = False

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Switches it on for the code inside."""
        before, self.is_on = self.is_on, True
        try:
            yield
        finally:
            self.is_on = before
