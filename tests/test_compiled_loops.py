"""``torch.compile`` around a whole training step: it compiles no bookkeeping, and the steps are the same."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import DynamicLossScale, Policy

INF = float("inf")
BAD = {2, 5}
STEPS = 8
FLOAT16 = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(1024.0, growth_interval=2))


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    yield
    torch._dynamo.reset()


def train(source: nn.Module, is_attached: bool, fused: bool, is_compiled: bool) -> tuple[list[float], list]:
    amp = ampgraph.convert(source, (torch.ones(4, 8),), policy=FLOAT16)
    optimizer = torch.optim.AdamW(amp.parameters(), lr=0.1, fused=fused)
    if is_attached:
        amp.scaler.attach(optimizer)
    scaler, scales = amp.scaler, []

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        amp(x).square().mean().backward()
        if is_attached:
            optimizer.step()
        else:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    run = torch.compile(step, backend="eager") if is_compiled else step
    for index in range(STEPS):
        run(torch.full((4, 8), INF if index in BAD else 1.0))
        scales.append(scaler.get_scale())
    return scales, [p.detach().clone() for p in amp.parameters()]


@pytest.mark.parametrize("is_attached", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_compiled_step_is_the_step(is_attached, fused) -> None:
    source = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    expected = train(copy.deepcopy(source), is_attached, fused, is_compiled=False)
    assert expected[0] == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(lru_cache|non-Torch|pybind).*")
        scales, parameters = train(source, is_attached, fused, is_compiled=True)
    assert scales == expected[0]
    for ours, theirs in zip(parameters, expected[1], strict=True):
        assert torch.equal(ours, theirs)
    files = {metrics.co_filename for metrics in torch._dynamo.utils.get_compilation_metrics()}
    assert __file__ in files
    assert not {file for file in files if "/ampgraph/training/" in file}
