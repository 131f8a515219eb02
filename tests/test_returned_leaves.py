"""Forward makes a tensor, lets it require gradients and returns it, as SIREN does with its coordinates."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import ampgraph

X = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))


def detached(x: Tensor) -> Tensor:
    return x.clone().detach().requires_grad_(True)


def cloned(x: Tensor) -> Tensor:
    x = x.clone()
    x.requires_grad = True
    return x


def made(x: Tensor) -> Tensor:
    return torch.zeros(4, 2, requires_grad=True)


class Coordinates(nn.Module):
    def __init__(self, leaf, is_returned: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.leaf, self.is_returned = leaf, is_returned

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = self.leaf(x)
        return (leaf if self.is_returned else x), self.net(leaf)


def gradient_of(model: nn.Module) -> Tensor:
    leaf, y = model(X)
    return torch.autograd.grad(y.float().sum(), leaf)[0]


@pytest.mark.parametrize("leaf", [detached, cloned, made])
def test_a_returned_leaf_keeps_its_gradient(leaf) -> None:
    model = Coordinates(leaf, is_returned=True)
    lost = r"loses requires_grad_\(\) of a tensor that forward returns \(Coordinates, .*leaves\.py:\d+\)"
    with pytest.warns(UserWarning, match=lost):
        amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16)
    torch.testing.assert_close(gradient_of(amp), gradient_of(model), rtol=0.02, atol=0.02)
    with pytest.warns(UserWarning, match=lost):
        ahead = ampgraph.convert(Coordinates(leaf, True), (X,), capture="ahead of time")
    with pytest.raises(ampgraph.CaptureError, match=lost):
        ahead(X)


@pytest.mark.parametrize("leaf", [detached, cloned, made])
def test_a_leaf_inside_is_captured(leaf) -> None:
    model = Coordinates(leaf, is_returned=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16)
        amp(X)[1].sum().backward()
    assert len(amp.graph_modules) == 1
