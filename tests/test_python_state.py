"""What forward reads from Python: a change after the capture is captured again, or told."""

import contextlib
import decimal
import fractions
import functools
import random
import sys
import threading
import types
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampgraph
from ampgraph.capture import Reads
from ampgraph.capture.ahead_of_time import capture_program
from ampgraph.capture.code_place import Place
from ampgraph.runtime.places import Places
from tests.helpers import close

LOW = {"policy": "O1", "dtype": torch.bfloat16}
X = torch.randn(6, 4)


@dataclass
class Rope:
    base: float = 2.0


@dataclass
class Config:
    scale: float = 3.0
    powers: list = field(default_factory=lambda: [1.0, 2.0])
    rope: Rope = field(default_factory=Rope)


class Scaled(nn.Module):
    """Multiplies by whatever the function finds in the module."""

    of_class = 2.0

    def __init__(self, factor=None):
        super().__init__()
        self.fc, self.factor = nn.Linear(4, 4), factor
        self.temp, self.unread = 2.0, 1.0
        self.some = {"a": 2.0, "b": [3.0, 4.0]}
        self.config = Config()
        self.space = types.SimpleNamespace(deep=types.SimpleNamespace(value=2.0))
        self.table = torch.tensor([2.0])
        self.act = torch.tanh

    @property
    def computed(self):
        return self.temp * 2

    def forward(self, x):
        return self.fc(x) * self.factor(self) + self.act(x)


FACTORS = {
    "a number": (lambda m: m.temp, lambda m: setattr(m, "temp", 5.0)),
    "a property": (lambda m: m.computed, lambda m: setattr(m, "temp", 5.0)),
    "a flag": (lambda m: 2.0 if m.temp else 9.0, lambda m: setattr(m, "temp", None)),
    "a dict": (lambda m: m.some["a"], lambda m: m.some.update(a=7.0)),
    "a list in a dict": (lambda m: m.some["b"][1], lambda m: m.some["b"].append(m.some["b"].pop(0))),
    "a config": (lambda m: m.config.scale, lambda m: setattr(m.config, "scale", 9.0)),
    "a list in a config": (lambda m: m.config.powers[0], lambda m: m.config.powers.insert(0, 4.0)),
    "a config in a config": (lambda m: m.config.rope.base, lambda m: setattr(m.config.rope, "base", 9.0)),
    "another config": (lambda m: m.config.scale, lambda m: setattr(m, "config", Config(8.0))),
    "a namespace": (lambda m: m.space.deep.value, lambda m: setattr(m.space.deep, "value", 9.0)),
    "a tensor": (lambda m: m.table, lambda m: setattr(m, "table", torch.tensor([9.0]))),
    "a function": (lambda m: 2.0, lambda m: setattr(m, "act", torch.exp)),
    "of the class": (lambda m: m.of_class, lambda m: setattr(m, "of_class", 9.0)),
    "by name": (lambda m: getattr(m, "te" + "mp"), lambda m: setattr(m, "temp", 5.0)),
    "gone": (lambda m: getattr(m, "temp", 7.0), lambda m: delattr(m, "temp")),
}


@pytest.mark.parametrize("what", FACTORS)
def test_a_changed_attribute_is_captured_again_once(what):
    factor, change = FACTORS[what]
    model = Scaled(factor)
    amp = ampgraph.convert(model, (X,), **LOW)
    close(amp(X), model(X))
    change(model)
    close(amp(X), model(X))
    close(amp(X), model(X))
    assert len(amp.graph_modules) == 2


def _by_name_of_a_global(model):
    try:
        return LATER
    except NameError:
        return 2.0


class Settings:
    """Settings that have no attributes at first."""


class Layer(nn.Module):
    """A layer that a plain list holds."""

    def __init__(self):
        super().__init__()
        self.scale = 2.0

    def forward(self):
        return self.scale

    def scaled(self):
        return 2.0


class Factor:
    """An object whose special methods read a global."""

    def __call__(self):
        return GLOBAL_FACTOR

    def __getitem__(self, key):
        return GLOBAL_FACTOR


