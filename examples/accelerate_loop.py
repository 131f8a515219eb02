"""Hugging Face Accelerate: prepares, accumulates, clips and checkpoints a converted model like any other.

    python examples/accelerate_loop.py

Leave Accelerate's ``mixed_precision`` at "no". The only extra line is `attach`, before `prepare`. Register
the scaler to put the loss scale into Accelerate's checkpoints.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ampgraph

EPOCHS, BATCH = 6, 16
SCALE = ampgraph.DynamicLossScale(2.0**10, growth_interval=8)
POLICY = ampgraph.Policy(dtype=torch.float16, loss_scale=SCALE)


def data() -> DataLoader:
    x = torch.randn(128, 16, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, (x[:, :8] * x[:, 8:]).sum(1, keepdim=True)), batch_size=BATCH)


class Run:
    """A model, its optimizer and its data, prepared."""

    def __init__(self, converted: bool):
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model: nn.Module = nn.Sequential(nn.Linear(16, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 1))
        if converted:
            model = ampgraph.convert(model, (torch.zeros(BATCH, 16),), policy=POLICY)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if converted:
            model.scaler.attach(optimizer)
            self.accelerator.register_for_checkpointing(model.scaler)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, data())

    def train(self, epochs: int) -> float:
        for _ in range(epochs):
            losses = []
            for x, y in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = F.mse_loss(self.model(x), y)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                losses.append(loss.item())
        return sum(losses) / len(losses)


def main() -> dict[str, float]:
    exact, amp, resumed = Run(converted=False), Run(converted=True), Run(converted=True)
    amp.train(EPOCHS // 2)
    with TemporaryDirectory() as folder:
        amp.accelerator.save_state(folder)
        resumed.accelerator.load_state(folder)
    return {
        "loss float32": exact.train(EPOCHS),
        "loss float16": amp.train(EPOCHS - EPOCHS // 2),
        "loss float16, resumed": resumed.train(EPOCHS - EPOCHS // 2),
        "scale": amp.model.scaler.get_scale(),
        "scale, resumed": resumed.model.scaler.get_scale(),
    }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:22} {value:.6g}")
