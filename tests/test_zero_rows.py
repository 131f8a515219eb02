"""Rows that a mask sets to zero before a norm: their gradients are finite where autocast's are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampgraph
from ampgraph import Policy, StaticLossScale
from ampgraph.testing import cast_map

IDS = torch.arange(10).view(2, 5)
KEEP = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
Masked = Callable[[Tensor, Tensor], Tensor]


class Embedded(nn.Module):
    def __init__(self, masked: Masked, eps: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masked = masked
        self.embedding, self.norm, self.head = nn.Embedding(10, 32), nn.LayerNorm(32, eps), nn.Linear(32, 4)

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        x = self.masked(self.embedding(ids), keep)
        return self.head(self.norm(x)) + x[..., :4]


def converted(masked: Masked, eps: float = 1e-12, **options) -> ampgraph.AmpModule:
    policy = Policy("O2", dtype=torch.float16, loss_scale=StaticLossScale(256.0), **options)
    return ampgraph.convert(Embedded(masked, eps), (IDS, KEEP), policy=policy)


def gradient(amp: ampgraph.AmpModule) -> Tensor:
    amp(IDS, KEEP).sum().backward()
    return amp.embedding.weight.grad


MASKED: dict[str, Masked] = {
    "integers": lambda x, keep: x * keep[..., None],
    "cast": lambda x, keep: keep.to(x.dtype).unsqueeze(-1) * x,
    "inverted": lambda x, keep: x * (1.0 - (keep == 0).float())[..., None],
    "with a cast behind": lambda x, keep: (x * keep[..., None]).to(x.dtype).contiguous(),
}


@pytest.mark.parametrize("masked", MASKED)
def test_gradients_are_finite(masked: str) -> None:
    assert not gradient(converted(MASKED[masked], hazards=False)).isfinite().all()
    found = gradient(converted(MASKED[masked]))
    source = Embedded(MASKED[masked], 1e-12)
    source(IDS, KEEP).sum().backward()
    torch.testing.assert_close(found, source.embedding.weight.grad, rtol=0.02, atol=0.02)


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "normalize": lambda x: F.normalize(x, dim=-1),
    "sum of magnitudes": lambda x: x / x.abs().sum(-1, keepdim=True).clamp(min=1e-6),
    "layer norm": lambda x: F.layer_norm(x, (32,), eps=1e-12),
    "rms norm": lambda x: F.rms_norm(x, (32,), eps=1e-12),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("norm", NORMS)
def test_training_with_a_mask_of_floats_skips_no_step(norm: str, backend: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return self.last(NORMS[norm](self.first(x) * keep[..., None]))

    model, x, keep = Model(), torch.randn(2, 5, 16), KEEP.float()
    amp = ampgraph.convert(model, (x, keep), policy="O2", dtype=torch.float16, backend=backend)
    for _ in range(3):
        amp(x, keep).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


QUOTIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "probabilities": lambda scores, keep: _shares((scores * keep).softmax(-1) * keep, 1e-13),
    "gates": lambda scores, keep: _shares(scores.sigmoid() * keep, 1e-10),
    "features": lambda scores, keep: _shares((F.elu(scores) + 1) * keep, 1e-9),
    "a mean": lambda scores, keep: scores * keep / (keep.sum(-1, keepdim=True) + 1e-12),
    "instance norm": lambda scores, keep: F.instance_norm(scores * keep, eps=1e-12),
    "instance norm with a usual eps": lambda scores, keep: F.instance_norm(scores * keep, eps=1e-8),
}


def _shares(x: Tensor, eps: float) -> Tensor:
    return x / (x.sum(-1, keepdim=True) + eps)


@pytest.mark.parametrize("given", [torch.int64, torch.float32])
@pytest.mark.parametrize("quotient", QUOTIENTS)
def test_training_with_masked_quotients_skips_no_step(quotient: str, given: torch.dtype) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            pairs = (keep[:, None] * keep[:, :, None]).float()
            return QUOTIENTS[quotient](self.q(x) @ self.k(x).transpose(1, 2) / 4, pairs) @ x

    model, x, keep = Model(), torch.randn(2, 5, 16), KEEP.to(given)
    policy = Policy("O2", dtype=torch.float16, loss_scale=StaticLossScale(1024.0))
    amp = ampgraph.convert(model, (x, keep), policy=policy)
    found = amp(x, keep)
    found.square().mean().backward()
    assert found.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_the_reason_names_mask_and_norm() -> None:
    decision = converted(MASKED["inverted"]).plan.decisions["layer_norm"]
    assert decision.reason.startswith("'unsqueeze' may set rows to 0")
    assert "gradients of 'layer_norm' reach 1e+06 there" in decision.reason


@pytest.mark.parametrize(
    ("masked", "eps"),
    [
        (MASKED["integers"], 1e-5),
        (lambda x, keep: x * torch.rand(2, 5, 1), 1e-12),
        (lambda x, keep: x + keep[..., None], 1e-12),
    ],
)
def test_other_norms_run_low(masked: Masked, eps: float) -> None:
    with_hazards, without = (cast_map(converted(masked, eps, hazards=on)) for on in (True, False))
    assert with_hazards == without
