"""Forward keeps tensors outside of the model: none of a capture stays there, and results are not frozen."""

import functools
import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import ampgraph
from ampgraph.capture import kept_tensors

EXACT = {"policy": ampgraph.Policy(ops=ampgraph.OpLists()), "dtype": torch.bfloat16}  # no op runs low
BATCHES = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in (3, 3, 5)]


@pytest.fixture(autouse=True, scope="module")
def unfrozen():
    gc.unfreeze()
    kept_tensors._seen_frozen.clear()
    yield
    gc.collect()
    gc.freeze()


def rows(count):
    return torch.arange(4.0 * count).view(count, 4)


@functools.lru_cache(None)
def cached(count):
    return rows(count)


@functools.lru_cache(2)
def cached_pair(count):
    return rows(count), torch.ones(4)


def by_default(count, _tables={}):  # noqa: B006
    return _tables.setdefault(count, rows(count))


def closure():
    tables = {}

    def get(count):
        if count not in tables:
            tables[count] = rows(count)
        return tables[count]

    return get


class Tables:
    last = None
    shared = {}  # noqa: RUF012

    def __init__(self):
        self.own = {}

    @classmethod
    def newest(cls, count):
        if cls.last is None or cls.last.shape[0] != count:
            cls.last = rows(count)
        return cls.last

    @classmethod
    def of_class(cls, count):
        if count not in cls.shared:
            cls.shared[count] = rows(count)
        return cls.shared[count]

    def of_object(self, count):
        if count not in self.own:
            self.own[count] = {"rows": [rows(count), torch.ones(4)]}
        return self.own[count]["rows"][0]


NEWEST = None


def as_variable(count):
    global NEWEST
    if NEWEST is None or NEWEST.shape[0] != count:
        NEWEST = rows(count)
    return NEWEST


def as_function_attribute(count):
    if not hasattr(as_function_attribute, f"of{count}"):
        setattr(as_function_attribute, f"of{count}", rows(count))
    return getattr(as_function_attribute, f"of{count}")


TABLES = {
    "lru_cache": cached,
    "lru_cache with a size": lambda count: cached_pair(count)[0],
    "default argument": by_default,
    "closure": closure(),
    "class attribute": Tables.newest,
    "dict of a class": Tables.of_class,
    "object": Tables().of_object,
    "global variable": as_variable,
    "function attribute": as_function_attribute,
}


class Adds(nn.Module):
    def __init__(self, get):
        super().__init__()
        self.fc, self.get = nn.Linear(4, 4), get

    def forward(self, x):
        return self.fc(x) + self.get(x.shape[0])


@pytest.mark.parametrize("where", TABLES)
def test_tables_in_caches_are_captured_and_hold_no_tensor_of_the_capture(where, recwarn):
    model = Adds(TABLES[where])
    amp = ampgraph.convert(model, (BATCHES[0],), **EXACT)
    for x in BATCHES:
        assert torch.equal(amp(x), model.fc(x) + rows(x.shape[0]))
    for x in reversed(BATCHES):
        assert torch.equal(model(x), model.fc(x) + rows(x.shape[0]))
    assert not amp.is_just_in_time
    assert not recwarn


class State:
    last = None


STATE, SEEN, LAST = State(), [], {}


def attribute_of_an_object(y):
    before, STATE.last = STATE.last, y.detach().mean(0)
    return y if before is None else y + before


def global_list(y):
    SEEN.append(y.detach().mean(0))
    return y + SEEN[0]


def global_dict(y):
    y = y + LAST.get("y", 0)
    LAST["y"] = y.detach().mean(0)
    return y


def drawn_once(y):
    if "drawn" not in LAST:
        LAST["drawn"] = torch.randn(4)
    return y + LAST["drawn"]


class Keeps(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.fc, self.keep = nn.Linear(4, 4), keep

    def forward(self, x):
        return self.keep(self.fc(x))


def forget():
    STATE.last = None
    SEEN.clear(), LAST.clear()


@pytest.mark.parametrize("keep", [attribute_of_an_object, global_list, global_dict, drawn_once])
def test_results_that_forward_keeps_for_later_calls_are_those_of_the_source(keep):
    forget()
    model = Keeps(keep)
    with pytest.raises(ampgraph.CaptureError, match=r"Keeps: forward keeps results in .*, which"):
        ampgraph.convert(model, (BATCHES[0],), capture="ahead of time", **EXACT)
    assert not any(isinstance(v, FakeTensor) for v in (STATE.last, *SEEN, *LAST.values()))
    with pytest.warns(UserWarning, match="forward keeps results in"):
        amp = ampgraph.convert(model, (BATCHES[0],), **EXACT)
    assert not (STATE.last, *SEEN, *LAST.values())[1:]
    torch.manual_seed(0)
    got = [amp(x) for x in BATCHES]
    forget()
    torch.manual_seed(0)
    for x, y in zip(BATCHES, got, strict=True):
        assert torch.equal(model(x), y)


def test_a_hook_that_stores_activations_stores_those_of_each_call():
    model, stored = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {}
    model[0].register_forward_hook(lambda module, args, result: stored.update(linear=result.detach()))
    with pytest.warns(UserWarning, match="keeps results in"):
        amp = ampgraph.convert(model, (BATCHES[0],), **EXACT)
    for x in BATCHES:
        amp(x)
        assert torch.equal(stored["linear"], model[0](x))


def test_a_reference_cycle_that_forward_leaves_behind_keeps_nothing(recwarn):
    class Cycle(nn.Module):
        def forward(self, x):
            state = State()
            state.last, state.itself = x * 2, state
            return state.last + 1

    amp = ampgraph.convert(Cycle(), (BATCHES[0],), capture="ahead of time", **EXACT)
    assert torch.equal(amp(BATCHES[2]), BATCHES[2] * 2 + 1)
    assert not recwarn


class Irrep(tuple):
    """As e3nn has them: a tuple that refuses what would be ambiguous."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_tuples_without_a_length_are_read() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.irrep, self.more = nn.Linear(4, 4), Irrep((1, -1)), [Irrep((0, 1))]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            degree, parity = self.irrep
            return self.linear(x) * degree * parity

    x, model = torch.randn(2, 4), Model()
    amp = ampgraph.convert(model, (x,), policy="O0", capture="ahead of time")
    assert torch.equal(amp(x), model(x))
    model.irrep = Irrep((2, 1))
    assert torch.equal(amp(x), model(x))
