"""Masks of large numbers that a model makes and adds: they hide whole rows, whose scores must not be lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from ampgraph import NoLossScale, Policy
from ampgraph.testing import cast_map

LENGTH, WIDTH = 6, 16
EPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
X = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)) * 2
KEEP = torch.tensor([[True] * 4 + [False] * 2, [False] * LENGTH])
BIASES = nn.Parameter(torch.linspace(0.0, 200.0, LENGTH**2).view(LENGTH, LENGTH))
Masked = Callable[[Tensor, Tensor], Tensor]


def _twice(scores: Tensor, keep: Tensor) -> Tensor:
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    padding = torch.where(keep[:, None], 0.0, -2e4)
    return scores + (padding + later * -1e4)


def _written_out(scores: Tensor, keep: Tensor) -> Tensor:
    scores = scores + (~keep)[:, None] * -1e4
    return scores - scores.amax(-1, keepdim=True).detach()


MASKED: dict[str, Masked] = {
    "a product": lambda scores, keep: scores + (1.0 - keep.float())[:, None] * -1e4,
    "subtracted": lambda scores, keep: scores - (~keep).float()[:, None] * 1e4,
    "selected": lambda scores, keep: torch.where(keep[:, None], 0.0, -1e4) + scores,
    "in place": lambda scores, keep: scores.add_((~keep)[:, None] * -1e4),
    "two masks": _twice,
    "one after the other": lambda scores, keep: _twice(scores + (~keep)[:, None] * -1e4, keep),
    "bounded scores": lambda scores, keep: scores.tanh() * 5 + (~keep)[:, None] * -1e4,
    "before a softmax that is written out": _written_out,
}


class Attention(nn.Module):
    def __init__(self, masked: Masked) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masked = masked
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        scores = self.masked(self.q(x) @ self.k(x).transpose(1, 2), keep)
        if self.masked is _written_out:
            shares = scores.exp()
            return shares / shares.sum(-1, keepdim=True) @ self.v(x)
        return scores.softmax(-1) @ self.v(x)


def converted(masked: Masked, dtype: torch.dtype, **options) -> ampgraph.AmpModule:
    policy = Policy("O2", dtype=dtype, loss_scale=NoLossScale(), **options)
    return ampgraph.convert(Attention(masked), (X, KEEP), policy=policy)


def error(amp: ampgraph.AmpModule, masked: Masked) -> float:
    expected = Attention(masked).double()(X.double(), KEEP)
    return float((amp(X, KEEP) - expected).detach().norm() / expected.detach().norm())


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("masked", MASKED)
def test_a_row_that_is_hidden_attends_as_in_float32(masked: str, dtype: torch.dtype) -> None:
    assert error(converted(MASKED[masked], dtype), MASKED[masked]) < 8 * EPS[dtype]
    assert error(converted(MASKED[masked], dtype, hazards=False), MASKED[masked]) > 32 * EPS[dtype]


OF_INPUTS: dict[str, Masked] = {
    "a product": lambda scores, keep: scores + (1 - keep[:, None].float()) * -1e4,
    "of the other sign": lambda scores, keep: (keep[:, None].to(scores.dtype) - 1.0) * 1e4 + scores,
    "a sum": lambda scores, keep: scores + (keep.float() * 1e4 - 1e4).unsqueeze(1),
    "a quotient": lambda scores, keep: scores - (1 - keep[:, None].float()) / 1e-4,
    "clamped": lambda scores, keep: (scores + (1 - keep[:, None].float()) * -1e4).clamp(min=-3e38),
}


@pytest.mark.parametrize("given", [torch.int64, torch.float32, torch.bool])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("masked", OF_INPUTS)
def test_masks_that_are_inputs_have_any_dtype(masked: str, backend: str, given: torch.dtype) -> None:
    """Nothing is known of the values of an input but the number that multiplies them."""
    model, keep = Attention(OF_INPUTS[masked]), KEEP.to(given)
    for dtype in EPS:
        policy = Policy("O2", dtype=dtype, loss_scale=NoLossScale())
        found = ampgraph.convert(model, (X, keep), policy=policy, backend=backend)(X, keep)
        expected = model(X, keep)
        assert float((found - expected).detach().norm() / expected.detach().norm()) < 8 * EPS[dtype]


def test_the_reason_names_the_mask() -> None:
    amp = converted(MASKED["a product"], torch.bfloat16)
    decisions = {name: amp.plan.decisions[name] for name in ("add", "mul")}
    assert decisions["add"].dtype is torch.float32
    assert decisions["add"].reason == "adds the mask 'mul': bfloat16 rounds such sums by up to 39.1"


@pytest.mark.parametrize(
    "masked",
    [
        lambda scores, keep: scores + (~keep).float()[:, None] * -100.0,  # a windowed transformer's
        lambda scores, keep: scores + torch.arange(6.0),
        lambda scores, keep: scores + BIASES[:, :LENGTH],  # learned
        lambda scores, keep: scores.masked_fill(~keep[:, None], -1e4),
    ],
)
def test_other_sums_run_low(masked: Masked) -> None:
    with_hazards, without = (cast_map(converted(masked, torch.bfloat16, hazards=on)) for on in (True, False))
    assert with_hazards == without
