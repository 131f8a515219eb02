"""Models of timm, on small images."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from tests.zoo._images import allow_torchvision, image
from tests.zoo.models import ZooModel

if TYPE_CHECKING:
    from torch import nn

_SMALL_VIT = {"img_size": 64, "depth": 2, "embed_dim": 96, "num_heads": 4}

_MODELS: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("resnet18", "convnet", 64, {}),
    ("resnet50", "convnet", 64, {}),
    ("resnetv2_50d_gn", "convnet", 64, {}),
    ("densenet121", "convnet", 64, {}),
    ("mobilenetv2_050", "convnet", 64, {}),
    ("mobilenetv3_small_100", "convnet", 64, {}),
    ("efficientnet_b0", "convnet", 64, {}),
    ("ghostnet_050", "convnet", 64, {}),
    ("convnext_atto", "convnet", 64, {}),
    ("convnextv2_atto", "convnet", 64, {}),
    ("regnetx_002", "convnet", 64, {}),
    ("repvgg_a0", "convnet", 64, {}),
    ("nf_regnet_b0", "convnet", 64, {}),
    ("hrnet_w18_small", "convnet", 64, {}),
    ("vit_tiny_patch16_224", "vit", 64, {"img_size": 64, "depth": 4}),
    ("deit_tiny_distilled_patch16_224", "vit", 64, {"img_size": 64, "depth": 4}),
    ("beit_base_patch16_224", "vit", 64, _SMALL_VIT),
    ("eva02_tiny_patch14_224", "vit", 56, {"img_size": 56, "depth": 2}),
    ("cait_xxs24_224", "vit", 64, {"img_size": 64, "depth": 2}),
    ("swin_tiny_patch4_window7_224", "vit", 64, {"img_size": 64, "window_size": 2, "embed_dim": 48}),
    ("maxvit_rmlp_pico_rw_256", "hybrid", 64, {"img_size": 64}),
    ("coatnet_pico_rw_224", "hybrid", 64, {"img_size": 64}),
    ("coat_lite_tiny", "hybrid", 64, {"img_size": 64}),
    ("levit_128s", "hybrid", 224, {}),
    ("pvt_v2_b0", "hybrid", 64, {}),
    ("mobilevit_xxs", "hybrid", 64, {}),
    ("edgenext_xx_small", "hybrid", 64, {}),
    ("poolformer_s12", "hybrid", 64, {}),
    ("mixer_s32_224", "mlp", 64, {"img_size": 64}),
    ("resmlp_12_224", "mlp", 64, {"img_size": 64}),
)


def models() -> list[ZooModel]:
    """Returns timm's part of the registry."""
    return [
        ZooModel(f"timm/{name}", "timm", kind, functools.partial(_build, name, options), image(size))
        for name, kind, size, options in _MODELS
    ]


def _build(name: str, options: dict[str, Any]) -> nn.Module:
    allow_torchvision()
    import timm

    return timm.create_model(name, pretrained=False, num_classes=10, **options)
