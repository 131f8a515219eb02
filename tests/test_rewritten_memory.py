"""A run of a CUDA graph writes to what the run before returned; here a backend does so on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

import ampgraph
from ampgraph import DynamicLossScale, Policy
from ampgraph.runtime.options import Options

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
BAD = torch.full_like(X, float("inf"))
POLICY = Policy("O1", dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=64.0, growth_interval=3))


class Rewriting:
    """Runs graphs as they are, and spoils what each returned when it, or a forward, runs again."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.backend = aot_autograd(fw_compiler=self.forward, bw_compiler=self.backward)

    def spoil(self, spared: Any) -> None:
        """Overwrites what graphs returned, except weights and what the caller passes now."""
        kept = {t.untyped_storage().data_ptr() for t in spared if isinstance(t, Tensor)}
        for tensor in self.given:
            if tensor.untyped_storage().data_ptr() not in kept:
                tensor.fill_(float("nan") if tensor.is_floating_point() else -7)
        self.given.clear()

    def forward(self, graph: fx.GraphModule, _: Any) -> Callable:
        def run(*args: Any) -> Any:
            self.spoil(args)
            return self.note(graph(*args))

        return run

    def backward(self, graph: fx.GraphModule, _: Any) -> Callable:
        return lambda *args: self.note(graph(*args))

    def note(self, results: Any) -> Any:
        self.given += [t for t in results if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]
        return results


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Callable:
    monkeypatch.setattr(Options, "records_cuda_graphs", property(lambda options: callable(options.backend)))
    return Rewriting().backend


def scales(backend: Any, parts: int, one_graph: bool) -> tuple[list[float], Any]:
    """Trains with overflows on the way; returns the scale after each step, and the scaler's last overflow."""
    amp = ampgraph.convert(model(), (X,), policy=POLICY, backend=backend)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.01, fused=True)
    step = ampgraph.compile_step(amp, optimizer, lambda m, x: m(x).square().mean()) if one_graph else None
    amp.scaler.attach(optimizer)
    found = []
    for index in range(12):
        for part in range(parts):
            x = BAD if index in (2, 7) and part == 0 else X
            if step is not None:
                step(x)
                continue
            amp(x).square().mean().div(parts).backward()
            # A loop that accumulates has to copy gradients of CUDA graphs itself.
            for p in amp.parameters():
                p.grad = copy.deepcopy(p.grad) if part + 1 < parts else p.grad
        if step is None:
            optimizer.step()
            optimizer.zero_grad()
        found.append(amp.scaler.get_scale())
    return found, amp.scaler.last_overflow


@pytest.mark.parametrize("parts", [1, 2])
def test_a_loop(backend, parts) -> None:
    found, last = scales(backend, parts, one_graph=False)
    expected, _ = scales("eager", parts, one_graph=False)
    assert found == expected
    assert last is not None
    assert last.step == 8


def test_a_step_as_one_graph(backend) -> None:
    found, last = scales(backend, 1, one_graph=True)
    expected, _ = scales("eager", 1, one_graph=True)
    assert found == expected
    assert last is not None
    assert last.step == 8
