"""Four ranks: engine by way by dtype; gradients of one process, faults of one rank, the example of FSDP2."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import ampgraph
from ampgraph import DynamicLossScale, Policy
from ampgraph.cli.torchvision_shim import allow_torchvision

from .ranks import Ranks

pytestmark = pytest.mark.distributed
EXAMPLE = Path(__file__).parent.parent / "examples" / "fsdp2_llama.py"
X = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(4, imports=("transformers.models.llama.modeling_llama",))
    yield pool
    pool.stop()


STAGED = ("pipeline of shards", "1F1B of shards")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Job:
    """One rank's part of a model under an engine.

    Attributes:
        model: What this rank holds.
        reference: The same part of the model in one process.
        bad: The rank whose loss overflows.
    """

    def __init__(self, rank: int, engine: str, way: str, dtype: torch.dtype, bad: int):
        self.rank, self.bad = rank, bad
        self.stage = rank // 2 if engine in STAGED else None
        self.is_bad = False
        whole = nn.Sequential(*(Block() for _ in range(4)))
        self.whole = copy.deepcopy(whole)
        # The stages have unlike numbers of blocks.
        self.parts = {None: slice(0, 4), 0: slice(0, 1), 1: slice(1, 4)}[self.stage]
        model, self.reference = whole[self.parts], self.whole[self.parts]
        policy = Policy(dtype=dtype, loss_scale=DynamicLossScale(init_scale=1024.0))
        if engine == "replicas":
            self._replicate(model, way, policy)
        else:
            self._shard(model, engine, way, policy)
        self.schedule = self._schedule() if engine.startswith("1F1B") else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.scaler.attach(self.optimizer)

    def _schedule(self) -> Schedule1F1B:
        group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")).get_group("outer")
        stage = PipelineStage(self.model, self.stage, 2, torch.device("cpu"), group=group)
        return Schedule1F1B(stage, n_microbatches=2, loss_fn=self._loss)

    def _loss(self, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return y.square().mean() * (float("inf") if self.is_bad and self.rank == self.bad else 1.0)

    def _replicate(self, model: nn.Module, way: str, policy: Policy) -> None:
        if way == "blocks":
            inner, self.scaler = model, ampgraph.convert_blocks(model, "[0-9]", policy=policy).scaler
        else:
            inner = ampgraph.convert(model, (X[:2],) if way == "ahead of time" else None, policy=policy)
            self.scaler = inner.scaler
        self.model: nn.Module = DistributedDataParallel(inner)

    def _shard(self, model: nn.Module, engine: str, way: str, policy: Policy) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        mesh = {
            "shards": init_device_mesh("cpu", (4,)),
            "shards of replicas": mesh,
            "pipeline of shards": mesh["inner"],
            "1F1B of shards": mesh["inner"],
        }[engine]
        capture = "just in time" if way == "blocks just in time" else "auto"
        self.scaler = ampgraph.convert_blocks(model, "[0-9]", policy=policy, capture=capture).scaler
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        self.model = model

    def rows(self) -> slice:
        count = 4 if self.stage is None else 2
        size, place = len(X) // count, self.rank % count
        return slice(size * place, size * place + size)

    def backward(self, is_bad: bool) -> None:
        """Runs this rank's rows, through the stage of a peer where there is one."""
        x, self.is_bad = X[self.rows()], is_bad
        if self.schedule is not None:
            self.schedule.step(x) if self.stage == 0 else self.schedule.step(target=x)
            return
        if self.stage == 0:
            y = self.model(x)
            dist.send(y.detach(), self.rank + 2)
            dist.recv(gradient := torch.empty_like(y), self.rank + 2)
            if is_bad and self.rank == self.bad:
                gradient = gradient * float("inf")
            y.backward(gradient)
            return
        if self.stage == 1:
            dist.recv(x := torch.empty_like(x), self.rank - 2)
            x.requires_grad_()
        loss = self.model(x).square().mean()
        (loss * (float("inf") if is_bad and self.rank == self.bad else 1.0)).backward()
        if self.stage == 1:
            # The overflow of this stage alone: the stage before gets finite gradients.
            dist.send(x.grad.nan_to_num(0.0, 0.0, 0.0), self.rank - 2)

    def everything(self) -> list[torch.Tensor]:
        state = [v for values in self.optimizer.state.values() for v in values.values()]
        tensors = (*self.model.parameters(), *state)
        return [(t.to_local() if hasattr(t, "to_local") else t).detach().clone() for t in tensors]


