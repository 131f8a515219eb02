"""State that forward keeps in objects that a graph cannot follow: refused, or told with a warning."""

import array
import collections
import itertools

import pytest
import torch
from torch import nn

import ampgraph

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
COUNT = itertools.count(1)


class Uses(nn.Module):
    def __init__(self, held, scale):
        super().__init__()
        self.fc, self.held, self.scale, self.text = nn.Linear(4, 4), held, scale, open("/dev/null")  # noqa: SIM115

    def forward(self, x):
        return self.fc(x) * self.scale(self)


def generated():
    number = 0
    while True:
        number += 1
        yield number


SGD = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=3.0)
OPAQUE = {
    "count": (itertools.count(1), lambda m: next(m.held)),
    "cycle in a list": ([itertools.cycle([1, 2, 3])], lambda m: next(m.held[0])),
    "generator": (generated(), lambda m: next(m.held)),
    "global": (None, lambda m: next(COUNT)),
    "array": (array.array("d", [2.0]), lambda m: m.held[0]),
    "optimizer": (SGD, lambda m: m.held.param_groups[0]["lr"]),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_such_an_object_is_refused_before_the_capture(name):
    held, scale = OPAQUE[name]
    model = Uses(held, scale)
    with pytest.raises(ampgraph.CaptureError, match=r"forward uses .*whose state no graph follows"):
        ampgraph.convert(model, (X,), dtype=torch.bfloat16, capture="ahead of time")
    with pytest.warns(UserWarning, match="captured just in time instead"):
        ampgraph.convert(model, (X,), dtype=torch.bfloat16)
    if name == "count":
        assert next(held) == 1  # no capture took one


def _of_set(model):
    model.held.add(len(model.held))
    return len(model.held)


def _of_counter(model):
    model.held["calls"] += 1
    return model.held["calls"]


def _of_object(model):
    model.held.data["calls"] = model.held.data.get("calls", 0) + 1
    return model.held.data["calls"]


@pytest.mark.parametrize(
    ("held", "scale"),
    [(set(), _of_set), (collections.Counter(), _of_counter), (collections.UserDict(), _of_object)],
    ids=["set", "Counter", "UserDict"],
)
def test_state_in_a_container_is_told(held, scale):
    with pytest.warns(UserWarning, match="forward (reads|sets) held"):
        ampgraph.convert(Uses(held, scale), (X,), dtype=torch.bfloat16)


def test_an_object_that_forward_does_not_name_and_a_file():
    model = Uses(1.0, lambda m: 2 if m.text else 1)
    model.another = itertools.count(1)
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16, capture="ahead of time")
    torch.testing.assert_close(amp(X), model(X), rtol=0.05, atol=0.05)


def test_an_input_that_forward_lets_require_gradients():
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Linear(4, 1)

        def forward(self, x):
            x.requires_grad_()
            return self.energy(x).square().sum()

    model, x = Forces(), X.clone()
    with pytest.warns(UserWarning, match=r"loses requires_grad_\(\)"):
        amp = ampgraph.convert(model, (X.clone(),), dtype=torch.bfloat16)
    amp(x).backward()
    assert x.grad is not None


def test_an_iterator_of_an_object_that_forward_uses():
    class Schedule:
        def __init__(self):
            self.numbers = itertools.count(1)

        def step(self):
            return next(self.numbers)

    model = Uses(Schedule(), lambda m: m.held.step())
    with pytest.raises(ampgraph.CaptureError, match=r"forward uses held\.numbers"):
        ampgraph.convert(model, (X,), dtype=torch.bfloat16, capture="ahead of time")
