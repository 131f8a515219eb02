"""The steps of timm's training script with ``--torchcompile ampgraph``, which names the backend.

    python train.py DATA --model test_vit --opt adamw --sched cosine --model-ema --torchcompile ampgraph
    python examples/timm_train.py    # the same steps, on made-up images

bfloat16 needs no loss scale. For float16 (ampgraph's default on CUDA) run the script with ``--amp``. Its
NativeScaler scales the loss, and its ``torch.autocast`` only sets the dtype of the compiled graph.
"""

from __future__ import annotations

import contextlib

import torch
from torch.nn import functional as F

try:
    from timm import create_model
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import ModelEmaV3, NativeScaler, dispatch_clip_grad
except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision built for another torch
    raise SystemExit(
        f"{error}: install timm, and torchvision as built for torch {torch.__version__}: "
        "pip install timm torchvision"
    ) from error

EPOCHS, UPDATES, BATCH, CLASSES = 3, 6, 8, 4


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    colours = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]])[labels]
    return torch.randn(BATCH, 3, 64, 64, generator=generator) + colours[:, :, None, None], labels


def train(backend: str, amp_dtype: torch.dtype | None = None) -> dict[str, float]:
    torch.manual_seed(0)
    model = create_model("test_vit", num_classes=CLASSES, img_size=64)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=5e-3, weight_decay=0.05)
    autocast = torch.autocast("cpu", dtype=amp_dtype) if amp_dtype else contextlib.nullcontext()
    scaler = NativeScaler(device="cpu") if amp_dtype == torch.float16 else None
    ema = ModelEmaV3(model, decay=0.8)
    model = torch.compile(model, backend=backend)
    scheduler, _ = create_scheduler_v2(optimizer, "cosine", EPOCHS, warmup_epochs=1, warmup_lr=1e-4)
    losses = []
    for epoch in range(EPOCHS):
        model.train()
        for index in range(epoch * UPDATES, (epoch + 1) * UPDATES):
            images, labels = batch(index)
            with autocast:
                loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            if scaler:
                scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
            else:
                loss.backward()
                dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
                optimizer.step()
            optimizer.zero_grad()
            ema.update(model, step=index)
            losses.append(loss.item())
        scheduler.step(epoch + 1)

    images, labels = batch(-1)
    with torch.no_grad(), autocast:
        accuracy = (model.eval()(images).argmax(1) == labels).float().mean().item()
        averaged = (ema.module(images).argmax(1) == labels).float().mean().item()
    return {"first loss": losses[0], "last loss": losses[-1], "accuracy": accuracy, "accuracy EMA": averaged}


def main() -> dict[str, dict[str, float]]:
    return {
        "float32": train("eager"),
        "bfloat16": train("ampgraph"),
        "float16, NativeScaler": train("ampgraph", amp_dtype=torch.float16),
    }


if __name__ == "__main__":
    for name, figures in main().items():
        print(f"{name:22}", *(f"{key} {value:.5f}  " for key, value in figures.items()))
