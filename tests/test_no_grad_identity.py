"""Calls under ``no_grad`` that return their input: the input keeps its gradients, so the result does too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import NoLossScale, Policy


def broadcast(x):
    return torch.broadcast_tensors(x, x)[1]


def partly(x):
    return torch.broadcast_tensors(x[:1], x)[1]


def at_least(x):
    return torch.atleast_1d(x, x)[0]


CALLS = {
    "to": lambda x: x.to(x.dtype),
    "float": lambda x: x.float(),
    "type_as": lambda x: x.type_as(x),
    "contiguous": lambda x: x.contiguous(),
    "twice": lambda x: x.float().contiguous().float(),
    "dropout": lambda x: nn.functional.dropout(x, 0.5, training=False),
    "broadcast": broadcast,
    "partly": partly,
    "atleast_1d": at_least,
    "new": lambda x: x * 2,
    "new and the same": lambda x: (x * 2).float(),
    "expanded": lambda x: torch.broadcast_tensors(x[:1], x)[0],
}


class Model(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.first, self.second, self.call = nn.Linear(8, 8), nn.Linear(8, 8), call

    def forward(self, x):
        hidden = self.first(x)
        with torch.no_grad():
            same = self.call(hidden)
        return self.second(hidden) + same.exp()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_pass_a_returned_input(name, capture, level):
    torch.manual_seed(0)
    model, x = Model(CALLS[name]), torch.randn(4, 8)
    model(x).sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    policy = Policy(level, dtype=torch.bfloat16, loss_scale=NoLossScale())
    given = (x,) if capture == "ahead of time" else None
    amp = ampgraph.convert(model, given, policy=policy, capture=capture, backend="eager")
    amp(x).sum().backward()
    for path, parameter in model.named_parameters():
        error = (parameter.grad - expected[path]).norm() / expected[path].norm()
        assert error < 0.03, f"{path}: {error:.3f}"
