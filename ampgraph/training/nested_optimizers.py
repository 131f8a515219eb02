"""Optimizers inside optimizers: finds them, and detects whether a step runs inside a guarded outer step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch.optim import Optimizer

_INSIDE, _OUTER = "_amp_inside", "_amp_outer"
_OF_TENSORS = ("state", "param_groups")


def nested(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yields the optimizer and those in its attributes (SAM, Lookahead) and in lists and dicts of these."""
    seen: set[int] = set()
    waiting = [optimizer]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += _held(one)


def _held(optimizer: Optimizer) -> Iterator[Optimizer]:
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            yield value
        elif name not in _OF_TENSORS and isinstance(value, (list, tuple, dict)):
            items = value.values() if isinstance(value, dict) else value
            yield from (item for item in items if isinstance(item, Optimizer))


def put_inside(optimizer: Optimizer, outer: Optimizer) -> None:
    """Records that an optimizer belongs to the optimizer around it."""
    if optimizer is not outer:
        setattr(optimizer, _OUTER, weakref.ref(outer))


def outermost(optimizer: Optimizer) -> Optimizer:
    """Returns the outermost optimizer around this one."""
    outer = vars(optimizer).get(_OUTER, lambda: None)()
    return optimizer if outer is None else outer


def is_inside(optimizer: Optimizer) -> bool:
    """Whether a guarded step of the optimizer, or of one around it, runs now."""
    return _INSIDE in vars(optimizer)


class Inside:
    """Skips the guard for steps inside a step that was already checked."""

    def __init__(self, optimizer: Optimizer):
        self._optimizers = [o for o in nested(optimizer) if not is_inside(o)]

    def __enter__(self) -> None:
        for optimizer in self._optimizers:
            setattr(optimizer, _INSIDE, True)

    def __exit__(self, *error: object) -> None:
        for optimizer in self._optimizers:
            delattr(optimizer, _INSIDE)
