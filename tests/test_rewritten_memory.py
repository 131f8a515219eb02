"""A run of a CUDA graph writes to what the run before returned; here a backend does so on a CPU."""

from __future__ import annotations

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
        self.parameters: list[nn.Parameter] = []
        self.backend = aot_autograd(fw_compiler=self.forward, bw_compiler=self.backward)

    def __deepcopy__(self, memo: dict) -> Rewriting:
        return self  # Lightning copies the arguments of torch.compile

    def spoil(self, spared: Any) -> None:
        """Overwrites what graphs returned, except gradients and what the caller passes now."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        kept = {t.untyped_storage().data_ptr() for t in (*spared, *gradients) if isinstance(t, Tensor)}
        for tensor in self.given:
            if tensor.untyped_storage().data_ptr() not in kept:
                tensor.zero_()
        self.given.clear()

    def forward(self, graph: fx.GraphModule, _: Any) -> Callable:
        def run(*args: Any) -> Any:
            self.spoil(args)
            return self.note(graph(*args), args)

        return run

    def backward(self, graph: fx.GraphModule, _: Any) -> Callable:
        return lambda *args: self.note(graph(*args), args)

    def note(self, results: Any, args: Any) -> Any:
        """Takes the tensors that a graph has made, and none that it was given."""
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        tensors = [t for t in results if isinstance(t, Tensor)]
        self.given += [t for t in tensors if t.untyped_storage().data_ptr() not in given]
        return results


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))


@pytest.fixture
def rewriting() -> Rewriting:
    return Rewriting()


def scales(rewriting: Rewriting | None, one_graph: bool) -> tuple[list[float], Any]:
    """Trains with overflows on the way; returns the scale after each step, and the scaler's last overflow."""
    amp = ampgraph.convert(model(), (X,), policy=POLICY, backend=rewriting.backend if rewriting else "eager")
    if rewriting:
        rewriting.parameters = [*amp.parameters()]
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.01, fused=True)
    step = ampgraph.compile_step(amp, optimizer, lambda m, x: m(x).square().mean()) if one_graph else None
    amp.scaler.attach(optimizer)
    found = []
    for index in range(12):
        x = BAD if index in (2, 7) else X
        if step is not None:
            step(x)
        else:
            amp(x).square().mean().backward()
            with torch.no_grad():
                amp(X)  # writes to what the forward and the backward have returned
            optimizer.step()
            optimizer.zero_grad()
        found.append(amp.scaler.get_scale())
    assert all(p.isfinite().all() for p in amp.parameters())
    return found, amp.scaler.last_overflow


@pytest.mark.parametrize("one_graph", [False, True])
def test_scale_and_overflows_are_those_of_the_eager_loop(rewriting, one_graph) -> None:
    found, last = scales(rewriting, one_graph)
    expected, _ = scales(None, one_graph)
    assert found == expected
    assert last is not None
    assert last.step == 8


@pytest.mark.parametrize(
    ("backend", "mode", "records"),
    [
        ("eager", None, False),
        ("aot_eager", None, False),
        ("cudagraphs", None, True),
        ("inductor", None, False),
        ("inductor", "default", False),
        ("inductor", "reduce-overhead", True),
        ("inductor", "max-autotune", True),
        ("inductor", "max-autotune-no-cudagraphs", False),
        (Rewriting().backend, None, False),
    ],
)
def test_backends_that_record(backend, mode, records) -> None:
    options = Options(POLICY, backend, mode)
    assert options.records_cuda_graphs == records
    assert options.may_rewrite_results == (records or callable(backend))


def test_a_setting_of_torch_records() -> None:
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert Options(POLICY, "inductor").records_cuda_graphs
