"""Losses inside of a model: their value, and the values that they compare, are those of the autocast rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import ampgraph
from ampgraph.testing import cast_map

BACKENDS = ("eager", "aot_eager")


def _cross_entropy(x: torch.Tensor, labels: torch.Tensor, **options: str) -> torch.Tensor:
    return F.cross_entropy(x.float(), labels, **options)


def _entropies(x: torch.Tensor) -> torch.Tensor:
    return (x.softmax(-1) * x.log_softmax(-1)).sum(-1)


def _dice(x: torch.Tensor) -> torch.Tensor:
    return 1 - 2 * (x.sigmoid() ** 2).sum() / x.sigmoid().sum()


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
    "mean of two": lambda x, y: (-_entropies(x).mean() + -_entropies(x.flip(-1) * 2).mean()) / 2,
    "minus before the mean": lambda x, y: ((-_entropies(x)).mean() + (-_entropies(x * 2)).mean()) / 2,
    "weighted entropies": lambda x, y: -0.3 * _entropies(x).mean() - 0.7 * _entropies(x * 2).mean(),
    "log likelihoods": lambda x, y: (-x.log_softmax(-1)[:, 0].mean() + -x.log_softmax(-1)[:, 1].mean()) / 2,
    "overlaps": lambda x, y: (_dice(x) + _dice(x * 2)) / 2,
    "stacked": lambda x, y: -torch.stack([-_entropies(x).mean(), -_dice(x)]),
    "variance of an error": lambda x, y: (1000 + y * 0.02 - x[:, 0]).var(),
    "explained variance": lambda x, y: 1 - (1000 + y * 0.02 - x[:, 0]).var() / (y * 0.02).var(),
    "largest": lambda x, y: ((x[:, 0] - y * 5) ** 2).topk(8)[0].mean(),
    "nearest": lambda x, y: ((x - y[:, None] * 5) ** 2).sqrt().min(1)[0].mean(),
    "trimmed": lambda x, y: ((x - y[:, None] * 5) ** 2).sort(-1)[0][:, :40].mean(),
    "in large units": lambda x, y: x[:, 0] * (y * 4000.0),
    "likelihood": lambda x, y: (0.5 * ((x[:, 0] - y / 2) ** 2 / x[:, 1].exp() + x[:, 1])).mean(),
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
    found, exact = amp.training_graph(*inputs), model(*inputs)
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


class Between(nn.Module):
    """Something of a loss enters a network, or hidden states are compared."""

    def __init__(self, way: Callable) -> None:
        super().__init__()
        self.way = way
        self.norm, self.first, self.second = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = x + F.gelu(self.first(self.norm(x)))
        h = h + self.second(self.norm(h))
        return self.way(self.first(h), h, labels).float()


BETWEEN: dict[str, Callable] = {
    "selected by a loss": lambda o, h, y: (
        o[_cross_entropy(o, y % 16, reduction="none").topk(4)[1]].relu() * 2
    ),
    "a mask of a loss": lambda o, h, y: torch.where(
        (c := _cross_entropy(o, y % 16, reduction="none"))[:, None] < c.mean(), o, o.relu()
    ).relu(),
    "added to a hidden state": lambda o, h, y: ((o + 0 * _cross_entropy(o, y % 16)).relu() * 2).relu(),
    "reweighted": lambda o, h, y: (o * _cross_entropy(o, y % 16, reduction="none")[:, None]).relu(),
    "hidden states compared": lambda o, h, y: F.smooth_l1_loss(o, F.layer_norm(h, (16,)).detach()),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_is_no_loss_is_as_low_as_without(name):
    """No hazard about losses reaches the network."""
    torch.manual_seed(0)
    model, inputs = Between(BETWEEN[name]), (torch.randn(48, 16), torch.randint(1, 64, (48,)))
    amp = ampgraph.convert(model, inputs, policy="O2", dtype=torch.bfloat16, backend="aot_eager")
    reasons = {name: decision.reason for name, decision in amp.plan.decisions.items()}
    nodes = [n for n in amp.graph_module.graph.nodes if "the loss" in reasons.get(n.name, "")]
    tensors = [t for n in nodes for t in tree_leaves(n.meta["val"])]
    assert all(tensor.numel() <= len(inputs[1]) for tensor in tensors), nodes


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
    assert "the loss 'mse_loss' compares it" in ampgraph.explain(amp).why("broadcast_tensors")
