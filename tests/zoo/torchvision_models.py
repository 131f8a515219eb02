"""Models of torchvision, on small images; the large ones with fewer and narrower layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.zoo._images import allow_torchvision, image
from tests.zoo.models import Inputs, ZooModel

if TYPE_CHECKING:
    from torch import nn

_NO_AUX = {"aux_logits": False, "init_weights": False}
_NO_BACKBONE = {"weights_backbone": None}

_BY_NAME: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("resnet18", "convnet", 64, {}),
    ("resnext50_32x4d", "convnet", 64, {}),
    ("densenet121", "convnet", 64, {}),
    ("mobilenet_v2", "convnet", 64, {}),
    ("mobilenet_v3_small", "convnet", 64, {}),
    ("efficientnet_b0", "convnet", 64, {}),
    ("mnasnet0_5", "convnet", 64, {}),
    ("convnext_tiny", "convnet", 64, {}),
    ("regnet_y_400mf", "convnet", 64, {}),
    ("shufflenet_v2_x0_5", "convnet", 64, {}),
    ("squeezenet1_1", "convnet", 64, {}),
    ("googlenet", "convnet", 64, _NO_AUX),
    ("inception_v3", "convnet", 96, _NO_AUX),
    ("fcn_resnet50", "segmentation", 64, _NO_BACKBONE),
    ("deeplabv3_mobilenet_v3_large", "segmentation", 64, _NO_BACKBONE),
    ("lraspp_mobilenet_v3_large", "segmentation", 64, _NO_BACKBONE),
)


def models() -> list[ZooModel]:
    """Returns torchvision's part of the registry."""
    by_name = [
        ZooModel(
            f"torchvision/{name}",
            "torchvision",
            kind,
            functools.partial(_by_name, name, options),
            image(size),
        )
        for name, kind, size, options in _BY_NAME
    ]
    built: tuple[tuple[str, str, Callable[[], nn.Module], Callable[[], Inputs]], ...] = (
        ("vgg11_bn", "convnet", _vgg, image()),
        ("vit", "vit", _vit, image()),
        ("swin", "vit", _swin, image()),
        ("swin_v2", "vit", _swin_v2, image()),
        ("maxvit", "hybrid", _maxvit, image()),
        ("r3d_18", "video", _r3d, _clip),
    )
    return by_name + [
        ZooModel(f"torchvision/{name}", "torchvision", kind, build, inputs)
        for name, kind, build, inputs in built
    ]


def _by_name(name: str, options: dict[str, Any]) -> nn.Module:
    allow_torchvision()
    import torchvision

    return torchvision.models.get_model(name, weights=None, num_classes=10, **options)


def _vgg() -> nn.Module:
    allow_torchvision()
    from torch import nn
    from torchvision.models import vgg

    features = vgg.make_layers(vgg.cfgs["A"], batch_norm=True)
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(512, 10))


def _vit() -> nn.Module:
    allow_torchvision()
    from torchvision.models import VisionTransformer

    return VisionTransformer(64, 16, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10)


def _swin() -> nn.Module:
    allow_torchvision()
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 32, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=10)


def _swin_v2() -> nn.Module:
    allow_torchvision()
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    v2 = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
    return SwinTransformer(
        [4, 4], 32, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=10, **v2
    )


def _maxvit() -> nn.Module:
    allow_torchvision()
    from torchvision.models import MaxVit

    return MaxVit(
        (64, 64),
        16,
        4,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.1,
        num_classes=10,
    )


def _r3d() -> nn.Module:
    allow_torchvision()
    from torchvision.models.video import r3d_18

    return r3d_18(weights=None, num_classes=10)


def _clip() -> Inputs:
    import torch

    return (torch.randn(1, 3, 4, 32, 32),), {}
