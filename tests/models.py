"""Small models that several test files share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """A norm, two layers and a sum, ``[..., 8]``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class CastTwice(nn.Module):
    """Memory that is written between two reads in low, so that each needs a cast."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        buffer = torch.zeros(2, 2)
        buffer[:1] = x
        first = buffer @ w
        buffer[1:] = x
        return first + buffer @ w


class NormWithCasts(nn.Module):
    """An RMS norm as models write it: in float32, then back in the dtype of the input, float32 here."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.up = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

    def forward(self, x):
        x = self.up(x)
        y = x.to(torch.float32)
        y = y * y.pow(2).mean(-1, keepdim=True).add(1e-3).rsqrt()
        return self.up(self.weight * y.to(x.dtype))


class ReluNet(nn.Module):
    """Two layers with a ReLU between, ``[..., 8]`` to ``[..., 4]``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class TwoHeads(nn.Module):
    """Two layers over one input, or over one input each: two outputs ``[..., 4]``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x if y is None else y)