def _by_import(model):
    import ampgraph_test_settings

    return ampgraph_test_settings.scale


def marked():
    return marked.factor


def by_default(factors=[2.0]):  # noqa: B006
    return factors[0]


GLOBAL_FACTOR = 2.0
marked.factor = 2.0
settings = Settings()
plain_module = types.ModuleType("settings")
plain_module.scale = 2.0
sys.modules["ampgraph_test_settings"] = plain_module
HELD = [Layer()]


def _set(name, value):
    return lambda model: setattr(model, name, value)


# What forward reads, the change; (holder, name) of what is put back afterwards.
ELSEWHERE = {
    "an attribute that comes": (lambda m: getattr(m, "late", 2.0), _set("late", 5.0)),
    "asked for before": (lambda m: m.late if hasattr(m, "late") else 2.0, _set("late", 5.0)),
    "an error caught": (lambda m: getattr(m, "late", None) or 2.0, _set("late", 5.0)),
    "a key of its dict": (lambda m: m.__dict__.get("late", 2.0), _set("late", 5.0)),
    "a value of its dict": (lambda m: vars(m)["temp"], _set("temp", 5.0)),
    "of the class, later": (
        lambda m: getattr(m, "of_class_later", 2.0),
        lambda m: setattr(Scaled, "of_class_later", 5.0),
    ),
    "a global that comes": (_by_name_of_a_global, lambda m: globals().update(LATER=5.0)),
    "an attribute of empty settings": (
        lambda m: getattr(settings, "late", 2.0),
        lambda m: setattr(settings, "late", 5.0),
    ),
    "of the settings' class": (
        lambda m: getattr(settings, "later", 2.0),
        lambda m: setattr(Settings, "later", 5.0),
    ),
    "by text of a Python module": (
        lambda m: getattr(plain_module, "scale", 1.0),
        lambda m: setattr(plain_module, "scale", 5.0),
    ),
    "later of a Python module": (
        lambda m: getattr(plain_module, "late", 2.0),
        lambda m: setattr(plain_module, "late", 5.0),
    ),
    "later of a class": (lambda m: getattr(Config, "late", 2.0), lambda m: setattr(Config, "late", 5.0)),
    "a layer in a list": (lambda m: m.some["c"][0](), lambda m: setattr(m.some["c"][0], "scale", 5.0)),
    "a layer elsewhere": (lambda m: HELD[0](), lambda m: setattr(HELD[0], "scale", 5.0)),
    "the mode of a layer in a list": (
        lambda m: 2.0 + m.some["c"][0].training,
        lambda m: m.some["c"][0].eval(),
    ),
    "an attribute of a function": (lambda m: marked(), lambda m: setattr(marked, "factor", 5.0)),
    "a default": (lambda m: by_default(), lambda m: by_default.__defaults__[0].__setitem__(0, 5.0)),
    "an argument of a partial": (lambda m: m.some["d"](), lambda m: m.some["d"].keywords.update(factor=5.0)),
    "read by a call": (lambda m: m.some["e"](), lambda m: globals().update(GLOBAL_FACTOR=5.0)),
    "read by an index": (lambda m: m.some["e"][0], lambda m: globals().update(GLOBAL_FACTOR=5.0)),
    "a method that an attribute hides": (
        lambda m: m.some["c"][0].scaled(),
        lambda m: setattr(m.some["c"][0], "scaled", lambda: 5.0),
    ),
    "a module that forward imports": (_by_import, lambda m: setattr(plain_module, "scale", 5.0)),
    "what a function gains": (
        lambda m: getattr(marked, "gained", 2.0),
        lambda m: setattr(marked, "gained", 5.0),
    ),
    "another operator": (
        lambda m: m.some["e"][0],
        lambda m: setattr(Factor, "__getitem__", lambda f, key: 9.0),
    ),
}


def _as_it_is(factor):
    return factor


