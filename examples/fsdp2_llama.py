"""FSDP2: a Llama built on meta, float16 blocks with activation checkpointing, a distributed checkpoint.

    torchrun --nproc-per-node 4 examples/fsdp2_llama.py --checkpoint /tmp/llama
    torchrun --nproc-per-node 2 examples/fsdp2_llama.py --checkpoint /tmp/llama --resume

The first run saves after half of its steps and goes on. The second begins there with half as many ranks and
prints the same losses. One step overflows on one rank: all ranks skip it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import ampgraph

BATCH, LENGTH, STEPS = 8, 16, 8
SAVED_AFTER, BAD_STEP = STEPS // 2, STEPS - 2
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)
POLICY = ampgraph.Policy(
    dtype=torch.float16, loss_scale=ampgraph.DynamicLossScale(init_scale=2.0**10, growth_interval=3)
)


def built() -> tuple[nn.Module, ampgraph.LossScaler]:
    """Builds and shards the model without values; each rank makes its own. Then converts blocks."""
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    layers = model.model.layers
    for i in range(len(layers)):
        layers[i] = checkpoint_wrapper(layers[i])
    for layer in layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    fully_shard(model)
    model.to_empty(device="cpu")
    model.model.rotary_emb = LlamaRotaryEmbedding(CONFIG)  # its table is no parameter
    for parameter in model.parameters():
        nn.init.ones_(parameter) if parameter.dim() == 1 else nn.init.normal_(parameter, std=0.1)
    blocks = ampgraph.convert_blocks(model, "model.layers.*", policy=POLICY)
    return model, blocks.scaler


def batch_of(step: int) -> torch.Tensor:
    """Returns this rank's rows of a step's batch: sums modulo the vocabulary."""
    generator = torch.Generator().manual_seed(step)
    start, stride = torch.randint(1, 8, (2, BATCH, 1), generator=generator)
    tokens = (start + stride * torch.arange(LENGTH)) % CONFIG.vocab_size
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: ampgraph.LossScaler) -> dict:
    parameters, optimizers = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": optimizers, "scaler": scaler.state_dict()}


def main(checkpoint: Path, resume: bool = False) -> dict[str, object]:
    torch.manual_seed(0)
    model, scaler = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler.attach(optimizer)
    if resume:
        state = state_of(model, optimizer, scaler)
        dcp.load(state, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scaler.load_state_dict(state["scaler"])
    losses = []
    for step in range(SAVED_AFTER if resume else 0, STEPS):
        tokens = batch_of(step)
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        is_bad = step == BAD_STEP and dist.get_rank() == dist.get_world_size() - 1
        (loss * (float("inf") if is_bad else 1.0)).backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
        if not resume and step + 1 == SAVED_AFTER:
            dcp.save(state_of(model, optimizer, scaler), checkpoint_id=checkpoint)
    overflow = scaler.last_overflow
    assert overflow is not None
    return {"losses": losses, "scale": scaler.get_scale(), "overflow": (overflow.step, overflow.rank)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    figures = main(arguments.checkpoint, arguments.resume)
    if dist.get_rank() == 0:
        for name, value in figures.items():
            print(f"{name}: {value}")
    dist.destroy_process_group()
