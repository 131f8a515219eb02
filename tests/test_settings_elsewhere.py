"""What forward reads beside plain attributes of modules: objects, globals, closures, classes, functions."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import warnings
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampgraph
from tests.helpers import close

LOW = {"policy": "O1", "dtype": torch.bfloat16}
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
HERE = sys.modules[__name__]
SETTINGS = types.ModuleType("settings")

FACTOR, TABLE, OPTIONS = 2.0, {"a": 2.0}, None
Pair = namedtuple("Pair", "first second")


def helper(x):
    return x * 2


def outer(x):
    return helper(x)


class Part:
    scale, limit = 2.0, 1.0

    def scaled(self, x):
        return x * self.scale


class Slots:
    __slots__ = ("inner", "scale")

    def __init__(self, scale=2.0, inner=None):
        self.scale, self.inner = scale, inner


@dataclass(slots=True)
class SlottedData:
    scale: float = 2.0


@dataclass
class Data:
    scale: float = 2.0


class Base(nn.Module):
    of_class = 2.0

    def scaled(self, x):
        return x * 2

    @property
    def computed(self):
        return 2.0


def closing_over():
    factor = 2.0

    def read(module, x):
        return x * factor

    def change():
        nonlocal factor
        factor = 5.0

    return read, change


def decorated(function):
    @functools.wraps(function)
    def instead(*args):
        return function(*args)

    return instead


@contextlib.contextmanager
def nothing():
    yield


@contextlib.contextmanager
def factor():
    yield FACTOR


def in_context(x):
    with factor() as by:
        return x * by


class Owner:
    def __init__(self):
        self.scale = 2.0

    def scaled(self, module, x):
        return x * self.scale


OWNER = Owner()
BOUND = OWNER.scaled


def keeping(functions):
    return lambda m, x: functions[0](m, x)


class Reads(Base):
    def __init__(self, read):
        super().__init__()
        self.fc, self.read = nn.Linear(4, 4), read
        self.parts = {"a": Data(), "b": [Data()]}
        self.listed, self.pair, self.shared = [Part(), Slots()], Pair(Data(), 2.0), Part()
        self.slots, self.slotted = Slots(inner=Data()), SlottedData()
        self.kind, self.bound = Part, Part().scaled

    def forward(self, x):
        return self.read(self, self.fc(x))


READ, CHANGE = closing_over()


def set_on(owner, name, value):
    return lambda m, patch: patch.setattr(owner, name, value)


# What forward computes, and what changes then: (model, pytest's monkeypatch).
CASES = {
    "an object in a dict": (
        lambda m, x: x * m.parts["a"].scale,
        lambda m, p: setattr(m.parts["a"], "scale", 5.0),
    ),
    "an object in a list in a dict": (
        lambda m, x: x * m.parts["b"][0].scale,
        lambda m, p: setattr(m.parts["b"][0], "scale", 5.0),
    ),
    "slots in a list": (lambda m, x: x * m.listed[1].scale, lambda m, p: setattr(m.listed[1], "scale", 5.0)),
    "an object in a namedtuple": (
        lambda m, x: x * m.pair.first.scale,
        lambda m, p: setattr(m.pair.first, "scale", 5.0),
    ),
    "another namedtuple": (
        lambda m, x: x * m.pair.second,
        lambda m, p: setattr(m, "pair", m.pair._replace(second=5.0)),
    ),
    "slots": (lambda m, x: x * m.slots.scale, lambda m, p: setattr(m.slots, "scale", 5.0)),
    "an object in slots": (
        lambda m, x: x * m.slots.inner.scale,
        lambda m, p: setattr(m.slots.inner, "scale", 5.0),
    ),
    "a dataclass with slots": (
        lambda m, x: x * m.slotted.scale,
        lambda m, p: setattr(m.slotted, "scale", 5.0),
    ),
    "an object's class": (lambda m, x: x * m.shared.scale, set_on(Part, "scale", 5.0)),
    "what hides its class's": (lambda m, x: x * m.shared.scale, lambda m, p: setattr(m.shared, "scale", 5.0)),
    "an object's method": (lambda m, x: m.shared.scaled(x), set_on(Part, "scaled", lambda s, x: x * 5)),
    "a class as settings": (lambda m, x: x * m.kind.scale, set_on(Part, "scale", 5.0)),
    "a new attribute": (
        lambda m, x: x * getattr(m.parts["a"], "more", 2.0),
        lambda m, p: setattr(m.parts["a"], "more", 5.0),
    ),
    "a global": (lambda m, x: x * FACTOR, set_on(HERE, "FACTOR", 5.0)),
    "a global dict": (lambda m, x: x * TABLE["a"], lambda m, p: p.setitem(TABLE, "a", 5.0)),
    "a global object": (lambda m, x: x * OPTIONS.scale, lambda m, p: setattr(OPTIONS, "scale", 5.0)),
    "another global object": (lambda m, x: x * OPTIONS.scale, set_on(HERE, "OPTIONS", Data(5.0))),
    "in a Python module": (lambda m, x: x * SETTINGS.factor, set_on(SETTINGS, "factor", 5.0)),
    "a global in a comprehension": (lambda m, x: sum([x * FACTOR for _ in "a"]), set_on(HERE, "FACTOR", 5.0)),
    "a function": (lambda m, x: helper(x), set_on(HERE, "helper", lambda x: x * 5)),
    "a function in a function": (lambda m, x: outer(x), set_on(HERE, "helper", lambda x: x * 5)),
    "decorated": (decorated(lambda m, x: helper(x)), set_on(HERE, "helper", lambda x: x * 5)),
    "decorated by torch": (
        torch.autocast("cpu", enabled=False)(lambda m, x: helper(x)),
        set_on(HERE, "helper", lambda x: x * 5),
    ),
    "decorated by Python": (
        nothing()(lambda m, x: helper(x)),
        set_on(HERE, "helper", lambda x: x * 5),
    ),
    "decorated by a guard": (
        ampgraph.fp16_guard()(lambda m, x: x * FACTOR),
        set_on(HERE, "FACTOR", 5.0),
    ),
    "in a context": (lambda m, x: in_context(x), set_on(HERE, "FACTOR", 5.0)),
    "a partial function": (
        functools.partial(lambda y, m, x: outer(x), 1),
        set_on(HERE, "helper", lambda x: x * 5),
    ),
    "the object of a bound method": (
        lambda m, x: m.bound(x),
        lambda m, p: setattr(m.bound.__self__, "scale", 5.0),
    ),
    "the object of a bound method that torch decorates": (
        torch.enable_grad()(BOUND),
        lambda m, p: p.setattr(OWNER, "scale", 5.0),
    ),
    "the object of a bound method in a list": (
        keeping([BOUND]),
        lambda m, p: p.setattr(OWNER, "scale", 5.0),
    ),
    "a closure": (READ, lambda m, p: CHANGE()),
    "of the class": (lambda m, x: x * m.of_class, set_on(Reads, "of_class", 5.0)),
    "of a base class": (lambda m, x: x * m.of_class, set_on(Base, "of_class", 5.0)),
    "a method": (lambda m, x: m.scaled(x), set_on(Base, "scaled", lambda m, x: x * 5)),
    "an overridden method": (lambda m, x: m.scaled(x), set_on(Reads, "scaled", lambda m, x: x * 5)),
    "a property": (lambda m, x: x * m.computed, set_on(Base, "computed", property(lambda m: 5.0))),
    "forward": (lambda m, x: x * 2, set_on(Reads, "forward", lambda m, x: m.fc(x) * 5)),
    "forward of a layer": (lambda m, x: x * 2, set_on(nn.Linear, "forward", lambda m, x: x @ m.weight * 5)),
    "a function of torch": (lambda m, x: F.gelu(x), set_on(F, "gelu", lambda x: x * 5)),
    "a function of torch in a layer": (lambda m, x: x * 2, set_on(F, "linear", lambda x, w, b: x @ w * 5)),
    "a class attribute in a branch": (
        lambda m, x: torch.cond(x.sum() > -1e4, lambda y: y * m.of_class, lambda y: y * 0.5, (x,)),
        set_on(Reads, "of_class", 5.0),
    ),
    "a global in a branch": (
        lambda m, x: torch.cond(x.sum() > -1e4, lambda y: y * FACTOR, lambda y: y * 0.5, (x,)),
        set_on(HERE, "FACTOR", 5.0),
    ),
}


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setattr(HERE, "OPTIONS", Data())
    monkeypatch.setattr(SETTINGS, "factor", 2.0, raising=False)


@pytest.mark.parametrize("what", CASES)
def test_a_change_is_captured_again_once(what, monkeypatch):
    read, change = CASES[what]
    model = Reads(read)
    amp = ampgraph.convert(model, (X,), capture="ahead of time", **LOW)
    before = model(X)
    for _ in range(2):
        close(amp(X), before)
    assert len(amp.graph_modules) == 1
    change(model, monkeypatch)
    torch._dynamo.reset()  # with which the source itself runs torch.cond; it does not see classes change
    assert not torch.allclose(before, model(X))
    for _ in range(2):
        close(amp(X), model(X))
    assert len(amp.graph_modules) == 2


@pytest.mark.parametrize("what", [name for name in CASES if "a branch" not in name])
def test_a_change_is_captured_again_just_in_time(what, monkeypatch):
    read, change = CASES[what]
    model = Reads(read)
    torch._dynamo.reset()
    amp = ampgraph.convert(model, (X,), capture="just in time", **LOW)
    close(amp(X), model(X))
    change(model, monkeypatch)
    for _ in range(2):
        close(amp(X), model(X))


class Loop:
    """Holds callbacks of the objects that count steps, as the Trainer of a framework does."""

    def __init__(self, kind):
        self.steps, self.fetcher = Data(), Part()
        self.fetcher.callback = {
            "a bound method": self.advance,
            "a partial function": functools.partial(self.advance, 1),
        }[kind]

    def advance(self, by=1):
        self.steps.scale += by

    def __call__(self):
        self.fetcher.callback()


@pytest.mark.parametrize("kind", ["a bound method", "a partial function"])
def test_an_object_that_forward_does_not_read_does_not_count(kind):
    model = Reads(lambda m, x: x.log())
    model.loop, model.log = Loop(kind), lambda: model.loop()  # forward names log, of a tensor
    amp = ampgraph.convert(model, (X,), capture="ahead of time", **LOW)
    for _ in range(3):
        amp(X)
        model.log()
    assert model.loop.steps.scale == 5.0
    assert len(amp.graph_modules) == 1


@pytest.mark.parametrize("module", ["numpy.a_library", "a_library"])
def test_a_cache_in_a_class_counts_unless_it_is_of_numpy(module, monkeypatch):
    library = types.ModuleType(module)
    monkeypatch.setitem(sys.modules, module, library)
    library.__file__ = "/site-packages/a_library.py"
    lines = (
        "class Table:",
        "    by_kind = {}",
        "    def of(self, x):",
        "        return self.by_kind.setdefault(str(x.dtype), 2.0)",
        "def doubled(x):",
        "    return x * Table().of(x)",
    )
    exec(compile("\n".join(lines), library.__file__, "exec"), vars(library))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ampgraph.convert(Reads(lambda m, x: library.doubled(x)), (X,), **LOW)
    assert any("sets it for the next call" in str(each.message) for each in told) == (module == "a_library")


@pytest.mark.parametrize(("folder", "tells"), [("site-packages", False), ("src", True)])
def test_a_cache_of_an_installed_library_is_no_state(folder, tells, monkeypatch):
    library = types.ModuleType("a_library")
    monkeypatch.setitem(sys.modules, "a_library", library)
    library.__file__ = f"/{folder}/a_library.py"
    source = "BY_KIND = {}\ndef doubled(x):\n    return x * BY_KIND.setdefault(str(x.dtype), 2.0)\n"
    exec(compile(source, library.__file__, "exec"), vars(library))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        amp = ampgraph.convert(Reads(lambda m, x: library.doubled(x)), (X,), **LOW)
        amp(X)
    assert any("sets it for the next call" in str(each.message) for each in told) == tells
    assert len(amp.graph_modules) == 1


# As transformers finds attention functions: the code names the table alone, which another module has.
ATTENTIONS = types.ModuleType("attentions")
exec(
    "import torch\n"
    "GAIN = 1.0\n"
    "CALLS = 0\n"
    "SEEN = {}\n"
    "def attend(q):\n"
    "    global CALLS\n"
    "    CALLS += 1\n"
    "    SEEN[CALLS] = q.shape\n"
    "    return torch.nn.functional.scaled_dot_product_attention(q, q, q) * GAIN\n",
    vars(ATTENTIONS),
)


class Found(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.name = nn.Linear(4, 4), "attend"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attend = sys.modules["attentions"].__dict__[self.name]
        return attend(self.layer(x)[None])[0]


@pytest.mark.parametrize("what", ["function of torch", "global"])
def test_functions_count_that_only_ran(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setitem(sys.modules, "attentions", ATTENTIONS)
    model = Found()
    amp = ampgraph.convert(model, (X,), **LOW, capture="ahead of time")
    close(amp(X), model(X))
    if what == "global":
        monkeypatch.setattr(ATTENTIONS, "GAIN", 3.0)
    else:
        attention = F.scaled_dot_product_attention
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *given: 3 * attention(*given))
    close(amp(X), model(X))


def test_what_such_a_function_counts_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "attentions", ATTENTIONS)
    model = Found()
    amp = ampgraph.convert(model, (X,), **LOW, capture="ahead of time")
    for number in range(6):
        amp.train(number % 2 == 0)
        amp(X)
        attend = ATTENTIONS.attend
        attend(X[None])
    assert len(amp.graph_modules) == 2