@pytest.fixture
def all_put_back():
    holders = [Scaled, Config, Settings, Factor]
    before = [dict(vars(holder)) for holder in holders]
    yield
    globals().pop("LATER", None)
    globals()["GLOBAL_FACTOR"], marked.factor, plain_module.scale = 2.0, 2.0, 2.0
    by_default.__defaults__[0][0], HELD[0].scale = 2.0, 2.0
    vars(plain_module).pop("late", None)
    vars(marked).pop("gained", None)
    vars(settings).clear()
    for holder, attributes in zip(holders, before, strict=True):
        for name in [name for name in vars(holder) if name not in attributes]:
            delattr(holder, name)
    Factor.__getitem__ = before[3]["__getitem__"]


@pytest.mark.usefixtures("all_put_back")
@pytest.mark.parametrize("what", ELSEWHERE)
def test_what_is_elsewhere_or_comes_later_is_captured_again_once(what):
    factor, change = ELSEWHERE[what]
    model = Scaled(factor)
    model.some.update(c=[Layer()], d=functools.partial(_as_it_is, factor=2.0), e=Factor())
    amp = ampgraph.convert(model, (X,), **LOW)
    before = amp(X)
    close(before, model(X))
    assert len(amp.graph_modules) == 1
    change(model)
    close(amp(X), model(X))
    close(amp(X), model(X))
    assert len(amp.graph_modules) == 2
    assert not torch.equal(before, amp(X))


REGIONS = {
    "a branch": lambda inner, x: torch.cond(x.sum() > -1e4, inner, lambda y: y * 0.5, (x,)),
    "a checkpoint": lambda inner, x: checkpoint(inner, x, use_reentrant=False),
    "a map": lambda inner, x: torch.vmap(inner)(x),
}
READ_INSIDE = ("a number", "a property", "a config", "a tensor")


class Inside(Scaled):
    """Reads its attributes in a function that torch traces in a way of its own."""

    def __init__(self, factor, region):
        super().__init__(factor)
        self.region = region

    def forward(self, x):
        return self.region(lambda y: Scaled.forward(self, y), x)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("what", READ_INSIDE)
def test_what_is_read_inside_a_region_is_watched(what, region):
    factor, change = FACTORS[what]
    model = Inside(factor, REGIONS[region])
    amp = ampgraph.convert(model, (X,), capture="ahead of time", **LOW)
    close(amp(X), model(X))
    change(model)
    torch.compiler.reset()  # torch 2.15 refuses another number in the model's own torch.cond
    close(amp(X), model(X))
    assert len(amp.graph_modules) == 2


@pytest.mark.parametrize("region", REGIONS)
def test_what_is_read_inside_a_region_is_watched_just_in_time(region):
    factor, change = FACTORS["a flag"]  # torch.compile refuses another float in torch.cond
    model = Inside(factor, REGIONS[region])
    torch._dynamo.reset()
    amp = ampgraph.convert(model, capture="just in time", **LOW)
    close(amp(X), model(X))
    change(model)
    close(amp(X), model(X))


def test_another_thread_reads_as_ever_during_a_capture_and_is_not_watched():
    found = []

    def read(module):
        found.extend((module.temp, nn.Module.__getattribute__(module, "unread")))
        return 2.0

    def factor(module):
        thread = threading.Thread(target=read, args=(module,))
        thread.start()
        thread.join()
        return module.some["a"]

    model = Scaled(factor)
    reads = Reads(model)
    capture_program(model, (X,), reads=reads)
    assert found == [2.0, 1.0]
    assert set(reads.paths().values()) == {"factor", "some", "act"}


@pytest.mark.parametrize("region", REGIONS)
def test_a_capture_that_fails_in_a_region_leaves_torch_as_it_was(region):
    def refuses(module):
        raise KeyError(module.temp)

    model = Inside(refuses, REGIONS[region])
    torch.compile(nn.Identity(), backend="eager")(X)  # Dynamo's first use patches nn.Module for good
    before = dict(vars(nn.Module)), torch.is_grad_enabled
    with pytest.raises(ampgraph.CaptureError):
        capture_program(model, (X,), reads=Reads(model))
    assert (dict(vars(nn.Module)), torch.is_grad_enabled) == before
    assert torch.is_grad_enabled is before[1]  # what stands in for it is equal to it


