"""Scalers of several converted models that one optimizer steps together."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from .optimizer_step import Scaler, parameters_of
from .weak_registry import WeakRegistry


class Partner(Scaler, Protocol):
    """The interface of a scaler that this file uses."""

    def is_enabled(self) -> bool:
        """Whether gradients are scaled at all."""


P = TypeVar("P", bound=Partner)


class PartnerRegistry(WeakRegistry[P]):
    """All scalers of the process."""

    def __init__(self) -> None:
        super().__init__()
        # Scalers that own no parameter of an optimizer, by number, with the number of its parameters then.
        self._strangers: weakref.WeakKeyDictionary[Optimizer, dict[int, int]] = weakref.WeakKeyDictionary()

    def with_partners(self, scalers: Sequence[P], optimizer: Optimizer, before: bool = False) -> list[P]:
        """Returns the scalers, each once, and those of other converted models that own these parameters.

        A model that owns some parameters alone always counts: ranks of a mixture of experts run different
        models. A model that shares all its parameters (two conversions of one network, a converted part)
        counts for a step if its own backward made gradients for it.

        Args:
            scalers: The scalers that are known.
            optimizer: The optimizer.
            before: Whether the backward of the step is yet to come: the step has a closure, or the loop
                attaches the optimizer. Then every model that shares parameters counts.
        """
        found = list(dict.fromkeys(scalers))
        parameters = rest = parameters_of(optimizer)
        for scaler in found:
            rest = [p for p, slot in zip(rest, scaler.guard.slots.of(rest), strict=True) if slot is None]
        others = [o for o in self if o not in found and (rest or before or o.guard.has_untaken())]
        for other in sorted(others, key=lambda scaler: scaler.guard.number):
            if other.is_enabled() and self._is_partner(other, optimizer, parameters, rest, before):
                other.guard.note_optimizer(optimizer)
                found.append(other)
        for scaler in found if len(found) > 1 else ():
            scaler.guard.share_wrapper([other.guard for other in found])
        return found

    def _is_partner(
        self, other: P, optimizer: Optimizer, parameters: list[Tensor], rest: list[Tensor], before: bool
    ) -> bool:
        if any(slot is not None for slot in other.guard.slots.of(rest)):
            return True
        strangers = self._strangers.setdefault(optimizer, {})
        if strangers.get(other.guard.number) == len(parameters):
            return False
        if all(slot is None for slot in other.guard.slots.of(parameters)):
            strangers[other.guard.number] = len(parameters)
            return False
        return before or other.guard.has_due(parameters)
