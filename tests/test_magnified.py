"""What black ops compute is not rounded before a loss, a softmax or a logarithm, at O2 on every backend."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampgraph
from ampgraph import NoLossScale, OpLists, Policy
from ampgraph.passes.analysis import magnified

from .helpers import Fn

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ROWS, WIDTH, CODES = 256, 128, 32


def _labels(t: torch.Tensor) -> torch.Tensor:
    return (t * 7).long() % CODES


def _pooled(z: torch.Tensor) -> torch.Tensor:
    return (z[:, :2] * 8).softmax(1).view(-1, 8, 2)[:, :, 1].amax(1)


def _similarities(z: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    squares = torch.cdist(z, codes) ** 2
    return ((squares + 1) / (squares + 1e-4)).log()


# Of a prediction, targets from 0 to 400, and codes.
LOSSES: dict[str, Loss] = {
    "a probability near 1": lambda z, t, c: F.binary_cross_entropy(_pooled(z), (t[::8] > 200).float()),
    "of a region": lambda z, t, c: F.binary_cross_entropy(_pooled(z).float(), (t[::8] > 200).float()),
    "a decoded size": lambda z, t, c: F.mse_loss((z[:, 0] * 0.01).exp() * t, t),
    "a decoded size, not squared": lambda z, t, c: F.smooth_l1_loss((z[:, 0] * 0.1).exp() * t, 1.01 * t),
    "an expected place": lambda z, t, c: F.huber_loss(
        ((z[:, :48] * 0.3).softmax(1) * torch.arange(48.0)).sum(1) * 4, 94 + t / 100
    ),
    "distances": lambda z, t, c: F.cross_entropy(-10 * torch.cdist(z, c), _labels(t)),
    "cosines": lambda z, t, c: F.cross_entropy(
        F.cosine_similarity(z[:, None], z.roll(1, 0)[None], dim=-1) / 0.07, torch.arange(len(z))
    ),
    "near codes": lambda z, t, c: (((-(torch.cdist(z, c) ** 2)).softmax(1) @ c - z) ** 2).mean(),
    "similarities": lambda z, t, c: F.cross_entropy(_similarities(z, c) @ c[:, :CODES], _labels(t)),
}


class WithLoss(nn.Module):
    """A residual stream in float32, so that low sums save bytes in fused kernels."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss, self.head, self.codes = loss, nn.Linear(64, WIDTH), nn.Parameter(torch.randn(CODES, WIDTH))
        self.last = nn.LayerNorm(64)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return self.loss(self.head(self.last(x)), t, self.codes)


def _gradients(run: Callable, model: nn.Module, inputs: tuple) -> torch.Tensor:
    model.zero_grad()
    run(*inputs).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _errors(name: str, policy: Policy, backend: str) -> tuple[float, float]:
    torch.manual_seed(0)
    model, inputs = WithLoss(LOSSES[name]), (torch.randn(ROWS, 64), 400 * torch.rand(ROWS))
    exact, true = model(*inputs), _gradients(model, model, inputs)
    graph = ampgraph.convert(model, inputs, policy=policy, backend=backend).graph_module
    found = _gradients(graph, model, inputs)
    return float((graph(*inputs) - exact).abs() / exact.abs()), float((found - true).norm() / true.norm())


RULE = {"ops": OpLists.torch(), "placement": "autocast", "hazards": False, "loss_scale": NoLossScale()}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_nearly_those_of_the_autocast_rule(name, backend):
    rule = _errors(name, Policy("O1", dtype=torch.bfloat16, **RULE), "eager")
    found = _errors(name, Policy("O2", dtype=torch.bfloat16, loss_scale=NoLossScale()), backend)
    assert found[0] <= 5 * rule[0] + 2e-3
    assert found[1] <= 5 * rule[1]


def test_without_the_analysis_losses_are_wrong(monkeypatch):
    monkeypatch.setattr(magnified, "_made_of_black", lambda tracer: set())
    policy = Policy("O2", dtype=torch.bfloat16, loss_scale=NoLossScale())
    assert _errors("of a region", policy, "aot_eager")[0] > 1
    for name in ("a decoded size", "near codes", "similarities"):
        assert _errors(name, policy, "aot_eager")[1] > 0.1, name


@pytest.mark.parametrize(
    "scores",
    [
        lambda q, s, x: (q @ q.T) * s.clamp(max=4).exp(),  # one learned number for each row, as in Swin v2
        lambda q, s, x: q @ q.T + x,  # what an input adds
        lambda q, s, x: (x + q @ q.T) / 8,
    ],
    ids=["scaled", "biased", "residual"],
)
def test_low_scores_stay_low(scores):
    weight, scale, x = torch.randn(16, 16), nn.Parameter(torch.ones(16, 1)), torch.randn(16, 16)
    model = Fn(lambda q, s, x: scores(q @ weight, s, x).softmax(-1) @ weight)
    amp = ampgraph.convert(model, (torch.randn(16, 16), scale, x), policy="O2", dtype=torch.bfloat16)
    reasons = [decision.reason for decision in amp.plan.decisions.values()]
    assert not any("magnifies a rounding" in reason for reason in reasons), reasons
