"""The tensors through which a loss scaler and the graphs that it scales speak to each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

STATE_NAMES = ("amp_scale", "amp_inverse", "amp_probe")


class ScaleState(nn.Module):
    """What graphs read: ``scale``, ``inverse`` (0-dim float32) and ``probe`` (float32, one per parameter)."""

    scale: Tensor
    inverse: Tensor
    probe: Tensor

    def __init__(self, scale: float, size: int, device: torch.device):
        super().__init__()
        self.set(torch.tensor(scale, dtype=torch.float32, device=device))
        probe = torch.zeros(size, dtype=torch.float32, device=device, requires_grad=True)
        object.__setattr__(self, "probe", probe)

    def set(self, scale: Tensor) -> None:
        """Replaces the scale; the old tensors stay as they are, for backwards still to come."""
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "inverse", scale.reciprocal())

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns scale, inverse and probe."""
        return self.scale, self.inverse, self.probe

    def move(self, device: torch.device) -> None:
        """Moves everything to another device."""
        self.set(self.scale.to(device))
        probe = torch.zeros(self.probe.shape[0], dtype=torch.float32, device=device, requires_grad=True)
        object.__setattr__(self, "probe", probe)
