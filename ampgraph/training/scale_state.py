"""The tensors that a loss scaler shares with the graphs that it scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import never_compiled
from .checked_gradients import CheckedGradients

# A boundary that runs in Python records its checked gradients in this attribute of the probe.
CHECKED = "_amp_checked"
STATE_NAMES = ("amp_scale", "amp_inverse", "amp_probe")


class ScaleState(nn.Module):
    """The inputs of graphs: ``scale``, ``inverse`` (0-dim float32), ``probe`` (float32, one per parameter).

    Attributes:
        flags: The flags that the last backward reported to the probe.
        checked: The gradients that boundaries have checked in the current backward.
        is_rewritten: Whether the next run of a graph may write to the tensors that the last one returned.
    """

    scale: Tensor
    inverse: Tensor
    probe: Tensor
    flags: Tensor | None
    checked: CheckedGradients
    is_rewritten: bool
    _tell: Callable[[Tensor], None]

    def __init__(self, scale: float, size: int, device: torch.device):
        super().__init__()
        self._build(torch.tensor(scale, dtype=torch.float32, device=device), size)

    def _build(self, scale: Tensor, size: int) -> None:
        object.__setattr__(self, "_tell", lambda _: None)
        object.__setattr__(self, "flags", None)
        object.__setattr__(self, "is_rewritten", False)
        object.__setattr__(self, "checked", CheckedGradients())
        self.set(scale)
        self._set_probe(size)

    @torch.inference_mode(False)
    def _set_probe(self, size: int) -> None:
        probe = torch.zeros(size, dtype=torch.float32, device=self.scale.device, requires_grad=True)
        setattr(probe, CHECKED, self.checked)
        object.__setattr__(self, "probe", probe)
        self.watch(self._tell)

    def set(self, scale: Tensor, inverse: Tensor | None = None) -> None:
        """Replaces the scale; the old tensors stay unchanged for pending backwards."""
        inverse = scale.reciprocal() if inverse is None else inverse
        object.__setattr__(self, "scale", _may_be_saved(scale))
        object.__setattr__(self, "inverse", _may_be_saved(inverse))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns scale, inverse and probe."""
        return self.scale, self.inverse, self.probe

    def watch(self, tell: Callable[[Tensor], None]) -> None:
        """Calls ``tell`` with the flags of each backward that reaches the probe, and clears them."""
        object.__setattr__(self, "_tell", tell)
        if hook := self.__dict__.get("_hook"):
            hook.remove()
        after = never_compiled(lambda probe: tell(_taken(probe)))
        hook = self.probe.register_post_accumulate_grad_hook(after)
        object.__setattr__(self, "_hook", hook)

    def note(self, flags: Tensor) -> None:
        """Records the flags of a backward."""
        object.__setattr__(self, "flags", flags)

    def move(self, device: torch.device) -> None:
        """Moves everything to another device."""
        self.set(self.scale.to(device))
        self._set_probe(self.probe.shape[0])

    def __getstate__(self) -> dict[str, Any]:
        return {"scale": self.scale, "size": self.probe.shape[0]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        self._build(state["scale"], state["size"])


def _may_be_saved(tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy if it was made in inference mode: no backward can save such a tensor."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def _taken(probe: Tensor) -> Tensor:
    flags, probe.grad = probe.grad, None
    assert flags is not None
    return flags.detach()
