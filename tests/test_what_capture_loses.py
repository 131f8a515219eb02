"""What a capture cannot carry is said, and never silently wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampgraph

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Signed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return StraightThrough.apply(self.linear(x))


def test_custom_backward_ahead_of_time_is_reported():
    apply = torch.autograd.Function.__dict__["apply"]
    with pytest.warns(UserWarning, match="only the forward of StraightThrough"):
        ampgraph.convert(Signed(), (X,))
    assert torch.autograd.Function.__dict__["apply"] is apply


@pytest.mark.filterwarnings("ignore:Signed ran in its own dtypes")
def test_custom_backward_just_in_time_is_kept():
    model = Signed()
    amp = ampgraph.convert(model)
    with pytest.warns(UserWarning, match=r"custom autograd\.Function"):
        amp(X).sum().backward()
    assert model.linear.weight.grad.abs().sum() > 0


def test_nothing_captured_is_reported_once(recwarn):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 2)

        @torch.compiler.disable
        def forward(self, x):
            return self.head(x)

    amp = ampgraph.convert(Tagger())
    amp(X)
    amp(X)
    assert sum("ran in its own dtypes" in str(w.message) for w in recwarn) == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sparse_gradients_reach_the_table(level):
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 3)

        def forward(self, i):
            return self.head(self.table(i).mean(1))

    model = Bag()
    ids = torch.randint(0, 20, (4, 5))
    ampgraph.convert(model, (ids,), policy=level, dtype=torch.bfloat16)(ids).sum().backward()
    assert model.table.weight.grad.layout == torch.sparse_coo


@pytest.mark.parametrize("eps", [1e-12, 1e-5])
def test_norm_of_constant_rows_has_finite_gradients(eps):
    """1/sqrt(1e-12) is no float16 number: the norm keeps its statistics, not itself, in float32."""
    norm = nn.LayerNorm(8, eps=eps)

    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm = nn.Linear(8, 8), norm

        def forward(self, x):
            return self.norm(self.a(x) * 0)

    policy = ampgraph.Policy(loss_scale=ampgraph.StaticLossScale(8.0))
    amp = ampgraph.convert(Padded(), (X,), policy=policy, dtype=torch.float16)
    ampgraph.testing.assert_dtype(amp, "layer_norm", torch.float16)
    amp(X).sum().backward()
    assert norm.weight.grad.isfinite().all()


def test_norm_without_weight_stays_float32_where_its_statistics_do_not_fit():
    model = nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-12, elementwise_affine=False), nn.Linear(8, 8)
    )
    amp = ampgraph.convert(model, (X,), dtype=torch.float16)
    ampgraph.testing.assert_dtype(amp, "layer_norm", torch.float32)


def test_grad_mode_of_the_caller_survives_a_region():
    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                gate = self.a(x)
            return self.b(x) * gate

    amp = ampgraph.convert(Region(), (X,))
    with torch.no_grad():
        assert not amp(X).requires_grad
    assert amp(X).requires_grad
