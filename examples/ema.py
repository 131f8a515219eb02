"""Averaged weights over a converted model: torch's AveragedModel and timm's ModelEmaV3.

    python examples/ema.py

Both copy the model once and average its float32 parameters. A copy of a converted model is converted too, so
the averaged model runs in mixed precision. Its low copies of the weights (level O2) follow the averages. Pass
the copy's ``.source`` to `update_bn`, to compute the batch statistics in float32.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import ampgraph

STEPS, DECAY = 150, 0.9
POLICY = ampgraph.Policy("O2", dtype=torch.float16, loss_scale=ampgraph.DynamicLossScale(2.0**10))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    return x, (x[:, :8] * x[:, 8:]).sum(1, keepdim=True)


def train() -> tuple[ampgraph.AmpModule, dict[str, nn.Module], list[torch.Tensor]]:
    """Returns the model, its averages by library, and the average computed by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Linear(128, 1))
    amp = ampgraph.convert(model, batch(0)[:1], policy=POLICY)
    optimizer = torch.optim.AdamW(amp.parameters(), lr=1e-2)
    amp.scaler.attach(optimizer)

    averages: dict[str, nn.Module] = {"torch": AveragedModel(amp, multi_avg_fn=get_ema_multi_avg_fn(DECAY))}
    averages["torch"].update_parameters(amp)  # the first call copies
    try:
        from timm.utils import ModelEmaV3
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision built for another torch
        print(f"without timm's ModelEmaV3, since timm cannot be imported: {error}")
    else:
        averages["timm"] = ModelEmaV3(amp, decay=DECAY)
    by_hand = [parameter.detach().clone() for parameter in amp.parameters()]

    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(amp(x), y).backward()
        optimizer.step()
        averages["torch"].update_parameters(amp)
        if "timm" in averages:
            averages["timm"].update(amp)
        pairs = zip(by_hand, amp.parameters(), strict=True)
        by_hand = [DECAY * average + (1 - DECAY) * p.detach() for average, p in pairs]
    update_bn((batch(step)[0] for step in range(STEPS)), averages["torch"].module.source)
    return amp.eval(), {name: average.eval() for name, average in averages.items()}, by_hand


def main() -> dict[str, float]:
    amp, averages, by_hand = train()
    x, y = batch(-1)
    figures = {}
    with torch.no_grad():
        figures["loss of the last weights"] = F.mse_loss(amp(x), y).item()
        for name, average in averages.items():
            exact = copy.deepcopy(average.module.source)  # the same weights in float32
            pairs = zip(exact.parameters(), by_hand, strict=True)
            figures[f"{name}: off the average by hand"] = max((a - b).abs().max().item() for a, b in pairs)
            figures[f"{name}: loss of the average"] = F.mse_loss(average(x), y).item()
            figures[f"{name}: the same in float32"] = F.mse_loss(exact(x), y).item()
    return figures


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:32} {value:.6g}")
