"""Batches of gradients and forward-mode AD through the loss-scaling boundary."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, jacobian

import ampgraph
from ampgraph import Policy, StaticLossScale

from .helpers import close

X = torch.randn(2, 4)


@pytest.fixture(params=["O1", "O2"])
def pair(request) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    policy = Policy(request.param, dtype=torch.float16, loss_scale=StaticLossScale(16.0))
    return model, ampgraph.convert(model, (X,), policy=policy)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorized_jacobian(pair, strategy, create_graph) -> None:
    if create_graph and strategy == "forward-mode":
        create_graph = False  # torch has none
    options = {"vectorize": True, "strategy": strategy, "create_graph": create_graph}
    expected, found = (jacobian(m, X, **options) for m in pair)
    close(found, expected)


def test_vectorized_hessian(pair) -> None:
    expected, found = (hessian(lambda x, m=m: m(x).square().sum(), X, vectorize=True) for m in pair)
    close(found, expected)


@pytest.mark.parametrize("create_graph", [False, True])
def test_batch_of_gradients(pair, create_graph) -> None:
    def gradients(model: nn.Module) -> tuple[torch.Tensor, ...]:
        x = X.clone().requires_grad_()
        rows = torch.eye(6).view(6, 2, 3)
        inputs = [x, *model.parameters()]
        return torch.autograd.grad(model(x), inputs, rows, is_grads_batched=True, create_graph=create_graph)

    expected, found = map(gradients, pair)
    for low, full in zip(found, expected, strict=True):
        assert low.shape == full.shape
        close(low, full)
    assert pair[1].scaler.state.probe.grad is None


def test_tangents(pair) -> None:
    def tangent(model: nn.Module) -> torch.Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(model(forward_ad.make_dual(X, torch.ones_like(X)))).tangent

    expected, found = map(tangent, pair)
    close(found, expected)


def test_forward_mode_captures_nothing(pair) -> None:
    x = torch.randn(5, 4, 4)
    with forward_ad.dual_level(), pytest.raises(ampgraph.CaptureError, match="forward-mode AD"):
        pair[1](forward_ad.make_dual(x, torch.ones_like(x)))
