"""Lightning's Trainer with the precision plugin: the LightningModule does not change.

    python examples/lightning_module.py

The plugin converts the network inside, skips bad steps, and keeps the loss scale in the Trainer's checkpoints
(../docs/lightning.md).
"""

from __future__ import annotations

import logging
from tempfile import TemporaryDirectory

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ampgraph
from ampgraph.integrations.lightning import AmpGraphPrecision

EPOCHS, BATCH = 6, 16
SCALE = ampgraph.DynamicLossScale(2.0**10, growth_interval=16)
POLICY = ampgraph.Policy(dtype=torch.float16, loss_scale=SCALE)


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(16, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 1))

    def training_step(self, batch, index):
        x, y = batch
        loss = F.mse_loss(self.network(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data() -> DataLoader:
    x = torch.randn(128, 16, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, (x[:, :8] * x[:, 8:]).sum(1, keepdim=True)), batch_size=BATCH)


def fit(*plugins: AmpGraphPrecision, epochs: int = EPOCHS, checkpoint: str | None = None) -> Trainer:
    torch.manual_seed(0 if checkpoint is None else 1)  # a checkpoint has to bring all
    trainer = Trainer(
        plugins=list(plugins),
        max_epochs=epochs,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), data(), ckpt_path=checkpoint)
    return trainer


def main() -> dict[str, float]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    exact, plugin, second = fit(), AmpGraphPrecision(POLICY), AmpGraphPrecision(POLICY)
    low = fit(plugin)
    with TemporaryDirectory() as folder:
        fit(AmpGraphPrecision(POLICY), epochs=EPOCHS // 2).save_checkpoint(f"{folder}/half.ckpt")
        resumed = fit(second, checkpoint=f"{folder}/half.ckpt")
    return {
        "loss float32": exact.callback_metrics["loss"].item(),
        "loss float16": low.callback_metrics["loss"].item(),
        "loss float16, resumed": resumed.callback_metrics["loss"].item(),
        "scale": plugin.scaler.get_scale(),
        "scale, resumed": second.scaler.get_scale(),
    }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:22} {value:.6g}")
