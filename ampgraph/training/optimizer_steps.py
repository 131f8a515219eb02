"""One hook for the steps of every optimizer of the process, and the objects that it notifies.

torch iterates over one dictionary of such hooks during each step, in any thread. A hook that goes when its
model is collected would change that dictionary under another thread's step, so this hook stays.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._compat import never_compiled, optimizer_hooks
from .weak_registry import WeakRegistry


class Listener(Protocol):
    """An object that is notified of steps."""

    def after_step(self, optimizer: Optimizer, parameters: set[int]) -> None:
        """Called after the step of any optimizer, in the thread of the step.

        Args:
            optimizer: The optimizer.
            parameters: The ids of its parameters.
        """


_listeners: WeakRegistry[Listener] = WeakRegistry()


def tell_after_steps(listener: Listener) -> None:
    """Calls ``listener.after_step`` after every optimizer step, as long as the listener lives."""
    _install()
    _listeners.add(listener)


def has_other_hooks() -> bool:
    """Whether there are hooks for the steps of all optimizers besides the one of this file."""
    return any(hook is not _after_step for hook in optimizer_hooks())


@never_compiled
def _after_step(optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    tell_of_step(optimizer)


def tell_of_step(optimizer: Optimizer) -> None:
    """Tells the listeners of a step that did not call ``optimizer.step``."""
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for listener in _listeners:
        listener.after_step(optimizer, parameters)


@functools.cache
def _install() -> None:
    register_optimizer_step_post_hook(_after_step)
