"""Optimizers inside optimizers, and whether one of them runs inside a step that was asked for already."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch.optim import Optimizer

_INSIDE, _OUTER = "_amp_inside", "_amp_outer"


def nested(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yields the optimizer and those that its attributes hold: the base of SAM, Lookahead and the like."""
    seen: set[int] = set()
    waiting = [optimizer]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [value for value in vars(one).values() if isinstance(value, Optimizer)]


def put_inside(optimizer: Optimizer, outer: Optimizer) -> None:
    """Notes that steps of an optimizer are steps of the one around it."""
    if optimizer is not outer:
        setattr(optimizer, _OUTER, weakref.ref(outer))


def outermost(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer whose steps those of this one are."""
    outer = vars(optimizer).get(_OUTER, lambda: None)()
    return optimizer if outer is None else outer


def is_inside(optimizer: Optimizer) -> bool:
    """Whether a guarded step of the optimizer, or of one around it, runs now."""
    return _INSIDE in vars(optimizer)


class Inside:
    """Lets steps of an optimizer, and of those inside it, happen unasked: the step around them asked."""

    def __init__(self, optimizer: Optimizer):
        self._optimizers = [o for o in nested(optimizer) if not is_inside(o)]

    def __enter__(self) -> None:
        for optimizer in self._optimizers:
            setattr(optimizer, _INSIDE, True)

    def __exit__(self, *error: object) -> None:
        for optimizer in self._optimizers:
            delattr(optimizer, _INSIDE)
