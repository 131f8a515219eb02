"""A loop that leaves out an attached step after an overflow lowers the scale as GradScaler's loop does."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import DynamicLossScale, NoLossScale, Policy

from .models import TwoHeads

pytestmark = pytest.mark.usefixtures("shared_captures")
NUMBERS = {"init_scale": 2.0**22, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
ROUNDS = 24
BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


class Run(NamedTuple):
    """A model with optimizers, whose scaler is attached, or torch's around an unscaled one."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    scaler: Any
    scales: list[float]

    @property
    def is_torchs(self) -> bool:
        return isinstance(self.scaler, torch.amp.GradScaler)

    def backward(self, loss: torch.Tensor) -> None:
        self.scales.append(self.scaler.get_scale())
        self.scaler.scale(loss).backward()

    def norm(self, *optimizers: torch.optim.Optimizer) -> torch.Tensor:
        """Clips; torch's scaler has to unscale first."""
        optimizers = optimizers or tuple(self.optimizers)
        for optimizer in optimizers if self.is_torchs else ():
            self.scaler.unscale_(optimizer)
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        return nn.utils.clip_grad_norm_(parameters, 1.0)

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers or self.optimizers:
            if self.is_torchs:
                self.scaler.step(optimizer)
            else:
                optimizer.step()

    def end(self) -> None:
        if self.is_torchs:
            self.scaler.update()

    def zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def x_of(i: int) -> torch.Tensor:
    """Some batches have larger gradients than others."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) * (1.0 + i % 5)


def loss_of(model: nn.Module, i: int) -> torch.Tensor:
    return sum(out.square().mean() for out in model(x_of(i)))


def runs(backend: str = "eager", split: bool = False, fused: bool = False) -> Iterator[Run]:
    for scale in (DynamicLossScale(**NUMBERS), NoLossScale()):
        torch.manual_seed(0)
        policy = Policy(dtype=torch.float16, loss_scale=scale)
        amp = ampgraph.convert(TwoHeads(), (x_of(0),), policy=policy, backend=backend)
        parts = [amp.source.a, amp.source.b] if split else [amp.source]
        optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9, fused=fused) for m in parts]
        is_ours = amp.scaler.is_enabled()
        scaler = amp.scaler.attach(*optimizers) if is_ours else torch.amp.GradScaler("cpu", **NUMBERS)
        yield Run(amp, optimizers, scaler, [])


def zero_first(run: Run, i: int) -> None:
    run.zero()
    run.backward(loss_of(run.model, i))
    if run.norm().isfinite():
        run.step()
    run.end()


def zero_last(run: Run, i: int) -> None:
    run.backward(loss_of(run.model, i))
    if run.norm().isfinite():
        run.step()
    run.end()
    run.zero()


def accumulated(run: Run, i: int) -> None:
    for k in range(3):
        run.backward(loss_of(run.model, 3 * i + k) / 3)
    if run.norm().isfinite():
        run.step()
    run.end()
    run.zero()


def by_hand(run: Run, i: int) -> None:
    for p in run.model.parameters():
        p.grad = None
    run.backward(loss_of(run.model, i))
    if all(p.grad.isfinite().all() for p in run.model.parameters()) and run.norm() > 0:
        run.step()
    elif run.is_torchs:
        run.scaler.unscale_(run.optimizers[0])
    run.end()


def raised(run: Run, i: int) -> None:
    run.zero()
    run.backward(loss_of(run.model, i))
    try:
        if run.is_torchs:
            run.scaler.unscale_(run.optimizers[0])
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0, error_if_nonfinite=True)
        run.step()
    except RuntimeError:
        pass
    run.end()


def unscaled(run: Run, i: int) -> None:
    run.zero()
    run.backward(loss_of(run.model, i))
    run.scaler.unscale_(run.optimizers[0])
    if nn.utils.clip_grad_norm_(run.model.parameters(), 1.0).isfinite():
        run.step()
    run.end()


LOOPS = [zero_first, zero_last, accumulated, by_hand, raised, unscaled]


def assert_same(loop: Callable, **options: Any) -> list[float]:
    found = []
    for run in runs(**options):
        for i in range(ROUNDS):
            loop(run, i)
        found.append((run.scales, [p.detach().clone() for p in run.model.parameters()]))
    (ours, mine), (theirs, others) = found
    assert ours == theirs
    assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))
    return ours


@BACKENDS
@pytest.mark.parametrize("loop", LOOPS)
def test_the_scale_is_that_of_grad_scaler(loop, backend) -> None:
    scales = assert_same(loop, backend=backend)
    assert min(scales) < NUMBERS["init_scale"] / 4
    assert any(a < b for a, b in itertools.pairwise(scales))


@pytest.mark.parametrize("loop", [zero_first, accumulated])
def test_two_optimizers_that_are_left_out_together(loop) -> None:
    assert_same(loop, split=True)


# -- where the gradients go later --------------------------------------------------------------------


def after_forward(run: Run, i: int) -> None:
    loss = loss_of(run.model, i)
    run.zero()
    run.backward(loss)
    if run.norm().isfinite():
        run.step()


def in_place(run: Run, i: int) -> None:
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=False)
    run.backward(loss_of(run.model, i))
    if run.norm().isfinite():
        run.step()


def each_by_itself(run: Run, i: int) -> None:
    """The first is stepped always."""
    run.zero()
    run.backward(loss_of(run.model, i))
    run.step(run.optimizers[0])
    if run.norm(run.optimizers[1]).isfinite():
        run.step(run.optimizers[1])


def in_place_after_forward(run: Run, i: int) -> None:
    loss = loss_of(run.model, i)
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.zero_()
    run.backward(loss)
    if run.norm().isfinite():
        run.step()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", [after_forward, in_place, in_place_after_forward, each_by_itself])
def test_the_scale_falls_and_training_goes_on(loop, fused) -> None:
    run = next(runs(split=loop is each_by_itself, fused=fused))
    if loop is each_by_itself:
        with torch.no_grad():
            run.model.source.a.weight.mul_(1e-6)  # never overflows
            run.model.source.a.bias.mul_(1e-6)
    before = copy.deepcopy(run.model.source.b.state_dict())
    for i in range(ROUNDS):
        loop(run, i)
    assert run.scaler.get_scale() < NUMBERS["init_scale"] / 4
    assert not torch.equal(before["weight"], run.model.source.b.weight)
    assert run.scaler.last_overflow is not None


def test_a_clip_after_each_micro_batch_throws_nothing_away() -> None:
    run = next(runs())
    for i in range(8):
        run.backward(loss_of(run.model, i) * (float("inf") if i == 0 else 1e-6))
        run.norm()
    run.step()
    assert run.scaler.get_scale() == NUMBERS["init_scale"] / 2


def test_a_step_that_is_left_out_is_named() -> None:
    run = next(runs())
    zero_first(run, 0)
    assert run.scaler.last_overflow is None
    run.zero()
    run.model(x_of(0))
    overflow = run.scaler.last_overflow
    assert (overflow.step, overflow.scale) == (1, NUMBERS["init_scale"])
    assert set(overflow.parameters) <= {"a.weight", "a.bias", "b.weight", "b.bias"}


# -- gradients that others throw away -----------------------------------------------------------------


class Pair(nn.Module):
    """A generator and a discriminator under one scaler."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d = nn.Linear(8, 8), nn.Linear(8, 4)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("first", ["d", "g"])
