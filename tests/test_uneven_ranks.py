"""Ranks that run out of inputs before others, and optimizers that step inside the backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ampgraph
from ampgraph import DynamicLossScale, Policy

from .ranks import gathered

FLOAT16 = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=1024.0))


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3)))


def _uneven(rank: int, how: str, fused: bool) -> tuple[float, int]:
    """Rank 1 has two batches more; of its four the third overflows, and so does rank 0's first."""
    model = net()
    if how == "blocks":
        inner = model
        scaler = ampgraph.convert_blocks(model, "[0-9]", policy=FLOAT16).scaler
    else:
        args = (torch.randn(2, 4),) if how == "ahead of time" else None
        inner = ampgraph.convert(model, args, policy=FLOAT16)
        scaler = inner.scaler
    wrapped = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1, fused=fused)
    scaler.attach(optimizer)
    steps = 0
    with wrapped.join():
        for step in range(2 + 2 * rank):
            x = torch.randn(2, 4)
            if (rank, step) in ((0, 0), (1, 2)):
                x = x / 0
            before = [p.detach().clone() for p in wrapped.parameters()]
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
            is_same = all(torch.equal(a, b) for a, b in zip(before, wrapped.parameters(), strict=True))
            assert is_same == (step in (0, 2))
            steps += not is_same
    for parameter in wrapped.parameters():
        assert parameter.isfinite().all()
        mine, theirs = gathered(parameter)
        assert torch.equal(mine, theirs)
    return scaler.get_scale(), steps


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["ahead of time", "just in time", "blocks"])
def test_a_rank_without_inputs_is_not_waited_for(ranks, how, fused) -> None:
    assert ranks.run(_uneven, how, fused) == [(512.0, 1), (256.0, 2)]


def step_in_backward(model: nn.Module, scaler: ampgraph.LossScaler) -> None:
    """Gives each parameter an optimizer that steps as soon as its gradient is there."""

    def hook_of(optimizer: torch.optim.Optimizer):
        def hook(parameter: torch.Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return hook

    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        scaler.attach(optimizer)
        parameter.register_post_accumulate_grad_hook(hook_of(optimizer))


def run_in_backward(model: nn.Module, scaler: ampgraph.LossScaler) -> None:
    scales = []
    for step in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        x = torch.randn(2, 4)
        model(x / 0 if step == 2 else x).square().mean().backward()
        moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(p.isfinite().all() for p in model.parameters())
        assert sum(moved) >= len(moved) / 2 if step != 2 else sum(moved) == 0
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 1024.0, 512.0, 512.0]


@pytest.mark.parametrize("how", ["ahead of time", "just in time", "blocks"])
def test_an_optimizer_in_the_backward_takes_in_nothing_infinite(how) -> None:
    model = net()
    if how == "blocks":
        scaler = ampgraph.convert_blocks(model, "[0-9]", policy=FLOAT16).scaler
    else:
        args = (torch.randn(2, 4),) if how == "ahead of time" else None
        model = ampgraph.convert(model, args, policy=FLOAT16)
        scaler = model.scaler
    step_in_backward(model, scaler)
    run_in_backward(model, scaler)


def _in_sharded_backward(rank: int) -> None:
    model = net()
    scaler = ampgraph.convert_blocks(model, "[0-9]", policy=FLOAT16).scaler
    for block in model:
        fully_shard(block)
    fully_shard(model)
    step_in_backward(model, scaler)
    for step in range(3):
        x = torch.randn(2, 4)
        model(x / 0 if (step, rank) == (1, 1) else x).square().mean().backward()
        assert all(p.to_local().isfinite().all() for p in model.parameters())
    assert scaler.get_scale() == 512.0


def test_an_optimizer_in_the_backward_of_a_sharded_model(ranks) -> None:
    ranks.run(_in_sharded_backward)
