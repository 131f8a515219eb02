"""Scalers of several converted models that one optimizer steps together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

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

    def with_partners(self, scalers: Sequence[P], optimizer: Optimizer) -> list[P]:
        """Returns the scalers, each once, and those of other converted models that own these parameters.

        Models that have not run count too, because ranks of a mixture of experts run different models.
        """
        found = list(dict.fromkeys(scalers))
        rest = parameters_of(optimizer)
        for scaler in found:
            rest = [p for p, slot in zip(rest, scaler.guard.slots.of(rest), strict=True) if slot is None]
        if not rest:
            return found
        for other in sorted(self, key=lambda scaler: scaler.guard.number):
            if other in found or not other.is_enabled():
                continue
            if any(slot is not None for slot in other.guard.slots.of(rest)):
                found.append(other)
        for scaler in found:
            scaler.guard.share_wrapper([other.guard for other in found])
        return found
