"""Hooks for all modules, or for all optimizers, of the process. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.nn.modules import module
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from .forked import new_lock

_HOOKS: tuple[dict[int, Any], ...] = (
    module._global_forward_pre_hooks,
    module._global_forward_hooks,
    module._global_backward_pre_hooks,
    module._global_backward_hooks,
)
_lock = new_lock()
_hidden: list[dict[int, Any]] = [{} for _ in _HOOKS]
_inside = 0


def has_global_hooks() -> bool:
    """Whether any hook is registered for all modules of the process."""
    return any(_HOOKS)


def optimizer_hooks() -> list[Any]:
    """Returns the hooks for the steps of all optimizers."""
    return [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]


@contextlib.contextmanager
def no_global_hooks() -> Iterator[None]:
    """Hides the hooks for all modules of the process, in all threads: torch keeps them for the process."""
    _hide()
    try:
        yield
    finally:
        _show()


def _hide() -> None:
    global _inside
    with _lock:
        _inside += 1
        for hooks, hidden in zip(_HOOKS, _hidden, strict=True):
            hidden.update(hooks)
            hooks.clear()


def _show() -> None:
    """Puts the hooks back when the last thread leaves."""
    global _inside
    with _lock:
        _inside -= 1
        if _inside:
            return
        for hooks, hidden in zip(_HOOKS, _hidden, strict=True):
            hidden.update(hooks)  # those that came meanwhile, last
            hooks.clear()
            hooks.update(hidden)
            hidden.clear()
