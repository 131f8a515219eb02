"""Libraries that wrap the optimizer see which of its steps were skipped, and so do their schedulers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import DynamicLossScale, Policy

from .test_loop_watch import bert_trainer

FLOAT16 = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=64.0))
BAD = (0, 2, 3)
STEPS = 6
accelerate = pytest.importorskip("accelerate")


def converted() -> ampgraph.AmpModule:
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    return ampgraph.convert(source, (torch.randn(4, 8),), policy=FLOAT16)


def loss_of(model: nn.Module, is_bad: bool) -> torch.Tensor:
    return model(torch.full((4, 8), float("inf") if is_bad else 1.0)).square().mean()


def before_prepare(amp: ampgraph.AmpModule, optimizer: Any, accelerator: Any) -> Any:
    amp.scaler.attach(optimizer)
    return accelerator.prepare(optimizer)


def after_prepare(amp: ampgraph.AmpModule, optimizer: Any, accelerator: Any) -> Any:
    wrapper = accelerator.prepare(optimizer)
    amp.scaler.attach(wrapper)
    return wrapper


def inner_after_prepare(amp: ampgraph.AmpModule, optimizer: Any, accelerator: Any) -> Any:
    wrapper = accelerator.prepare(optimizer)
    amp.scaler.attach(optimizer)
    return wrapper


def prepared_twice(amp: ampgraph.AmpModule, optimizer: Any, accelerator: Any) -> Any:
    """The first wrapper is alive, and another one is called."""
    amp.scaler.attach(accelerate.Accelerator(cpu=True).prepare(optimizer))
    return accelerator.prepare(optimizer)


WAYS = [before_prepare, after_prepare, inner_after_prepare, prepared_twice]


@pytest.mark.parametrize("way", WAYS)
def test_accelerate_sees_a_skipped_step(way) -> None:
    accelerator, amp = accelerate.Accelerator(cpu=True), converted()
    wrapper = way(amp, torch.optim.SGD(amp.parameters(), lr=0.1, momentum=0.5), accelerator)
    scheduler = torch.optim.lr_scheduler.StepLR(wrapper.optimizer, 1, gamma=0.5)
    scheduler = accelerator.prepare(scheduler)
    seen, rates = [], []
    for step in range(STEPS):
        accelerator.backward(loss_of(amp, step in BAD))
        wrapper.step()
        scheduler.step()
        wrapper.zero_grad()
        seen.append((accelerator.optimizer_step_was_skipped, wrapper.step_was_skipped))
        rates.append(scheduler.get_last_lr()[0])
    assert seen == [(step in BAD,) * 2 for step in range(STEPS)]
    assert rates == [0.1, 0.05, 0.05, 0.05, 0.025, 0.0125]


@pytest.mark.parametrize("way", WAYS)
def test_a_fused_step_is_skipped_where_accelerate_cannot_see_it(way) -> None:
    """Only the device knows: so it is with GradScaler."""
    accelerator, amp = accelerate.Accelerator(cpu=True), converted()
    wrapper = way(amp, torch.optim.SGD(amp.parameters(), lr=0.1, fused=True), accelerator)
    weight, changed = next(amp.parameters()), []
    for step in range(STEPS):
        before = weight.detach().clone()
        accelerator.backward(loss_of(amp, step in BAD))
        wrapper.step()
        wrapper.zero_grad()
        changed.append(not torch.equal(before, weight))
        assert not accelerator.optimizer_step_was_skipped
    assert changed == [step not in BAD for step in range(STEPS)]


def test_a_step_of_the_plain_optimizer_tells_no_other_wrapper() -> None:
    accelerator, amp, other = accelerate.Accelerator(cpu=True), converted(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    its = accelerator.prepare(torch.optim.SGD(other.parameters(), lr=0.1))
    amp.scaler.attach(optimizer)
    loss_of(amp, is_bad=True).backward()
    optimizer.step()
    assert amp.scaler.last_overflow is not None
    assert not its.step_was_skipped


@pytest.mark.parametrize("fused", [False, True])
def test_the_scheduler_of_a_trainer_sees_skipped_steps(fused, tmp_path) -> None:
    rounds = 4
    name = "adamw_torch_fused" if fused else "adamw_torch"
    schedule = {
        "lr_scheduler_type": "linear",
        "learning_rate": 1.0,
        "max_grad_norm": 0.0,
        "max_steps": rounds,
    }
    trainer = bert_trainer(tmp_path, optim=name, **schedule)
    blocks = ampgraph.convert_blocks(trainer.model, "", policy=FLOAT16)
    blocks.scaler.attach(trainer.create_optimizer())
    backwards = []

    def overflow_twice(grad: torch.Tensor) -> torch.Tensor:
        backwards.append(len(backwards))
        return grad * float("inf") if len(backwards) <= 2 else grad

    trainer.model.classifier.bias.register_hook(overflow_twice)
    trainer.train()
    assert backwards == list(range(rounds))
    assert blocks.scaler.get_scale() == 16.0
    # A fused step is skipped on the device, and the scheduler goes on, as with GradScaler.
    seen = rounds if fused else rounds - 2
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(1.0 - seen / rounds)


class Several(torch.optim.Optimizer):
    """Optimizers in a list, as OpenNMT has them."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers, self.state, self.defaults = optimizers, {}, {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.optimizers for group in one.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        for one in self.optimizers:
            one.step()


@pytest.mark.filterwarnings("error")
def test_an_optimizer_that_holds_others_in_a_list() -> None:
    amp = converted()
    parts = amp.source[0], amp.source[2]
    optimizer = Several([torch.optim.AdamW(part.parameters(), lr=1e-2) for part in parts])
    amp.scaler.attach(optimizer)
    skipped = []
    for step in range(STEPS):
        before = [p.detach().clone() for p in amp.parameters()]
        optimizer.zero_grad()
        loss_of(amp, step in BAD).backward()
        optimizer.step()
        skipped.append(all(map(torch.equal, before, amp.parameters())))
    assert skipped == [step in BAD for step in range(STEPS)]


@pytest.mark.filterwarnings("error")
def test_parameters_that_are_results_of_others() -> None:
    """As in MAML: torch warns of reads of ``.grad`` of results."""
    amp = converted()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    x = torch.ones(4, 8)
    for _ in range(2):
        optimizer.zero_grad()
        slow = dict(amp.named_parameters())
        loss = torch.func.functional_call(amp, slow, (x,)).square().mean()
        gradients = torch.autograd.grad(loss, list(slow.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(slow.items(), gradients, strict=True)}
        before = amp.source[0].weight.detach().clone()
        torch.func.functional_call(amp, fast, (x,)).square().mean().backward()
        optimizer.step()
        assert not torch.equal(before, amp.source[0].weight)
