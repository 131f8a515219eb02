"""Models that no library has in a small form, for breadth: converted by `tools/breadth.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.zoo._hugging_face import randint, randn
from tests.zoo.models import Inputs, ZooModel, projection

if TYPE_CHECKING:
    from torch import Tensor, nn

_Maker = Callable[[], Any]
_TOKENS = randint(0, 20, 2, 6)

_MODELS: tuple[tuple[str, str, str, tuple[_Maker, ...]], ...] = (
    ("dit", "diffusion", "DiffusionTransformer", (randn(2, 4, 8, 8), randint(0, 1000, 2))),
    ("vae", "generative", "Autoencoder", (randn(2, 3, 16, 16),)),
    ("vq", "generative", "Quantizer", (randn(4, 16),)),
    ("flow", "generative", "Coupling", (randn(6, 8),)),
    ("conformer", "audio", "ConformerBlock", (randn(2, 12, 32),)),
    ("ctc", "audio", "SpeechRecognizer", (randn(2, 256), randint(1, 12, 2, 3))),
    ("wavenet", "audio", "WaveNet", (randn(2, 1, 40),)),
    (
        "recommender",
        "tables",
        "Recommender",
        (randn(4, 6), lambda: [randint(0, 20, 4, 3)() for _ in range(3)]),
    ),
    ("graph_attention", "graph", "GraphAttention", (randn(6, 8), randint(0, 6, 2, 14))),
    ("translator", "rnn", "Translator", (_TOKENS, _TOKENS)),
    ("experts", "moe", "Experts", (randn(2, 6, 16),)),
    ("state_space", "ssm", "StateSpace", (randn(2, 12, 16),)),
    ("radiance_field", "graphics", "RadianceField", (randn(4, 6, 3),)),
    ("super_resolution", "super-resolution", "SuperResolution", (randn(2, 3, 8, 8),)),
    ("matcher", "vision-language", "Matcher", (randn(4, 12), randint(0, 20, 4, 5))),
    ("detector", "detection", "Detector", (randn(2, 3, 16, 16),)),
    ("early_exit", "control flow", "EarlyExit", (randn(4, 16),)),
    ("segments", "control flow", "Segments", (randn(9, 8), randint(0, 4, 9))),
)


def models() -> list[ZooModel]:
    """Returns the part of the registry for breadth that is written here."""
    return [
        ZooModel(
            f"own/{name}",
            "own",
            kind,
            functools.partial(_build, made),
            functools.partial(_inputs, makers),
            loss,
        )
        for name, kind, made, makers in _MODELS
        for loss in [_of_dataclass if name == "detector" else projection]
    ]


def _build(name: str) -> nn.Module:
    from tests.zoo import _more_modules

    return getattr(_more_modules, name)()


def _inputs(makers: tuple[_Maker, ...]) -> Inputs:
    return tuple(make() for make in makers), {}


def _of_dataclass(output: Any) -> Tensor:
    return projection(vars(output))
