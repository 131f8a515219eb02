"""Parts of a model that change after the capture: classes, dicts, tied tensors, dtypes, types of values."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph._compat import dict_versions, has_dict_versions
from ampgraph.runtime import module_structure
from ampgraph.runtime.held_tensors import HeldTensors
from ampgraph.runtime.module_structure import Structure

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(6).view(2, 3)


class Tied(nn.Module):
    """Two layers with one weight and two buffers that are one tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.register_buffer("low", torch.ones(8))
        self.register_buffer("high", self.low)
        self.first.register_forward_hook(lambda module, args, y: y * 2)
        self.gain, self.sizes = 1, [1, 2]

    def forward(self, x):
        rows = self.last.weight.shape[0]  # forward reads sizes of a parameter
        y = self.last(self.first(x)) * self.low + self.high
        return y * rows, torch.full((2,), self.gain), torch.tensor(self.sizes)


class Louder(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 5


class LouderTied(Tied):
    def forward(self, x):
        return [3 * y for y in super().forward(x)]


def parameter(rows, scale=1.0):
    return nn.Parameter(scale * torch.randn(rows, 8, generator=torch.Generator().manual_seed(1)))


def _narrower(m):
    m.last.weight, m.last.bias = parameter(4), nn.Parameter(torch.zeros(4))
    m.low, m.high = torch.ones(4), torch.ones(4)


def _other_dict(m):
    m.first._parameters = {"weight": parameter(8), "bias": None}


def _other_modules(m):
    m._modules = dict(m._modules, first=nn.Identity())


def _other_hook(m):
    m.first._forward_hooks[next(iter(m.first._forward_hooks))] = lambda module, args, y: y * 9


def _other_weight_in_the_dict(m):
    m.last._parameters.update(weight=parameter(8, 3.0))


def _first_hook(m):
    m.last.register_forward_hook(lambda module, args, y: y * 9)


def _another_dict_with_a_hook(m):
    m.last._forward_hooks = OrderedDict({5: lambda module, args, y: y * 9})


def _first_hook_in_another_dict(m):
    m.last._forward_hooks = OrderedDict()
    _first_hook(m)


CHANGES = {
    "weight in the dict": _other_weight_in_the_dict,
    "buffer in the dict": lambda m: m._buffers.__ior__({"high": torch.full((8,), 5.0)}),
    "module in the dict": lambda m: m._modules.__setitem__("last", nn.Linear(8, 8, bias=False)),
    "attribute in the dict": lambda m: vars(m).update(gain=3),
    "first hook": _first_hook,
    "first hook in another dict": _first_hook_in_another_dict,
    "another dict with a hook": _another_dict_with_a_hook,
    "forward": lambda m: vars(m.last).setdefault("forward", lambda x: x * 7),
    "untied weight": lambda m: setattr(m.last, "weight", parameter(8, 3.0)),
    "untied buffer": lambda m: setattr(m, "high", torch.full((8,), 5.0)),
    "class": lambda m: setattr(m, "__class__", LouderTied),
    "class of a layer": lambda m: setattr(m.last, "__class__", Louder),
    "hooks": lambda m: setattr(m.first, "_forward_hooks", OrderedDict()),
    "hook": _other_hook,
    "dict of parameters": _other_dict,
    "dict of modules": _other_modules,
    "sizes of parameters": _narrower,
    "bool for int": lambda m: setattr(m, "gain", True),
    "float for int": lambda m: setattr(m, "gain", 1.0),
    "float in a list": lambda m: setattr(m, "sizes", [1.0, 2]),
}


def assert_like(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * float(b.detach().double().abs().max()))


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("level", ["O0", "O1", "O1 without versions of dicts"])
def test_an_exchanged_part_is_seen(how, level, monkeypatch):
    torch.manual_seed(0)
    if level not in ("O0", "O1"):
        monkeypatch.setattr(module_structure, "dict_versions", lambda *_: None)
    model = Tied()
    amp = ampgraph.convert(model, (X,), policy=level[:2], dtype=torch.bfloat16, backend="eager")
    for _ in range(3):
        assert_like(amp(X), model(X))
    CHANGES[how](model)
    assert_like(amp(X), model(X))
    assert_like(amp(X), model(X))
    assert len(amp.graph_modules) <= 2


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_the_sign_of_zero_counts(zero):
    class Signs(nn.Module):
        shift = zero

        def forward(self, x, y):
            return x.sign() + torch.copysign(x, torch.tensor(self.shift)), torch.copysign(x, torch.tensor(y))

    model = Signs()
    amp = ampgraph.convert(model, (X, zero), dtype=torch.bfloat16, backend="eager")
    model.shift = -zero
    assert_like(amp(X, -zero), model(X, -zero))


def test_parts_of_the_same_kind_are_not_captured_again():
    model = Tied()
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16, backend="eager")
    model.first.weight = model.last.weight = parameter(8)
    model.low = model.high = torch.full((8,), float("2.5"))
    model.sizes, model.gain = [1, 2], int("1")
    assert_like(amp(X), model(X))
    assert len(amp.graph_modules) == 1


