"""The last overflow: parameters, step and scale; recorded without waiting for the device."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

log = logging.getLogger("ampgraph")

INPUTS = "<inputs>"
# Of each output; it stays in memory until the next call.
MOST_BYTES = 2**20


@dataclass(frozen=True)
class Overflow:
    """One step whose gradients were not finite.

    Attributes:
        step: The number of the step, from 1, including skipped steps.
        parameters: The parameters with non-finite gradients, in the order in which the backward met them.
        scale: The loss scale of that step.
        in_forward: Whether the model's outputs were not finite, so that no scale would have helped. Large
            outputs, and those of all calls but the last, are not known, and count as finite. Each rank
            knows its own; a checkpoint does not keep it.
    """

    step: int
    parameters: tuple[str, ...]
    scale: float
    in_forward: bool = field(default=False, compare=False)


class OverflowLog:
    """Keeps the last overflow; its flags stay on the device until they are read.

    Args:
        names: The parameters' names, by slot of the probe.
    """

    def __init__(self, names: list[str]):
        self._names = names
        self._pending: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._last: Overflow | None = None
        self._outputs: list[Tensor] = []

    def note_outputs(self, outputs: Any) -> None:
        """Keeps what a call returned, up to `MOST_BYTES` each; nothing is computed before the step."""
        leaves = (outputs,) if isinstance(outputs, Tensor) else tree_leaves(outputs)
        self._outputs = [t.detach() for t in leaves if isinstance(t, Tensor) and t.nbytes <= MOST_BYTES]

    def note(self, step: int, flags: Tensor, scale: Tensor, found: Tensor) -> None:
        """Records a step's flags if ``found`` is positive."""
        new = torch.full_like(found, step), flags, scale, self._bad_outputs(found)
        if self._pending is not None:
            new = tuple(torch.where(found > 0, n, old) for n, old in zip(new, self._pending, strict=True))  # type: ignore[assignment]
        self._pending = new

    def last(self) -> Overflow | None:
        """Returns the last overflow, and logs it if it is new; waits for the device."""
        if self._pending is None:
            return self._last
        (step, flags, scale, outputs), self._pending = self._pending, None
        slots = [i for i, flag in enumerate(flags.tolist()) if flag > 0]
        if not slots:
            return self._last
        count = len(self._names)
        parameters = tuple(self._names[i] for i in sorted(slots, reverse=True) if i < count) or (INPUTS,)
        self._last = Overflow(int(step), parameters, float(scale), float(outputs) > 0)
        if self._last.in_forward:
            log.warning(
                "step %d: the model's outputs are not finite, whatever the loss scale; "
                "ampgraph.check_numerics(amp, args) names the node and finds rules that cure it",
                self._last.step,
            )
            return self._last
        log.warning(
            "step %d: non-finite gradients at loss scale %g, first in %s (%d parameters in all)",
            self._last.step,
            self._last.scale,
            parameters[0],
            len(parameters),
        )
        return self._last

    def _bad_outputs(self, like: Tensor) -> Tensor:
        """Returns whether the last call's outputs are not all finite, 1 or 0, on the device."""
        floats = [t for t in self._outputs if t.is_floating_point() and t.device == like.device]
        if not floats:
            return torch.zeros_like(like)
        return torch.stack([~t.isfinite().all() for t in floats]).any().to(like.dtype)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_outputs": []}

    def restore(self, last: Overflow | None) -> None:
        """Restores the last overflow of another run."""
        self._last = last
