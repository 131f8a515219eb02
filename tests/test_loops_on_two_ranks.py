"""Loops of other libraries on two ranks: Trainer, Accelerate with FSDP2, checkpoints at other sizes."""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import ampgraph
from ampgraph import DynamicLossScale, Policy
from ampgraph.cli.torchvision_shim import allow_torchvision

from .ranks import SIZE, Ranks, gathered
from .test_loop_watch import bert_trainer

pytestmark = pytest.mark.distributed
allow_torchvision()  # the processes have no conftest
if not all(map(importlib.util.find_spec, ("transformers", "accelerate"))):  # an import would take seconds
    pytest.skip("needs transformers and accelerate", allow_module_level=True)

LIBRARIES = "transformers.models.llama.modeling_llama", "transformers.trainer", "accelerate"
INF = float("inf")
FLOAT16 = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=1024.0, growth_interval=3))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(imports=LIBRARIES)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    pool = Ranks(1, imports=LIBRARIES)
    yield pool
    pool.stop()


def as_torchrun(rank: int) -> None:
    """Sets what torchrun tells a process."""
    size = str(SIZE)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, use_cache=False, **sizes))


def loss_of(model: nn.Module, step: int, rank: int, size: int = SIZE) -> torch.Tensor:
    tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
    return model(input_ids=tokens, labels=tokens).loss


# -- Hugging Face's Trainer ------------------------------------------------------------------------------


def _trainer(rank: int, folder: str, batches: int, fused: bool) -> tuple:
    as_torchrun(rank)
    logging.disable(logging.WARNING)
    name = "adamw_torch_fused" if fused else "adamw_torch"
    options = {"max_steps": 4, "ddp_backend": "gloo", "ddp_find_unused_parameters": False, "optim": name}
    trainer = bert_trainer(folder, gradient_accumulation_steps=batches, **options)
    blocks = ampgraph.convert_blocks(trainer.model, "", policy=FLOAT16)
    blocks.scaler.attach(trainer.create_optimizer())
    compute, calls = trainer.compute_loss, iter(range(100))

    def compute_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        is_bad = next(calls) == batches and rank == 1  # the first micro-batch of the second step
        return compute(*args, **kwargs) * (INF if is_bad else 1.0)

    trainer.compute_loss = compute_loss
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    for parameter in trainer.model.parameters():
        assert torch.equal(*gathered(parameter))
    overflow = blocks.scaler.last_overflow
    return blocks.scaler.get_scale(), overflow.step, overflow.rank, overflow.parameters[0]


@pytest.mark.parametrize(("batches", "fused"), [(1, False), (2, True)])
def test_a_trainer_under_torchrun(ranks, tmp_path, batches, fused) -> None:
    expected = (512.0, 2, 1, "classifier.bias")
    assert ranks.run(_trainer, str(tmp_path), batches, fused) == [expected] * 2


# -- Accelerate with FSDP2 -------------------------------------------------------------------------------


def _accelerate(rank: int, converts_first: bool) -> list[tuple]:
    as_torchrun(rank)
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True)
    # Accelerate shards on devices only; nothing of what it does depends on that.
    accelerator.state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    model = llama()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if converts_first:
        scaler = ampgraph.convert_blocks(model, "model.layers.*", policy=FLOAT16).scaler
        scaler.attach(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    if not converts_first:
        scaler = ampgraph.convert_blocks(model, "model.layers.*", policy=FLOAT16).scaler
        scaler.attach(optimizer)
    assert type(model.model.layers[0]).__name__ == "FSDPLlamaDecoderLayer"
    loss_of(reference, 0, 0, 1).backward()
    found = []
    for step in range(3):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, step, rank) * (INF if (step, rank) == (1, 1) else 1.0))
        if step == 0:
            check_gradients(model, reference)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        before = [p.to_local().clone() for p in model.parameters()]
        optimizer.step()
        same = [torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True)]
        assert all(same) if step == 1 else not any(same)
        found.append((accelerator.optimizer_step_was_skipped, scaler.get_scale()))
    assert (scaler.last_overflow.step, scaler.last_overflow.rank) == (2, 1)
    return found