def _row(rank: int, engine: str, way: str, dtype: torch.dtype, bad: int) -> tuple:
    job = Job(rank, engine, way, dtype, bad)
    job.whole(X).square().mean().backward()
    for step in range(3):
        job.optimizer.zero_grad()
        is_bad = step == 1
        job.backward(is_bad)
        if step == 0:
            check_gradients(job, dtype)
        before = job.everything()
        job.optimizer.step()
        same = [torch.equal(a, b) for a, b in zip(before, job.everything(), strict=False)]
        assert all(same) if is_bad else not all(same)
    overflow = job.scaler.last_overflow
    return job.scaler.get_scale(), overflow and (overflow.step, overflow.rank, overflow.parameters[0])


def check_gradients(job: Job, dtype: torch.dtype) -> None:
    # Each of four blocks rounds half a dozen times, forward and backward.
    tolerance = 4 * torch.finfo(dtype).eps
    for mine, theirs in zip(job.model.parameters(), job.reference.parameters(), strict=True):
        gradient = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
        error = (gradient - theirs.grad).norm() / theirs.grad.norm()
        assert gradient.dtype == torch.float32
        assert error <= tolerance, error


ROWS = [
    ("replicas", "ahead of time"),
    ("replicas", "just in time"),
    ("replicas", "blocks"),
    ("shards", "blocks"),
    ("shards", "blocks just in time"),
    ("shards of replicas", "blocks"),
    ("pipeline of shards", "blocks"),
    ("1F1B of shards", "blocks"),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("engine", "way"), ROWS)
def test_gradients_and_skipping(ranks, engine, way, dtype) -> None:
    found = ranks.run(_row, engine, way, dtype, 3)
    # The schedules send the infinite gradient to the stage before: rank 1 is the lowest that overflows.
    first = (2, 1, "0.down.bias") if engine.startswith("1F1B") else (2, 3, "3.down.bias")
    assert found == [(512.0, first)] * 4


def test_an_overflow_of_the_first_stage_alone(ranks) -> None:
    found = ranks.run(_row, "pipeline of shards", "blocks", torch.float16, 0)
    assert found == [(512.0, (2, 0, "0.down.bias"))] * 4


def _offloaded(rank: int, dtype: torch.dtype) -> tuple:
    """Decoder layers of transformers' Llama, sharded in pairs of replicas, with their values on the CPU."""
    allow_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, use_cache=False, **sizes))
    tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    reference = copy.deepcopy(model)
    reference(input_ids=tokens, labels=tokens).loss.backward()
    policy = Policy(dtype=dtype, loss_scale=DynamicLossScale(init_scale=1024.0))
    scaler = ampgraph.convert_blocks(model, "model.layers.*", policy=policy).scaler
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler.attach(optimizer)
    mine = tokens[rank : rank + 1]
    for step in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=mine, labels=mine).loss
        (loss * (float("inf") if (step, rank) == (1, 3) else 1.0)).backward()
        if step == 0:
            check_shards(model, reference, dtype)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = [p.to_local().clone() for p in model.parameters()]
        optimizer.step()
        same = [torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True)]
        assert all(same) if step == 1 else not all(same)
    overflow = scaler.last_overflow
    return scaler.get_scale(), overflow.step, overflow.rank


def check_shards(model: nn.Module, reference: nn.Module, dtype: torch.dtype) -> None:
    # Two layers of a dozen roundings each, forward and backward.
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        error = (mine.grad.full_tensor() - theirs.grad).norm() / theirs.grad.norm()
        assert error <= 8 * torch.finfo(dtype).eps, error


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layers_of_llama_sharded_with_offload(ranks, dtype) -> None:
    assert ranks.run(_offloaded, dtype) == [(512.0, 2, 3)] * 4


def _example(rank: int, folder: str, resume: bool) -> dict[str, Any]:
    allow_torchvision()
    spec = importlib.util.spec_from_file_location("example_fsdp2_llama", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(Path(folder), resume)


def test_the_example_resumes_with_half_the_ranks(ranks, tmp_path) -> None:
    first = ranks.run(_example, str(tmp_path), False)
    pool = Ranks(2)
    try:
        second = pool.run(_example, str(tmp_path), True)
    finally:
        pool.stop()
    assert first == [first[0]] * 4
    assert second == [second[0]] * 2
    whole, resumed = first[0], second[0]
    assert whole["losses"][-1] < 0.95 * whole["losses"][0]
    assert resumed["losses"] == pytest.approx(whole["losses"][4:], rel=1e-3)
    assert resumed["scale"] == whole["scale"]
    assert (whole["overflow"], resumed["overflow"]) == ((7, 3), (7, 1))
