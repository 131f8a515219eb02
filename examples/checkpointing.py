"""Activation checkpointing with `torch.utils.checkpoint`: the ways of converting that keep the saving.

    python examples/checkpointing.py

A capture ahead of time inlines checkpointed regions: gradients are right, but no memory is saved. Two ways
keep the saving. With `convert_blocks` the model's code calls `checkpoint` around converted blocks, on any
backend. Just in time, a backend on AOTAutograd (``"aot_eager"``, ``"inductor"``) recomputes the regions.
Low copies of weights cost 2 bytes a parameter. `Policy(weight_copies=False)` does without them.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampgraph

LAYERS, WIDTH, BATCH = 6, 64, 256


class Network(nn.Module):
    def __init__(self, checkpointed: bool):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))]
        self.blocks = nn.ModuleList(copy.deepcopy(blocks[0]) for _ in range(LAYERS))
        self.checkpointed = checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return x


def measured(model: nn.Module, parameters: list[nn.Parameter]) -> tuple[int, torch.Tensor]:
    """Returns the bytes of activations saved for the backward, and the gradients as one vector."""
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    kept: dict[int, int] = {}
    skip = {t.untyped_storage().data_ptr() for t in (x, *parameters)}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skip:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).square().mean()
    bytes_kept = sum(kept.values())
    loss.backward()
    return bytes_kept, torch.cat([p.grad.flatten() for p in parameters])


def build(how: str) -> tuple[nn.Module, list[nn.Parameter]]:
    torch.manual_seed(0)
    model = Network(checkpointed=how != "float32, no checkpoints")
    parameters = list(model.parameters())
    policy = ampgraph.Policy(dtype=torch.bfloat16, weight_copies=False)
    if how == "ahead of time":
        return ampgraph.convert(model, (torch.zeros(BATCH, WIDTH),), policy=policy), parameters
    if how == "just in time, aot_eager":
        return ampgraph.convert(model, policy=policy, backend="aot_eager"), parameters
    if how == "convert_blocks":
        ampgraph.convert_blocks(model, "blocks.*", policy=policy)
    return model, parameters


WAYS = ("float32, no checkpoints", "float32", "ahead of time", "just in time, aot_eager", "convert_blocks")


def main() -> dict[str, tuple[int, float]]:
    """Returns the saved bytes and the relative error of the gradients, for each way of converting."""
    figures, exact = {}, None
    for how in WAYS:
        model, parameters = build(how)
        measured(model, parameters)  # captures and compiles
        for parameter in parameters:
            parameter.grad = None
        kept, gradients = measured(model, parameters)
        exact = gradients if exact is None else exact
        figures[how] = kept, ((gradients - exact).norm() / exact.norm()).item()
    return figures


if __name__ == "__main__":
    for name, (kept, error) in main().items():
        print(f"{name:24} {kept / 1024:8.0f} KiB kept    gradients off by {error:.1e}")
