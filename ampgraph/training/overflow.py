"""The last overflow: parameters, step and scale; recorded without waiting for the device.

A compiled forward tells no node. So after an overflow that the forward may have made, the calls of the next
step run a second time, node by node (`OverflowLog.looks`). The node that is found belongs to that step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .agreement import Peers, origin_of

log = logging.getLogger("ampgraph")

INPUTS = "<inputs>"
# Of each output; it stays in memory until the next call.
MOST_BYTES = 2**20
# What a number says of the forward, besides its largest output; `SEEN` minus n: the n-th sight tells where.
UNKNOWN, SEEN = -1.0, -2.0
# Steps that wait until one is picked on the device.
MOST_NOTES = 16


class Sight(NamedTuple):
    """The first node of a forward that was not finite; see `Overflow`."""

    node: str
    module: str
    op: str
    line: str

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.node} ({self.op}){where}" + (f", {self.line}" if self.line else "")


@dataclass(frozen=True)
class Overflow:
    """One step whose gradients were not finite.

    Attributes:
        step: The number of the step, from 1, including skipped steps.
        parameters: The parameters with non-finite gradients, in the order in which the backward met them.
            With several ranks: the first one of `rank`, then those of this rank.
        scale: The loss scale of that step.
        in_forward: Whether the forward was not finite, so that no scale would have helped. Where nobody
            looked at the nodes, the outputs tell; large ones, and those of all calls but the last, are not
            known, and count as finite. Each rank knows its own; a checkpoint does not keep it.
        rank: The lowest rank whose backward overflowed; None without other ranks.
        node: The first node of the forward that was not finite. The step after an overflow looks for it, so
            it is ``""`` at the first of several. Kept and known like `in_forward`.
        module: Path of the module that the node is in.
        op: Its op; ``placeholder`` or ``get_attr`` for a value that was given and is not finite, and
            ``cast to float16`` for one that is finite and does not fit.
        line: ``file:line`` of the code that made it.
    """

    step: int
    parameters: tuple[str, ...]
    scale: float
    in_forward: bool = field(default=False, compare=False)
    rank: int | None = None
    node: str = field(default="", compare=False)
    module: str = field(default="", compare=False)
    op: str = field(default="", compare=False)
    line: str = field(default="", compare=False)


def overflow_of(numbers: Sequence[Any]) -> Overflow:
    """Returns an overflow from a state: step, parameters, scale, and the rank, which old states lack."""
    step, parameters, scale, *rank = numbers
    return Overflow(step, tuple(parameters), scale, rank=rank[0] if rank else None)


class _Note(NamedTuple):
    """A step, on the device; see `OverflowLog.note`."""

    step: Tensor
    flags: Tensor
    scale: Tensor
    outputs: Tensor
    key: Tensor | None
    found: Tensor


class OverflowLog:
    """Keeps the last overflow; its flags stay on the device until they are read.

    Args:
        names: The parameters' names, by slot of the probe.
        peers: Those of other ranks.

    Attributes:
        looks: Whether the model's calls look for the first node that is not finite, and tell `saw`.
    """

    def __init__(self, names: list[str], peers: Peers):
        self._names, self._peers = names, peers
        self._notes: list[_Note] = []
        self._last: Overflow | None = None
        self._outputs: list[Tensor] = []
        self._has_all, self._calls = True, 0
        self.looks = False
        self._sights: list[Sight] = []
        self._seen: int | None = None  # which of them is of this round
        self._is_noted = self._looks_next = self._is_whole = False

    def note_outputs(self, outputs: Any, may_change: bool = False) -> None:
        """Keeps what a call returned, up to `MOST_BYTES` each; nothing is computed before the step.

        Args:
            outputs: What it returned.
            may_change: Whether a run before the step may write to these tensors. Then none is kept.
        """
        leaves = (outputs,) if isinstance(outputs, Tensor) else tree_leaves(outputs)
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        self._outputs = [t.detach() for t in tensors if t.nbytes <= MOST_BYTES and not may_change]
        self._has_all = self._calls == 0 and len(self._outputs) == len(tensors)
        self._calls += 1

    def saw(self, sight: Sight) -> None:
        """Takes the first node of this step's forward that is not finite."""
        if sight not in self._sights:
            self._sights.append(sight)
        self._seen, self.looks = self._sights.index(sight), False

    def end_round(self) -> None:
        """Begins a round: nothing is known of its forward."""
        self.looks, self._looks_next = self._looks_next, False
        self._calls, self._seen, self._is_noted = 0, None, False

    def note(
        self,
        step: int | Tensor,
        flags: Tensor,
        scale: Tensor,
        found: Tensor,
        key: Tensor | None = None,
        outputs: Tensor | None = None,
    ) -> None:
        """Records a step; the last one whose ``found`` is positive counts.

        Args:
            step: The number of the step.
            flags: Positive in the slots of this rank's non-finite gradients.
            scale: The loss scale of the step.
            found: Whether any rank has such a gradient.
            key: What the ranks agreed on; None without other ranks.
            outputs: `largest` of the outputs, of a step that ran as one graph; None: it is asked here.
        """
        self._is_noted, self._is_whole = True, outputs is not None
        step = step.to(found) if isinstance(step, Tensor) else torch.full_like(found, step)
        outputs = self._of_forward(found) if outputs is None else outputs
        self._notes.append(_Note(step, flags, scale, outputs, key, found))
        if len(self._notes) > MOST_NOTES:
            self._notes = [_picked(self._notes)]

    def last(self) -> Overflow | None:
        """Returns the last overflow, and logs it if it is new; waits for the device."""
        if not self._notes:
            return self._last
        (step, flags, scale, outputs, key, found), self._notes = _picked(self._notes), []
        if not float(found) > 0:
            return self._last
        count = len(self._names)
        slots = [i for i, flag in enumerate(flags.tolist()) if flag > 0 and i < count]
        parameters = [self._names[slot] for slot in reversed(slots)]
        rank = None
        if key is not None and int(key) > 0:
            origin = origin_of(int(key))
            rank, first = origin.rank, self._peers.name_at(origin)
            parameters = [p for p in (first,) if p is not None] + [p for p in parameters if p != first]
        named = tuple(parameters) or (INPUTS,)
        forward = float(outputs)
        sight = self._sights[int(SEEN - forward)] if forward <= SEEN else ()
        is_bad = forward <= SEEN or not math.isfinite(forward)
        self._last = Overflow(int(step), named, float(scale), is_bad, rank, *sight)
        if (is_bad or forward == UNKNOWN) and not self._is_whole:
            self._look()
        _log(self._last, self._is_whole)
        return self._last

    def _of_forward(self, like: Tensor) -> Tensor:
        """Returns what is known of this round's forward, on the device of ``like``."""
        if self._seen is not None:
            return torch.full_like(like, SEEN - self._seen)
        near = [t for t in self._outputs if t.device == like.device]
        found = largest(near, like)
        is_known = self._has_all and len(near) == len(self._outputs)
        return found if is_known else torch.where(found < math.inf, UNKNOWN, found)

    def _look(self) -> None:
        """Lets the calls of the next round look."""
        if self._is_noted:  # this round has not ended
            self._looks_next = True
        else:
            self.looks = True

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_outputs": []}

    def restore(self, last: Overflow | None) -> None:
        """Restores the last overflow of another run."""
        self._last = last


