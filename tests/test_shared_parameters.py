"""Conversions that share parameters: each scale adapts, whichever scaler the loop asks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import DynamicLossScale, Policy

ROUNDS = 12
TOO_LARGE, RIGHT = 2.0**16, 16.0
X = torch.linspace(-1.0, 1.0, 64).view(8, 8)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.part(x).relu()) + x


def policy(scale: float) -> Policy:
    return Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=scale))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))


def twice(net: nn.Module, *scales: float) -> list[ampgraph.AmpModule]:
    return [ampgraph.convert(net, (X,), policy=policy(scale)) for scale in scales]


def loss_of(amp: nn.Module, weight: float = 64.0) -> torch.Tensor:
    """Overflows float16 in the backward at the scale `TOO_LARGE`, but not at `RIGHT`."""
    return (amp(X) - 1.0).square().sum() * weight


@contextlib.contextmanager
def told_nothing_of_scales() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert not [str(w.message) for w in caught if "scale" in str(w.message)]


def steps_taken(net: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable, take: Callable) -> int:
    watched, taken = next(net.parameters()), 0
    for _ in range(ROUNDS):
        before = watched.detach().clone()
        optimizer.zero_grad()
        loss().backward()
        take()
        taken += not torch.equal(before, watched)
    return taken


@pytest.mark.parametrize("attached", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("fused", [False, True])
def test_two_conversions_of_one_network(attached, fused) -> None:
    net = network()
    first, second = amps = twice(net, TOO_LARGE, TOO_LARGE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
    with told_nothing_of_scales():
        for index in attached:
            amps[index].scaler.attach(optimizer)
        taken = steps_taken(net, optimizer, lambda: loss_of(first) + loss_of(second, 1e-3), optimizer.step)
    assert taken > 0
    assert all(RIGHT < amp.scaler.get_scale() < TOO_LARGE for amp in amps)


@pytest.mark.parametrize("unscale", [False, True])
def test_a_loop_that_asks_one_of_two_scalers(unscale) -> None:
    net = network()
    first, second = twice(net, TOO_LARGE, TOO_LARGE)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-6), second.scaler

    def take() -> None:
        if unscale:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    with told_nothing_of_scales():
        assert steps_taken(net, optimizer, lambda: loss_of(first) + loss_of(second, 1e-3), take) > 0
    assert RIGHT < first.scaler.get_scale() < TOO_LARGE


def test_a_loop_that_leaves_the_bad_steps_out_itself() -> None:
    net = network()
    first, second = twice(net, TOO_LARGE, RIGHT)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    second.scaler.attach(optimizer)

    def take() -> None:
        if torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).isfinite():
            optimizer.step()

    assert steps_taken(net, optimizer, lambda: loss_of(first) + loss_of(second, 1e-3), take) > 0
    assert RIGHT < first.scaler.get_scale() < TOO_LARGE


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
def test_steps_with_a_closure(kind) -> None:
    net = network()
    first, second = twice(net, TOO_LARGE, RIGHT)
    optimizer = kind(net.parameters(), lr=1e-6)
    second.scaler.attach(optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(first) + loss_of(second, 1e-3)
        loss.backward()
        return loss

    with told_nothing_of_scales():
        for _ in range(ROUNDS):
            optimizer.step(closure)
    assert RIGHT < first.scaler.get_scale() < TOO_LARGE
    assert all(p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("blocks", [False, True])
def test_a_converted_part_inside_a_model_captured_just_in_time(blocks) -> None:
    torch.manual_seed(0)
    parent = Parent()
    if blocks:
        part = ampgraph.convert_blocks(parent, "part", policy=policy(TOO_LARGE))
    else:
        part = parent.part = ampgraph.convert(parent.part, (X,), policy=policy(TOO_LARGE))
    amp = ampgraph.convert(parent, policy=policy(RIGHT))
    optimizer = torch.optim.AdamW(amp.parameters(), lr=1e-3)
    amp.scaler.attach(optimizer)
    with told_nothing_of_scales():
        assert steps_taken(parent.head, optimizer, lambda: loss_of(amp), optimizer.step) > 0
    assert RIGHT < part.scaler.get_scale() < TOO_LARGE


def test_a_conversion_whose_backward_does_not_run_counts_no_step() -> None:
    net = network()
    trained, other = twice(net, RIGHT, RIGHT)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    trained.scaler.attach(optimizer)
    assert steps_taken(net, optimizer, lambda: loss_of(trained) + 0.0 * other(X).sum(), optimizer.step) == 12
    counted = int(other.scaler.guard.steps)
    assert steps_taken(net, optimizer, lambda: loss_of(trained), optimizer.step) == ROUNDS
    assert counted == int(other.scaler.guard.steps) == ROUNDS
    assert int(trained.scaler.guard.steps) == 2 * ROUNDS


def test_an_overflow_that_the_loop_threw_away_skips_no_step_of_the_other() -> None:
    net = network()
    first, second = twice(net, TOO_LARGE, RIGHT)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    second.scaler.attach(optimizer)

    def loss() -> torch.Tensor:
        loss_of(first).backward()
        optimizer.zero_grad()
        return loss_of(second, 1e-3)

    assert steps_taken(net, optimizer, loss, optimizer.step) == ROUNDS
    assert first.scaler.get_scale() < TOO_LARGE
    assert second.scaler.get_scale() == RIGHT
