"""Finds the gradients that are not finite. Flags of the boundary avoid reading ``.grad`` again.

A boundary checks the gradients that leave it, and autograd stores them in ``.grad``. When a backward ends,
each ``.grad`` with the storage and version that left a boundary is marked with the flags of that backward.
The flags live as long as the gradient: ``zero_grad`` or an assignment removes them. A gradient without a
mark (set by hand, from outside a boundary, reduced between processes) is read. A gradient that was changed
in place is also read, and its flags stay, because a clip by value makes infinity finite. The end of a later
backward reads changed gradients and marks them again, because they were zeroed or accumulated.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from .._compat import after_backward, leave_note, never_compiled, note_of
from .distributed import is_distributed, local
from .gradient_boundary import non_finite
from .parameter_index import ParameterIndex, Slotted
from .scale_state import ScaleState
from .unscaled_step_warning import UnscaledStepWarning
from .untaken_gradients import UntakenGradients, has_hooks

MARK = "_amp_flags"
_MOST_MASKS = 16


class GradientFlags:
    """The flags of one scaler's gradients.

    Args:
        slots: The parameters' slots in the vector of flags.
        state: The tensors that the graphs read; its probe receives their flags.
        watch: Called at each backward.
    """

    def __init__(self, slots: ParameterIndex, state: ScaleState, watch: UnscaledStepWarning):
        self._slots, self._state, self.watch = slots, state, watch
        self._masks: dict[tuple[int, ...], Tensor] = {}
        self._is_new = False
        self.untaken = UntakenGradients(slots, self._mask, self._read)
        self.connect()

    def has_new_backward(self) -> bool:
        """Whether a backward has reached gradients since this was asked."""
        is_new, self._is_new = self._is_new, False
        return is_new

    def connect(self) -> None:
        """Subscribes to each backward with a weak reference, because tensors hold the hook."""
        this = weakref.ref(self)

        def backward_reached_probe(reported: Tensor) -> None:
            if (flags := this()) is not None:
                reported = reported.clone() if flags._state.is_rewritten else reported
                flags._state.note(reported)
                flags._is_new = True
                flags.watch.note_backward()
                after_backward(functools.partial(flags.mark, reported))

        self._state.watch(backward_reached_probe)

    @never_compiled
    def mark(self, flags: Tensor) -> None:
        """Marks the gradients that boundaries have checked in the backward that ends now."""
        if is_distributed():
            # The forward looked up gathered parameters; their shards hold the gradients.
            self._slots.refresh()
        checked, reached = self._state.checked, self._state.checked.take()
        parameters = [(p, slot) for p, slot in self._slots.items() if p.grad is not None]
        gradients: Slotted = [(p.grad, slot) for p, slot in parameters]  # type: ignore[misc]
        self.untaken.note_backward(flags, self._state.scale, reached, gradients)
        if is_distributed():
            return
        changed: list[tuple[Tensor, int]] = []
        for (parameter, slot), (gradient, _) in zip(parameters, gradients, strict=True):
            is_taken_over = slot in reached and checked.is_checked(gradient, slot)
            if is_taken_over and not gradient.requires_grad and not has_hooks(parameter):
                leave_note(gradient, MARK, (flags, slot))
            elif (marked := _marked(gradient, slot)) is not None and not marked[1]:
                changed.append((gradient, slot))
        if changed:
            fresh = torch.stack(self._read(changed)).amax(0)
            for gradient, slot in changed:
                leave_note(gradient, MARK, (fresh, slot))

    def of(self, parameters: Slotted, reported: Tensor | None = None) -> Tensor | None:
        """Returns a vector, positive in the slots of gradients that are not finite; None without gradients.

        A parameter without a slot counts in the last slot.

        Args:
            parameters: The parameters.
            reported: What the last backward reported of gradients that were changed since; it counts too.
        """
        gradients = [(p.grad, slot) for p, slot in parameters if p.grad is not None]
        if not gradients:
            return None
        size = len(self._slots.names) + 1
        known: dict[int, tuple[Tensor, list[int]]] = {}
        unknown: list[tuple[Tensor, int]] = []
        for gradient, slot in gradients:
            marked = _marked(gradient, slot)
            if marked is not None and marked[0].shape[0] == size:
                flags, is_unchanged = marked
                known.setdefault(id(flags), (flags, []))[1].append(slot)  # type: ignore[arg-type]
                if is_unchanged:
                    continue
            unknown.append((gradient, size - 1 if slot is None else slot))
        vectors = [flags * self._mask(slots) for flags, slots in known.values()]
        vectors += self._read(unknown)
        if reported is not None:
            vectors.append(reported)
        return torch.stack(vectors).amax(0) if len(vectors) > 1 else vectors[0]

    def any_value(self, parameters: Slotted) -> Tensor:
        """Returns whether a gradient has a value other than zero; reads all of them."""
        gradients = [local(p.grad) for p, _ in parameters if p.grad is not None]
        values = [g._values() if g.is_sparse else g for g in gradients]
        device = self._state.scale.device
        with torch.no_grad():
            found = [(v != 0).any().to(device) for v in values if v.numel()]
        return torch.stack(found).any() if found else torch.zeros((), dtype=torch.bool, device=device)

    def _read(self, gradients: list[tuple[Tensor, int]]) -> list[Tensor]:
        """Returns a vector for each device that gradients are on."""
        by_device: dict[torch.device, list[tuple[Tensor, int]]] = {}
        for gradient, slot in gradients:
            by_device.setdefault(gradient.device, []).append((local(gradient), slot))
        vectors, size = [], len(self._slots.names) + 1
        for pairs in by_device.values():
            pairs.sort(key=lambda pair: pair[1])
            with torch.no_grad():
                flags = non_finite([g for g, _ in pairs], [s for _, s in pairs], size)
            vectors.append(flags.to(self._state.scale.device, torch.float32, non_blocking=True))
        return vectors

    def _mask(self, slots: Sequence[int]) -> Tensor:
        """Returns 1 in these slots; computed once for each optimizer, because a copy to the device waits."""
        key = tuple(slots)
        mask = self._masks.get(key)
        if mask is None or mask.device != self._state.scale.device:
            if len(self._masks) >= _MOST_MASKS:
                self._masks.clear()
            values = torch.zeros(len(self._slots.names) + 1, dtype=torch.float32, device="cpu")
            values[list(key)] = 1.0
            mask = self._masks[key] = values.to(self._state.scale.device)
        return mask

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_masks": {}}


def _marked(gradient: Tensor, slot: int | None) -> tuple[Tensor, bool] | None:
    """Returns the flags of a marked gradient of the slot, and whether it is unchanged since."""
    found = note_of(gradient, MARK)
    if found is None or found[0][1] != slot:
        return None
    return found[0][0], found[1]
