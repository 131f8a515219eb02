"""Gradients that no step has taken: whether the loop threw them away, and what their backward reported.

A loop that looks at the norm itself (``if norm.isfinite(): optimizer.step()``) leaves a step out, and nothing
tells of the step that is missing. But the next call of the model, or the end of the next backward, finds
gradients gone that no step has taken. What was not finite among them lowers the scale.

Where another optimizer took its part of the same backward, two in a row have to be gone: a GAN's generator
leaves gradients in the discriminator, which clears them and steps with others.
"""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._compat import is_in_backward
from .distributed import is_distributed, is_spread
from .parameter_index import ParameterIndex, Slotted

SEEN = "_amp_backward"
_numbers = itertools.count()
# What gradients are marked with: numbers, which torch.load may read. No other process has the same.
_marks = itertools.count(secrets.randbits(60))
_IN_A_ROW = 2


class Backward:
    """A backward that reached gradients.

    Attributes:
        flags: Positive in the slots of gradients that were not finite, of earlier micro-batches too.
        scale: The scale that its forward read.
        is_taken: Whether a step took some of the gradients.
    """

    def __init__(self, flags: Tensor, scale: Tensor):
        self.flags, self.scale, self.is_taken = flags, scale, False


# In the place of an entry, on a gradient that a step has taken.
_TAKEN = next(_marks)
# The backward of a gradient, the gradient's version when that backward ended, and the gradient's mark.
_Entry = tuple[Backward, int, int]


class LeftOut(NamedTuple):
    """What a step that was left out would have taken.

    Attributes:
        flags: Positive in the slots of gradients that were not finite.
        scale: The scale that the forward read.
    """

    flags: Tensor
    scale: Tensor


