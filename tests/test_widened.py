"""Level O3 keeps in float32 what the model's own code casts to float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import Policy

from .helpers import dtype_of

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class RMSNorm(nn.Module):
    """As in Llama and T5: the cast back is one to float32, too, in a float32 source."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    """A residual stream that begins with a cast, as ``self.embed(ids).to(self.dtype)`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(32, 32), RMSNorm(), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).to(torch.float32)
        return self.second(x + torch.exp(-self.second(self.norm(x))))


@pytest.mark.parametrize("size", [0.02, 300.0, 2000.0])
@pytest.mark.parametrize("is_training", [False, True])
def test_squares_do_not_overflow(size: float, is_training: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), RMSNorm()).train(is_training)
    x = size * torch.randn(4, 32)
    expected = model(x)
    amp = ampgraph.convert(model, (x,), policy=Policy("O3", dtype=FP16, loss_scale=ampgraph.NoLossScale()))
    torch.testing.assert_close(amp(x), expected, rtol=0.01, atol=0.01)


def test_only_black_ops_after_the_cast_stay() -> None:
    amp = ampgraph.convert(Block().train(), (torch.randn(4, 32),), policy="O3", dtype=BF16)
    dtypes = {name: dtype_of(amp.graph_module, name) for name in ("pow", "mean", "rsqrt", "exp")}
    assert dtypes == {"pow": [FP32], "mean": [FP32], "rsqrt": [FP32], "exp": [BF16]}
    assert dtype_of(amp.graph_module, "linear") == [BF16] * 3
    assert dtype_of(amp.graph_module, "add") == [FP32, BF16]  # the eps; the stream
    reason = amp.plan["pow"].reason if "pow" in amp.plan.decisions else amp.plan["pow_1"].reason
    assert "casts to float32" in reason


def test_without_hazards_everything_is_low() -> None:
    policy = Policy("O3", dtype=BF16, hazards=False)
    amp = ampgraph.convert(Block().train(), (torch.randn(4, 32),), policy=policy)
    assert dtype_of(amp.graph_module, "rsqrt") == [BF16]
