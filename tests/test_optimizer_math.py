"""The updates in ops that a compiler fuses, beside torch's fused kernels, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import ampgraph
from ampgraph import NoLossScale, Policy
from ampgraph.errors import AmpGraphError
from ampgraph.step import trace_step
from ampgraph.step.optimizer_math import can_update, update
from ampgraph.step.whole_step import Rates, take

from .inductor_schedule import scheduled

SETTINGS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1, "eps": 1e-3}),
    (AdamW, {"weight_decay": 0.1, "lr": torch.tensor(0.02)}),
    (AdamW, {"maximize": True, "betas": (0.0, 0.99)}),
    (SGD, {"weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    (Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2}),
]


def trained(make: type[Optimizer], settings: dict[str, Any], step: Callable) -> Optimizer:
    """Returns an optimizer after steps, the fourth and ninth skipped; ``step`` takes all but the first."""
    torch.manual_seed(0)
    parameters = [torch.randn(5, 3, requires_grad=True) for _ in range(3)]
    optimizer = make(parameters, fused=True, **{"lr": 0.01} | settings)
    for i in range(12):
        is_bad = i % 5 == 3
        for parameter in parameters[: 3 if i % 2 == 0 else 2]:
            parameter.grad = torch.randn_like(parameter)
        if is_bad:
            parameters[0].grad = torch.full((5, 3), math.nan)
        with torch.no_grad():
            (step if i else take)(optimizer, torch.tensor(float(is_bad)))
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize(("make", "settings"), SETTINGS, ids=lambda value: getattr(value, "__name__", ""))
def test_updates_equal_those_of_the_fused_kernels(make: type[Optimizer], settings: dict[str, Any]) -> None:
    mine, theirs = trained(make, settings, update), trained(make, settings, take)
    assert can_update(mine)
    groups = zip(mine.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True)
    for a, b in groups:
        torch.testing.assert_close(a, b, rtol=1e-6, atol=2e-7)
        assert mine.state[a].keys() == theirs.state[b].keys()
        for name, value in mine.state[a].items():
            torch.testing.assert_close(value, theirs.state[b][name], rtol=1e-6, atol=2e-7)
    assert all(s["step"] == n for s, n in zip(mine.state.values(), (10, 10, 5), strict=True) if "step" in s)


def test_early_steps_keep_their_digits() -> None:
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = AdamW([parameter], lr=1.0, eps=0.0, weight_decay=0.0, fused=True)
    parameter.grad = torch.ones(1)
    take(optimizer, None)
    parameter.data.zero_()
    with torch.no_grad():
        update(optimizer, None)
    assert abs(parameter.item() + 1) < 3e-7  # in float32, 1 - 0.999 ** 2 is wrong by 3e-5


def test_what_ops_do_not_update() -> None:
    class Other(SGD):
        pass

    def held(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.ones(2, dtype=dtype, requires_grad=True)]

    assert can_update(SGD(held()))
    assert not can_update(Other(held()))
    assert not can_update(SGD(held(torch.float64)))
    assert not can_update(SGD([*held(), torch.ones(2, device="meta", requires_grad=True)]))
    flat = torch.ones(4)
    assert not can_update(SGD([nn.Parameter(flat[:2]), nn.Parameter(flat[2:])]))
    assert not can_update(Adam(held(), betas=(torch.tensor(0.9), torch.tensor(0.99)), lr=torch.tensor(1.0)))
    optimizer = SGD(held(), momentum=0.9, fused=True)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    with pytest.raises(AmpGraphError, match="creates state"):
        update(optimizer, None)


def test_low_copies_cost_what_they_are_written_with() -> None:
    size, x = 128, torch.randn(4, 128)
    model = nn.Linear(size, size, bias=False)
    policy = Policy("O2", dtype=torch.bfloat16, loss_scale=NoLossScale())
    amp = ampgraph.convert(model, (x,), policy=policy, backend="inductor")
    assert amp.training_graph is not None  # it has made the copies
    optimizer = SGD(model.parameters(), fused=True)
    step = trace_step.trace_step(amp, optimizer, lambda amp, x: amp(x).sum(), None, (x,), {})
    shadows = amp._graphs.shadows
    assert shadows is not None
    assert len(shadows.pairs()) == 1
    with torch.no_grad():
        kernels = scheduled(lambda *args: step.graph_module(*args), *Rates(optimizer)(), x).forward
    # The parameter is read and written, a low gradient is read, the low copy is written; and the rate.
    assert max(kernel.bytes for kernel in kernels if kernel.is_generated) == (8 + 2 + 2) * size**2 + 8
