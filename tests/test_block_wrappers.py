"""Wrappers around converted blocks: activation checkpointing, FSDP1; and optimizers inside the backward."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import ampgraph
from ampgraph import CaptureError, DynamicLossScale, Policy

from .helpers import close
from .models import ResidualBlock

FLOAT16 = Policy(dtype=torch.float16, loss_scale=DynamicLossScale(init_scale=1024.0))
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList([ResidualBlock(), ResidualBlock()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


class Saves:
    """The policy of a selective checkpoint: keeps matrix products, and notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list = []

    def __call__(self, context, op, *args, **kwargs) -> CheckpointPolicy:
        self.asked.append((context.is_recompute, op))
        return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

    def wrap(self, model: Net) -> None:
        for i, layer in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(
                layer, context_fn=lambda: create_selective_checkpoint_contexts(self)
            )


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("order", ["convert first", "wrap first"])
def test_selective_checkpointing_captures_inside_its_mode(order, level) -> None:
    model, x, saves = Net(), torch.randn(5, 8), Saves()
    expected = gradients(model, x)
    names = [name for name, _ in model.named_parameters()]
    if order == "wrap first":
        saves.wrap(model)
    blocks = ampgraph.convert_blocks(model, "layers.*", policy=level, dtype=torch.bfloat16)
    if order == "convert first":
        saves.wrap(model)
    asked = []
    for _ in range(2):  # the first call captures, and is not another to the policy
        saves.asked.clear()
        for low, full in zip(gradients(model, x), expected, strict=True):
            close(low, full)
        asked.append([*saves.asked])
    assert asked[0] == asked[1]
    assert any(op in PRODUCTS for _, op in asked[0])
    assert blocks.scaler.names == names


def test_modes_of_the_caller_see_the_model_and_no_capture() -> None:
    """A count of flops counts the call, not the capture before it."""
    model = nn.Sequential(nn.Linear(8, 4))
    ampgraph.convert_blocks(model, "0", dtype=torch.bfloat16)
    with FlopCounterMode(display=False) as counter, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it hooks all modules of the process
        model(torch.randn(2, 8))
    assert counter.get_total_flops() == 2 * 2 * 8 * 4


def test_wrappers_that_come_later_change_no_name() -> None:
    model = Net()
    blocks = ampgraph.convert_blocks(model, "layers.*", policy=FLOAT16)
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer)
    model.load_state_dict(model.state_dict(), assign=True)  # other parameter objects, found by their names
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks.scaler.attach(optimizer)
    model(torch.randn(5, 8)).sum().backward()
    model.layers[1].down.bias.grad.fill_(float("nan"))
    optimizer.step()
    assert blocks.scaler.last_overflow.parameters == ("layers.1.down.bias",)


@pytest.mark.parametrize("kind", ["plain", "fused", "foreach"])
@pytest.mark.parametrize("way", ["attach", "step"])
def test_an_optimizer_inside_the_backward(way, kind) -> None:
    """Each parameter steps as soon as it has its gradient. Not one with a gradient that is not finite."""
    model, x = Net(), torch.randn(5, 8)
    blocks = ampgraph.convert_blocks(model, "layers.*", policy=FLOAT16)
    how = {} if kind == "plain" else {kind: True}
    optimizers = {p: torch.optim.AdamW([p], lr=0.01, **how) for p in model.parameters()}
    scaler = blocks.scaler
    if way == "attach":
        scaler.attach(*optimizers.values())

    def step(parameter: nn.Parameter) -> None:
        optimizer = optimizers[parameter]
        optimizer.step() if way == "attach" else scaler.step(optimizer)
        optimizer.zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)

    def train(factor: float = 1.0) -> list[str]:
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        (model(x).square().mean() * factor).backward()
        if way == "step":
            scaler.update()
        assert all(p.isfinite().all() for p in model.parameters())
        return [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]

    assert train() == [name for name, _ in model.named_parameters()]
    assert scaler.get_scale() == 1024.0
    assert train(float("inf")) == []
    assert scaler.get_scale() == 512.0
    assert train() == [name for name, _ in model.named_parameters()]
    assert scaler.get_scale() == 512.0


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fsdp1(model: nn.Module, **given) -> FullyShardedDataParallel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **given)


@pytest.mark.parametrize("keeps_parameters", [False, True])
def test_fsdp1_is_refused(one_rank, keeps_parameters) -> None:
    x, advice = torch.randn(2, 8), r"FSDP1.*Use FSDP2: .*fully_shard"
    wrapped = fsdp1(Net(), use_orig_params=keeps_parameters)
    with pytest.raises(CaptureError, match=advice):
        ampgraph.convert_blocks(wrapped, ResidualBlock)
    assert not any("forward" in vars(m) for m in wrapped.modules())
    for convert in (lambda m: ampgraph.convert(m), lambda m: ampgraph.convert(m, (x,))):
        with pytest.raises(CaptureError, match=advice):
            convert(nn.Sequential(wrapped))
    for capture in ("auto", "just in time"):
        model = Net()
        ampgraph.convert_blocks(model, ResidualBlock, capture=capture, dtype=torch.float16)
        with pytest.raises(CaptureError, match=r"layers.0: .*" + advice):
            fsdp1(model, use_orig_params=keeps_parameters)(x)
    amp = ampgraph.convert(Net(), (x,), dtype=torch.float16)
    with pytest.raises(CaptureError, match=advice):
        fsdp1(amp, use_orig_params=keeps_parameters)(x)