def check_gradients(model: nn.Module, reference: nn.Module) -> None:
    # Two layers of a dozen roundings each, forward and backward.
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        error = (mine.grad.full_tensor() - theirs.grad).norm() / theirs.grad.norm()
        assert error <= 8 * torch.finfo(torch.float16).eps, error


@pytest.mark.parametrize("converts_first", [True, False])
def test_accelerate_with_fsdp2(ranks, converts_first) -> None:
    assert ranks.run(_accelerate, converts_first) == [[(False, 1024.0), (True, 512.0), (False, 512.0)]] * 2


# -- checkpoints at another size -------------------------------------------------------------------------


class TrainState:
    """What torchtitan's loop gives to DCP beside model and optimizer: an object with a state."""

    def __init__(self, scaler: ampgraph.LossScaler) -> None:
        self.step, self.scaler = 0, scaler

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        self.scaler.load_state_dict(state["scaler"])


def _titan(rank: int, folder: str, resumes: bool) -> tuple[list[float], dict[str, Any]]:
    """Trains to the fourth step; saves after the second, where the third overflows on the last rank."""
    size = dist.get_world_size()
    model = llama()
    scaler = ampgraph.convert_blocks(model, "model.layers.*", policy=FLOAT16).scaler
    for module in (*model.model.layers, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler.attach(optimizer)
    train, losses = TrainState(scaler), []
    if resumes:
        load(model, optimizer, train, folder)
    while train.step < 4:
        optimizer.zero_grad()
        loss = loss_of(model, train.step, rank, size)
        (loss * (INF if train.step == 2 and rank == size - 1 else 1.0)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        train.step += 1
        mean = loss.detach() / size
        dist.all_reduce(mean)
        losses.append(float(mean))
        if train.step == 2 and not resumes:
            parts = get_state_dict(model, optimizer)
            dcp.save({"model": parts[0], "optimizer": parts[1], "train_state": train}, checkpoint_id=folder)
    state = scaler.state_dict()
    return losses, {name: state[name] for name in ("scale", "_growth_tracker", "_steps")}


def load(model: nn.Module, optimizer: torch.optim.Optimizer, train: TrainState, folder: str) -> None:
    parts = get_state_dict(model, optimizer)
    dcp.load({"model": parts[0], "optimizer": parts[1], "train_state": train}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=parts[0], optim_state_dict=parts[1])


@pytest.mark.parametrize("grows", [False, True])
def test_a_checkpoint_at_another_size(ranks, one, tmp_path, grows) -> None:
    first, second = (one, ranks) if grows else (ranks, one)
    (losses, state), *others = first.run(_titan, str(tmp_path), False)
    (resumed, its_state), *its_others = second.run(_titan, str(tmp_path), True)
    assert all(other == (losses, state) for other in others)
    assert all(other == (resumed, its_state) for other in its_others)
    assert resumed == pytest.approx(losses[2:], rel=1e-3)
    assert its_state == state == {"scale": 512.0, "_growth_tracker": 1, "_steps": 4}


# -- a rank that ends ------------------------------------------------------------------------------------


def _ends_before_a_step(rank: int, folder: str) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    scaler = ampgraph.convert_blocks(net, "[0-9]", policy=FLOAT16).scaler
    for module in (*net, net):
        fully_shard(module)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler.attach(optimizer)
    for step in range(3):
        net(torch.ones(2, 4)).sum().backward()
        if (rank, step) == (1, 1):
            os._exit(1)
        try:
            optimizer.step()
        except RuntimeError as error:
            Path(folder, "error").write_text(f"{step} {error}")
            return


def test_the_others_hear_of_a_rank_that_ends(tmp_path) -> None:
    """As without ampgraph, where the next collective raises."""
    pool = Ranks()
    try:
        with pytest.raises(EOFError):
            pool.run(_ends_before_a_step, str(tmp_path))
    finally:
        pool.stop()
    step, error = (tmp_path / "error").read_text().split(maxsplit=1)
    assert step == "1"
    assert "Connection" in error
