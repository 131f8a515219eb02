"""When the scale changes: attached optimizers that rest, that come back, and steps that raise."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import DynamicLossScale, Policy

from .models import TwoHeads

INF = float("inf")
NUMBERS = {"init_scale": 1024.0, "growth_interval": 1000}


class Loop:
    """Steps of two attached optimizers; the second has the parameters of ``b``."""

    def __init__(self, **options: object) -> None:
        torch.manual_seed(0)
        policy = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(**NUMBERS))
        self.amp = ampgraph.convert(TwoHeads(), (torch.ones(2, 8),), policy=policy)
        parts = self.amp.source.a, self.amp.source.b
        self.a, self.b = (torch.optim.SGD(m.parameters(), lr=0.1, **options) for m in parts)
        self.scaler = self.amp.scaler.attach(self.a, self.b)

    def step(self, names: str, bad: str = "") -> float:
        """One backward, and a step of each optimizer that is named; returns the scale after them."""
        for optimizer in (self.a, self.b):
            optimizer.zero_grad()
        outs = dict(zip("ab", self.amp(torch.ones(2, 8)), strict=True))
        sum(outs[n].sum() * (INF if n in bad else 1.0) for n in names).backward()
        for name in names:
            getattr(self, name).step()
        return self.scaler.get_scale()

    def rounds(self) -> int:
        return self.scaler.state_dict()["_steps"]


def test_an_optimizer_that_rests_is_waited_for_once() -> None:
    loop = Loop()
    assert [loop.step("a", bad="a") for _ in range(4)] == [1024.0, 256.0, 128.0, 64.0]


def test_a_good_step_counts_at_once_while_another_optimizer_rests() -> None:
    loop = Loop()
    for _ in range(3):
        loop.step("a")
    before = loop.scaler.state_dict()["_growth_tracker"]
    loop.step("a")
    assert loop.scaler.state_dict()["_growth_tracker"] == before + 1 == 4


def test_phases() -> None:
    """First one, then both, then the other: a round for each backward, and each overflow counts at once."""
    loop = Loop()
    for names in ("a", "ab", "b", "ab"):
        for _ in range(4):
            loop.step(names)
        before, scale = loop.rounds(), loop.scaler.get_scale()
        assert [loop.step(names, bad=names[-1]) for _ in range(2)] == [scale / 2, scale / 4]
        assert loop.rounds() == before + 2


@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("bad", ["a", "b"])
def test_one_steps_less_often(every, bad) -> None:
    loop = Loop()
    pattern = itertools.cycle(["a"] * (every - 1) + ["ab"])
    for _ in range(3 * every):
        loop.step(next(pattern))
    for _ in range(2 * every):
        names, scale = next(pattern), loop.scaler.get_scale()
        after = loop.step(names, bad=bad if bad in names else "")
        assert after == (scale / 2 if bad in names else scale)


@pytest.mark.parametrize("every", [2, 3, 5])
def test_one_steps_less_often_after_a_call_by_itself(every) -> None:
    """As the critic and the actor, or the discriminator and the generator, of many loops do."""
    loop = Loop()
    pattern = itertools.cycle(["a"] * every + ["b"])
    for _ in range(3 * every + 3):
        loop.step(next(pattern))
    for _ in range(every + 1):
        names, scale = next(pattern), loop.scaler.get_scale()
        assert loop.step(names, bad=names) == scale / 2


def test_both_step_always_and_one_rests_now_and_then() -> None:
    loop = Loop()
    for names in ("ab", "a", "ab", "ab", "ab"):
        loop.step(names)
    before = loop.rounds()
    assert [loop.step("ab", bad="ab") for _ in range(3)] == [512.0, 256.0, 128.0]
    assert loop.rounds() == before + 3


# -- optimizers of the same parameters -----------------------------------------------------------------


def scales_of(
    pick: Callable[[nn.Module, int], list[torch.optim.Optimizer]], bad: set[int], clips: bool = False
) -> list[float]:
    """Returns the scale after each of eight backwards; ``pick`` attaches optimizers, and returns some."""
    policy = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(1024.0, growth_interval=3))
    amp = ampgraph.convert(nn.Linear(8, 4), (torch.ones(2, 8),), policy=policy)
    scales = []
    for turn in range(8):
        amp.zero_grad()
        before = amp.scaler.get_scale()
        (amp(torch.ones(2, 8)).sum() * (INF if turn in bad else 1.0)).backward()
        for optimizer in pick(amp, turn):
            optimizer.step()
            if clips:
                nn.utils.clip_grad_norm_(amp.parameters(), 0.1)
        scales.append(amp.scaler.get_scale())
        if turn in bad:
            assert amp.scaler.last_overflow.scale == before
    return scales


EXPECTED = [512.0, 512.0, 512.0, 1024.0, 512.0, 256.0, 256.0, 256.0]


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_new_optimizer_for_each_step(is_kept) -> None:
    kept = []

    def pick(amp: nn.Module, turn: int) -> list[torch.optim.Optimizer]:
        kept[:] = [*(kept if is_kept else ()), torch.optim.SGD(amp.parameters(), lr=1e-3)]
        amp.scaler.attach(kept[-1])
        return kept[-1:]

    assert scales_of(pick, {0, 4, 5}) == EXPECTED


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("is_together", [False, True])
def test_optimizers_of_the_same_parameters(number, is_together, clips) -> None:
    """One after the other, or all on the gradients of one backward: in both an update for each backward."""
    optimizers: list[torch.optim.Optimizer] = []

    def pick(amp: nn.Module, turn: int) -> list[torch.optim.Optimizer]:
        if not optimizers:
            optimizers.extend(torch.optim.SGD(amp.parameters(), lr=1e-3) for _ in range(number))
            amp.scaler.attach(*optimizers)
        return optimizers if is_together else [optimizers[turn % number]]

    assert scales_of(pick, {0, 4, 5}, clips) == EXPECTED


# -- steps that raise ----------------------------------------------------------------------------------


class Failing(torch.optim.SGD):
    fails = 0

    def step(self, closure: Callable | None = None) -> None:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("out of memory")
        super().step(closure)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("is_attached", [False, True])
def test_a_step_that_raises_may_be_tried_again(is_attached, bad) -> None:
    policy = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(**NUMBERS))
    amp = ampgraph.convert(nn.Linear(8, 4), (torch.ones(2, 8),), policy=policy)
    optimizer = Failing(amp.parameters(), lr=0.1)
    scaler = amp.scaler.attach(optimizer) if is_attached else amp.scaler

    def step() -> None:
        if is_attached:
            optimizer.step()
        else:
            scaler.step(optimizer)

    for good in range(1, 4):
        optimizer.zero_grad()
        amp(torch.ones(2, 8)).sum().backward()
        before, optimizer.fails = amp.source.weight.detach().clone(), 2
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of memory"):
                step()
            assert torch.equal(before, amp.source.weight)
        step()
        scaler.update()
        assert not torch.equal(before, amp.source.weight)
        state = scaler.state_dict()
        assert (state["_growth_tracker"], state["_steps"], state["scale"]) == (good, good, 1024.0)
    if bad:
        optimizer.zero_grad()
        (amp(torch.ones(2, 8)) * INF).sum().backward()
        step()
        scaler.update()
        assert scaler.get_scale() == 512.0


def test_a_closure_that_raises_may_be_tried_again() -> None:
    loop, failures = Loop(), [1]

    def closure() -> torch.Tensor:
        loop.a.zero_grad()
        if failures:
            raise RuntimeError(f"out of memory {failures.pop()}")
        loss = loop.amp(torch.ones(2, 8))[0].sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="out of memory"):
        loop.a.step(closure)
    loop.a.step(closure)
    loop.amp(torch.ones(2, 8))[1].sum().backward()
    loop.b.step()
    assert loop.rounds() == 1