def test_an_exchanged_layer_has_low_copies_and_the_old_one_is_freed():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16, backend="eager")
    amp(X)
    old, shadows = weakref.ref(model[0].weight), amp._graphs.shadows
    kept = shadows.of(model[2].weight)
    model[0] = nn.Linear(8, 8)
    for _ in range(2):
        with torch.no_grad():
            model[0].weight.mul_(2)
            assert_like(amp(X), model(X))
    gc.collect()
    assert old() is None
    assert amp._graphs.is_in_place()
    amp(X)
    assert {id(master) for _, master in shadows.pairs()} == {*map(id, model.parameters())}
    assert shadows.of(model[2].weight) is kept


needs_versions = pytest.mark.skipif(not has_dict_versions(), reason="this Python has no versions of dicts")


@needs_versions
def test_only_a_write_lets_a_call_read_the_modules():
    model = Tied()
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16, backend="eager")
    amp(X)
    flags = amp._graphs.modes()
    amp(X)
    assert amp._graphs.modes() is flags
    model.note = "unread"
    assert amp._graphs.modes() is not flags
    assert amp._graphs.modes() == flags
    assert len(amp.graph_modules) == 1


@needs_versions
def test_a_write_between_two_looks_is_seen_and_a_read_is_not():
    held, other = {"a": 1}, OrderedDict(b=2)
    versions = dict_versions([held, other])
    before = versions()
    assert held["a"] == 1
    assert versions() == before
    other["b"] = 3
    assert versions() != before


def test_what_is_no_dict_has_no_versions():
    assert dict_versions([{}, torch.nn.ParameterDict()]) is None


@needs_versions
def test_a_model_of_no_parts_has_versions_too():
    structure = Structure([nn.Identity()], counts_data=True)
    assert structure.flags() is structure.flags()


class Words(nn.Module):
    """A model whose inputs do not show its dtype."""

    def __init__(self):
        super().__init__()
        self.words, self.norm, self.fc = nn.Embedding(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, ids):
        return (self.fc(self.norm(self.words(ids))),)


@pytest.mark.parametrize("policy", ["O0", "O1", "O2", ampgraph.Policy(weight_copies=False)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_model_of_another_dtype_returns_this_dtype(policy, dtype):
    torch.manual_seed(0)
    model = Words()
    other = copy.deepcopy(model).to(dtype)
    amp = ampgraph.convert(model, (IDS,), policy=policy, dtype=torch.bfloat16, backend="eager")
    amp(IDS)
    model.to(dtype)  # not through the converted model
    assert_like(amp(IDS), other(IDS))
    amp.float()
    assert_like(amp(IDS), other.float()(IDS))


class Settings(nn.Module):
    """Reads settings of torch, by name and without a name."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        gain = 1 + 2 * torch.is_inference_mode_enabled() + 4 * torch.are_deterministic_algorithms_enabled()
        return self.fc(x) * gain, torch.tensor([1.0]), torch.arange(3) / 2, torch.zeros(2)


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("setting", [default_dtype, deterministic, torch.inference_mode])
def test_a_setting_of_torch_is_seen(setting):
    model = Settings()
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16, backend="eager", capture="ahead of time")
    for _ in range(2):
        with setting():
            assert_like(amp(X), model(X))
        assert_like(amp(X), model(X))
    assert len(amp.graph_modules) == 2


def test_equal_kinds_are_one_object():
    """Graphs are found by kinds, and Dynamo of torch 2.11 compares them by identity only."""

    def kinds(*shapes):
        return HeldTensors([{str(i): torch.empty(shape) for i, shape in enumerate(shapes)}], False).kinds()

    assert kinds(3, 4) is kinds(3, 4)
    assert kinds(3, 4) != kinds(4, 3)
    layer = nn.Linear(2, 2)
    held = HeldTensors([layer._parameters], False)
    before = held.kinds()
    layer.half()
    assert held.kinds() is not before
    layer.float()
    assert held.kinds() is before


class Gained(nn.Module):
    """Its gain has no low copy, and forward reads its size."""

    def __init__(self):
        super().__init__()
        self.linear, self.gain = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.linear(x) + self.gain.sum() * self.gain.shape[0]


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_data_of_a_parameter_without_low_copy_gets_another_size(level):
    model = Gained()
    amp = ampgraph.convert(model, (X,), policy=level, dtype=torch.bfloat16, backend="eager")
    for rows in (8, 4, 2):
        model.gain.data = torch.ones(rows)
        torch.testing.assert_close(amp(X), model(X), atol=0.05, rtol=0.01)