def test_what_is_set_back_is_not_captured_again():
    model = Scaled(lambda m: m.temp)
    amp = ampgraph.convert(model, (X,), **LOW)
    for temp in (2.0, 5.0, 2.0, 5.0, 2.0):
        amp.temp = temp
        close(amp(X), model(X))
    assert len(amp.graph_modules) == 2


class Registry(dict):
    """Keeps what belongs to a class under its name, as transformers does."""

    def __setitem__(self, key, value):
        super().__setitem__(type(key).__name__, value)

    def __iter__(self):
        raise AssertionError("not by name")


class Doubled(list):
    def __iter__(self):
        return (2 * item for item in super().__iter__())


REGISTRY, DOUBLED = Registry(), Doubled([1.0])
REGISTRY[X] = {"factor": 2.0, "kind": nn.Linear}


class ReadsOddContainers(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.factors = nn.Linear(4, 4), Doubled([1.0, 2.0])

    def forward(self, x):
        return self.fc(x) * REGISTRY.get("Tensor")["factor"] * sum(DOUBLED) * sum(self.factors)


def test_containers_with_item_access_that_differs_are_compared_by_their_content():
    model = ReadsOddContainers()
    amp = ampgraph.convert(model, (X,), **LOW)
    for _ in range(3):
        close(amp(X), model(X))
    assert len(list(amp._graphs)) == 1
    for change in (
        lambda: REGISTRY["Tensor"].update(factor=3.0),
        lambda: DOUBLED.append(2.0),
        lambda: model.factors.append(2.0),
    ):
        change()
        for _ in range(2):
            close(amp(X), model(X))
    assert len(list(amp._graphs)) == 4


def test_what_forward_does_not_read_is_not_watched():
    model = Scaled(lambda m: m.temp)
    amp = ampgraph.convert(model, (X,), **LOW)
    for step in range(3):
        model.unread = model.epoch = step
        amp(X)
    assert len(amp.graph_modules) == 1


@pytest.mark.parametrize("attribute", ["some", "config"])
def test_capture_leaves_the_models_own_objects_in_place(attribute):
    model = Scaled(lambda m: m.some["a"])
    held = getattr(model, attribute)
    ampgraph.convert(model, (X,), **LOW)
    assert getattr(model, attribute) is held


def test_dropout_and_batch_norm():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0))
    amp = ampgraph.convert(model, (X,), **LOW)
    amp(X)
    model[2].p = 1.0
    assert torch.equal(amp(X), torch.zeros(6, 4))
    model[1].momentum = 1.0
    amp(X)
    close(model[1].running_mean, model[0](X).mean(0))
    assert len(amp.graph_modules) == 3


def test_update_bn():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    amp = ampgraph.convert(model, (X,), **LOW)
    amp(X)
    batches = [torch.randn(6, 4) + i for i in range(3)]
    torch.optim.swa_utils.update_bn(batches, amp)
    got = model[1].running_mean.clone(), model[1].running_var.clone()
    torch.optim.swa_utils.update_bn(batches, model)
    close(got[0], model[1].running_mean)
    close(got[1], model[1].running_var)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.calls, self.seen = nn.Linear(4, 4), 0, []

    def forward(self, x):
        self.calls += 1
        self.width = x.shape[1]
        return self.fc(x) * self.width


class Collects(Counts):
    def forward(self, x):
        self.seen.append(len(self.seen))
        return self.fc(x)


@pytest.mark.parametrize(("model", "name"), [(Counts(), "calls"), (Collects(), "seen")])
def test_what_forward_sets_for_the_next_call_is_told_and_not_captured_again(model, name):
    with pytest.warns(UserWarning, match=f"forward reads {name} and sets it") as told:
        amp = ampgraph.convert(model, (X,), **LOW)
    assert [w.filename for w in told] == [__file__]
    for _ in range(3):
        amp(X)
        model(X)
    assert len(amp.graph_modules) == 1


