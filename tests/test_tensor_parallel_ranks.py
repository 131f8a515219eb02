"""Converted blocks beside tensor parallel ones on two ranks: they get results that nobody has waited for."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ampgraph
from ampgraph import DynamicLossScale, Policy

from .ranks import Ranks

pytestmark = pytest.mark.distributed
FLOAT16 = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=1024.0))
X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
# A handful of roundings each, forward and backward.
TOLERANCE = 4 * torch.finfo(torch.float16).eps


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.stop()


class Seen(nn.Module):
    """Notes the class of what the tensor parallel module before it returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.name = type(x).__name__
        return x


def net() -> nn.Sequential:
    feed = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    return nn.Sequential(nn.Linear(8, 8), feed, Seen(), nn.Linear(8, 8))


def parallelized(model: nn.Sequential) -> nn.Sequential:
    parallelize_module(
        model[1], init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _beside(rank: int, capture: str, backend: str) -> float:
    model = net()
    reference = copy.deepcopy(model)
    blocks = ampgraph.convert_blocks(
        parallelized(model), ("0", "3"), policy=FLOAT16, capture=capture, backend=backend
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks.scaler.attach(optimizer)
    reference(X).square().mean().backward()
    for step in range(3):
        optimizer.zero_grad()
        (model(X).square().mean() * (float("inf") if (step, rank) == (1, 1) else 1.0)).backward()
        if step == 0:
            assert model[2].name == "AsyncCollectiveTensor"
            check_gradients(model, reference)
        before = [whole(p) for p in model.parameters()]
        optimizer.step()
        same = [torch.equal(a, whole(p)) for a, p in zip(before, model.parameters(), strict=True)]
        assert all(same) if step == 1 else not any(same)
    for block in blocks.values():
        assert torch.float16 in {decision.dtype for decision in block.plan.decisions.values()}
    return blocks.scaler.get_scale()


def check_gradients(model: nn.Module, reference: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (whole(mine.grad) - theirs.grad).norm() <= TOLERANCE * theirs.grad.norm()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
def test_blocks_beside_tensor_parallel_ones(ranks, capture, backend) -> None:
    assert ranks.run(_beside, capture, backend) == [512.0, 512.0]


def _as_a_backend(rank: int) -> None:
    model = parallelized(net())
    expected, dtypes = model(X), []
    model[3].register_forward_hook(lambda *_: None)
    model[3].compile(backend="ampgraph", options={"dtype": torch.float16})
    found = model(X)
    dtypes.append(found.dtype)
    error = (whole(found) - whole(expected)).abs().max()
    assert dtypes == [torch.float32]
    assert 0 < error < TOLERANCE  # float32 would have no error


def test_the_backend_behind_a_tensor_parallel_module(ranks) -> None:
    ranks.run(_as_a_backend)
