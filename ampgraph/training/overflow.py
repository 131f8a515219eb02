"""The last overflow: parameters, step and scale; recorded without waiting for the device."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

log = logging.getLogger("ampgraph")

INPUTS = "<inputs>"


@dataclass(frozen=True)
class Overflow:
    """One step whose gradients were not finite.

    Attributes:
        step: The number of the step, from 1, including skipped steps.
        parameters: The parameters with non-finite gradients, in the order in which the backward met them.
        scale: The loss scale of that step.
    """

    step: int
    parameters: tuple[str, ...]
    scale: float


class OverflowLog:
    """Keeps the last overflow; its flags stay on the device until they are read.

    Args:
        names: The parameters' names, by slot of the probe.
    """

    def __init__(self, names: list[str]):
        self._names = names
        self._pending: tuple[Tensor, Tensor, Tensor] | None = None
        self._last: Overflow | None = None

    def note(self, step: int, flags: Tensor, scale: Tensor, found: Tensor) -> None:
        """Records a step's flags if ``found`` is positive."""
        new = torch.full_like(found, step), flags, scale
        if self._pending is not None:
            new = tuple(torch.where(found > 0, n, old) for n, old in zip(new, self._pending, strict=True))  # type: ignore[assignment]
        self._pending = new

    def last(self) -> Overflow | None:
        """Returns the last overflow, and logs it if it is new; waits for the device."""
        if self._pending is None:
            return self._last
        (step, flags, scale), self._pending = self._pending, None
        slots = [i for i, flag in enumerate(flags.tolist()) if flag > 0]
        if not slots:
            return self._last
        count = len(self._names)
        parameters = tuple(self._names[i] for i in sorted(slots, reverse=True) if i < count) or (INPUTS,)
        self._last = Overflow(int(step), parameters, float(scale))
        log.warning(
            "step %d: non-finite gradients at loss scale %g, first in %s (%d parameters in all)",
            self._last.step,
            self._last.scale,
            parameters[0],
            len(parameters),
        )
        return self._last

    def restore(self, last: Overflow | None) -> None:
        """Restores the last overflow of another run."""
        self._last = last
