"""Models of Hugging Face transformers, with a few narrow layers each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.zoo._images import allow_torchvision
from tests.zoo.models import Inputs, ZooModel

if TYPE_CHECKING:
    from torch import nn

_VOCABULARY = 96
_BASE = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DECODER = {**_BASE, "use_cache": False}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2, "output_router_logits": True}
_TOWER_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_TOWER = {key: _BASE[key] for key in _TOWER_KEYS}
_IMAGE_TOWER = {**_TOWER, "image_size": 32, "patch_size": 8}
_SPEECH = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "use_cache": False,
}


def _tokens(length: int = 16, **more: Callable[[], Any]) -> Callable[[], Inputs]:
    def make() -> Inputs:
        import torch

        tokens = torch.randint(3, _VOCABULARY, (2, length))
        return (), {"input_ids": tokens, **{key: value() for key, value in more.items()}}

    return make


def _randn(*shape: int) -> Callable[[], Any]:
    def make() -> Any:
        import torch

        return torch.randn(shape)

    return make


def _randint(low: int, high: int, *shape: int) -> Callable[[], Any]:
    def make() -> Any:
        import torch

        return torch.randint(low, high, shape)

    return make


def _only(**values: Callable[[], Any]) -> Callable[[], Inputs]:
    return lambda: ((), {key: value() for key, value in values.items()})


def _padding() -> Any:
    import torch

    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    return mask


_TEXT = _tokens()
_PADDED = _tokens(attention_mask=_padding)
_LABELLED = _tokens(labels=_randint(3, _VOCABULARY, 2, 16))
_BOTH_SIDES = _tokens(decoder_input_ids=_randint(3, _VOCABULARY, 2, 8))
_PIXELS = _randn(2, 3, 32, 32)

# fmt: off
_MODELS: tuple[tuple[str, str, str, str, dict[str, Any], Callable[[], Inputs]], ...] = (
    ("bert", "encoder", "BertForSequenceClassification", "BertConfig", _BASE,
     _tokens(attention_mask=_padding, labels=_randint(0, 2, 2))),
    ("bert_eager", "encoder", "BertModel", "BertConfig", {**_BASE, "attn_implementation": "eager"}, _PADDED),
    ("roberta", "encoder", "RobertaForMaskedLM", "RobertaConfig", _BASE, _PADDED),
    ("distilbert", "encoder", "DistilBertForMaskedLM", "DistilBertConfig",
     {"vocab_size": _VOCABULARY, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}, _PADDED),
    ("electra", "encoder", "ElectraForPreTraining", "ElectraConfig",
     {**_BASE, "embedding_size": 16}, _PADDED),
    ("albert", "encoder", "AlbertModel", "AlbertConfig", {**_BASE, "embedding_size": 16}, _PADDED),
    ("deberta_v2", "encoder", "DebertaV2ForMaskedLM", "DebertaV2Config",
     {**_BASE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}, _PADDED),
    ("modernbert", "encoder", "ModernBertForMaskedLM", "ModernBertConfig", _BASE, _PADDED),
    ("gpt2", "decoder", "GPT2LMHeadModel", "GPT2Config",
     {**_DECODER, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, _LABELLED),
    ("gpt2_eager", "decoder", "GPT2LMHeadModel", "GPT2Config",
     {**_DECODER, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
      "attn_implementation": "eager"}, _TEXT),
    ("llama", "decoder", "LlamaForCausalLM", "LlamaConfig", _GROUPED, _LABELLED),
    ("llama_eager", "decoder", "LlamaForCausalLM", "LlamaConfig",
     {**_GROUPED, "attn_implementation": "eager"}, _TEXT),
    ("qwen2", "decoder", "Qwen2ForCausalLM", "Qwen2Config", _GROUPED, _TEXT),
    ("qwen3", "decoder", "Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 8}, _TEXT),
    ("opt", "decoder", "OPTForCausalLM", "OPTConfig",
     {**_DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32}, _TEXT),
    ("gpt_neox", "decoder", "GPTNeoXForCausalLM", "GPTNeoXConfig", _DECODER, _TEXT),
    ("gemma2", "decoder", "Gemma2ForCausalLM", "Gemma2Config", {**_GROUPED, "head_dim": 8}, _TEXT),
    ("phi", "decoder", "PhiForCausalLM", "PhiConfig", _DECODER, _TEXT),
    ("bloom", "decoder", "BloomForCausalLM", "BloomConfig", {**_DECODER, "n_layer": 2, "n_head": 4}, _TEXT),
    ("t5", "encoder-decoder", "T5ForConditionalGeneration", "T5Config",
     {"vocab_size": _VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
      "use_cache": False}, _BOTH_SIDES),
    ("bart", "encoder-decoder", "BartForConditionalGeneration", "BartConfig",
     {**_SPEECH, "vocab_size": _VOCABULARY, "max_position_embeddings": 64}, _BOTH_SIDES),
    ("mixtral", "moe", "MixtralForCausalLM", "MixtralConfig", {**_EXPERTS, "num_local_experts": 4}, _TEXT),
    ("qwen2_moe", "moe", "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
     {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
     _TEXT),
    ("mamba", "ssm", "MambaForCausalLM", "MambaConfig",
     {"vocab_size": _VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2,
      "use_cache": False}, _tokens(8)),
    ("rwkv", "rnn", "RwkvForCausalLM", "RwkvConfig",
     {"vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 16,
      "use_cache": False}, _tokens(8)),
    ("wav2vec2", "audio", "Wav2Vec2ForCTC", "Wav2Vec2Config",
     {**_TOWER, "vocab_size": 32, "conv_dim": (16, 16, 16), "conv_kernel": (10, 3, 3),
      "conv_stride": (5, 2, 2), "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 8,
      "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0},
     _only(input_values=_randn(2, 640))),
    ("whisper", "audio", "WhisperForConditionalGeneration", "WhisperConfig",
     {**_SPEECH, "vocab_size": _VOCABULARY, "num_mel_bins": 16, "max_source_positions": 32,
      "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
      "decoder_start_token_id": 1},
     _only(input_features=_randn(2, 16, 64), decoder_input_ids=_randint(3, _VOCABULARY, 2, 8))),
    ("clip", "vision-language", "CLIPModel", "CLIPConfig",
     {"text_config": _BASE, "vision_config": _IMAGE_TOWER, "projection_dim": 16},
     _tokens(pixel_values=_PIXELS)),
    ("siglip", "vision-language", "SiglipModel", "SiglipConfig",
     {"text_config": _BASE, "vision_config": _IMAGE_TOWER}, _tokens(pixel_values=_PIXELS)),
    ("blip", "vision-language", "BlipForConditionalGeneration", "BlipConfig",
     {"text_config": {**_DECODER, "encoder_hidden_size": 32, "projection_dim": 16},
      "vision_config": _IMAGE_TOWER, "projection_dim": 16}, _tokens(pixel_values=_PIXELS)),
    ("dinov2", "vit", "Dinov2ForImageClassification", "Dinov2Config", _IMAGE_TOWER,
     _only(pixel_values=_PIXELS)),
    ("segformer", "segmentation", "SegformerForSemanticSegmentation", "SegformerConfig",
     {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 3, 4],
      "decoder_hidden_size": 16}, _only(pixel_values=_randn(2, 3, 64, 64))),
)
# fmt: on


def models() -> list[ZooModel]:
    """Returns transformers' part of the registry."""
    return [
        ZooModel(f"transformers/{name}", "transformers", kind, functools.partial(_build, *how), inputs)
        for name, kind, *how, inputs in _MODELS
    ]


def _build(model: str, config: str, options: dict[str, Any]) -> nn.Module:
    allow_torchvision()
    import transformers

    options = dict(options)
    attention = options.pop("attn_implementation", None)
    made = getattr(transformers, config)(**options)
    made._attn_implementation = attention
    return getattr(transformers, model)(made)
