"""Models of Hugging Face transformers, with a few narrow layers each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tests.zoo._hugging_face import (
    BASE,
    BOTH_SIDES,
    DECODER,
    EXPERTS,
    GROUPED,
    IMAGE_TOWER,
    LABELLED,
    PADDED,
    PIXELS,
    SPEECH,
    TEXT,
    TOWER,
    VOCABULARY,
    build,
    only,
    padding,
    randint,
    randn,
    tokens,
)
from tests.zoo.models import Inputs, ZooModel

# fmt: off
_MODELS: tuple[tuple[str, str, str, str, dict[str, Any], Callable[[], Inputs]], ...] = (
    ("bert", "encoder", "BertForSequenceClassification", "BertConfig", BASE,
     tokens(attention_mask=padding, labels=randint(0, 2, 2))),
    ("bert_eager", "encoder", "BertModel", "BertConfig", {**BASE, "attn_implementation": "eager"}, PADDED),
    ("roberta", "encoder", "RobertaForMaskedLM", "RobertaConfig", BASE, PADDED),
    ("distilbert", "encoder", "DistilBertForMaskedLM", "DistilBertConfig",
     {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}, PADDED),
    ("electra", "encoder", "ElectraForPreTraining", "ElectraConfig",
     {**BASE, "embedding_size": 16}, PADDED),
    ("albert", "encoder", "AlbertModel", "AlbertConfig", {**BASE, "embedding_size": 16}, PADDED),
    ("deberta_v2", "encoder", "DebertaV2ForMaskedLM", "DebertaV2Config",
     {**BASE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}, PADDED),
    ("modernbert", "encoder", "ModernBertForMaskedLM", "ModernBertConfig", BASE, PADDED),
    ("gpt2", "decoder", "GPT2LMHeadModel", "GPT2Config",
     {**DECODER, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, LABELLED),
    ("gpt2_eager", "decoder", "GPT2LMHeadModel", "GPT2Config",
     {**DECODER, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
      "attn_implementation": "eager"}, TEXT),
    ("llama", "decoder", "LlamaForCausalLM", "LlamaConfig", GROUPED, LABELLED),
    ("llama_eager", "decoder", "LlamaForCausalLM", "LlamaConfig",
     {**GROUPED, "attn_implementation": "eager"}, TEXT),
    ("qwen2", "decoder", "Qwen2ForCausalLM", "Qwen2Config", GROUPED, TEXT),
    ("qwen3", "decoder", "Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}, TEXT),
    ("opt", "decoder", "OPTForCausalLM", "OPTConfig",
     {**DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32}, TEXT),
    ("gpt_neox", "decoder", "GPTNeoXForCausalLM", "GPTNeoXConfig", DECODER, TEXT),
    ("gemma2", "decoder", "Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 8}, TEXT),
    ("phi", "decoder", "PhiForCausalLM", "PhiConfig", DECODER, TEXT),
    ("bloom", "decoder", "BloomForCausalLM", "BloomConfig", {**DECODER, "n_layer": 2, "n_head": 4}, TEXT),
    ("t5", "encoder-decoder", "T5ForConditionalGeneration", "T5Config",
     {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
      "use_cache": False}, BOTH_SIDES),
    ("bart", "encoder-decoder", "BartForConditionalGeneration", "BartConfig",
     {**SPEECH, "vocab_size": VOCABULARY, "max_position_embeddings": 64}, BOTH_SIDES),
    ("mixtral", "moe", "MixtralForCausalLM", "MixtralConfig", {**EXPERTS, "num_local_experts": 4}, TEXT),
    ("qwen2_moe", "moe", "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
     {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
     TEXT),
    ("mamba", "ssm", "MambaForCausalLM", "MambaConfig",
     {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2,
      "use_cache": False}, tokens(8)),
    ("rwkv", "rnn", "RwkvForCausalLM", "RwkvConfig",
     {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 16,
      "use_cache": False}, tokens(8)),
    ("wav2vec2", "audio", "Wav2Vec2ForCTC", "Wav2Vec2Config",
     {**TOWER, "vocab_size": 32, "conv_dim": (16, 16, 16), "conv_kernel": (10, 3, 3),
      "conv_stride": (5, 2, 2), "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 8,
      "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0},
     only(input_values=randn(2, 640))),
    ("whisper", "audio", "WhisperForConditionalGeneration", "WhisperConfig",
     {**SPEECH, "vocab_size": VOCABULARY, "num_mel_bins": 16, "max_source_positions": 32,
      "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
      "decoder_start_token_id": 1},
     only(input_features=randn(2, 16, 64), decoder_input_ids=randint(3, VOCABULARY, 2, 8))),
    ("clip", "vision-language", "CLIPModel", "CLIPConfig",
     {"text_config": BASE, "vision_config": IMAGE_TOWER, "projection_dim": 16},
     tokens(pixel_values=PIXELS)),
    ("siglip", "vision-language", "SiglipModel", "SiglipConfig",
     {"text_config": BASE, "vision_config": IMAGE_TOWER}, tokens(pixel_values=PIXELS)),
    ("blip", "vision-language", "BlipForConditionalGeneration", "BlipConfig",
     {"text_config": {**DECODER, "encoder_hidden_size": 32, "projection_dim": 16},
      "vision_config": IMAGE_TOWER, "projection_dim": 16}, tokens(pixel_values=PIXELS)),
    ("dinov2", "vit", "Dinov2ForImageClassification", "Dinov2Config", IMAGE_TOWER,
     only(pixel_values=PIXELS)),
    ("segformer", "segmentation", "SegformerForSemanticSegmentation", "SegformerConfig",
     {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 3, 4],
      "decoder_hidden_size": 16}, only(pixel_values=randn(2, 3, 64, 64))),
)
# fmt: on


def models() -> list[ZooModel]:
    """Returns transformers' part of the registry."""
    return [
        ZooModel(f"transformers/{name}", "transformers", kind, functools.partial(build, *how), inputs)
        for name, kind, *how, inputs in _MODELS
    ]