def test_a_gan_is_that_of_grad_scaler(first, both) -> None:
    found = []
    for scale in (DynamicLossScale(**NUMBERS), NoLossScale()):
        torch.manual_seed(0)
        pair = Pair()
        policy = Policy(dtype=torch.float16, loss_scale=scale)
        blocks = ampgraph.convert_blocks(pair, ("g", "d"), policy=policy)
        g, d = (torch.optim.SGD(m.parameters(), lr=1e-3) for m in (pair.g, pair.d))
        is_ours = blocks.scaler.is_enabled()
        scaler = blocks.scaler.attach(g, d) if is_ours else torch.amp.GradScaler("cpu", **NUMBERS)
        run = Run(pair, [g, d], scaler, [])

        def turn(optimizer: torch.optim.Optimizer, loss: Callable, run: Run = run) -> None:
            if both:
                run.zero()
            else:
                optimizer.zero_grad()
            run.backward(loss())
            run.step(optimizer)

        for i in range(ROUNDS):
            losses = [
                (g, lambda i=i, pair=pair: pair.d(pair.g(x_of(i))).square().mean()),
                (d, lambda i=i, pair=pair: pair.d(pair.g(x_of(i)).detach()).square().mean()),
            ]
            for optimizer, loss in losses if first == "g" else losses[::-1]:
                turn(optimizer, loss)
            run.end()
        found.append((run.scales, [p.detach().clone() for p in pair.parameters()]))
    (ours, mine), (theirs, others) = found
    assert ours == theirs
    assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


def test_gradients_of_one_call_that_are_thrown_away_lower_the_scale_once() -> None:
    """A gradient for each of many losses, added up by hand."""
    run = next(runs())
    losses = [out.square().mean() for out in run.model(x_of(0)) for _ in range(8)]
    total: dict[nn.Parameter, torch.Tensor] = {}
    for loss in losses:
        run.zero()
        loss.backward(retain_graph=True)
        for p in (p for p in run.model.parameters() if p.grad is not None):
            total[p] = total.get(p, 0.0) + p.grad
    for p, gradient in total.items():
        p.grad = gradient
    before = [p.detach().clone() for p in run.model.parameters()]
    run.step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    assert run.scaler.get_scale() >= NUMBERS["init_scale"] / 4


def test_finite_gradients_that_are_thrown_away_count_for_nothing() -> None:
    run = next(runs())
    run.scaler.update(new_scale=16.0)
    for i in range(8):
        run.zero()
        run.backward(loss_of(run.model, i))
    state = run.scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"], state["_steps"]) == (16.0, 0, 0)


def test_what_no_optimizer_holds_counts_for_nothing() -> None:
    run = next(runs(split=True))
    run.optimizers[1].param_groups.clear()
    for _ in range(4):
        run.model.zero_grad()
        (run.model(x_of(0))[1] * float("inf")).sum().backward()
    assert run.scaler.get_scale() == NUMBERS["init_scale"]


@BACKENDS
@pytest.mark.parametrize("how", [torch.nan_to_num, lambda g: g.clamp(-1.0, 1.0), torch.sign])
def test_an_overflow_made_finite_in_a_new_tensor_is_skipped(how, backend) -> None:
    run = next(runs(backend=backend))
    before = [p.detach().clone() for p in run.model.parameters()]
    (loss_of(run.model, 0) * float("inf")).backward()
    for p in run.model.parameters():
        p.grad = how(p.grad)
    run.step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    assert run.scaler.get_scale() == NUMBERS["init_scale"] / 2