class AsksGradMode(nn.Module):
    def __init__(self, asks):
        super().__init__()
        self.fc, self.asks = nn.Linear(4, 4), asks

    def forward(self, x):
        y = self.fc(x)
        return y * 2 if self.asks(self, y) else y


ASKS = {
    "grad mode": lambda m, y: torch.is_grad_enabled(),
    "a result": lambda m, y: y.requires_grad,
    "how it was made": lambda m, y: y.grad_fn is not None,
    "whether it is a leaf": lambda m, y: not y.is_leaf,
    "a parameter": lambda m, y: m.fc.weight.requires_grad and torch.is_grad_enabled(),
}


@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize("first", [torch.enable_grad, torch.no_grad])
def test_grad_mode_that_forward_reads(asks, first):
    model = AsksGradMode(ASKS[asks])
    with first():
        amp = ampgraph.convert(model, (X,), **LOW)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            close(amp(X), model(X))
    assert len(amp.graph_modules) == 2
    amp(X).sum().backward()
    assert model.fc.weight.grad is not None


def test_a_frozen_parameter_that_forward_asks_about():
    model = AsksGradMode(ASKS["a parameter"])
    amp = ampgraph.convert(model, (X,), **LOW)
    model.fc.requires_grad_(False)
    close(amp(X), model(X))


def test_grad_mode_that_torch_alone_reads_makes_one_graph():
    model = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    amp = ampgraph.convert(model, (x,), **LOW)
    for mode in (contextlib.nullcontext, torch.no_grad):
        with mode():
            close(amp(x), model(x))
    assert len(amp.graph_modules) == 1


def test_other_sizes_after_a_change():
    model = Scaled(lambda m: m.temp)
    amp = ampgraph.convert(model, (X,), dynamic_shapes=({0: torch.export.Dim.AUTO},), **LOW)
    model.temp = 7.0
    for rows in (6, 5, 9):
        x = torch.randn(rows, 4)
        close(amp(x), model(x))
    assert len(amp.graph_modules) == 2


def test_many_captures_name_what_changed(caplog):
    model = Scaled(lambda m: m.config.scale)
    amp = ampgraph.convert(model, (X,), **LOW)
    for step in range(8):
        model.config.scale = float(step)
        amp(X)
    assert "(config.scale)" in caplog.text


DRAWS = {
    "random": lambda m: random.random(),
    "numpy.random": lambda m: float(numpy.random.random()),
    "numpys": lambda m: float(m.numpys.random()),
    "state": lambda m: float(m.state.random()),
    "own": lambda m: m.own.random(),
    "PYTHONS": lambda m: PYTHONS.random(),
    "helper.dice": lambda m: m.helper["dice"][0].dice.choice((0.2, 0.8)),
    "bound": lambda m: m.bound(),
    "of_torch": lambda m: torch.rand(1, generator=m.of_torch),
    "GENERATOR": lambda m: torch.empty(1).uniform_(generator=GENERATOR),
}
GENERATOR = torch.Generator()
PYTHONS = random.Random(0)


class Dice:
    def __init__(self):
        self.dice = random.Random(0)


