"""Lists, dicts and sets that modules share are the same objects with the same content after a capture."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import AmpGraphError, Policy

X = torch.randn(4, 8)
POLICY = Policy(dtype=torch.bfloat16)


class Layer(nn.Module):
    def __init__(self, store: Any, put: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.store, self.put = nn.Linear(8, 8), store, put

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc(x)
        self.put(self.store, y.tanh())
        return y


class Model(nn.Module):
    def __init__(self, store: Any, put: Callable[[Any, torch.Tensor], Any], get: Callable) -> None:
        super().__init__()
        self.store, self.layer, self.head, self.get = store, Layer(store, put), nn.Linear(8, 8), get

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)) + self.get(self.store)


def _count(store: Any, _: torch.Tensor) -> None:
    store.append(len(store))


def _append(store: list, value: torch.Tensor) -> None:
    store.append(value)


def _insert(store: dict, value: torch.Tensor) -> None:
    store["inner"][0] = value


CASES = {
    "list": (lambda: [torch.zeros(4, 8)], lambda s, v: s.__setitem__(0, v), lambda s: s[0]),
    "numbers": (lambda: [0, 1], _count, len),
    "deque": (lambda: deque([torch.zeros(4, 8)], maxlen=1), deque.append, lambda s: s[-1]),
    "dict": (dict, lambda s, v: s.update(y=v), lambda s: s["y"]),
    "ordered": (OrderedDict, lambda s, v: s.update(y=v), lambda s: s["y"]),
    "nested": (lambda: {"inner": [torch.zeros(4, 8)]}, _insert, lambda s: s["inner"][0]),
    "set": (set, lambda s, v: s.add(v.shape[0]), len),
}


def _flat(store: Any) -> list[object]:
    """Returns the content, where a call compares tensors by their values."""
    items = [*store.items()] if isinstance(store, dict) else [*store]
    return [item.tolist() if isinstance(item, torch.Tensor) else str(item) for item in items]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["auto", "ahead of time", "blocks"])
def test_a_container_stays_the_same(case: str, how: str, recwarn: pytest.WarningsRecorder) -> None:
    make, put, get = CASES[case]
    store = make()
    before = _flat(store)
    model = Model(store, put, get)
    try:
        if how == "blocks":
            ampgraph.convert_blocks(model, "layer", policy=POLICY)
            model(X)
        else:
            ampgraph.convert(model, (X,), policy=POLICY, capture=how)
    except AmpGraphError:
        assert how == "ahead of time"
    assert model.store is store
    assert model.layer.store is store
    if how != "blocks":
        assert _flat(store) == before


# A call carries numbers to the next, which a graph does not; a warning says so.
@pytest.mark.parametrize("case", [case for case in CASES if case != "numbers"])
def test_results_are_those_of_the_source(case: str, recwarn: pytest.WarningsRecorder) -> None:
    make, put, get = CASES[case]
    torch.manual_seed(0)
    source = Model(make(), put, get)
    torch.manual_seed(0)
    amp = ampgraph.convert(Model(make(), put, get), (X,), policy=POLICY)
    for _ in range(2):
        torch.testing.assert_close(amp(X), source(X), atol=0.05, rtol=0.05)
    assert amp.source.store is amp.source.layer.store


def test_a_list_that_others_hold_gets_the_results_of_calls() -> None:
    store: list[torch.Tensor] = []
    with pytest.warns(UserWarning, match="forward keeps results in store, which a graph cannot"):
        amp = ampgraph.convert(Model(store, _append, lambda s: s[-1]), (X,), policy=POLICY)
    assert store == []
    assert amp(X).shape == (4, 8)
    assert len(store) == 1
    assert amp.source.store is store


class Alone(nn.Module):
    def __init__(self, results: list | dict) -> None:
        super().__init__()
        self.fc, self.results = nn.Linear(8, 8), results

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = len(self.results) if isinstance(self.results, dict) else slice(None)
        self.results[key] = [self.fc(x)]
        return self.fc(x)


def test_a_list_gets_the_results_of_calls() -> None:
    model = Alone([])
    with pytest.warns(UserWarning, match="forward keeps results in results, which a graph cannot"):
        amp = ampgraph.convert(model, (X,), policy=POLICY)
    assert model.results == []
    amp(X)
    assert len(model.results) == 1


def test_a_dict_that_nothing_else_holds_may_be_a_cache() -> None:
    model = Alone({})
    with pytest.warns(UserWarning, match="forward reads results and sets it for the next call"):
        ampgraph.convert(model, (X,), policy=POLICY, capture="ahead of time")
    assert model.results == {}


def test_settings_in_a_shared_dict_count_for_later_calls(recwarn: pytest.WarningsRecorder) -> None:
    settings = {"scale": 1.0, "calls": 0}
    model = Model(settings, lambda s, _: s.update(calls=s["calls"] + 1), lambda s: s["scale"])
    amp = ampgraph.convert(model, (X,), policy=POLICY, capture="just in time")
    amp(X)
    settings["scale"] = 5.0
    torch.testing.assert_close(amp(X), model(X), atol=0.05, rtol=0.05)


class Cached(nn.Module):
    def __init__(self, table_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc, self.tables, self.table_of = nn.Linear(8, 8), dict[int, torch.Tensor](), table_of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        if n not in self.tables:
            self.tables[n] = self.table_of(x)
        return self.fc(x) + self.tables[n]


@pytest.mark.parametrize(
    ("table_of", "is_warm"),
    [
        (lambda x: torch.arange(float(x.shape[0]))[:, None], False),
        (lambda x: torch.arange(float(x.shape[0]))[:, None], True),
        (lambda x: x.new_zeros(x.shape), False),
        (lambda x: torch.full_like(x, 2.0), False),
    ],
)
def test_a_cache_of_tables_is_captured(
    table_of: Callable, is_warm: bool, recwarn: pytest.WarningsRecorder
) -> None:
    model = Cached(table_of)
    if is_warm:
        model(torch.randn(3, 8))
    amp = ampgraph.convert(model, (X,), policy=POLICY, capture="ahead of time")
    assert [*model.tables] == [3] * is_warm
    torch.testing.assert_close(amp(X), model(X), atol=0.05, rtol=0.05)
