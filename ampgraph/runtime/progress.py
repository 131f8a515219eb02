"""Progress of long work on standard error: a bar for many items, the seconds of one that takes long."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")
_WIDTH = 30
# Seconds after which, and between which, work that takes long says so.
_PATIENCE = 10.0


def with_progress(items: Iterable[T], what: str, shown: bool | None) -> Iterator[T]:
    """Yields the items, with a bar that says how many there were and how long it took.

    Args:
        items: What to go through; a bar without a length counts.
        what: The work, for the line of progress.
        shown: Whether to show it; None: where standard error is a terminal.
    """
    if not (_is_terminal() if shown is None else shown):
        yield from items
        return
    total = len(items) if isinstance(items, Sized) else None
    start, count = time.perf_counter(), 0
    _say(what, count, total, 0.0)
    try:
        for item in items:
            yield item
            count += 1
            _say(what, count, total, time.perf_counter() - start)
    finally:
        print(file=sys.stderr)


@contextlib.contextmanager
def told_if_long(what: str) -> Iterator[None]:
    """While active, says from time to time how long the work takes, where standard error is a terminal.

    Args:
        what: The work, for the line of progress.
    """
    if not _is_terminal():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_tell_until, args=(ended, what), name="ampgraph progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _tell_until(ended: threading.Event, what: str) -> None:
    start = time.perf_counter()
    end_of_line = ""
    while not ended.wait(_PATIENCE):
        print(f"\r{what}, {time.perf_counter() - start:.0f} s", end="", file=sys.stderr, flush=True)
        end_of_line = "\n"
    print(end=end_of_line, file=sys.stderr, flush=True)


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # none, one of the user's, or a closed one
        return False


def _say(what: str, count: int, total: int | None, seconds: float) -> None:
    bar = ""
    if total:
        done = min(_WIDTH, _WIDTH * count // total)
        bar = f" [{'#' * done}{'.' * (_WIDTH - done)}]"
    of = f"/{total}" if total is not None else ""
    print(f"\r{what}{bar} {count}{of}, {seconds:.0f} s", end="", file=sys.stderr, flush=True)
