"""Locks in forked processes: one that another thread held at the fork would stay held.

Tried on Python 3.11, whose standard library renews its own locks with the same two private methods.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def after_fork(function: Callable[[], object]) -> None:
    """Runs a function in each process that is forked from this one. Windows forks none."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def new_lock() -> Any:
    """Returns a re-entrant lock; in a forked process, at most the thread that forked holds it."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def renew_lock(lock: Any) -> None:
    """Frees a re-entrant lock in a forked process, unless the thread that forked holds it."""
    if not lock._is_owned():
        lock._at_fork_reinit()


def _renew_locks() -> None:
    for lock in [*_locks]:
        renew_lock(lock)


after_fork(_renew_locks)
