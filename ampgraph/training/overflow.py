"""The last overflow: parameters, step and scale; recorded without waiting for the device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .agreement import Peers, origin_of

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
            With several ranks: the first one of `rank`, then those of this rank.
        scale: The loss scale of that step.
        in_forward: Whether the model's outputs were not finite, so that no scale would have helped. Large
            outputs, and those of all calls but the last, are not known, and count as finite. Each rank
            knows its own; a checkpoint does not keep it.
        rank: The lowest rank whose backward overflowed; None without other ranks.
    """

    step: int
    parameters: tuple[str, ...]
    scale: float
    in_forward: bool = field(default=False, compare=False)
    rank: int | None = None


def overflow_of(numbers: Sequence[Any]) -> Overflow:
    """Returns an overflow from a state: step, parameters, scale, and the rank, which old states lack."""
    step, parameters, scale, *rank = numbers
    return Overflow(step, tuple(parameters), scale, rank=rank[0] if rank else None)


class OverflowLog:
    """Keeps the last overflow; its flags stay on the device until they are read.

    Args:
        names: The parameters' names, by slot of the probe.
        peers: Those of other ranks.
    """

    def __init__(self, names: list[str], peers: Peers):
        self._names, self._peers = names, peers
        self._pending: tuple[Tensor, ...] | None = None
        self._last: Overflow | None = None
        self._outputs: list[Tensor] = []

    def note_outputs(self, outputs: Any) -> None:
        """Keeps what a call returned, up to `MOST_BYTES` each; nothing is computed before the step."""
        leaves = (outputs,) if isinstance(outputs, Tensor) else tree_leaves(outputs)
        self._outputs = [t.detach() for t in leaves if isinstance(t, Tensor) and t.nbytes <= MOST_BYTES]

    def note(
        self,
        step: int | Tensor,
        flags: Tensor,
        scale: Tensor,
        found: Tensor,
        key: Tensor | None = None,
        outputs: Tensor | None = None,
    ) -> None:
        """Records a step if ``found`` is positive.

        Args:
            step: The number of the step.
            flags: Positive in the slots of this rank's non-finite gradients.
            scale: The loss scale of the step.
            found: Whether any rank has such a gradient.
            key: What the ranks agreed on; None without other ranks.
            outputs: Whether the model's outputs were not finite, 1 or 0; None: it is asked here.
        """
        step = step.to(found) if isinstance(step, Tensor) else torch.full_like(found, step)
        key = torch.zeros_like(found, dtype=torch.int64) if key is None else key
        outputs = bad_outputs(self._outputs, found) if outputs is None else outputs
        new = step, flags, scale, outputs, key, found
        if self._pending is not None:
            new = tuple(torch.where(found > 0, n, old) for n, old in zip(new, self._pending, strict=True))  # type: ignore[assignment]
        self._pending = new

    def last(self) -> Overflow | None:
        """Returns the last overflow, and logs it if it is new; waits for the device."""
        if self._pending is None:
            return self._last
        (step, flags, scale, outputs, key, found), self._pending = self._pending, None
        if not float(found) > 0:
            return self._last
        count = len(self._names)
        slots = [i for i, flag in enumerate(flags.tolist()) if flag > 0 and i < count]
        parameters = [self._names[slot] for slot in reversed(slots)]
        rank = None
        if int(key) > 0:
            origin = origin_of(int(key))
            rank, first = origin.rank, self._peers.name_at(origin)
            parameters = [p for p in (first,) if p is not None] + [p for p in parameters if p != first]
        named = tuple(parameters) or (INPUTS,)
        self._last = Overflow(int(step), named, float(scale), float(outputs) > 0, rank)
        _log(self._last)
        return self._last

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_outputs": []}

    def restore(self, last: Overflow | None) -> None:
        """Restores the last overflow of another run."""
        self._last = last


def _log(overflow: Overflow) -> None:
    if overflow.in_forward:
        log.warning(
            "step %d: the model's outputs are not finite at any loss scale; "
            "ampgraph.check_numerics(amp, args) with the arguments of this step names the node and finds "
            "rules that cure it; ampgraph.watch(amp) names it in the loop",
            overflow.step,
        )
        return
    log.warning(
        "step %d: non-finite gradients at loss scale %g, first in %s%s (%d parameters in all)",
        overflow.step,
        overflow.scale,
        overflow.parameters[0],
        "" if overflow.rank is None else f" of rank {overflow.rank}",
        len(overflow.parameters),
    )


def bad_outputs(outputs: list[Tensor], like: Tensor) -> Tensor:
    """Returns whether outputs are not all finite, 1 or 0, on the device of ``like``."""
    floats = [t for t in outputs if t.is_floating_point() and t.device == like.device]
    if not floats:
        return torch.zeros_like(like)
    return torch.stack([~t.isfinite().all() for t in floats]).any().to(like.dtype)