class Draws(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.fc, self.draw = nn.Linear(4, 4), draw
        self.own, self.of_torch = random.Random(0), torch.Generator()
        self.numpys, self.state = numpy.random.default_rng(0), numpy.random.RandomState(0)
        self.helper, self.bound = {"dice": [Dice()]}, random.Random(0).random
        self.of_system = random.SystemRandom()  # has no state

    def forward(self, x):
        return self.fc(x) * (self.draw(self) < 0.5) * 2.0


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_of_python_are_drawn_at_each_call(name):
    model, owner = Draws(DRAWS[name]), name.partition(".")[0]
    told = rf"Draws: forward draws from \S*{owner}.*, which a graph cannot"
    before = random.getstate(), model.own.getstate()
    with pytest.raises(ampgraph.CaptureError, match=told):
        ampgraph.convert(model, (X,), capture="ahead of time", **LOW)
    with pytest.warns(UserWarning, match=f"{told}; it is"):
        amp = ampgraph.convert(model, (X,), **LOW)
    assert (random.getstate(), model.own.getstate()) == before
    means = {float(amp(X).abs().mean()) > 0 for _ in range(30)}
    assert means == {True, False}


@pytest.mark.parametrize("name", ["own", "PYTHONS", "helper.dice", "numpys"])
def test_without_example_inputs_generators_are_drawn_from_at_each_call_too(name):
    model, source = Draws(DRAWS[name]), Draws(DRAWS[name])
    source.load_state_dict(model.state_dict())
    state = PYTHONS.getstate()
    expected = [bool(source(X).any()) for _ in range(12)]
    PYTHONS.setstate(state)
    amp = ampgraph.convert(model, **LOW)
    assert [bool(amp(X).any()) for _ in range(12)] == expected
    assert set(expected) == {True, False}


@contextlib.contextmanager
def _forked():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        yield


def _seed():
    torch.manual_seed(5)
    return contextlib.nullcontext()


@pytest.mark.parametrize("seeds", [_forked, _seed])
def test_a_forward_that_seeds_torch_draws_as_the_source(seeds):
    class Seeds(nn.Linear):
        def forward(self, x):
            with seeds():
                noise = torch.rand(4)
            return super().forward(x) + noise

    model = Seeds(4, 4)
    with pytest.warns(UserWarning, match=rf"forward seeds torch's generator \({__file__}:.* just in time"):
        amp = ampgraph.convert(model, (X,), **LOW)
    close(amp(X), model(X))


def test_a_forward_that_draws_from_torchs_generator_is_captured_ahead_of_time(recwarn):
    class Noise(nn.Linear):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x + torch.rand(4), use_reentrant=False)

    model = Noise(4, 4)
    state = torch.get_rng_state()
    amp = ampgraph.convert(model, (X,), **LOW)
    assert not amp.is_just_in_time
    assert torch.equal(torch.get_rng_state(), state)


ASKED_IN_A_BRANCH = {
    "contiguous": (lambda y: 2 if y.is_contiguous() else 3, lambda x: x.clone().t().contiguous().t()),
    "stride": (lambda y: y.stride(0), lambda x: x.clone().t().contiguous().t()),
    "requires_grad": (lambda y: 2 if y.requires_grad else 3, lambda x: x.clone().requires_grad_()),
}


@pytest.mark.parametrize("what", ASKED_IN_A_BRANCH)
def test_what_a_branch_asks_about_its_argument(what):
    ask, other = ASKED_IN_A_BRANCH[what]

    class Asks(nn.Linear):
        def forward(self, x):
            inner = super().forward
            return torch.cond(x.sum() > -1e4, lambda y: inner(y) * ask(y), lambda y: inner(y), (x,))

    model = Asks(4, 4)
    amp = ampgraph.convert(model, (X,), **LOW)
    for x in (X, other(X), X):
        close(amp(x), model(x))
    assert not amp.is_just_in_time
    assert len(amp.graph_modules) == 2


epoch = 0  # a loop's own variable, with the name of an attribute


class Scheduled(nn.Module):
    """Reads an attribute, and in a function inside of forward a global."""

    def __init__(self):
        super().__init__()
        self.fc, self.epoch = nn.Linear(4, 4), 2

    def forward(self, x):
        return (lambda y: y * LOUDNESS["all"])(self.fc(x)) * self.epoch


LOUDNESS = {"all": 1.0}


def test_a_global_with_the_name_of_an_attribute_is_not_watched(monkeypatch):
    model = Scheduled()
    amp = ampgraph.convert(model, (torch.ones(2, 4),), dtype=torch.bfloat16, backend="eager")
    for number in range(3):
        monkeypatch.setitem(globals(), "epoch", number)
        amp(torch.ones(2, 4))
    assert len(amp.graph_modules) == 1
    monkeypatch.setitem(LOUDNESS, "all", 5.0)
    torch.testing.assert_close(amp(torch.ones(2, 4)), model(torch.ones(2, 4)), rtol=0.05, atol=0.05)
    assert len(amp.graph_modules) == 2


