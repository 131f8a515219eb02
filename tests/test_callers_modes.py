"""Dispatch modes of the caller around converted models: FLOP counters, loggers, memory trackers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ampgraph

BF16 = torch.bfloat16
X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
FORWARD = 2 * 2 * 8 * 32 * 32
BACKENDS = ("eager", "aot_eager", "inductor")


@pytest.fixture(autouse=True)
def forget_graphs() -> None:
    torch._dynamo.reset()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))


def is_low(result: Tensor) -> bool:
    return torch.equal(result, result.to(BF16).float())


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["ahead of time", "just in time"])
def test_a_counter_sees_all_ops_and_the_model_stays_converted(way, backend, is_first) -> None:
    args = (X,) if way == "ahead of time" else None
    amp = ampgraph.convert(net(), args, dtype=BF16, backend=backend)
    assert is_first or is_low(amp(X))
    with FlopCounterMode(display=False) as counter:
        result = amp(X)
        result.sum().backward()
    assert is_low(result)
    assert counter.get_total_flops() == 5 * FORWARD // 2
    for _ in range(2):
        assert is_low(amp(X))


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_compiled_graphs_run_again_after_a_counter(backend: str) -> None:
    amp = ampgraph.convert(net(), (X,), dtype=BF16, backend=backend)
    amp(X)
    with FlopCounterMode(display=False):
        amp(X)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        amp(X)
    assert any("Compiled" in event.name for event in profile.events())


class Spoilt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(self.linear(x) * 0 - 1).sum()


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("way", ["ahead of time", "just in time"])
def test_a_watch_sees_the_model_in_a_counter(way: str, counts: bool) -> None:
    amp = ampgraph.convert(
        Spoilt(), (X,) if way == "ahead of time" else None, dtype=BF16, backend="aot_eager"
    )
    with ampgraph.watch(amp) as seen, FlopCounterMode(display=False) if counts else torch.enable_grad():
        amp(X)
    assert seen.sightings


@pytest.mark.parametrize("way", ["ahead of time", "just in time"])
def test_a_float16_step_in_a_counter_is_the_same(way: str) -> None:
    found = []
    for counts in (False, True):
        amp = ampgraph.convert(net(), (X,) if way == "ahead of time" else None, dtype=torch.float16)
        optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
        for index in range(3):
            with FlopCounterMode(display=False) if counts and index == 1 else torch.enable_grad():
                amp(X).square().mean().backward()
                amp.scaler.step(optimizer)
                amp.scaler.update()
                optimizer.zero_grad()
        found.append([p.detach().clone() for p in amp.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step_runs_the_loop_in_a_counter(backend: str) -> None:
    amp = ampgraph.convert(net(), (X,), dtype=BF16, backend=backend)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1, fused=True)
    step = ampgraph.compile_step(amp, optimizer, lambda amp, x: amp(x).square().mean())
    step(X)
    step(X)
    assert step.reason is None
    with FlopCounterMode(display=False) as counter, warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        step(X)
    assert ("dispatch mode" in str(step.reason)) is (backend != "eager")
    assert counter.get_total_flops() == 5 * FORWARD // 2
    step(X)
    assert step.reason is None
