"""A ``torch.autocast`` around a whole training step: neither forward nor backward feels it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import Policy

BF16, FP16 = torch.bfloat16, torch.float16
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def gradients(call, parameters, ambient=None, **options):
    with torch.autocast("cpu", dtype=ambient, enabled=ambient is not None):
        loss = call(X).float().square().mean()
        found = torch.autograd.grad(loss, parameters, **options)
        assert torch.is_autocast_enabled("cpu") == (ambient is not None)
    return found


WAYS = {
    "eager": lambda m, policy: ampgraph.convert(m, (X,), policy=policy),
    "aot_eager": lambda m, policy: ampgraph.convert(m, (X,), policy=policy, backend="aot_eager"),
    "just in time": lambda m, policy: ampgraph.convert(m, policy=policy),
    "the backend of torch.compile": lambda m, policy: torch.compile(
        m, backend="ampgraph", options={"policy": policy}
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("policy", "ambient"),
    [
        (Policy("O1", dtype=FP16), BF16),
        (Policy("O2", dtype=BF16), FP16),
        (Policy("O0", dtype=BF16), BF16),
    ],
    ids=["float16", "bfloat16", "O0"],
)
def test_gradients_are_those_outside(way, policy, ambient):
    torch._dynamo.reset()
    model = network()
    call, parameters = WAYS[way](model, policy), [*model.parameters()]
    expected = gradients(call, parameters)
    for _ in range(2):
        found = gradients(call, parameters, ambient)
        assert all(map(torch.equal, found, expected))


def test_the_callers_own_nodes_keep_their_autocast():
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch.is_autocast_enabled("cpu"))
            return gradient

    model, x = network(), X.clone().requires_grad_()
    amp = ampgraph.convert(model, (X,), dtype=BF16)
    parameters = [*model.parameters()]
    expected = torch.autograd.grad(amp(x).square().mean(), [x, *parameters])
    with torch.autocast("cpu", dtype=FP16):
        loss = Look.apply(amp(Look.apply(x))).square().mean()
        for _ in range(2):  # the second backward meets the hooks of the first
            found = torch.autograd.grad(loss, [x, *parameters], retain_graph=True)
            assert all(map(torch.equal, found, expected))
    assert seen == [True] * 4


def test_autocast_is_back_after_an_error_in_the_backward():
    model = network()
    amp = ampgraph.convert(model, (X,), dtype=BF16)

    def fail(gradient):
        raise ValueError("from the hook")

    with torch.autocast("cpu", dtype=FP16):
        loss = amp(X).square().mean()
        handle = model[0].weight.register_hook(fail)
        with pytest.raises(ValueError, match="from the hook"):
            loss.backward()
        assert torch.is_autocast_enabled("cpu")
    handle.remove()


def test_several_outputs_and_batches_of_gradients():
    model, weights = network(), torch.eye(3)
    amp = ampgraph.convert(model, (X,), policy=Policy("O0", dtype=BF16))
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=BF16, enabled=enabled):
            y = amp(X).flatten()[:3]
            found.append(torch.autograd.grad(y, model[0].weight, weights, is_grads_batched=True)[0])
    assert torch.equal(*found)
