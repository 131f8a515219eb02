"""Models without values (device meta): converted, sharded, then given values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ampgraph
from ampgraph import DynamicLossScale, NoLossScale, Policy, PolicyError
from ampgraph.cli.torchvision_shim import allow_torchvision
from ampgraph.errors import LoopError, NoGraphError

from .helpers import close


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(Block(), Block())


def with_values(model: nn.Module) -> nn.Module:
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    return model


def test_device_and_dtype_are_chosen_when_values_exist() -> None:
    model, x = on_meta(), torch.randn(4, 8)
    blocks = ampgraph.convert_blocks(model, Block)
    assert not blocks.scaler.is_enabled()
    with pytest.raises(NoGraphError, match=r"^0 has no values yet \(device meta\)"):
        _ = blocks["0"].plan
    with pytest.raises(LoopError, match="attach after to_empty, or name the dtype"):
        blocks.scaler.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(LoopError, match="load_state_dict after to_empty"):
        blocks.scaler.load_state_dict({"scale": 8.0})
    assert model(torch.empty(4, 8, device="meta")).device.type == "meta"
    copied = copy.deepcopy(model)
    with_values(model)
    expected = with_values(nn.Sequential(Block(), Block()))(x)
    close(model(x), expected)
    close(with_values(copied)(x), expected)
    assert blocks["0"].policy.dtype == torch.bfloat16
    assert blocks["0"].options.backend == "eager"
    assert isinstance(blocks.scaler.config, NoLossScale)


def test_values_on_cuda_choose_float16_and_a_loss_scale(monkeypatch) -> None:
    model = on_meta()
    blocks = ampgraph.convert_blocks(model, Block)
    with_values(model)
    monkeypatch.setattr(type(blocks.scaler), "device_of_values", lambda _: torch.device("cuda"))
    assert isinstance(blocks.scaler.config, DynamicLossScale)
    assert blocks.scaler.get_scale() == 65536.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    blocks.scaler.attach(optimizer)
    monkeypatch.setattr("ampgraph.runtime.backends.default_backend", lambda _: "aot_eager")
    assert blocks["0"].policy.dtype == torch.float16
    assert blocks["1"].options.backend == "aot_eager"
    before = copy.deepcopy(model[0].up.weight)
    model[0].up.weight.grad = torch.full_like(before, float("inf"))
    optimizer.step()
    assert torch.equal(model[0].up.weight, before)
    assert blocks.scaler.last_overflow.parameters == ("0.up.weight",)


def test_errors_of_arguments_do_not_wait_for_values() -> None:
    for given, message in (
        ({"backend": "nonsense"}, "nonsense"),
        ({"mode": "max-autotun"}, "max-autotune"),
        ({"policy": Policy(rules={"nowhere": "low"})}, "matches no module in a block"),
    ):
        model = on_meta()
        with pytest.raises(PolicyError, match=message):
            ampgraph.convert_blocks(model, Block, **given)
        assert not any("forward" in vars(block) for block in model)


class Bytes(TorchDispatchMode):
    """Counts the bytes of real tensors that ops make."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and not t.is_meta]
        self.total += sum(t.nbytes for t in made)
        return result


def test_seven_billion_parameters_convert_without_memory() -> None:
    allow_torchvision()
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig())
    assert sum(p.numel() for p in model.parameters()) > 6e9
    with Bytes() as counted:
        blocks = ampgraph.convert_blocks(model, LlamaDecoderLayer, dtype=torch.float16)
    assert len(blocks) == 32
    assert counted.total <= 64 * len(list(model.parameters()))


def _trains(rank: int, dtype: torch.dtype, shards_first: bool) -> None:
    model, x = on_meta(), torch.randn(2, 3, 8)
    blocks = None if shards_first else ampgraph.convert_blocks(model, Block, policy=Policy(dtype=dtype))
    for block in (*model, model):
        fully_shard(block)
    blocks = blocks or ampgraph.convert_blocks(model, Block, policy=Policy(dtype=dtype))
    model.to_empty(device="cpu")
    reference = with_values(nn.Sequential(Block(), Block()))
    values = dict(reference.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = torch.distributed.tensor.distribute_tensor(values[name], parameter.device_mesh)
            parameter.copy_(part)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    blocks.scaler.attach(optimizer)
    for _ in range(3):
        for each, step in ((model, optimizer), (reference, other)):
            step.zero_grad()
            each(x).square().mean().backward()
            step.step()
    for name, parameter in model.named_parameters():
        close(parameter.full_tensor(), values[name])
    assert blocks.scaler.names == [*values]
    assert blocks.scaler.last_overflow is None
    optimizer.zero_grad()
    model.to(torch.float64)  # swaps the contents of parameters, as a move to another device does
    assert blocks.scaler.slot_of(next(model.parameters())) == 0


@pytest.mark.parametrize("shards_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_meta_then_blocks_and_shards_then_values(ranks, dtype, shards_first) -> None:
    ranks.run(_trains, dtype, shards_first)
