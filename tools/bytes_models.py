"""The models of `bench_bytes.py`, each with its training loss inside: few layers, batches as in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Made = tuple[nn.Module, tuple[Tensor, ...]]

TOKENS = 1000
# The vocabularies are cut with the depth, so that logits weigh as much beside a layer as in the whole model.
WIDE = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2}


class WithLoss(nn.Module):
    """A model and its loss: cross-entropy of classes, pixels or tokens."""

    def __init__(self, model: nn.Module, tokens: bool = False, **options: Any) -> None:
        super().__init__()
        self.model, self.tokens, self.options = model, tokens, options

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(x, **self.options)
        logits = logits if isinstance(logits, Tensor) else logits[0]
        if self.tokens:
            return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        return F.cross_entropy(logits, labels)


class UNet(nn.Module):
    """Convolutions with group norm, pooling, upsampling and concatenated skip connections."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.down = nn.ModuleList((_block(3, width), _block(width, 2 * width), _block(2 * width, 4 * width)))
        self.up = nn.ModuleList((_block(6 * width, 2 * width), _block(3 * width, width)))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for index, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if index else x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.head(x)


class T5(nn.Module):
    """A T5 encoder with a head over tokens."""

    def __init__(self) -> None:
        import transformers

        super().__init__()
        config = transformers.T5Config(
            vocab_size=3328, d_model=512, d_kv=64, d_ff=2048, num_layers=2, num_heads=8, dropout_rate=0.0
        )
        self.encoder = transformers.T5EncoderModel(config)
        self.head = nn.Linear(512, 3328, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).last_hidden_state)


def _block(given: int, made: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (given, made):
        layers += [nn.Conv2d(width, made, 3, padding=1), nn.GroupNorm(8, made), nn.SiLU()]
    return nn.Sequential(*layers)


def _images(name: str, batch: int = 16, size: int = 224, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        import timm

        model = timm.create_model(name, pretrained=False, num_classes=TOKENS, **options)
        return WithLoss(model), (torch.randn(batch, 3, size, size), torch.randint(0, TOKENS, (batch,)))

    return make


def _mixer(
    blocks: str = "MixerBlock", norm: str = "LayerNorm", mlp: str = "Mlp", **given: Any
) -> Callable[[], Made]:
    """Returns the maker of a kin of the MLP mixer; timm's own makers fix the depth."""

    def make() -> Made:
        from timm import layers
        from timm.models import mlp_mixer

        parts = {
            "block_layer": getattr(mlp_mixer, blocks),
            "norm_layer": nn.LayerNorm if norm == "LayerNorm" else getattr(mlp_mixer, norm),
            "mlp_layer": getattr(layers, mlp),
        }
        x, labels = torch.randn(16, 3, 224, 224), torch.randint(0, TOKENS, (16,))
        return WithLoss(mlp_mixer.MlpMixer(num_blocks=2, patch_size=16, **parts, **given)), (x, labels)

    return make


def _poolformer() -> Made:
    """Returns `poolformer_s12` with one block a stage; timm's own maker fixes the depth."""
    from timm import layers
    from timm.models.metaformer import MetaFormer

    model = MetaFormer(
        depths=(1, 1, 1, 1),
        dims=(64, 128, 320, 512),
        downsample_norm=None,
        mlp_act=nn.GELU,
        mlp_bias=True,
        norm_layers=layers.GroupNorm1,
        layer_scale_init_values=1e-5,
        res_scale_init_values=None,
        use_mlp_head=False,
        num_classes=TOKENS,
    )
    return WithLoss(model), (torch.randn(8, 3, 224, 224), torch.randint(0, TOKENS, (8,)))


def _tokens(model: nn.Module, **options: Any) -> Made:
    ids = torch.randint(0, TOKENS, (8, 256))
    return WithLoss(model, tokens=True, **options), (ids, torch.randint(0, TOKENS, (8, 256)))


def _hugging_face(name: str, config: str, given: dict[str, Any], **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        import transformers

        return _tokens(getattr(transformers, name)(getattr(transformers, config)(**given)), **options)

    return make


def _unet() -> Made:
    return WithLoss(UNet()), (torch.randn(4, 3, 128, 128), torch.randint(0, 10, (4, 128, 128)))


_BERT = {
    **WIDE,
    "vocab_size": 3328,
    "intermediate_size": 2048,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GPT2 = {
    "vocab_size": 5120,
    "n_embd": 512,
    "n_head": 8,
    "n_layer": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_LLAMA = {**WIDE, "vocab_size": 3328, "intermediate_size": 1408, "num_key_value_heads": 8}

MODELS: dict[str, Callable[[], Made]] = {
    "bert": _hugging_face("BertForMaskedLM", "BertConfig", _BERT),
    "gpt2": _hugging_face("GPT2LMHeadModel", "GPT2Config", _GPT2, use_cache=False),
    "llama": _hugging_face("LlamaForCausalLM", "LlamaConfig", _LLAMA, use_cache=False),
    "t5": lambda: _tokens(T5()),
    "vit": _images("vit_small_patch16_224", depth=2),
    "mixer": _mixer(embed_dim=512),
    "unet": _unet,
    "convnext": _images("convnext_tiny", depths=(1, 1, 2, 1), drop_path_rate=0.0),
    "swin": _images(
        "swin_tiny_patch4_window7_224", batch=8, depths=(1, 2), num_heads=(3, 6), drop_path_rate=0.0
    ),
    "resnet26": _images("resnet26"),
    "resnetv2_gn": _images("resnetv2_50d_gn", batch=8, layers=(1, 1, 1, 1)),
    "cait": _images("cait_xxs24_224", batch=8, depth=2),
    "deit3": _images("deit3_small_patch16_224", depth=2),
    "resmlp": _mixer("ResBlock", norm="Affine", embed_dim=384, mlp_ratio=4),
    "gmlp": _mixer("SpatialGatingBlock", mlp="GatedMlp", embed_dim=256, mlp_ratio=6),
    "poolformer": _poolformer,
}

# Networks of convolutions, to which the layout of images matters.
CONVOLUTIONAL = ("unet", "convnext", "resnet26", "resnetv2_gn", "poolformer")


def channels_last(model: nn.Module, args: tuple[Tensor, ...]) -> Made:
    """Returns the model and its images with the channels of each pixel next to each other."""
    images = (a.contiguous(memory_format=torch.channels_last) if a.dim() == 4 else a for a in args)
    return model.to(memory_format=torch.channels_last), tuple(images)


def made(name: str) -> Made:
    """Returns a model in training mode and its inputs; without dropout, whose kernels draw numbers."""
    torch.manual_seed(0)
    model, args = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for rate in ("attn_drop", "drop_prob"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    return model.train(), args
