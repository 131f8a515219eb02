"""The models that `gpu_compile_check.py` compiles."""

from __future__ import annotations

from collections.abc import Callable

import torch
from bytes_models import UNet
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A transformer block with layer norm."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gated(nn.Module):
    """A block as Llama's: RMS norm, rotary embedding, gated MLP without biases."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        turns = 10_000 ** (torch.arange(32, device=x.device) / 32)
        angles = torch.arange(length, device=x.device)[:, None] / turns
        mixed = F.scaled_dot_product_attention(_turned(q, angles), _turned(k, angles), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        inner = self.second(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([low * cos - high * sin, low * sin + high * cos], dim=-1)


def _tokens(block: Callable[[], nn.Module], norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Embedding(1024, 256), block(), norm(256), nn.Linear(256, 1024))


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 2, 1)]
    for _ in range(2):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 64))


Made = tuple[Callable[[], nn.Module], Callable[[], Tensor]]
MODELS: dict[str, Made] = {
    "transformer": (lambda: _tokens(Block, nn.LayerNorm), lambda: torch.randint(0, 1024, (8, 256))),
    "gated transformer": (lambda: _tokens(Gated, nn.RMSNorm), lambda: torch.randint(0, 1024, (8, 256))),
    "convolutions": (_convolutions, lambda: torch.randn(16, 3, 64, 64)),
    "unet": (UNet, lambda: torch.randn(4, 3, 64, 64)),
}
