"""Ten small networks, whose time on a CPU is largely that of Python and the dispatcher."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A transformer block with a pre-norm."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.first(x))
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.out(attended.reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Convolutions(nn.Module):
    """A residual block of two convolutions with batch norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](self.first(x)).relu()
        return (x + self.norms[1](self.second(y))).relu()


class Mixer(nn.Module):
    """A block of an MLP-Mixer: one MLP over positions, one over channels."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(length, 2 * length), nn.GELU(), nn.Linear(2 * length, length))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


class Depthwise(nn.Module):
    """A block of ConvNeXt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


class Language(nn.Module):
    """A language model that returns its logits."""

    def __init__(self, words: int = 64, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(words, width), nn.Sequential(*(Block() for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.words(tokens))))


class Unet(nn.Module):
    """One level of a U-Net."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 4, 2, 1)
        self.middle, self.up = Convolutions(2 * width), nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.head = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.stem(x).relu()
        return self.head(torch.cat((wide, self.up(self.middle(self.down(wide).relu())).relu()), 1))


def _linears(count: int, width: int = 16) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def _perceptron(width: int = 64, layers: int = 6) -> nn.Module:
    one = (m for _ in range(layers) for m in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()))
    return nn.Sequential(*one, nn.Linear(width, 10))


def _residual(width: int = 16, blocks: int = 4) -> nn.Module:
    stem, head = nn.Conv2d(3, width, 3, padding=1), (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(stem, *(Convolutions(width) for _ in range(blocks)), *head, nn.Linear(width, 10))


_IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
_STEM = 16

MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "3 linears": (lambda: _linears(3), torch.randn(4, 16)),
    "30 linears": (lambda: _linears(30), torch.randn(4, 16)),
    "300 linears": (lambda: _linears(300), torch.randn(4, 16)),
    "perceptron": (_perceptron, torch.randn(16, 64)),
    "12 blocks": (lambda: nn.Sequential(*(Block() for _ in range(12))), torch.randn(1, 8, 32)),
    "language model": (Language, torch.arange(16).view(2, 8)),
    "mixer": (lambda: nn.Sequential(*(Mixer(8, 32) for _ in range(4))), torch.randn(2, 8, 32)),
    "residual network": (_residual, _IMAGES),
    "ConvNeXt": (
        lambda: nn.Sequential(nn.Conv2d(3, _STEM, 2, 2), *(Depthwise(_STEM) for _ in range(4))),
        _IMAGES,
    ),
    "U-Net": (Unet, _IMAGES),
}
