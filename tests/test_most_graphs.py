"""A model keeps a limited number of graphs; the one whose last use is longest ago makes room."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph.runtime import graph_cache

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, factor: int) -> torch.Tensor:
        return self.linear(x) * factor


@pytest.fixture
def amp(monkeypatch: pytest.MonkeyPatch) -> ampgraph.AmpModule:
    monkeypatch.setattr(graph_cache, "MOST_GRAPHS", 3)
    return ampgraph.convert(Times(), (X, 1), dtype=torch.bfloat16, backend="eager")


def graph_of(amp: ampgraph.AmpModule, factor: int) -> torch.fx.GraphModule:
    torch.testing.assert_close(amp(X, factor), amp.source(X, factor), rtol=0.05, atol=0.05 * factor)
    return amp.graph_module


def test_the_graph_whose_last_use_is_longest_ago_makes_room(amp) -> None:
    first, second, third = (graph_of(amp, factor) for factor in (1, 2, 3))
    assert graph_of(amp, 1) is first
    fourth = graph_of(amp, 4)
    assert {*amp.graph_modules} == {first, third, fourth}
    assert len(amp.timings) == 3
    assert "3 of 3" in str(ampgraph.explain(amp))
    assert graph_of(amp, 2) is not second
    assert {*amp.graph_modules} == {first, fourth, amp.graph_module}


def test_modes_share_the_limit_and_the_last_graph_stays(amp) -> None:
    kept = graph_of(amp, 1)
    amp.eval()
    others = [graph_of(amp, factor) for factor in (1, 2, 3)]
    assert amp.graph_modules == others
    amp.train()
    assert graph_of(amp, 1) is not kept
    assert amp.graph_module is amp.graph_modules[-1]


def test_a_backward_outlives_its_graph_and_then_the_graph_is_freed(amp) -> None:
    loss, graph = amp(X, 1).sum(), weakref.ref(amp.graph_module)
    for factor in (2, 3, 4, 5):
        graph_of(amp, factor)
    loss.backward()
    expected = X.sum(0).expand(8, 8)
    torch.testing.assert_close(amp.source.linear.weight.grad, expected, rtol=0.05, atol=0.05)
    del loss
    gc.collect()
    assert graph() is None
