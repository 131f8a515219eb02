"""`WeakRegistry`: living objects of the process that any thread may add to and iterate over."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

from .._compat import new_lock

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """Objects in the order of their addition, for as long as they live.

    A ``WeakSet`` raises when another thread adds to it during an iteration. Here an addition replaces a
    tuple, so that an iteration needs no lock.
    """

    def __init__(self) -> None:
        self._references: tuple[weakref.ref[T], ...] = ()
        self._lock = new_lock()

    def add(self, item: T) -> None:
        """Adds an object."""
        with self._lock:
            alive = (known for known in self._references if known() is not None)
            self._references = (*alive, weakref.ref(item))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[T]:
        for reference in self._references:
            if (item := reference()) is not None:
                yield item