# A loss scale is seldom useful below.
_LEAST = 1.0
_GIVEN = ("placeholder", "get_attr")  # inputs, and parameters and buffers
_ADVICE = "ampgraph.check_numerics(amp, args, loss=...) names the node and finds rules that fix it"


def _log(overflow: Overflow, is_whole: bool) -> None:
    if overflow.node and overflow.op in _GIVEN:
        log.warning(
            "step %d: the forward was given a value that is not finite, %s; no loss scale helps such a step, "
            "unless the value is made of gradients (an inner step): then a lower one does",
            overflow.step,
            overflow.node,
        )
        return
    if overflow.node:
        log.warning(
            "step %d: the forward is not finite at any loss scale, first in %s; "
            "ampgraph.check_numerics(amp, args) finds rules that fix it",
            overflow.step,
            Sight(overflow.node, overflow.module, overflow.op, overflow.line),
        )
        return
    if overflow.in_forward:
        log.warning(
            "step %d: the model's outputs are not finite at any loss scale; "
            "ampgraph.check_numerics(amp, args) with the arguments of this step names the node and finds "
            "rules that fix it%s",
            overflow.step,
            "" if is_whole else "; the next step looks for the node, too",
        )
        return
    log.warning(
        "step %d: non-finite gradients at loss scale %g, first in %s%s (%d in all)%s",
        overflow.step,
        overflow.scale,
        overflow.parameters[0],
        "" if overflow.rank is None else f" of rank {overflow.rank}",
        len(overflow.parameters),
        "" if overflow.scale > _LEAST else f"; lower scales do not help: {_ADVICE}",
    )


def _picked(notes: list[_Note]) -> _Note:
    """Returns a copy of the last note with an overflow, of the first one without any; waits for nothing."""
    found = torch.stack([note.found for note in notes])
    order = torch.arange(1, len(notes) + 1, device=found.device)
    last = ((found > 0) * order).argmax().view(1)
    return _Note(*(_at(last, column) for column in zip(*notes, strict=True)))


def _at(index: Tensor, column: tuple[Tensor | None, ...]) -> Any:
    like = next((t for t in column if t is not None), None)
    if like is None:
        return None
    # A step that the loop left out has no key.
    filled = [like.new_zeros(()) if t is None else t for t in column]
    return torch.stack(filled).index_select(0, index).squeeze(0)


def largest(outputs: list[Tensor], like: Tensor) -> Tensor:
    """Returns the largest absolute value of outputs, infinity or NaN if there is one; 0-dim, as ``like``."""
    given = [t for t in outputs if t.is_floating_point() and t.numel()]
    if not given:
        return torch.zeros_like(like)
    peaks = [torch.linalg.vector_norm(t, math.inf) for t in given]
    # A finite value may be beyond the range of `like`.
    peaks = [(p * 0.0 if p.dtype == torch.float64 else p).to(like.dtype) for p in peaks]
    return peaks[0] if len(peaks) == 1 else torch.stack(peaks).amax()
