"""A plain PyTorch loop in float16: loss scaling, accumulation, clipping, and a checkpoint to resume from.

    python examples/plain_loop.py

Float32 and float16 differ in two lines of `build`: `convert`, and `attach` for the loss scale that float16
needs. Gradients are unscaled float32 gradients, so accumulation and clipping work as in any loop. A
checkpoint has one extra entry, the scaler's.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.nn import functional as F

import ampgraph

STEPS, BATCH, MICRO_BATCHES = 60, 32, 2
SCALE = ampgraph.DynamicLossScale(2.0**10, growth_interval=20)
POLICY = ampgraph.Policy(dtype=torch.float16, loss_scale=SCALE)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 16, generator=generator)
    return x, (x[:, :4] * x[:, 4:8]).sum(1, keepdim=True)


def build(converted: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 1))
    if converted:
        model = ampgraph.convert(model, batch(0)[0].chunk(MICRO_BATCHES)[:1], policy=POLICY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if converted:
        model.scaler.attach(optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    for step in steps:
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(*(tensor.chunk(MICRO_BATCHES) for tensor in batch(step)), strict=True):
            loss = F.mse_loss(model(x), y) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return total


def save(path: Path, model: ampgraph.AmpModule, optimizer: torch.optim.Optimizer) -> None:
    parts = {"model": model, "optimizer": optimizer, "scaler": model.scaler}
    torch.save({name: part.state_dict() for name, part in parts.items()}, path)


def resume(path: Path) -> tuple[ampgraph.AmpModule, torch.optim.Optimizer]:
    model, optimizer = build(converted=True)
    state = torch.load(path)
    for name, part in {"model": model, "optimizer": optimizer, "scaler": model.scaler}.items():
        part.load_state_dict(state[name])
    return model, optimizer


def main() -> dict[str, float]:
    exact = train(*build(converted=False), range(STEPS))
    model, optimizer = build(converted=True)
    train(model, optimizer, range(STEPS // 2))
    with TemporaryDirectory() as folder:
        save(Path(folder) / "checkpoint.pt", model, optimizer)
        resumed, its_optimizer = resume(Path(folder) / "checkpoint.pt")
    return {
        "loss float32": exact,
        "loss float16": train(model, optimizer, range(STEPS // 2, STEPS)),
        "loss float16, resumed": train(resumed, its_optimizer, range(STEPS // 2, STEPS)),
        "scale": model.scaler.get_scale(),
        "scale, resumed": resumed.scaler.get_scale(),
    }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:22} {value:.6g}")
