"""Loops written for ``torch.amp.GradScaler`` run unchanged with ``amp.scaler``, also those of libraries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import DynamicLossScale, Policy
from ampgraph.errors import LoopError

pytestmark = pytest.mark.usefixtures("shared_captures")
NUMBERS = {"init_scale": 64.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2}
BAD = (2, 3, 6)
STEPS = 8


def plain_loop(model: nn.Module, optimizer: Any, scaler: Any, loss_of: Callable) -> list[bool]:
    """As in torch's own recipes: unscale, clip, step, update; a lower scale tells a skipped step."""
    skipped = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.get_scale() < before)
    return skipped


class PatchedOptimizer:
    """Notices a skipped step by whether the scaler called a ``step`` of its own (Accelerate's way)."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any):
        self.optimizer, self.scaler = optimizer, scaler
        self.own_step, self.was_called = optimizer.step, False

    def patched_step(self, *args: Any, **kwargs: Any) -> Any:
        self.was_called = True
        return self.own_step(*args, **kwargs)

    def step(self, closure: Callable | None = None) -> bool:
        self.was_called = False
        self.optimizer.step = self.patched_step
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()
        self.optimizer.step = self.own_step
        return not self.was_called


def library_loop(model: nn.Module, optimizer: Any, scaler: Any, loss_of: Callable) -> list[bool]:
    """Accumulation over two micro-batches, and a checkpoint of the scaler in the middle."""
    patched, skipped = PatchedOptimizer(optimizer, scaler), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            scaler.scale(loss_of(model, step) / 2).backward()
        skipped.append(patched.step())
        if step == STEPS // 2:
            scaler.load_state_dict(copy.deepcopy(scaler.state_dict()))
    return skipped


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    if step in BAD:
        x[0, 0] = float("inf")
    return model(x).square().mean()


@pytest.mark.parametrize("loop", [plain_loop, library_loop])
def test_the_same_loop_skips_the_same_steps(loop) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    reference = copy.deepcopy(model)
    policy = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(**NUMBERS))
    amp = ampgraph.convert(model, (torch.randn(4, 8),), policy=policy)
    theirs = torch.amp.GradScaler("cpu", **NUMBERS)
    expected = loop(reference, torch.optim.SGD(reference.parameters(), lr=0.1), theirs, loss_of)
    skipped = loop(amp, torch.optim.SGD(amp.parameters(), lr=0.1), amp.scaler, loss_of)
    assert skipped == expected == [step in BAD for step in range(STEPS)]
    assert amp.scaler.get_scale() == theirs.get_scale()
    assert theirs.state_dict().items() <= amp.scaler.state_dict().items()
    for low, full in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(low, full, rtol=0.0, atol=STEPS * 0.1 * torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("attached", ["before prepare", "after prepare"])
def test_accelerate_accumulates(attached) -> None:
    """An overflow in the first micro-batch skips the step after the second."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    policy = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(**NUMBERS))
    source = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    amp = ampgraph.convert(source, (torch.randn(4, 8),), policy=policy)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    if attached == "before prepare":
        amp.scaler.attach(optimizer)
    model, optimizer = accelerator.prepare(amp, optimizer)
    if attached == "after prepare":
        amp.scaler.attach(optimizer)
    changed, scales = [], []
    for step in range(STEPS):
        before = source[0].weight.detach().clone()
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, step))
            optimizer.step()
            optimizer.zero_grad()
        changed.append(not torch.equal(source[0].weight, before))
        scales.append(amp.scaler.get_scale())
    assert changed == [False, True, False, False, False, True, False, False]
    assert scales == [64.0, 64.0, 64.0, 32.0, 32.0, 32.0, 32.0, 16.0]


@pytest.mark.parametrize("updates", ["always", "after a step"])
def test_a_loop_that_looks_at_the_norm_itself(updates) -> None:
    """The scale falls, so that steps become good again."""
    policy = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(2.0**24, growth_interval=100))
    amp = ampgraph.convert(nn.Linear(8, 2), (torch.randn(4, 8),), policy=policy)
    optimizer, scaler, steps = torch.optim.SGD(amp.parameters(), lr=0.1), amp.scaler, 0
    for _ in range(20):
        optimizer.zero_grad()
        scaler.scale(amp(torch.ones(4, 8)).square().sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(amp.parameters(), 1.0)
        if norm.isfinite():
            scaler.step(optimizer)
            steps += 1
        if norm.isfinite() or updates == "always":
            scaler.update()
    assert steps >= 5
    assert scaler.last_overflow is not None
    assert scaler.get_scale() < 2.0**24


def test_a_grad_scaler_around_an_attached_fused_optimizer() -> None:
    policy = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(**NUMBERS))
    amp = ampgraph.convert(nn.Linear(8, 2), (torch.randn(4, 8),), policy=policy)
    optimizer = torch.optim.AdamW(amp.parameters(), lr=0.1, fused=True)
    amp.scaler.attach(optimizer)
    theirs, before = torch.amp.GradScaler("cpu", **NUMBERS), amp.weight.detach().clone()
    with pytest.warns(UserWarning, match="with both, gradients overflow"):
        theirs.scale(amp(torch.ones(4, 8)).sum()).backward()
    with pytest.raises(LoopError, match=r"a torch\.amp\.GradScaler steps this AdamW"):
        theirs.step(optimizer)
    assert torch.equal(before, amp.weight)
