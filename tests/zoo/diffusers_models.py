"""Models of Hugging Face diffusers, with a few narrow layers each; the library is optional."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.zoo._hugging_face import only, randint, randn
from tests.zoo._images import allow_torchvision
from tests.zoo.models import Inputs, ZooModel

if TYPE_CHECKING:
    from torch import nn

_SMALL = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "norm_num_groups": 4, "layers_per_block": 1}
_JOINT = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8,
          "num_attention_heads": 4}  # fmt: skip
_LATENT, _STEP, _PROMPT = randn(2, 4, 8, 8), randint(0, 1000, 2), randn(2, 6, 32)

# fmt: off
_MODELS: tuple[tuple[str, str, dict[str, Any], Callable[[], Inputs]], ...] = (
    ("unet_2d", "UNet2DModel",
     {**_SMALL, "block_out_channels": (8, 16), "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
      "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 8},
     only(sample=_LATENT, timestep=_STEP)),
    ("unet_2d_condition", "UNet2DConditionModel",
     {**_SMALL, "block_out_channels": (8, 16), "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
      "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 32,
      "attention_head_dim": 4}, only(sample=_LATENT, timestep=_STEP, encoder_hidden_states=_PROMPT)),
    ("controlnet", "ControlNetModel",
     {"in_channels": 4, "norm_num_groups": 4, "layers_per_block": 1, "block_out_channels": (8, 16),
      "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 32,
      "attention_head_dim": 4, "conditioning_embedding_out_channels": (8, 16)},
     only(sample=_LATENT, timestep=_STEP, encoder_hidden_states=_PROMPT,
          controlnet_cond=randn(2, 3, 16, 16))),
    ("autoencoder_kl", "AutoencoderKL",
     {"block_out_channels": (8, 16), "latent_channels": 4, "norm_num_groups": 4,
      "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
     only(sample=randn(2, 3, 16, 16))),
    ("dit", "DiTTransformer2DModel",
     {**_JOINT, "out_channels": 8, "num_embeds_ada_norm": 1000, "norm_num_groups": 4},
     only(hidden_states=_LATENT, timestep=_STEP, class_labels=randint(0, 1000, 2))),
    ("pixart", "PixArtTransformer2DModel",
     {**_JOINT, "out_channels": 8, "cross_attention_dim": 32, "caption_channels": 32,
      "norm_num_groups": 4, "use_additional_conditions": False},
     only(hidden_states=_LATENT, encoder_hidden_states=_PROMPT, timestep=_STEP)),
    ("stable_diffusion_3", "SD3Transformer2DModel",
     {**_JOINT, "joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 16,
      "out_channels": 4, "pos_embed_max_size": 8},
     only(hidden_states=_LATENT, encoder_hidden_states=_PROMPT, pooled_projections=randn(2, 16),
          timestep=_STEP)),
    ("flux", "FluxTransformer2DModel",
     {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
      "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 16,
      "axes_dims_rope": (4, 4, 8)},
     only(hidden_states=randn(2, 9, 4), encoder_hidden_states=_PROMPT, pooled_projections=randn(2, 16),
          timestep=lambda: _half(2), img_ids=lambda: _half(9, 3), txt_ids=lambda: _half(6, 3))),
)
# fmt: on


def models() -> list[ZooModel]:
    """Returns diffusers' part of the registry."""
    return [
        ZooModel(
            f"diffusers/{name}", "diffusers", "diffusion", functools.partial(_build, made, options), inputs
        )
        for name, made, options, inputs in _MODELS
    ]


def _build(name: str, options: dict[str, Any]) -> nn.Module:
    allow_torchvision()
    import diffusers

    return getattr(diffusers, name)(**options)


def _half(*shape: int) -> Any:
    import torch

    return torch.full(shape, 0.5)
