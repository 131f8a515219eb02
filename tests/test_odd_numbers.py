"""Numbers in the code of a model that passes must survive: zero, infinity, NaN, very large and small ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampgraph
from ampgraph import NoLossScale, Policy

F16, BF16 = torch.float16, torch.bfloat16
NUMBERS = (0, 0.0, -0.0, 1, -1, 0.5, -0.5, 2, 3, -2, True, False, 1e-30, 1e30, -1e30, 2**40, 1e308, 5e-324)
NUMBERS += (math.inf, -math.inf, math.nan)

ODD: dict[str, Callable] = {
    "power": lambda x, c: x**c,
    "power of a number": lambda x, c: c**x,
    "power of a power": lambda x, c: (x**2) ** c,
    "power of a square": lambda x, c: x.square() ** c,
    "summed power": lambda x, c: (x**c).sum(-1, keepdim=True),
    "power of a tensor": lambda x, c: x ** torch.full_like(x, c),
    "product": lambda x, c: x * c,
    "quotient": lambda x, c: x / c,
    "inverse": lambda x, c: c / x,
    "quotient by a tensor": lambda x, c: x / torch.full_like(x, c),
    "whole quotient": lambda x, c: x // c,
    "remainder": lambda x, c: torch.remainder(x, c),
    "scaled sum": lambda x, c: torch.add(x, x.tanh(), alpha=c),
    "scaled difference": lambda x, c: torch.sub(x, x.tanh(), alpha=c),
    "addcmul": lambda x, c: torch.addcmul(x, x, x, value=c),
    "addcdiv": lambda x, c: torch.addcdiv(x, x, x.exp(), value=c),
    "addmm": lambda x, c: torch.addmm(x, x, torch.eye(4), beta=c, alpha=c),
    "lerp": lambda x, c: torch.lerp(x, x.tanh(), float(c)),
    "least": lambda x, c: x.clamp(min=c),
    "most": lambda x, c: x.clamp(max=c),
    "hardtanh": lambda x, c: F.hardtanh(x, -abs(c), abs(c)),
    "leaky_relu": lambda x, c: F.leaky_relu(x, c),
    "elu": lambda x, c: F.elu(x, c),
    "softplus": lambda x, c: F.softplus(x, beta=c),
    "threshold": lambda x, c: F.threshold(x, c, c),
    "masked_fill": lambda x, c: x.masked_fill(x > 0, c),
    "where": lambda x, c: torch.where(x > 0, x, float(c)),
    "pad": lambda x, c: F.pad(x, (1, 1), value=c)[..., 1:-1],
    "exp": lambda x, c: (x * c).exp(),
    "cosh": lambda x, c: (x * c).cosh(),
    "logarithm": lambda x, c: (x.abs() + c).log(),
    "square root": lambda x, c: (x.abs() * c + c).sqrt(),
    "logsumexp": lambda x, c: (x * c).logsumexp(-1, keepdim=True),
    "softmax": lambda x, c: (x / c).softmax(-1),
    "prod": lambda x, c: (x * c).prod(-1, keepdim=True),
    "norm": lambda x, c: x.norm(p=float(c), dim=-1, keepdim=True),
    "norm and eps": lambda x, c: x / (x.norm(dim=-1, keepdim=True) + c),
    "rms and eps": lambda x, c: x * (x.square().mean(-1, keepdim=True) + c).rsqrt(),
    "std and eps": lambda x, c: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + c),
    "layer_norm": lambda x, c: F.layer_norm(x, (4,), eps=float(c)),
    "rms_norm": lambda x, c: F.rms_norm(x, (4,), eps=float(c)),
    "attention": lambda x, c: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=float(c))[0],
    "quantized": lambda x, c: (x / c).round() * c,
    "positions": lambda x, c: x + torch.arange(4) * c,
    "cdist": lambda x, c: torch.cdist(x, x.tanh(), p=abs(float(c))),
    "xlogy": lambda x, c: torch.xlogy(x.abs(), c),
    "renorm": lambda x, c: x.renorm(2, 0, abs(float(c))),
}


class Odd(nn.Module):
    """A function between two layers, once for each number that it takes."""

    def __init__(self, function: Callable, x: torch.Tensor) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function
        self.numbers = [c for c in NUMBERS if is_taken(function, x, c)]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = self.first(x)
        return [self.last(self.function(hidden, number).expand_as(hidden)) for number in self.numbers]


def is_taken(function: Callable, x: torch.Tensor, number: float) -> bool:
    """Whether the op takes the number at all."""
    try:
        function(x, number)
    except (RuntimeError, ValueError, TypeError, ZeroDivisionError, OverflowError):
        return False
    return True


@pytest.mark.parametrize(("level", "dtype"), [("O1", BF16), ("O2", F16), ("O3", F16)])
@pytest.mark.parametrize("name", ODD)
def test_any_number_that_an_op_takes(name, level, dtype):
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    model = Odd(ODD[name], x)
    assert len(model.numbers) > 5
    policy = Policy(level=level, dtype=dtype, loss_scale=NoLossScale())
    amp = ampgraph.convert(model, (x,), policy=policy, capture="ahead of time")
    found, expected = amp(x), model(x)
    if level == "O3":  # it has float16's range, whatever the values are
        return
    for number, one, other in zip(model.numbers, found, expected, strict=True):
        if number in (0, 0.5, 1, 2, 3) and other.isfinite().all():
            assert (one - other).norm() < 0.05 * other.norm(), number
