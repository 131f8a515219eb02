"""Small converted models for the tests of pictures."""

from __future__ import annotations

import torch
from torch import nn

import ampgraph


class Layer(nn.Module):
    """Two linear layers around one ReLU module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.second(self.relu(self.first(x)))) + x


class Stack(nn.Module):
    """Two layers, one of them in a guard, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.tail = nn.ModuleList([Layer()]), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        with ampgraph.fp32_guard():
            x = self.tail(x)
        return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))


class Masked(nn.Module):
    """Two attention blocks under one mask, which a float table and positions make, and a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(16, 8), nn.Embedding(4, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1])
        x = self.embed(tokens) + self.place(places)
        mask = (torch.full((4, 4), 1.0).triu(1) > 0) | (places > 2)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        scores = self.head(x)
        return scores * (scores.argmax(-1, keepdim=True) != 0).logical_not()


def masked() -> ampgraph.AmpModule:
    """Returns `Masked`, converted for float16."""
    return ampgraph.convert(Masked(), (torch.tensor([[1, 2, 3, 4]]),), dtype=torch.float16)


def stack() -> ampgraph.AmpModule:
    """Returns `Stack`, converted for float16."""
    return ampgraph.convert(Stack(), (torch.randn(2, 8),), dtype=torch.float16)


def trained() -> ampgraph.AmpModule:
    """Returns `Layer` on a backend that keeps AOTAutograd's graphs, after one backward."""
    amp = ampgraph.convert(Layer(), (torch.randn(2, 8),), dtype=torch.float16, backend="aot_eager")
    amp(torch.randn(2, 8)).sum().backward()
    return amp
