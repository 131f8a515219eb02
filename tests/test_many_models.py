"""Many models of one class, captured just in time in one process: all are converted, and later freed."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph._compat import dynamo

BF16 = torch.bfloat16
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.breaks = nn.Linear(4, 4), nn.Linear(4, 4), breaks

    def forward(self, x: torch.Tensor, words: str = "a") -> torch.Tensor:
        x = self.a(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.b(x) * len(words)


def runs_low(amp: nn.Module, source: nn.Module) -> bool:
    with torch.no_grad():
        return not torch.equal(amp(X), source(X))


@pytest.mark.skipif(dynamo.VERSION < (2, 13), reason="Limits: torch 2.11 compiles a layer's code eight times")
@pytest.mark.parametrize("breaks", [False, True])
def test_the_limit_of_the_process_ends_no_conversion(breaks) -> None:
    """Dynamo compiles a code object 256 times in all, for models that are gone too."""
    first = ampgraph.convert(Net(breaks), dtype=BF16)
    with torch._dynamo.config.patch(accumulated_recompile_limit=2):
        kept = []
        for _ in range(5):
            amp = copy.deepcopy(first)
            assert runs_low(amp, amp.source)
            kept.append(amp)
        assert torch._dynamo.config.accumulated_recompile_limit == 2


@pytest.mark.skipif(dynamo.VERSION < (2, 13), reason="torch 2.11 has no limit for one model")
def test_the_limit_of_a_model_is_told(monkeypatch) -> None:
    monkeypatch.setattr(dynamo, "RECOMPILE_LIMIT", 2)
    amp = ampgraph.convert(Net(), dtype=BF16)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Net ")
        amp(X, "a"), amp(X, "bb")
    with pytest.warns(UserWarning, match="Net runs in part unconverted.*as often as its limit"):
        amp(X, "ccc")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Net ")
        amp(X, "dddd")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("args", [None, (X,)], ids=["just in time", "ahead of time"])
def test_a_model_that_is_gone_is_freed(args, breaks, backend) -> None:
    if args and breaks:
        pytest.skip("ahead of time there is no graph break")
    source = Net(breaks)
    amp = ampgraph.convert(source, args, dtype=torch.float16, backend=backend)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    for _ in range(2):
        amp(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    gone = [weakref.ref(each) for each in (source, amp, source.a.weight, optimizer)]
    del source, amp, optimizer
    gc.collect()
    assert [each() for each in gone] == [None] * 4


@pytest.mark.parametrize("tool", ["check_numerics", "compare", "calibrate", "watch"])
def test_tools_free_a_model_captured_just_in_time(tool) -> None:
    source = Net()
    amp = ampgraph.convert(source, dtype=torch.float16)
    if tool == "watch":
        with ampgraph.watch(amp):
            amp(X)
    else:
        getattr(ampgraph, tool)(amp, [(X,)] if tool == "calibrate" else (X,))
    gone = [weakref.ref(each) for each in (source, amp, source.a.weight)]
    del source, amp
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def _wrapped(forward):
    def wrapper(self, *args):
        torch._dynamo.graph_break()
        return forward(self, *args)

    return wrapper


class Wrapped(nn.Module):
    """Its class shares a wrapper with others, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @_wrapped
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.linear(x)


@pytest.mark.filterwarnings("error:.*unconverted")
def test_models_with_one_wrapper_share_no_limit_and_no_graphs_of_models_that_are_gone() -> None:
    """In torch 2.11 a refused wrapper ran what it called with graphs of any model."""
    x = torch.randn(2, 4)
    with torch._dynamo.config.patch(recompile_limit=3):
        for cls in (Wrapped, *(type(f"Wrapped{i}", (Wrapped,), {}) for i in range(4)), Wrapped):
            model = cls()
            amp = ampgraph.convert(model, dtype=torch.bfloat16, backend="eager", capture="just in time")
            assert not torch.equal(amp(x), model(x))
            del amp
            gc.collect()
