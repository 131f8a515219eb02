"""A whole training step as one graph, beside the plain loop: the same losses, bit for bit.

    python examples/compiled_step.py

`build` is the same for both. The step has an overflow now and then, which the device skips.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import ampgraph

STEPS, BATCH = 60, 32


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 16, generator=generator)
    weight = torch.tensor(1e38 if step % 20 == 7 else 1.0)  # overflows
    return x, (x[:, :4] * x[:, 4:8]).sum(1, keepdim=True), weight


def build() -> tuple[ampgraph.AmpModule, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1))
    amp = ampgraph.convert(model, (batch(0)[0],), policy="O2", dtype=torch.float16, backend="eager")
    return amp, torch.optim.AdamW(amp.parameters(), lr=1e-2, fused=True)


def loss_of(amp: ampgraph.AmpModule, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(amp(x), y) * weight


def one_graph() -> tuple[list[float], str | None]:
    amp, optimizer = build()
    step = ampgraph.compile_step(amp, optimizer, loss_of)
    losses = [step(*batch(i)).item() for i in range(STEPS)]
    return losses, step.reason


def plain_loop() -> list[float]:
    amp, optimizer = build()
    amp.scaler.attach(optimizer)
    losses = []
    for i in range(STEPS):
        loss = loss_of(amp, *batch(i))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> dict[str, object]:
    losses, reason = one_graph()
    figures = {"loss": losses[-1], "is_equal": losses == plain_loop(), "reason": reason}
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, equal to the loop: {figures['is_equal']}")
    return figures


if __name__ == "__main__":
    main()
