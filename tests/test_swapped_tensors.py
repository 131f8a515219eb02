"""A converted model where torch swaps the contents of parameters: ``.to()`` and ``load_state_dict`` may."""

import copy

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import Policy, StaticLossScale
from tests.helpers import close

X = torch.randn(2, 4)


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def train(model, amp, optimizer):
    optimizer.zero_grad()
    amp(X).square().sum().backward()
    wanted = torch.autograd.grad(model(X).square().sum(), list(model.parameters()))
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        close(parameter.grad, grad)
    optimizer.step()


@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_goes_on_with_the_same_parameters(level, capture, swapping):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    policy = Policy(level, dtype=torch.float16, loss_scale=StaticLossScale(16.0))
    amp = ampgraph.convert(model, (X,), policy=policy, backend="eager", capture=capture)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    amp.scaler.attach(optimizer)
    train(model, amp, optimizer)
    before, weights = list(model.parameters()), copy.deepcopy(model.state_dict())
    nn.Sequential(amp).to(torch.float64).to(torch.float32)
    train(model, amp, optimizer)
    amp.load_state_dict(weights)
    assert torch.equal(model[0].weight, weights["0.weight"])
    train(model, amp, optimizer)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert torch.__future__.get_swap_module_params_on_conversion()


def test_what_torch_cannot_swap_it_refuses_and_nothing_changes(swapping):
    model = nn.Sequential(nn.Linear(4, 4))
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(4, 4)))
    with pytest.raises(RuntimeError, match=r"swap Linear\.weight"):
        model.to(torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    close(amp(X), model(X))
