"""Losses inside of a model: their value, and the values that they compare, are those of the autocast rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampgraph
from ampgraph.testing import cast_map

BACKENDS = ("eager", "aot_eager")


def _cross_entropy(x: torch.Tensor, labels: torch.Tensor, **options: str) -> torch.Tensor:
    return F.cross_entropy(x.float(), labels, **options)


LOSSES: dict[str, Callable] = {
    "sum by count": lambda x, y: _cross_entropy(x, y, reduction="sum") / y.numel(),
    "sum by a tensor": lambda x, y: _cross_entropy(x, y, reduction="sum") / torch.tensor(y.numel()),
    "times": lambda x, y: _cross_entropy(x, y) * 0.5,
    "mean of each": lambda x, y: _cross_entropy(x, y, reduction="none").mean(),
    "of each": lambda x, y: _cross_entropy(x, y, reduction="none") / 3,
    "weighted": lambda x, y: (_cross_entropy(x, y, reduction="none") * (y * 0.1 + 1)).sum() / y.sum(),
    "plus a low number": lambda x, y: _cross_entropy(x, y, reduction="sum") / 40 + 0.01 * x.mean(),
    "focal": lambda x, y: ((1 - (-(c := _cross_entropy(x, y, reduction="none"))).exp()) ** 2 * c).mean(),
    "targets": lambda x, y: F.mse_loss(x[:, 0].float(), y / 7 + y, reduction="sum") / y.numel(),
    "targets beside low": lambda x, y: F.mse_loss(x[:, 0], y * 1.37, reduction="sum") / y.numel(),
    "absolute": lambda x, y: F.l1_loss(x[:, 0], y * 1.37),
    "by hand": lambda x, y: -x.log_softmax(-1).gather(1, y[:, None]).sum() / y.numel(),
    "by hand, of each": lambda x, y: -x.log_softmax(-1).gather(1, y[:, None]).sum(1) / 3,
    "by hand, plus a low number": lambda x, y: x.logsumexp(-1).sum() / 40 + 0.01 * x.mean(),
}


class WithLoss(nn.Module):
    def __init__(self, loss: Callable) -> None:
        super().__init__()
        self.loss = loss
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return self.loss(self.head(x), labels)


def _case(name: str, rows: int = 48) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return WithLoss(LOSSES[name]), (torch.randn(rows, 16), torch.randint(1, 64, (rows,)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_is_rounded(name, dtype, backend):
    model, inputs = _case(name)
    amp = ampgraph.convert(model, inputs, policy=ampgraph.Policy("O2", dtype=dtype), backend=backend)
    found, exact = amp(*inputs), model(*inputs)
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.to(dtype).float())
    with torch.autocast("cpu", dtype):
        rule = model(*inputs)
    # Predictions of O2 and of autocast differ as much: about one rounding of each, and many are averaged.
    limit = 2 * (rule - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max() / 4
    assert (found - exact).abs().max() <= limit


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["sum by count", "by hand", "by hand, plus a low number", "targets"])
def test_a_sum_of_many_losses_is_finite_in_float16(name, backend):
    model, inputs = _case(name, rows=20_000)
    amp = ampgraph.convert(model, inputs, policy="O2", dtype=torch.float16, backend=backend)
    torch.testing.assert_close(amp(*inputs), model(*inputs), rtol=1e-3, atol=0)


def test_a_policy_may_still_round_a_loss():
    model, inputs = _case("times")
    policy = ampgraph.Policy("O2", dtype=torch.bfloat16, rules={"mul": "low"})
    found = ampgraph.convert(model, inputs, policy=policy, backend="aot_eager")(*inputs)
    assert torch.equal(found, found.bfloat16().float())


def test_reasons_name_the_loss():
    model, inputs = _case("targets")
    amp = ampgraph.convert(model, inputs, policy="O2", dtype=torch.bfloat16, backend="aot_eager")
    assert "div_1: f32 <- mse_loss" in cast_map(amp)
    assert "computed from the loss 'mse_loss'" in ampgraph.explain(amp).why("div_1")
    assert "the loss 'mse_loss' compares it" in ampgraph.explain(amp).why("add_3")
