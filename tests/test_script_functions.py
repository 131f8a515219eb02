"""Functions of ``torch.jit.script`` and ``torch.jit.trace`` in a model."""

import pytest
import torch
from torch import nn

import ampgraph

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def gated(a, b):
    c = a + b
    return torch.tanh(c) * torch.sigmoid(c)


def repeated(a, b):
    for i in range(3):
        a = a * 2 + b if i % 2 == 0 else torch.tanh(a)
    return a


class Gated(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.up, self.end, self.function = nn.Linear(4, 8), nn.Linear(8, 4), function

    def forward(self, x):
        h = self.up(x)
        return self.end(self.function(h, h + 1))


FUNCTIONS = {
    "scripted": lambda: torch.jit.script(gated),
    "scripted loop": lambda: torch.jit.script(repeated),
    "traced": lambda: torch.jit.trace(gated, (torch.ones(3, 8), torch.ones(3, 8))),
}


def gradients(model, call):
    call(X).square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("earlier_calls", [0, 1, 2, 4])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_pass_through(function, earlier_calls):
    """From its second call on, the function detaches its inputs: a trace of that loses the layers before."""
    model = Gated(FUNCTIONS[function]())
    for _ in range(earlier_calls):
        expected = gradients(model, model)
    expected = gradients(model, model)
    for _ in range(2):
        amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16, capture="ahead of time")
        found = gradients(model, amp)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=0.05, atol=0.02, msg=name)


def test_a_capture_leaves_scripts_as_they_were():
    function, call = torch.jit.script(gated), torch.jit.ScriptFunction.__call__
    ampgraph.convert(Gated(function), (X,), dtype=torch.bfloat16, capture="ahead of time")
    assert torch.jit.ScriptFunction.__call__ is call


def test_a_scripted_submodule_is_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.GELU())))
    with pytest.raises(ampgraph.CaptureError, match=r"submodule '1' is a TorchScript module.*convert_blocks"):
        ampgraph.convert(model, (X,), dtype=torch.bfloat16)
    ampgraph.convert_blocks(model, ("0",), dtype=torch.bfloat16)
    model(X).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
