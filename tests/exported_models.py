"""Small models that together hold what an exported program finds hard."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampgraph


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return x + self.out(mixed.reshape(batch, length, width))


class Convolution(nn.Module):
    """Batch norm's buffers and an op in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x)), inplace=True).mean((2, 3))).softmax(-1)


class Tied(nn.Module):
    """A tied weight, a constant, a buffer that is not saved, ``no_grad``, a guard, nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.table = torch.arange(8.0)
        self.register_buffer("offset", torch.ones(8), persistent=False)

    def forward(self, ids: Tensor, *, mask: Tensor | None = None) -> dict[str, object]:
        hidden = self.embedding(ids) + self.table + self.offset
        if mask is not None:
            hidden = hidden * mask.unsqueeze(-1)
        with torch.no_grad():
            largest = self.head(hidden).amax(-1, keepdim=True)
        with ampgraph.fp32_guard():
            shifted = self.head(hidden) - largest
        return {"logits": self.head(hidden), "others": (shifted, hidden)}


class Branch(nn.Module):
    """``torch.cond``: sub-graphs that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.yes(x), lambda x: self.no(x).relu(), (x,))


class Regions(nn.Module):
    """Autocast regions in the model's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.layer(x)
        with torch.autocast("cpu", enabled=False):
            first = self.layer(first).exp()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            second = self.layer(first)
        return first, second.float()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def models() -> dict[str, tuple[type[nn.Module], tuple[Tensor, ...], dict[str, Tensor]]]:
    """Returns (class, positional arguments, keyword arguments) by name."""
    made = torch.Generator().manual_seed(0)
    return {
        "attention": (Attention, (torch.randn(2, 5, 32, generator=made),), {}),
        "convolution": (Convolution, (torch.randn(2, 3, 8, 8, generator=made),), {}),
        "tied": (Tied, (torch.tensor([[1, 2, 3]]),), {"mask": torch.ones(1, 3)}),
        "branch": (Branch, (torch.randn(4, 8, generator=made),), {}),
        "regions": (Regions, (torch.randn(4, 8, generator=made),), {}),
        "recurrent": (Recurrent, (torch.randn(2, 3, 8, generator=made),), {}),
    }
