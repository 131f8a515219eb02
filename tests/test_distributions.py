"""Models that draw from ``torch.distributions``, whose checks of arguments branch on values."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal, kl_divergence

import ampgraph

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Encoder(nn.Module):
    """The encoder of a VAE: a draw, and its divergence from the prior."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Linear(8, 2), nn.Linear(8, 2)
        self.register_buffer("zero", torch.zeros(2))
        self.register_buffer("one", torch.ones(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = Normal(self.mean(x), nn.functional.softplus(self.scale(x)))
        return found.rsample(), kl_divergence(found, Normal(self.zero, self.one)).sum(-1)


@pytest.fixture(autouse=True)
def checks(monkeypatch):
    """Dynamo turns the checks off for good at its first compilation."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_distribution_is_captured_ahead_of_time(level) -> None:
    model = Encoder()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp = ampgraph.convert(model, (X,), policy=level, dtype=torch.bfloat16)
    assert len(amp.graph_modules) == 1
    results = []
    for one in (model, amp):
        torch.manual_seed(0)
        results.append(one(X))
    tolerance = {"rtol": 0.0, "atol": 1e-6 if level == "O0" else 0.05}
    torch.testing.assert_close([r.float() for r in results[1]], list(results[0]), **tolerance)
    assert Distribution._validate_args
    with pytest.raises(ValueError, match="scale"):
        Normal(0.0, torch.tensor(-1.0))


def test_a_step_draws_from_a_distribution_anew() -> None:
    drawn = []

    def loss_fn(model, x):
        share = torch.distributions.Beta(0.4, 0.4).sample()
        return share * model(x).square().mean(), share

    torch.manual_seed(0)
    model, x = nn.Linear(8, 4), torch.randn(8, 8)
    amp = ampgraph.convert(model, (x,), dtype=torch.bfloat16)
    step = ampgraph.compile_step(amp, torch.optim.AdamW(model.parameters(), fused=True), loss_fn)
    for _ in range(3):
        drawn.append(float(step(x)[1]))
    assert step.reason is None
    assert len(set(drawn)) == 3
    assert Distribution._validate_args is True
