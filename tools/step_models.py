"""The models of `bench_step.py`, each with its loss inside: small ones, and real ones in sizes for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bytes_models import UNet, WithLoss, channels_last
from small_models import Block
from torch import Tensor, nn
from torch.nn import functional as F

Made = tuple[nn.Module, tuple[Tensor, ...]]


class Regression(nn.Module):
    """A model that learns its input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.model(x).float(), x.float())


def _linears(count: int, width: int, batch: int) -> Made:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))
    return Regression(model), (torch.randn(batch, width),)


def _blocks() -> Made:
    return Regression(nn.Sequential(*(Block(64) for _ in range(6)))), (torch.randn(4, 32, 64),)


def _language(name: str, batch: int, length: int, **given: Any) -> Made:
    import transformers

    config = getattr(transformers, f"{name}Config")(vocab_size=50304, **given)
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[name])(config)
    ids = torch.randint(0, config.vocab_size, (batch, length))
    return WithLoss(model, tokens=True, use_cache=False), (ids, ids.roll(-1, 1))


def _images(name: str, batch: int, **given: Any) -> Made:
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=1000, **given)
    return WithLoss(model), (torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,)))


def _unet() -> Made:
    return WithLoss(UNet(128)), (torch.randn(16, 3, 256, 256), torch.randint(0, 10, (16, 256, 256)))


_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_LLAMA = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 12,
    "intermediate_size": 2816,
}

SMALL: dict[str, Callable[[], Made]] = {
    "30 linears": lambda: _linears(30, 64, 32),
    "6 blocks": _blocks,
}
LARGE: dict[str, Callable[[], Made]] = {
    "9 x Linear 8192": lambda: _linears(9, 8192, 8192),
    "GPT-2, 12 x 768, 8 x 1024 tokens": lambda: _language("GPT2", 8, 1024, **_NO_DROPOUT),
    "Llama, 12 x 1024, 8 x 1024 tokens": lambda: _language("Llama", 8, 1024, **_LLAMA),
    "ViT-B/16, 64 images": lambda: _images("vit_base_patch16_224", 64),
    "ConvNeXt-T, 64 images": lambda: channels_last(*_images("convnext_tiny", 64, drop_path_rate=0.0)),
    "Swin-T, 64 images": lambda: _images("swin_tiny_patch4_window7_224", 64, drop_path_rate=0.0),
    "ResNet-50, 128 images": lambda: channels_last(*_images("resnet50", 128)),
    "U-Net, 16 images": lambda: channels_last(*_unet()),
}
MODELS = SMALL | LARGE


def made(name: str, device: str) -> Made:
    """Returns a model and its inputs on a device, the same each time."""
    torch.manual_seed(0)
    with torch.device(device):
        return MODELS[name]()