@pytest.mark.parametrize("count", [1, 6], ids=["one holder", "many holders"])
@pytest.mark.parametrize(
    ("before", "after"), [(2.0, 3.0), (object(), object())], ids=["a value", "an object"]
)
@pytest.mark.parametrize("is_watched", [False, True], ids=["unwatched", "watched"])
def test_every_holder_of_a_name_is_read(count, before, after, is_watched):
    holders, places = [{"name": before} for _ in range(count)], Places()
    for i, holder in enumerate(holders):
        places.add(Place(holder, "name", f"{i}.name"))
    places.settle([*map(id, holders)] if is_watched else [])
    assert places.are_same()
    for holder in holders:
        holder["name"] = after
        assert not places.are_same()
        assert places.are_same(is_untouched=True) is is_watched
        holder["name"] = before
        assert places.are_same()


def test_a_function_of_a_class_that_names_no_module_is_called():
    """Functions that Cython compiled are of such a class."""
    compiled = type("compiled", (), {"__module__": property(repr), "__call__": lambda self, x: x * 2})()

    class Calls(nn.Linear):
        def forward(self, x):
            return compiled(super().forward(x))

    model = Calls(4, 4)
    amp = ampgraph.convert(model, (X,), capture="ahead of time", **LOW)
    close(amp(X), model(X))


RATE = 1.0


def rated(x):
    return x * RATE


def _by_default(x, functions=(rated,)):
    return functions[0](x)


class Called:
    def __init__(self, function):
        self.function = function

    def __call__(self, x):
        return self.function(x)


class Registry:
    known = {"rated": rated}  # noqa: RUF012


