"""A progress bar on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")
_WIDTH = 30


def with_progress(items: Iterable[T], what: str, shown: bool | None) -> Iterator[T]:
    """Yields the items, with a bar that says how many there were and how long it took.

    Args:
        items: What to go through; a bar without a length counts.
        what: The work, for the line of progress.
        shown: Whether to show it; None: where standard error is a terminal.
    """
    if not (sys.stderr.isatty() if shown is None else shown):
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


def _say(what: str, count: int, total: int | None, seconds: float) -> None:
    bar = ""
    if total:
        done = min(_WIDTH, _WIDTH * count // total)
        bar = f" [{'#' * done}{'.' * (_WIDTH - done)}]"
    of = f"/{total}" if total is not None else ""
    print(f"\r{what}{bar} {count}{of}, {seconds:.0f} s", end="", file=sys.stderr, flush=True)
