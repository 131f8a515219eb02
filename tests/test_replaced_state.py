"""Forward replaces buffers, parameters, submodules: refused ahead of time, right in mode "auto"."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import ampgraph

EXACT = {"policy": ampgraph.Policy(ops=ampgraph.OpLists()), "dtype": torch.bfloat16}  # no op runs low
BATCHES = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in (3, 3, 5)]


def by_name(module, new):
    module.table = new


def by_registration(module, new):
    module.register_buffer("table", new, persistent=False)


def in_the_dict(module, new):
    module._buffers["table"] = new


def as_data(module, new):
    module.table.data = new


class Base(nn.Module):
    start = torch.ones(4)

    def __init__(self, put=by_name):
        super().__init__()
        self.fc, self.put = nn.Linear(4, 4), put
        if self.start is not False:
            self.register_buffer("table", self.start if self.start is None else self.start.clone())

    def forward(self, x):
        return self.fc(x) + self.new_table(x)


class Grows(Base):
    """A table for as many rows as were ever needed, as rotary embeddings keep one."""

    start = torch.zeros(0, 4)

    def new_table(self, x):
        rows = x.shape[0]
        if self.table.shape[0] < rows:
            self.put(self, torch.arange(4.0 * rows).view(rows, 4))
        return self.table[:rows]


class Lazy(Base):
    """A table made at the first call, from the data, as ActNorm does."""

    start = None

    def new_table(self, x):
        if self.table is None:
            self.put(self, -x.detach().mean(0))
        return self.table


class New(Base):
    start = False

    def new_table(self, x):
        if not hasattr(self, "table"):
            self.put(self, torch.arange(4.0))
        return self.table


class Running(Base):
    def new_table(self, x):
        self.put(self, self.table * 0.9 + x.detach().mean(0) * 0.1)
        return self.table


class OtherDtype(Base):
    def new_table(self, x):
        self.table = self.table.double() * 1.1
        return self.table.float()


class Deletes(Base):
    def new_table(self, x):
        return self._buffers.pop("table", 0.0)


class ParameterData(Base):
    def new_table(self, x):
        self.fc.bias.data = self.fc.bias.data * 0.5
        return self.table


class NewParameter(Base):
    def new_table(self, x):
        self.fc.bias = nn.Parameter(self.fc.bias.detach() * 0.5)
        return self.table


class SwapsModules(Base):
    def __init__(self):
        super().__init__()
        self.act = nn.Tanh()

    def new_table(self, x):
        self.act = nn.ReLU() if isinstance(self.act, nn.Tanh) else nn.Tanh()
        return self.act(x)


class SwapsBuffers(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("other", torch.zeros(4))

    def new_table(self, x):
        self.table, self.other = self.other, self.table
        return self.table


REPLACING = {
    **{f"grows {put.__name__}": (Grows, put) for put in (by_name, by_registration, in_the_dict, as_data)},
    **{f"lazy {put.__name__}": (Lazy, put) for put in (by_name, by_registration, in_the_dict)},
    **{f"new {put.__name__}": (New, put) for put in (by_registration, in_the_dict)},
    **{f"running {put.__name__}": (Running, put) for put in (by_registration, in_the_dict, as_data)},
    **{kind.__name__: (kind,) for kind in (OtherDtype, Deletes, ParameterData, NewParameter, SwapsModules)},
}


def made(kind, *put):
    torch.manual_seed(0)
    return kind(*put)


def state(model):
    """Returns every entry of every table, None included, by identity and value."""
    return {
        (path, table, name): (id(value), value.tolist() if isinstance(value, torch.Tensor) else None)
        for path, module in model.named_modules()
        for table in ("_parameters", "_buffers", "_modules")
        for name, value in getattr(module, table).items()
    }


@pytest.mark.parametrize("what", REPLACING)
def test_it_is_refused_ahead_of_time_and_changes_nothing(what):
    model = made(*REPLACING[what])
    before = state(model)
    with pytest.raises(ampgraph.CaptureError, match=r"forward replaces [\w.]+, which a graph cannot"):
        ampgraph.convert(model, (BATCHES[0],), capture="ahead of time", **EXACT)
    assert state(model) == before
    assert not model._non_persistent_buffers_set


@pytest.mark.parametrize("what", REPLACING)
def test_it_is_right_in_mode_auto(what):
    model = made(*REPLACING[what])
    source, inputs = copy.deepcopy(model), [x.clone() for x in BATCHES]
    with pytest.warns(UserWarning, match="it is captured just in time instead"):
        amp = ampgraph.convert(model, (inputs[0],), **EXACT)
    for x, kept in zip(inputs, BATCHES, strict=True):
        assert torch.equal(amp(x), source(kept))
        assert torch.equal(x, kept)
    assert not [b for b in model.buffers() if isinstance(b, FakeTensor)]
    for a, b in zip(model.buffers(), source.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", [Running, SwapsBuffers])
def test_a_buffer_assigned_to_a_tensor_like_it_is_captured(make, recwarn):
    model = made(make)
    source = copy.deepcopy(model)
    amp = ampgraph.convert(model, (BATCHES[0],), capture="ahead of time", **EXACT)
    for x in BATCHES:
        assert torch.equal(amp(x), source(x))
    for a, b in zip(model.buffers(), source.buffers(), strict=True):
        assert torch.equal(a, b)
    assert not recwarn
