"""A training step waits for the device nowhere: no read of a value by the host, no copy from the host."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import ampgraph
from ampgraph import DynamicLossScale, Policy

READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero")
# What a list or number of the host becomes: a tensor, an index.
COPIES = ("aten::lift_fresh", "aten::index", "aten::index_put_", "aten::index_put")
X = torch.ones(2, 4)


class Waits(TorchDispatchMode):
    """Counts the ops that wait for a device."""

    def __init__(self):
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.name().partition(".")[0]
        if name in READS or name in COPIES:
            self.found[name] += 1
        return op(*args, **(kwargs or {}))


def _one(model: nn.Module, make: Callable[..., Optimizer]) -> list[Optimizer]:
    return [make(model.parameters())]


def _of_parts(model: nn.Module, make: Callable[..., Optimizer]) -> list[Optimizer]:
    parameters = [*model.parameters()]
    return [make(parameters[:2]), make(parameters[2:])]


def _of_each(model: nn.Module, make: Callable[..., Optimizer]) -> list[Optimizer]:
    return [make([parameter]) for parameter in model.parameters()]


ATTACHED, STEPS, UNSCALES = "attached", "scaler.step", "scaler.unscale_ first"


@pytest.mark.parametrize("how", [ATTACHED, STEPS, UNSCALES])
@pytest.mark.parametrize("split", [_one, _of_parts, _of_each])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_with_fused_optimizers_waits_for_nothing(level, split, how):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    scale = DynamicLossScale(init_scale=1024.0, growth_interval=2)
    policy = Policy(level, dtype=torch.float16, loss_scale=scale)
    amp = ampgraph.convert(model, (X,), policy=policy, backend="eager")
    optimizers = split(amp, partial(AdamW, fused=True))
    if how == ATTACHED:
        amp.scaler.attach(*optimizers)
    for step in range(6):
        with Waits() as waits:
            for optimizer in optimizers:
                optimizer.zero_grad()
            amp(X).sum().backward()
            for optimizer in optimizers if how == UNSCALES else ():
                amp.scaler.unscale_(optimizer)
            for optimizer in optimizers:
                optimizer.step() if how == ATTACHED else amp.scaler.step(optimizer)
            if how != ATTACHED:
                amp.scaler.update()
        if step > 1:  # the first steps build state
            assert not waits.found
    assert amp.scaler.get_scale() > 1024.0


@pytest.mark.parametrize("make", [partial(SGD, fused=True), partial(Adam, fused=True)])
def test_two_kinds_of_optimizer_wait_for_nothing(make):
    amp = ampgraph.convert(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (X,), dtype=torch.float16, backend="eager"
    )
    optimizers = [make(amp[0].parameters()), AdamW(amp[1].parameters(), fused=True)]
    amp.scaler.attach(*optimizers)
    for step in range(4):
        with Waits() as waits:
            amp(X).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if step > 1:
            assert not waits.found


def test_one_look_decides_without_a_fused_optimizer():
    amp = ampgraph.convert(nn.Linear(4, 4), (X,), dtype=torch.float16, backend="eager")
    optimizer = SGD(amp.parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    for step in range(4):
        with Waits() as waits:
            amp(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step > 1:
            assert waits.found == {"aten::_local_scalar_dense": 1}
