"""`convert_blocks` and FSDP2 on blocks of other people's, whose constructors take arguments."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import ampgraph
from ampgraph import Policy
from ampgraph.cli.torchvision_shim import allow_torchvision

WIDTH = 16
RANKS_IMPORT = ("transformers.models.llama.modeling_llama", "timm.models.vision_transformer")


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer

        config = LlamaConfig(
            hidden_size=WIDTH, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=8
        )
        config._attn_implementation = "sdpa"
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, i) for i in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[1])[:, None] * torch.ones(8)
        table = angles.cos()[None], angles.sin()[None]
        for layer in self.layers:
            x = layer(x, position_embeddings=table)
        return x


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Defaults(nn.Linear):
    """A block whose constructor works without arguments, and draws random numbers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width, width)


def model_of(kind: str) -> nn.Module:
    allow_torchvision()
    if kind == "llama":
        return Llama()
    if kind == "vit":
        from timm.models.vision_transformer import Block

        return Layers(Block(WIDTH, 2), Block(WIDTH, 2))
    if kind == "linear":
        return Layers(nn.Linear(WIDTH, WIDTH), Defaults())
    feed = (nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
    return Layers(*map(checkpoint_wrapper, feed))


def _sharded(rank: int, kind: str, order: str, dtype: torch.dtype) -> None:
    model, x = model_of(kind), torch.randn(2, 3, WIDTH)
    reference = copy.deepcopy(model)
    expected = reference(x)
    expected.square().mean().backward()
    policy = Policy(dtype=dtype)
    state = torch.get_rng_state()
    if order == "convert first":
        blocks = ampgraph.convert_blocks(model, "layers.*", policy=policy)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    if order == "shard first":
        blocks = ampgraph.convert_blocks(model, "layers.*", policy=policy)
    tolerance = 8 * torch.finfo(dtype).eps  # two layers of half a dozen roundings each
    output = model(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert (output - expected).norm() <= tolerance * expected.norm()
    output.square().mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        error = (mine.grad.full_tensor() - theirs.grad).norm() / theirs.grad.norm()
        assert mine.grad.dtype == torch.float32
        assert error <= tolerance, error
    for block in blocks.values():
        assert dtype in {d.dtype for d in block.plan.decisions.values()}
    blocks.scaler.attach(torch.optim.AdamW(model.parameters(), lr=0.1))
    assert torch.equal(model(x), output)
    blocks.restore()
    assert not any("forward" in vars(m) for m in model.layers)
    assert (model(x) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", ["convert first", "shard first"])
@pytest.mark.parametrize("kind", ["llama", "vit", "linear", "checkpointed"])
def test_blocks_whose_constructors_take_arguments(ranks, kind, order, dtype) -> None:
    ranks.run(_sharded, kind, order, dtype)