class UntakenGradients:
    """The last backward of each gradient of one model, until the gradient is taken or gone.

    Args:
        slots: The parameters' slots.
        mask: Returns a vector that is 1 in the given slots.
        read: Returns vectors that are 1 in the slots of gradients that are not finite.

    Attributes:
        scale: The scale that the last call of the model read.
        optimizers: Those that ask the scaler.
        attached: Those of them whose steps end the rounds.
        left_out: Steps that the loop left out, until somebody counts them.
    """

    def __init__(
        self,
        slots: ParameterIndex,
        mask: Callable[[Sequence[int]], Tensor],
        read: Callable[[list[tuple[Tensor, int]]], list[Tensor]],
    ):
        self._slots, self._mask, self._read = slots, mask, read
        self._name_attribute()
        self.scale: Tensor | None = None
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.attached: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.forget()

    def _name_attribute(self) -> None:
        # Models that share a parameter mark its gradient side by side.
        self._seen = f"{SEEN}_{next(_numbers)}"

    def forget(self) -> None:
        """Forgets all backwards."""
        self._entries: dict[int, _Entry] = {}  # by slot
        # FSDP2 keeps gradients of micro-batches until it reduces them, after the last backward perhaps.
        self._kept_elsewhere: dict[int, Backward] = {}
        self._taken_inside: set[int] = set()  # by optimizers inside the backward that runs now
        self._is_unseen = False  # whether some are not taken that no call of the model came after
        self._missed: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.left_out: list[LeftOut] = []

    def __getstate__(self) -> dict[str, object]:
        gone: dict[str, object] = {"_entries": {}, "_kept_elsewhere": {}}
        gone |= {"_taken_inside": set(), "left_out": [], "_missed": None}
        gone |= {"optimizers": None, "attached": None}
        return {**vars(self), **gone}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self.optimizers, self.attached = weakref.WeakSet(), weakref.WeakSet()
        self._name_attribute()
        self.forget()

    # -- what comes and goes ---------------------------------------------------------------------

    def note_backward(self, flags: Tensor, scale: Tensor, reached: set[int], gradients: Slotted) -> None:
        """Notes a backward that ends now.

        Args:
            flags: What it reported.
            scale: The scale, where no call of the model was noted.
            reached: The slots that it has reached.
            gradients: All gradients of the model.
        """
        self.look(inside=True)
        for part in self._earlier(reached):
            flags = flags.maximum(part)
        new = Backward(flags, scale if self.scale is None else self.scale)
        noted = {slot: gradient for gradient, slot in gradients if slot in reached}
        for slot, gradient in noted.items():
            self._enter(slot, gradient, new)
        if is_distributed():
            self._kept_elsewhere.update(dict.fromkeys(reached - noted.keys() - self._taken_inside, new))
        self._taken_inside = set()
        self._is_unseen = True

    def _enter(self, slot: int, gradient: Tensor, backward: Backward) -> None:
        self._entries[slot] = entry = backward, gradient._version, next(_marks)
        setattr(gradient, self._seen, entry[2])

    def take(self, optimizer: Optimizer, parameters: Slotted) -> None:
        """Notes that an optimizer got the verdict on the gradients."""
        self._missed.pop(optimizer, None)
        slots = {slot for _, slot in parameters if slot is not None}
        for slot in slots & self._entries.keys():
            self._entries.pop(slot)[0].is_taken = True
        for slot in slots & self._kept_elsewhere.keys():
            del self._kept_elsewhere[slot]
        for parameter, _ in parameters if len(self.attached) > 1 else ():  # `were_taken` is asked
            if parameter.grad is not None:
                setattr(parameter.grad, self._seen, _TAKEN)
        if is_in_backward():
            self._taken_inside |= slots
        self._is_unseen = self._is_unseen and bool(self._entries)

    def backwards_of(self, parameters: Slotted) -> set[Backward]:
        """Returns the last backwards of these parameters' gradients that no step has taken."""
        return {self._entries[slot][0] for _, slot in parameters if slot in self._entries}

    def has_any(self) -> bool:
        """Whether there may be gradients that no step has taken."""
        return bool(self._kept_elsewhere or self._entries)

    def were_taken(self, parameters: Slotted) -> bool:
        """Whether a step has taken all these gradients; a loop may have clipped them since."""
        gradients = [p.grad for p, _ in parameters if p.grad is not None]
        return all(getattr(gradient, self._seen, None) == _TAKEN for gradient in gradients)

    def has_due(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the gradient of one of these is of a backward here and no step has taken it."""
        slots = zip(parameters, self._slots.of(parameters), strict=True)
        return any(slot is not None and self._is_due(p, slot) for p, slot in slots)

    def _is_due(self, parameter: Tensor, slot: int) -> bool:
        if slot in self._kept_elsewhere:
            return True
        if slot not in self._entries or parameter.grad is None:
            return False
        return is_distributed() or not self._is_gone(parameter, slot)

    def look(self, inside: bool = False) -> None:
        """Finds the gradients that are gone since the last look.

        Args:
            inside: Whether this is the end of a backward. Wrappers that reduce between processes may have put
                the sums into other tensors in it.
        """
        if not self._entries:
            return
        is_moved = inside and is_distributed()
        gone = {
            slot: self._entries[slot]
            for p, slot in self._slots.items()
            if self._is_gone(p, slot) and not (is_moved and p.grad is not None)
        }
        for slot in gone:
            del self._entries[slot]
        self._note({slot: backward for slot, (backward, *_) in gone.items()})

    def look_before_call(self) -> None:
        """Does so before the first call of the model after a backward, and finds what was zeroed in place."""
        if not self._is_unseen:
            return
        self._is_unseen = False
        self.look()
        written = self._written(by_sum=False)
        if not written:
            return
        lost = {slot: self._entries[slot][0] for _, slot in written}
        share = torch.zeros_like(next(iter(lost.values())).flags)
        zero = [_is_zero(gradient).to(share.device, share.dtype) for gradient, _ in written]
        share[torch.tensor(list(lost), device=share.device)] = torch.stack(zero)
        self._note(lost, share)
        for backward in set(lost.values()):
            backward.flags = backward.flags * (1.0 - share)
        for gradient, slot in written:
            self._enter(slot, gradient, lost[slot])

    def flags_of(self, parameters: Slotted) -> Tensor | None:
        """Returns what the last backward reported of gradients in whose place others are now.

        Between processes that of all gradients: what a process reads there is what others made of it.
        """
        found: dict[Backward, list[int]] = {}
        is_apart = is_distributed()
        for parameter, slot in parameters:
            if slot is None or parameter.grad is None:
                continue
            if is_apart and slot in self._kept_elsewhere:
                found.setdefault(self._kept_elsewhere[slot], []).append(slot)
            if slot in self._entries and (is_apart or self._is_gone(parameter, slot)):
                found.setdefault(self._entries[slot][0], []).append(slot)
        vectors = [backward.flags * self._mask(slots) for backward, slots in found.items()]
        return torch.stack(vectors).amax(0) if vectors else None

    def _is_gone(self, parameter: Tensor, slot: int) -> bool:
        entry = self._entries.get(slot)
        return entry is not None and getattr(parameter.grad, self._seen, None) != entry[2]

    def _earlier(self, reached: set[int]) -> list[Tensor]:
        """Returns what is left of the flags of gradients that the backward was added to."""
        sums = {slot: entry[0] for slot, entry in self._entries.items() if slot in reached}
        # No loop clips between a call and its backward; a write there was a zero.
        zeroed = {slot: sums.pop(slot) for _, slot in self._written(by_sum=True) if slot in sums}
        self._note(zeroed)
        if not is_distributed():
            return self._parts(sums)
        kept = {slot: b for slot in reached if (b := self._kept_elsewhere.pop(slot, None)) is not None}
        gradients = [(p.grad, slot) for p, slot in self._slots.items() if slot in sums and p.grad is not None]
        unsure = [(g, slot) for g, slot in gradients if not self._is_sum_of_shards(g, slot)]
        read = {slot: sums.pop(slot) for _, slot in unsure}
        surely = [*self._parts(kept), *self._parts(sums)]
        if not unsure:
            return surely
        now = torch.stack(self._read(unsure)).amax(0)
        self._note(read, 1.0 - now)
        return [*surely, *(part * now for part in self._parts(read))]

    def _parts(self, backwards: dict[int, Backward]) -> list[Tensor]:
        slots: dict[Backward, list[int]] = {}
        for slot, backward in backwards.items():
            slots.setdefault(backward, []).append(slot)
        return [backward.flags * self._mask(of_it) for backward, of_it in slots.items()]

    def _is_sum_of_shards(self, gradient: Tensor, slot: int) -> bool:
        """Whether only the sum of a backward was written to a shard since it was noted.

        The values that were not finite may be in the shards of other ranks.
        """
        return is_spread(gradient) and gradient._version <= self._entries[slot][1] + 1

    def _written(self, by_sum: bool) -> list[tuple[Tensor, int]]:
        """Returns the gradients, not taken yet, with a write since they were noted besides autograd's sum.

        Not those that hooks write to, nor any between processes, where wrappers do.
        """
        written: list[tuple[Tensor, int]] = []
        for parameter, slot in self._slots.items() if self._entries and not is_distributed() else ():
            entry, gradient = self._entries.get(slot), parameter.grad
            if entry is None or gradient is None or has_hooks(parameter):
                continue
            if gradient._version not in (entry[1], entry[1] + by_sum):
                written.append((gradient, slot))
        return written

    # -- what it means ---------------------------------------------------------------------------

    def _note(self, lost: dict[int, Backward], share: Tensor | float = 1.0) -> None:
        """Notes the left out steps of the optimizers that gradients belong to."""
        due: dict[Backward, list[int]] = {}
        for slot in sorted(self._due(lost)):
            due.setdefault(lost[slot], []).append(slot)
        for backward, slots in due.items():
            self.left_out.append(LeftOut(backward.flags * self._mask(slots) * share, backward.scale))

    def _due(self, lost: dict[int, Backward]) -> set[int]:
        if not self.optimizers:
            return {*lost}  # the loop has left out all steps so far
        due: set[int] = set()
        for optimizer in self.optimizers if lost else ():
            slots = self._slots.of([p for group in optimizer.param_groups for p in group["params"]])
            own = {slot for slot in slots if slot in lost}
            if own and all(lost[slot].is_taken for slot in own):
                self._missed[optimizer] = self._missed.get(optimizer, 0) + 1
                if self._missed[optimizer] < _IN_A_ROW:
                    continue
            due |= own
        return due


def _is_zero(gradient: Tensor) -> Tensor:
    values = gradient._values() if gradient.is_sparse else gradient
    return values.detach().count_nonzero() == 0


def has_hooks(parameter: Tensor) -> bool:
    """Whether hooks may have written to the gradient's ``.data``, whose writes no version counts."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
