"""What the registries of transformers' models share: small configurations and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.zoo._images import allow_torchvision
from tests.zoo.models import Inputs

if TYPE_CHECKING:
    from torch import nn

VOCABULARY = 96
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {**BASE, "use_cache": False}
GROUPED = {**DECODER, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "output_router_logits": True}
TOWER_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
TOWER = {key: BASE[key] for key in TOWER_KEYS}
IMAGE_TOWER = {**TOWER, "image_size": 32, "patch_size": 8}
SPEECH = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "use_cache": False,
}


def tokens(length: int = 16, **more: Callable[[], Any]) -> Callable[[], Inputs]:
    """Returns a maker of two token sequences, and of further keyword inputs."""

    def make() -> Inputs:
        import torch

        ids = torch.randint(3, VOCABULARY, (2, length))
        return (), {"input_ids": ids, **{key: value() for key, value in more.items()}}

    return make


def randn(*shape: int) -> Callable[[], Any]:
    """Returns a maker of a normal random tensor."""

    def make() -> Any:
        import torch

        return torch.randn(shape)

    return make


def randint(low: int, high: int, *shape: int) -> Callable[[], Any]:
    """Returns a maker of random integers."""

    def make() -> Any:
        import torch

        return torch.randint(low, high, shape)

    return make


def only(**values: Callable[[], Any]) -> Callable[[], Inputs]:
    """Returns a maker of keyword inputs."""
    return lambda: ((), {key: value() for key, value in values.items()})


def padding() -> Any:
    """Returns a mask whose second row ends in padding."""
    import torch

    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    return mask


TEXT = tokens()
PADDED = tokens(attention_mask=padding)
LABELLED = tokens(labels=randint(3, VOCABULARY, 2, 16))
BOTH_SIDES = tokens(decoder_input_ids=randint(3, VOCABULARY, 2, 8))
PIXELS = randn(2, 3, 32, 32)


def build(model: str, config: str, options: dict[str, Any]) -> nn.Module:
    """Builds a model by the names of its class and configuration class."""
    allow_torchvision()
    import transformers

    options = dict(options)
    attention = options.pop("attn_implementation", None)
    made = getattr(transformers, config)(**options)
    made._attn_implementation = attention
    return getattr(transformers, model)(made)