TABLE, FUNCTIONS, NAMES, OBJECT = {"rated": rated}, [rated], SimpleNamespace(rated=rated), Called(rated)
TABLES = {
    "dict": lambda x: TABLE["rated"](x),
    "list": lambda x: FUNCTIONS[0](x),
    "namespace": lambda x: NAMES.rated(x),
    "object": lambda x: OBJECT(x),
    "class": lambda x: Registry.known["rated"](x),
    "default": lambda x: _by_default(x),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_global_that_a_function_in_a_table_reads(name, monkeypatch):
    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.function = nn.Linear(4, 4), TABLES[name]

        def forward(self, x):
            return self.function(self.fc(x))

    model, x = Uses(), torch.randn(3, 4)
    amp = ampgraph.convert(model, (x,), dtype=torch.bfloat16)
    for rate in (1.0, 3.0, 5.0):
        monkeypatch.setitem(globals(), "RATE", rate)
        torch.testing.assert_close(amp(x), model(x), rtol=0.05, atol=0.05)
    assert not amp.is_just_in_time


SETTINGS = {
    "a function of torch": (torch.tanh, torch.relu),
    "a function that is built in": (nn.functional.gelu, nn.functional.softplus),
    "a method of tensors": (torch.Tensor.tanh, torch.Tensor.exp),
    "a number of numpy": (numpy.float32(1), numpy.float32(4)),
    "an array of numpy": (numpy.array(1.0), numpy.array(4.0)),
    "a decimal": (decimal.Decimal(1), decimal.Decimal(4)),
    "a fraction": (fractions.Fraction(1), fractions.Fraction(4)),
}


class Shares:
    shared = None


@pytest.mark.parametrize("place", ["object", "class"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_an_attribute_of_an_object_may_be_any_value(kind, place, monkeypatch):
    before, after = SETTINGS[kind]

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.settings = nn.Linear(4, 4), Shares()

        def forward(self, x):
            value = self.settings.shared
            return value(self.fc(x)) if callable(value) else self.fc(x) * float(value)

    model = Reads()
    holder = model.settings if place == "object" else Shares
    held = staticmethod(before) if place == "class" and callable(before) else before
    monkeypatch.setattr(holder, "shared", held, raising=False)
    amp = ampgraph.convert(model, (X,), **LOW)
    close(amp(X), model(X))
    held = staticmethod(after) if place == "class" and callable(after) else after
    monkeypatch.setattr(holder, "shared", held)
    close(amp(X), model(X))
    close(amp(X), model(X))
    assert len(amp.graph_modules) == 2


class Steers:
    """A hook that is an object."""

    def __init__(self):
        self.strength, self.is_on, self.inner = 1.0, True, {"factor": [1.0]}

    def __call__(self, module, args, result):
        return result * self.strength * self.inner["factor"][0] if self.is_on else result - 1

    def as_pre_hook(self, module, args):
        return (self(module, args, args[0]),)


@pytest.mark.parametrize("change", ["strength", "is_on", "inner"])
@pytest.mark.parametrize("form", ["object", "method", "partial", "pre-hook"])
def test_settings_of_a_hook_are_watched(form, change):
    model, steers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Steers()
    if form == "pre-hook":
        model[1].register_forward_pre_hook(functools.partial(Steers.as_pre_hook, steers))
    else:
        hooks = {
            "object": steers,
            "method": steers.__call__,
            "partial": functools.partial(Steers.__call__, steers),
        }
        model[0].register_forward_hook(hooks[form])
    amp = ampgraph.convert(model, (X,), **LOW)
    close(amp(X), model(X))
    if change == "strength":
        steers.strength = 3.0
    elif change == "is_on":
        steers.is_on = False
    else:
        steers.inner["factor"][0] = 4.0
    close(amp(X), model(X))
    assert len(amp.graph_modules) == 2


def test_a_buffer_that_comes_to_share_memory_with_a_written_one():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("bank", torch.randn(6, 4))
            self.register_buffer("head", torch.randn(2, 4))

        def forward(self, x):
            before = self.fc(self.head)
            self.bank.add_(x)
            return before, self.fc(self.head)

    model = Writes()
    amp = ampgraph.convert(model, (X,), **LOW)
    amp(X)
    model.head = model.bank[:2]
    values = model.bank.clone()
    result = amp(X)
    model.bank.copy_(values)
    for got, expected in zip(result, model(X), strict=True):
        close(got, expected)


def test_a_list_of_all_objects_of_a_class_is_not_watched():
    class Registered:
        every = ()

        def __init__(self):
            self.scale = 2.0
            Registered.every = [*Registered.every, self]

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.settings = nn.Linear(4, 4), Registered()

        def forward(self, x):
            return self.fc(x) * self.settings.scale

    amp = ampgraph.convert(Reads(), (X,), **LOW)
    for _ in range(3):
        Registered()
        close(amp(X), amp.source(X))
    assert len(amp.graph_modules) == 1


class Counts:
    """A hook that belongs to a trainer, say."""

    factor, steps = 2.0, 0

    def __call__(self, module, args, result):
        return result * self.factor


def test_a_hook_that_counts_and_reads_its_count_is_told():
    class ReadsItsCount:
        count = 0

        def __call__(self, module, args, result):
            self.count += 1
            return result * self.count

    model, hook = nn.Sequential(nn.Linear(4, 4)), ReadsItsCount()
    hook.count = 0
    model[0].register_forward_hook(hook)
    with pytest.warns(UserWarning, match=r"forward sets 0\.ReadsItsCount\.count"):
        ampgraph.convert(model, (X,), **LOW)


def test_what_no_code_names_of_a_hook_is_not_watched():
    model, hook = nn.Sequential(nn.Linear(4, 4)), Counts()
    hook.steps = 0
    model[0].register_forward_hook(hook)
    amp = ampgraph.convert(model, (X,), **LOW)
    for hook.steps in range(3):
        close(amp(X), model(X))
    assert len(amp.graph_modules) == 1


def test_arrays_that_change_at_each_call_are_named_at_the_eighth_capture(caplog):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.settings = nn.Linear(4, 4), SimpleNamespace(scale=numpy.ones(3))

        def forward(self, x):
            return self.fc(x) * float(self.settings.scale[0])

    amp = ampgraph.convert(Reads(), (X,), **LOW)
    for number in range(8):
        amp.source.settings.scale = numpy.full(3, float(number))
        close(amp(X), amp.source(X))
    assert "settings.scale" in caplog.text
