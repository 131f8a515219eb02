"""Converted containers are containers: special methods, which Python looks up on the type."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import ampgraph

from .helpers import close

X = torch.randn(2, 4)


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class Many(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


class Named(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return {name: layer(x) for name, layer in self.items()}


class Region(nn.Module):
    """A context manager that is equal to every one of its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.depth = nn.Linear(4, 4), 0

    def __enter__(self) -> Region:
        self.depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self.depth -= 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, nn.Module)

    __hash__ = nn.Module.__hash__

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.fixture(params=[True, False], ids=["ahead of time", "just in time"])
def converted(request):
    return lambda model: ampgraph.convert(model, (X,) if request.param else None)


@pytest.mark.parametrize("make", [sequential, lambda: Many(sequential())])
def test_lists(converted, make) -> None:
    model = make()
    amp, layers = converted(model), list(model)
    close(amp(X), model(X))
    assert isinstance(amp, ampgraph.AmpModule)
    assert len(amp) == 3
    assert list(amp) == layers
    assert amp[0] is layers[0]
    assert amp[-1] is layers[2]
    assert list(amp[1:]) == layers[1:]
    assert type(amp[1:]) is type(model)
    assert layers[1] in amp
    assert list(reversed(amp)) == layers[::-1]


def test_a_list_that_grows_is_captured_again(converted) -> None:
    model = sequential()
    amp = converted(model)
    amp(X)
    assert amp.append(nn.Linear(4, 2)) is amp
    assert amp(X).shape == (2, 2)
    amp[3] = nn.Linear(4, 5)
    assert amp(X).shape == (2, 5)
    del amp[3]
    amp += nn.Sequential(nn.Linear(4, 6))
    assert isinstance(amp, ampgraph.AmpModule)
    assert amp(X).shape == (2, 6)
    assert len(model) == 4


def test_dicts_and_parameters(converted) -> None:
    amp = converted(Named({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)}))
    amp(X)
    assert (len(amp), list(amp), "a" in amp, "c" in amp) == (2, ["a", "b"], True, False)
    assert amp["b"].out_features == 3
    vectors = ampgraph.convert(nn.ParameterList([torch.ones(4), torch.zeros(4)]))
    assert len(vectors) == 2
    assert vectors[1].sum() == 0


def test_special_methods_of_a_class() -> None:
    model = Region()
    amp = ampgraph.convert(model, (X,))
    with amp as inside:
        assert inside is amp
        assert model.depth == 1
    assert model.depth == 0
    assert amp == nn.ReLU()
    assert amp in {amp}
    assert (amp @ X).dtype == torch.float32
    assert torch.equal(amp @ X, amp(X))
    assert not torch.equal(amp @ X, model(X))


def test_copies_are_containers_too() -> None:
    amp = ampgraph.convert(sequential(), (X,))
    for copied in (copy.deepcopy(amp), pickle.loads(pickle.dumps(amp)), copy.copy(amp)):
        assert len(copied) == 3
        assert torch.equal(copied(X), amp(X))


def test_what_is_no_container_stays_none() -> None:
    amp = ampgraph.convert(nn.Linear(4, 4), (X,))
    assert type(amp) is ampgraph.AmpModule
    with pytest.raises(TypeError, match="has no len"):
        len(amp)


class Counting(nn.Linear):
    """Has extra state, which torch looks up on the class."""

    calls = 3

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


@pytest.mark.parametrize("layer", [nn.Linear, Counting])
def test_extra_state_is_the_sources(layer):
    """``torch.distributed.checkpoint`` looks it up on the class, too."""
    holder, twin = (nn.ModuleDict({"net": layer(4, 4)}) for _ in range(2))
    holder["net"] = ampgraph.convert(holder["net"], (torch.ones(2, 4),), dtype=torch.bfloat16)
    assert list(holder.state_dict()) == list(twin.state_dict())
    twin["net"].calls = 7
    state = get_model_state_dict(twin)
    set_model_state_dict(holder, state)
    assert get_model_state_dict(holder).keys() == state.keys()
    torch.testing.assert_close(holder["net"].weight, twin["net"].weight, rtol=0, atol=0)
    assert getattr(holder["net"].source, "calls", None) == (7 if layer is Counting else None)
