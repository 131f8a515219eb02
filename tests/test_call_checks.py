"""What a call checks before its graph runs: it sees every change of a model with many modules."""

from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph.runtime.signature import Likeness, signature_of

X = torch.randn(2, 4)


class Scaled(nn.Module):
    """A layer with plain attributes and an object of settings."""

    def __init__(self):
        super().__init__()
        self.fc, self.gain, self.shift = nn.Linear(4, 4), 1.0, 0.0
        self.register_buffer("offset", None)
        self.inner = nn.Module()
        self.inner.function = torch.relu

    def forward(self, x):
        y = self.inner.function(self.fc(x)) * self.gain + self.shift
        return y if self.offset is None else y + self.offset


def _set_forward(model):
    inner = model[5].forward
    model[5].forward = lambda x: inner(x) * 2


def _set_back(model):
    model[5].forward = type(model[5]).forward.__get__(model[5])
    model[5].gain = 4.0


def _turn_round(model):
    first = model._modules.pop("0")
    model._modules["0"] = first


CHANGES = {
    "attribute": lambda m: setattr(m[5], "gain", 2.0),
    "another attribute": lambda m: setattr(m[0], "shift", 2.0),
    "attribute in the dict": lambda m: vars(m[3]).update(gain=3.0),
    "function": lambda m: setattr(m[4].inner, "function", torch.sigmoid),
    "buffer": lambda m: setattr(m[5], "offset", torch.ones(4)),
    "buffer in the dict": lambda m: m[5]._buffers.update(offset=torch.ones(4)),
    "bias": lambda m: setattr(m[5].fc, "bias", None),
    "module": lambda m: m.__setitem__(2, nn.Linear(4, 4)),
    "module more": lambda m: m.append(nn.Linear(4, 4)),
    "module less": lambda m: m.__delitem__(5),
    "order": _turn_round,
    "forward": _set_forward,
    "forward of the class": _set_back,
    "hook": lambda m: m[4].register_forward_hook(lambda module, args, y: y + 1),
    "mode": lambda m: m.append(nn.Dropout(1.0)) and m.eval(),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_between_two_like_calls_is_seen(how):
    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled() for _ in range(6)))
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16, backend="eager")
    amp(X), amp(X)
    CHANGES[how](model)
    expected = model(X)
    assert (amp(X) - expected).abs().max() < 0.1
    assert (amp(X) - expected).abs().max() < 0.1


def test_each_training_mode_has_its_graph():
    amp = ampgraph.convert(nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0)), (X,), dtype=torch.bfloat16)
    modes = [True, True, False, False, True, False]
    for mode in modes:
        assert bool(amp.train(mode)(X).eq(0).all()) is mode


CALLS = [
    ((X,), {}),
    ((X[:1],), {}),
    ((X.double(),), {}),
    ((X.to("meta"),), {}),
    ((nn.Parameter(X),), {}),
    ((X, X), {}),
    ((), {"x": X}),
    ((), {"y": X}),
    ((X,), {"y": X}),
    ((X, None), {}),
    ((X, True), {}),
    ((X, 1), {}),
    ((X, 2), {}),
    ((X, "a"), {}),
    ((X, 0.0), {}),
    ((X, [X]), {}),
    (([X, X],), {}),
]


@pytest.mark.parametrize("seen", CALLS, ids=range(len(CALLS)))
def test_like_calls_have_one_signature(seen):
    likeness = Likeness(*seen)
    for call in CALLS:
        if likeness.fits(*call):
            assert signature_of(*call) == signature_of(*seen)
            assert all(type(a) is type(b) for a, b in zip(call[0], seen[0], strict=True))


def test_a_call_with_tensors_and_constants_is_like_itself():
    assert Likeness((X, None), {"y": X, "flag": True}).fits((X + 1, None), {"y": X * 2, "flag": True})


class AsksForTheContainer(nn.Module):
    """Adds another number for each kind of container."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, given):
        if isinstance(given, torch.Tensor):
            return self.fc(given)
        kinds = (OrderedDict, defaultdict, dict, Named, list, tuple)
        kind = next(i for i, kind in enumerate(kinds) if isinstance(given, kind))
        return self.fc(given["x"] if isinstance(given, dict) else given[0]) + 10 * kind


Named = namedtuple("Named", "x")


@pytest.mark.parametrize("first", range(7))
def test_one_tensor_in_containers_of_each_kind(first):
    calls = [X, [X], (X,), Named(X), {"x": X}, OrderedDict(x=X), defaultdict(int, x=X)]
    model = AsksForTheContainer().eval()
    amp = ampgraph.convert(model, (calls[first],), policy="O0")
    for given in calls:
        torch.testing.assert_close(amp(given), model(given), rtol=0, atol=0)
