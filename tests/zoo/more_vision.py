"""More models of timm and torchvision, for breadth: converted by `tools/breadth.py`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from tests.zoo._images import allow_torchvision, image
from tests.zoo.models import Inputs, ZooModel

if TYPE_CHECKING:
    from torch import nn

_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
_SHORT = {"layers": [1, 1, 1, 1]}

_TIMM: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("resnext26ts", "convnet", 64, {}),
    ("seresnet18", "convnet", 64, {}),
    ("skresnet18", "convnet", 64, {}),
    ("ecaresnet26t", "convnet", 64, {}),
    ("resnest14d", "convnet", 64, {}),
    ("res2net50_26w_4s", "convnet", 64, _SHORT),
    ("dla34", "convnet", 64, {}),
    ("dpn48b", "convnet", 64, {}),
    ("vovnet39a", "convnet", 64, {}),
    ("xception41p", "convnet", 64, {}),
    ("tf_efficientnet_lite0", "convnet", 64, {}),
    ("mixnet_s", "convnet", 64, {}),
    ("mobilenetv4_conv_small", "convnet", 64, {}),
    ("fbnetc_100", "convnet", 64, {}),
    ("tinynet_e", "convnet", 64, {}),
    ("hardcorenas_a", "convnet", 64, {}),
    ("rexnet_100", "convnet", 64, {}),
    ("lcnet_050", "convnet", 64, {}),
    ("cspresnet50", "convnet", 64, {}),
    ("inception_next_atto", "convnet", 64, {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}),
    ("fasternet_t0", "convnet", 64, {}),
    ("starnet_s1", "convnet", 64, {}),
    ("repghostnet_050", "convnet", 64, {}),
    ("mobileone_s0", "convnet", 64, {}),
    ("gernet_s", "convnet", 64, {}),
    ("convit_tiny", "vit", 32, _VIT),
    ("xcit_nano_12_p16_224", "vit", 32, {"img_size": 32, "depth": 2, "embed_dim": 32}),
    ("crossvit_tiny_240", "vit", 240, {"depth": [[1, 1, 0]]}),
    ("twins_svt_small", "vit", 64, {"img_size": 64, "depths": [1, 1, 1, 1]}),
    ("visformer_tiny", "hybrid", 32, {"img_size": 32, "embed_dim": 48}),
    ("tnt_s_patch16_224", "vit", 32, {"img_size": 32, "depth": 2}),
    ("swinv2_cr_tiny_224", "vit", 64, {"img_size": 64, "window_size": 2, "depths": (1, 1), "embed_dim": 16,
                                       "num_heads": (2, 2)}),
    ("davit_tiny", "hybrid", 64, {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32),
                                  "num_heads": (2, 2, 2, 2)}),
    ("efficientvit_b0", "hybrid", 64, {}),
    ("efficientvit_m0", "hybrid", 64, {"img_size": 64}),
    ("efficientformerv2_s0", "hybrid", 224, {"depths": (1, 1, 1, 2)}),
    ("fastvit_t8", "hybrid", 64, _SHORT),
    ("repvit_m0_9", "hybrid", 64, {}),
    ("tiny_vit_5m_224", "hybrid", 64, {}),
    ("mvitv2_tiny", "hybrid", 64, {"img_size": 64}),
    ("caformer_s18", "hybrid", 64, {}),
    ("gmlp_s16_224", "mlp", 32, {"img_size": 32}),
    ("sequencer2d_s", "rnn", 56, {"layers": [1, 1, 1, 1]}),
    ("naflexvit_base_patch16_gap", "vit", 32, {"embed_dim": 32, "depth": 2, "num_heads": 4}),
)  # fmt: skip

_TORCHVISION: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("alexnet", "convnet", 64, {}),
    ("deeplabv3_resnet50", "segmentation", 64, {"weights_backbone": None}),
    ("mc3_18", "video", 0, {}),
    ("r2plus1d_18", "video", 0, {}),
)


def models() -> list[ZooModel]:
    """Returns timm's and torchvision's part of the registry for breadth."""
    timm = [
        ZooModel(f"timm/{name}", "timm", kind, functools.partial(_timm, name, options), image(size))
        for name, kind, size, options in _TIMM
    ]
    torchvision = [
        ZooModel(
            f"torchvision/{name}",
            "torchvision",
            kind,
            functools.partial(_torchvision, name, options),
            image(size) if size else _video,
        )
        for name, kind, size, options in _TORCHVISION
    ]
    return [
        *timm,
        *torchvision,
        ZooModel("torchvision/raft", "torchvision", "optical flow", _raft, _two_images),
        ZooModel("torchvision/feature_pyramid", "torchvision", "detection", _pyramid, image(32)),
    ]


def _timm(name: str, options: dict[str, Any]) -> nn.Module:
    allow_torchvision()
    import timm

    return timm.create_model(name, pretrained=False, num_classes=10, **options)


def _torchvision(name: str, options: dict[str, Any]) -> nn.Module:
    allow_torchvision()
    import torchvision

    return torchvision.models.get_model(name, weights=None, num_classes=10, **options)


def _raft() -> nn.Module:
    allow_torchvision()
    from torchvision.models.optical_flow import raft_small

    return raft_small(weights=None)


def _pyramid() -> nn.Module:
    """A backbone whose outputs are an ordered dict, one feature map a level."""
    allow_torchvision()
    from torchvision.models import resnet18
    from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor

    return _resnet_fpn_extractor(resnet18(weights=None), trainable_layers=5)


def _video() -> Inputs:
    import torch

    return (torch.randn(2, 3, 2, 32, 32),), {}


def _two_images() -> Inputs:
    import torch

    return (torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128)), {"num_flow_updates": 2}
