"""Ten small models with places where a fault can be planted, and the faults."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Fault = Callable[[Tensor], Tensor]


class Host(nn.Module):
    """A model that passes values by `at`, where a fault may sit."""

    places: int
    size: tuple[int, ...]

    def __init__(self) -> None:
        super().__init__()
        self.faults: dict[int, Fault] = {}

    def at(self, place: int, y: Tensor) -> Tensor:
        return self.faults[place](y) if place in self.faults else y


class Mlp(Host):
    places, size = 3, (6, 12)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.at(0, F.gelu(self.a(x)))
        y = self.at(1, torch.tanh(self.b(y)))
        return self.at(2, self.c(y))


class Residual(Host):
    places, size = 3, (4, 6, 16)

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for i, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            x = x + self.at(i, F.silu(layer(norm(x))))
        return self.at(2, self.head(x))


class Convolutions(Host):
    places, size = 3, (2, 3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.at(0, self.a(x)).relu()
        y = self.at(1, self.norm(self.b(y))).relu()
        return self.at(2, self.head(y.mean((2, 3))))


class Attention(Host):
    places, size = 4, (2, 6, 16)

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.at(0, self.q(x)), self.at(1, self.k(x)), self.at(2, self.v(x))
        weights = (q @ k.transpose(-1, -2) / 4).softmax(-1)
        return self.at(3, self.out(weights @ v)) + x


class Gated(Host):
    places, size = 3, (3, 5, 12)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = F.silu(self.at(0, self.gate(y))) * self.at(1, self.up(y))
        return self.at(2, self.down(y)) + x


class Recurrent(Host):
    places, size = 2, (3, 4, 8)

    def __init__(self) -> None:
        super().__init__()
        self.i, self.h, self.head = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 8)
        for step in x.unbind(1):
            reset, update, new = (self.i(step) + self.h(state)).chunk(3, -1)
            new = torch.tanh(new * torch.sigmoid(reset))
            state = self.at(0, torch.lerp(new, state, torch.sigmoid(update)))
        return self.at(1, self.head(state))


class Branches(Host):
    places, size = 4, (6, 12)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.join = nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.at(0, F.relu(self.a(x))), self.at(1, torch.sigmoid(self.b(x)))
        y = self.at(2, self.join(torch.cat([left, right], -1)))
        return self.at(3, self.head(F.relu(y) + left))


class Pyramid(Host):
    places, size = 3, (2, 4, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(4, 8, 3, 2, 1), nn.Conv2d(8, 8, 1)
        self.up, self.head = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.at(0, F.relu(self.down(x)))
        y = self.at(1, self.up(F.gelu(self.middle(y))))
        return self.at(2, self.head(torch.cat([x, y], 1)))


class Embedded(Host):
    places, size = 3, (3, 6)

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(20, 12), nn.Linear(12, 12), nn.Linear(12, 5)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.at(0, self.table((x.abs() * 5).long() % 20))
        y = self.norm(y + self.at(1, self.mix(y)))
        return self.at(2, self.head(y.mean(1)))


class Mixture(Host):
    places, size = 3, (5, 10)

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(10, 3), nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(10, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.at(0, self.router(x)).softmax(-1)
        found = torch.stack([expert(x) for expert in self.experts], 1)
        y = self.at(1, (found * weights[..., None]).sum(1))
        return self.at(2, self.head(F.gelu(y)))


MODELS = (Mlp, Residual, Convolutions, Attention, Gated, Recurrent, Branches, Pyramid, Embedded, Mixture)


def forward_fault(rng: random.Random) -> tuple[str, Fault]:
    """Returns the name of a fault, and what it does to a value; in float32 it stays finite."""
    c = 10 ** rng.uniform(3, 5)
    faults: dict[str, Fault] = {
        "square sum": lambda y: y / ((y * c) * (y * c) + 1).sum(-1, keepdim=True).sqrt() * c,
        "mean square": lambda y: y * ((y * c) * (y * c)).mean(-1, keepdim=True).add(1e-6).rsqrt() * c,
        "difference": lambda y: (y * c + 3e5) - y * c - 3e5 + y,
        "1/x": lambda y: (1 / (y.abs() / c / 1e4 + 1e-9)) / c * 1e-3,
        "x/small": lambda y: y * 1e-5 / ((y * 1e-5) * (y * 1e-5) + 1e-12).sum(-1, keepdim=True).sqrt(),
        "up and down": lambda y: (y + 1) * (c * 100) / (c * 100),
        "running sum": lambda y: (y.abs() + 1).mul(c * 100).cumsum(-1) / (c * 100),
        "products": lambda y: ((y * c)[..., None] * (y * c)[..., None, :]).mean(-1) / c / c,
        "gram": lambda y: torch.matmul(y * c, (y * c).transpose(-1, -2)) @ y / c / c,
        "rectified": lambda y: F.relu(y * c * 50) / c / 50,
        "concatenated": lambda y: torch.cat([y, y * c * 50], -1)[..., y.shape[-1] :] / c / 50,
        "view of large": lambda y: (y * c * 50).transpose(-1, -2).contiguous().transpose(-1, -2) / c / 50,
    }
    name = rng.choice(list(faults))
    return name, faults[name]


def backward_fault(rng: random.Random) -> tuple[str, Fault]:
    """Returns a fault whose values fit, and whose gradients may not."""
    c = 10 ** rng.uniform(2, 5)
    faults: dict[str, Fault] = {
        "steep": lambda y: y + (y * 1e-4).tanh() * c,
        "square root": lambda y: (y.square() * 1e-6 + 1e-12).sqrt() * 1e3,
        "1/x": lambda y: 1 / (y.abs() * 0.01 + 1e-4) * 0.01,
        "log": lambda y: (y.abs() * 1e-3 + 1e-4).log(),
        "norm": lambda y: F.normalize(y * 1e-3, dim=-1),
        "small eps": lambda y: F.layer_norm(y * 1e-4, y.shape[-1:], eps=1e-12),
        "root": lambda y: (y.abs() * 1e-4 + 1e-4).pow(0.2),
        "cosine": lambda y: y / y.norm(dim=-1, keepdim=True).clamp(min=1e-4),
    }
    name = rng.choice(list(faults))
    return name, faults[name]
