"""Ranks whose scales went apart: the next step that all take makes them one again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ampgraph
from ampgraph import DynamicLossScale, Policy, StaticLossScale
from ampgraph.training.scaler import LossScaler

pytestmark = pytest.mark.usefixtures("shared_captures")
INF = float("inf")
X = torch.ones(2, 4)
BAD = "_bad_tracker", "_hysteresis_left"


def policy(**numbers: Any) -> Policy:
    return Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=1024.0, **numbers))


def wrapped(how: str, **numbers: Any) -> tuple[nn.Module, LossScaler]:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if how == "sharded":
        scaler = ampgraph.convert_blocks(net, "[0-9]", policy=policy(**numbers)).scaler
        for module in (*net, net):
            fully_shard(module)
        return net, scaler
    amp = ampgraph.convert(net, (X,), policy=policy(**numbers))
    return DistributedDataParallel(amp), amp.scaler


def numbers_of(scaler: LossScaler) -> dict[str, Any]:
    """Returns what a checkpoint has but the names, of which each rank lists its own."""
    return {k: v for k, v in scaler.state_dict().items() if k != "_last_overflow"}


def loop_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Callable[[str], None]:
    def step(kind: str) -> None:
        """Steps; "bad": after an overflow of rank 1; "left out": no rank steps after such a one."""
        optimizer.zero_grad()
        (model(X).sum() * (INF if kind != "good" and rank == 1 else 1.0)).backward()
        if kind != "left out":
            optimizer.step()

    return step


def _left_out(rank: int, how: str, kinds: list[str], fused: bool, numbers: dict) -> list[dict]:
    model, scaler = wrapped(how, **numbers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler.attach(optimizer)
    step, found = loop_of(model, optimizer, rank), []
    for kind in kinds:
        step(kind)
        if kind != "left out":
            found.append(numbers_of(scaler))
    return found


@pytest.mark.parametrize("how", ["replicated", "sharded"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_left_out_after_an_overflow_of_one_rank(ranks, how, fused) -> None:
    """The bad step after a step that was left out does not lower the scale again, on either rank."""
    kinds = ["good", "left out", "good", "good", "left out", "bad", "good"]
    first, second = ranks.run(_left_out, how, kinds, fused, {"growth_interval": 1000})
    assert first == second
    assert [state["scale"] for state in first] == [1024.0, 512.0, 512.0, 256.0, 256.0]
    assert [state["_growth_tracker"] for state in first] == [1, 1, 2, 0, 1]
    assert [state["_steps"] for state in first] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("numbers", "kinds", "counters", "scales"),
    [
        ({"hysteresis": 2}, ["left out", "good", "bad"], [(0, 1), (0, 0)], [1024.0, 512.0]),
        (
            {"bad_steps_before_backoff": 3},
            ["left out", "good", "left out", "left out", "bad"],
            [(0, 1), (2, 1)],
            [1024.0, 1024.0],
        ),
        (
            {"growth_interval": 2},
            ["good", "left out", "good", "good"],
            [(0, 1), (0, 1), (0, 1)],  # without hysteresis no backoff is ignored
            [1024.0, 512.0, 1024.0],
        ),
    ],
)
def test_the_counters_of_all_ranks_are_one_too(ranks, numbers, kinds, counters, scales) -> None:
    first, second = ranks.run(_left_out, "replicated", kinds, False, numbers)
    assert first == second
    assert [tuple(state[name] for name in BAD) for state in first] == counters
    assert [state["scale"] for state in first] == scales


def _unlike_states(rank: int, scale: str) -> list[float]:
    loss_scale = StaticLossScale(64.0) if scale == "fixed" else DynamicLossScale()
    amp = ampgraph.convert(nn.Linear(4, 4), (X,), policy=Policy(dtype=torch.float16, loss_scale=loss_scale))
    if scale == "alone":
        amp.scaler.process_groups = ()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    amp.scaler.load_state_dict({"scale": 2.0 ** (9 - rank)})
    amp(X).sum().backward()
    optimizer.step()
    return amp.scaler.get_scale()


@pytest.mark.parametrize(
    ("scale", "expected"), [("dynamic", [256.0] * 2), ("fixed", [512.0, 256.0]), ("alone", [512.0, 256.0])]
)
def test_ranks_that_start_with_unlike_scales(ranks, scale, expected) -> None:
    assert ranks.run(_unlike_states, scale) == expected


def _models(rank: int, counts: tuple[int, int]) -> list[float]:
    """The model with the number of the rank begins with a lower scale."""
    models = [ampgraph.convert(nn.Linear(4, 4), (X,), policy=policy()) for _ in range(counts[rank])]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.1)
    models[0].scaler.attach(optimizer)
    models[rank].scaler.load_state_dict({"scale": 64.0})
    sum(model(X).sum() for model in models).backward()
    optimizer.step()
    return [model.scaler.get_scale() for model in models]


@pytest.mark.parametrize("counts", [(2, 2), (1, 3), (3, 20)])
def test_the_scales_of_several_models_stay_apart(ranks, counts) -> None:
    found = ranks.run(_models, counts)
    assert found == [[64.0, 64.0, *[1024.0] * 18][:count] for count in counts]


def _adversaries(rank: int) -> tuple[list[float], int]:
    """An overflow of rank 1 leaves gradients in the discriminator, which leaves out its own step then."""
    pair = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 4)})
    scaler = ampgraph.convert_blocks(pair, ("g", "d"), policy=policy()).scaler
    g, d = (DistributedDataParallel(module) for module in pair.values())
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (g, d)]
    scaler.attach(*optimizers)
    scales = []
    for turn in range(4):
        for optimizer in optimizers:
            is_rest = turn in (1, 2) and optimizer is optimizers[1]
            for one in optimizers:
                one.zero_grad()
            fake = g(X) if optimizer is optimizers[0] else g(X).detach()
            (d(fake).sum() * (INF if turn == 1 and rank == 1 else 1.0)).backward()
            if not is_rest:
                optimizer.step()
                scales.append(scaler.get_scale())
    return scales, numbers_of(scaler)["_growth_tracker"]


def test_a_generator_and_a_discriminator_that_rests(ranks) -> None:
    first, second = ranks.run(_adversaries)
    assert first == second
    assert first[0][-1] < 1024.0
