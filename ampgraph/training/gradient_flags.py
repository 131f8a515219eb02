"""Which gradients are not finite: the truth is ``.grad``, the boundary's flags save reading it once more.

A boundary checks the gradients that leave it, and autograd puts them into ``.grad``. When a backward ends,
each gradient that still is what left a boundary in it, by storage and version, is marked with its flags. So
flags live exactly as long as their gradients: ``zero_grad``, an assignment or a clip ends them. A gradient
without a valid mark (hand-made, changed, accumulated, of no boundary, reduced between processes) is read
itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .._compat import after_backward
from .distributed import is_distributed, local
from .gradient_boundary import non_finite
from .parameter_index import ParameterSlots
from .scale_state import ScaleState
from .unscaled_step_warning import LoopWatch

MARK = "_amp_flags"
_MOST_MASKS = 16


class GradientFlags:
    """The flags of one scaler's gradients.

    Args:
        slots: The parameters' slots in the vector of flags.
        state: The tensors that the graphs read; its probe receives their flags.
        watch: Is told of each backward.
    """

    def __init__(self, slots: ParameterSlots, state: ScaleState, watch: LoopWatch):
        self._slots, self._state, self.watch = slots, state, watch
        self._masks: dict[tuple[int, ...], Tensor] = {}
        self.connect()

    def connect(self) -> None:
        """Asks the state to tell of each backward; weakly, since tensors hold the hook."""
        this = weakref.ref(self)

        def backward_reached_probe(reported: Tensor) -> None:
            if (flags := this()) is not None:
                flags._state.note(reported)
                flags.watch.note_backward()
                after_backward(lambda: flags.mark(reported))

        self._state.watch(backward_reached_probe)

    def mark(self, flags: Tensor) -> None:
        """Marks the gradients that are what boundaries have checked in the backward which ends now."""
        checked = self._state.checked.take()
        if is_distributed():
            return
        for parameter, slot in self._slots.items():
            gradient, content = parameter.grad, checked.get(slot)
            if gradient is None or content is None or _has_hooks(parameter):
                continue
            if content.is_of(gradient) and not gradient.requires_grad:
                setattr(gradient, MARK, (flags, slot, gradient._version, gradient.data_ptr()))

    def of(self, parameters: Iterable[Tensor]) -> Tensor | None:
        """Returns a vector, positive in the slots of gradients that are not finite; None without gradients.

        What has no slot counts in the last one.
        """
        parameters = [p for p in parameters if p.grad is not None]
        if not parameters:
            return None
        size = len(self._slots.names) + 1
        known: dict[int, tuple[Tensor, list[int]]] = {}
        unknown: list[tuple[Tensor, int]] = []
        for parameter, slot in zip(parameters, self._slots.of(parameters), strict=True):
            gradient: Tensor = parameter.grad  # type: ignore[assignment]
            flags = _flags_of(gradient, slot, size)
            if flags is None:
                unknown.append((gradient, size - 1 if slot is None else slot))
            else:
                known.setdefault(id(flags), (flags, []))[1].append(slot)  # type: ignore[arg-type]
        vectors = [flags * self._mask(slots) for flags, slots in known.values()]
        vectors += self._read(unknown)
        return torch.stack(vectors).amax(0) if len(vectors) > 1 else vectors[0]

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
        """Returns 1 in these slots; made once for each optimizer, since a copy to the device waits for it."""
        key = tuple(slots)
        mask = self._masks.get(key)
        if mask is None or mask.device != self._state.scale.device:
            if len(self._masks) >= _MOST_MASKS:
                self._masks.clear()
            values = torch.zeros(len(self._slots.names) + 1)
            values[list(key)] = 1.0
            mask = self._masks[key] = values.to(self._state.scale.device)
        return mask

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_masks": {}}


def _has_hooks(parameter: Tensor) -> bool:
    """Whether hooks may have written to the gradient's ``.data``, whose writes no version counts."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _flags_of(gradient: Tensor, slot: int | None, size: int) -> Tensor | None:
    """Returns the flags that a gradient is marked with, if they still tell of what it is now."""
    mark = getattr(gradient, MARK, None)
    if mark is None or mark[1:] != (slot, gradient._version, gradient.data_ptr()):
        return None
    flags: Tensor = mark[0]
    return flags if flags.shape[0] == size else None
