"""Notices that forward draws from Python's or numpy's random generator: a graph keeps what it drew."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def noting_random_numbers() -> Iterator[list[str]]:
    """Yields a list that fills, at the end, with the generators that were drawn from; they are set back."""
    found: list[str] = []
    before = {name: get() for name, get, _ in _generators()}
    try:
        yield found
    finally:
        for name, get, put in _generators():
            if name in before and get() != before[name]:
                found.append(name)
                put(before[name])


def _generators() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    yield "random", random.getstate, random.setstate
    if numpy := sys.modules.get("numpy"):
        # As numbers, which compare at once: the key, and where in it the next draw is.
        yield "numpy.random", lambda: _listed(numpy.random.get_state()), numpy.random.set_state


def _listed(state: Any) -> tuple:
    name, key, *rest = state
    return name, key.tolist(), *rest
