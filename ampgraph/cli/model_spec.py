"""Builds the model that a command line names, with random weights; runs only the named code."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import AmpGraphError, did_you_mean
from .torchvision_shim import allow_torchvision

# At most 19 digits, as 64 bits have; more than 64 dimensions keep torch busy for minutes.
_INPUT = re.compile(
    r"(?:(?P<name>[^\W\d]\w*)=)?(?P<shape>[0-9]{1,19}(?:x[0-9]{1,19}){0,63})(?::(?P<dtype>\w+))?"
)
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "bool")
# Values that make a configuration small, by the names that configurations use.
_SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), 64),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(
        ("intermediate_size", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 128
    ),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    "vocab_size": 1000,
}


class SpecError(AmpGraphError):
    """A named model or input does not exist; the message gives near matches."""


@dataclass(frozen=True)
class ModelSpec:
    """A model, with example inputs if its factory returned them.

    Attributes:
        name: The user's text.
        model: The model.
        args: Example positional arguments, or None.
        kwargs: Example keyword arguments.
        example_input: An ``--input`` that might fit, for messages.
    """

    name: str
    model: nn.Module
    args: tuple | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    example_input: str = "8x3x224x224"


class InputSpec(NamedTuple):
    """One example input: ``2x16:int64``, or ``input_ids=2x16:int64`` for a keyword argument."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def parse_input(text: str) -> InputSpec:
    """Reads one ``--input``.

    Raises:
        SpecError: The text has another form, or names an unknown dtype.
    """
    match = _INPUT.fullmatch(text)
    if match is None:
        raise SpecError(
            f"--input {text[:40]!r}: expected [NAME=]SHAPE[:DTYPE], such as 8x3x224x224 or 2x16:int64."
        )
    name = match["dtype"] or "float32"
    if name not in _DTYPES:
        raise SpecError(
            f"--input {text!r}: dtype {name!r}; legal: {', '.join(_DTYPES)}.{did_you_mean(name, _DTYPES)}"
        )
    return InputSpec(match["name"] or "", tuple(map(int, match["shape"].split("x"))), getattr(torch, name))


def build_inputs(inputs: Sequence[InputSpec]) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Makes tensors: random where floating, zeros (a valid index) where integer, True where bool."""
    return (
        tuple(_tensor(i) for i in inputs if not i.name),
        {i.name: _tensor(i) for i in inputs if i.name},
    )


def _tensor(spec: InputSpec) -> torch.Tensor:
    try:
        if spec.dtype.is_floating_point:
            return torch.randn(spec.shape).to(spec.dtype)
        return torch.full(spec.shape, spec.dtype == torch.bool, dtype=spec.dtype)
    except (RuntimeError, OverflowError, TypeError, MemoryError) as error:  # a size beyond 64 bits, ..
        shape = "x".join(map(str, spec.shape))
        raise SpecError(
            f"--input {shape}: this tensor cannot be created: {str(error).splitlines()[0]}"
        ) from error


def resolve(name: str) -> ModelSpec:
    """Builds the model that ``library:model`` or ``package.module:factory`` names.

    Raises:
        SpecError: There is no such library, module or model.
        AmpGraphError: The model's own code failed.
    """
    library, colon, model = name.partition(":")
    if not colon or not library or not model:
        raise SpecError(
            f"{name!r}: expected LIBRARY:MODEL or PACKAGE.MODULE:NAME, such as torchvision:resnet18."
        )
    libraries: dict[str, Callable[[str, str], ModelSpec]] = {
        "torchvision": _torchvision,
        "timm": _timm,
        "transformers": _transformers,
    }
    return libraries.get(library, _from_module)(name, model)


def _torchvision(spec: str, name: str) -> ModelSpec:
    allow_torchvision()
    models = _library("torchvision.models", "torchvision")
    _check_known(spec, name, models.list_models())
    example = "1x3x16x112x112" if "video" in models.get_model_builder(name).__module__ else "8x3x224x224"
    options = (
        {"weights_backbone": None}
        if "weights_backbone" in _parameters(models.get_model_builder(name))
        else {}
    )
    model = _built(spec, lambda: models.get_model(name, weights=None, **options))
    return ModelSpec(spec, model, example_input=example)


def _timm(spec: str, name: str) -> ModelSpec:
    allow_torchvision()
    timm = _library("timm", "timm")
    _check_known(spec, name, timm.list_models())
    model = _built(spec, lambda: timm.create_model(name, pretrained=False))
    shape = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))
    return ModelSpec(spec, model, example_input="8x" + "x".join(map(str, shape)))


def _transformers(spec: str, name: str) -> ModelSpec:
    allow_torchvision()
    transformers = _library("transformers", "transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    example = "input_ids=2x16:int64"
    if name in CONFIG_MAPPING_NAMES:
        config = _small(transformers.AutoConfig.for_model(name))
        return ModelSpec(
            spec, _built(spec, lambda: transformers.AutoModel.from_config(config)), example_input=example
        )
    _check_known(
        spec, name, [*CONFIG_MAPPING_NAMES, *(n for n in dir(transformers) if "Model" in n or "For" in n)]
    )
    cls = getattr(transformers, name)
    if getattr(cls, "config_class", None) is None:
        raise SpecError(f"{spec}: {name} is not a model class with a configuration.")
    return ModelSpec(spec, _built(spec, lambda: cls(_small(cls.config_class()))), example_input=example)


def _small(config: Any) -> Any:
    """Makes a configuration small, so that any machine can run a model of billions of parameters."""
    for name, value in _SMALL.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(value, getattr(config, name)))
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[:2]
    if getattr(config, "use_cache", None):
        config.use_cache = False  # a cache object among the outputs cannot be captured
    return config


def _from_module(spec: str, name: str) -> ModelSpec:
    module_name = spec.partition(":")[0]
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise SpecError(f"{spec!r}: {module_name!r} is not the name of a Python module.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    allow_torchvision()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise AmpGraphError(f"{spec}: importing {module_name} failed: {error}") from error
        known = ("torchvision", "timm", "transformers")
        raise SpecError(
            f"{spec}: there is no module {error.name!r}.{did_you_mean(module_name, known)}"
        ) from error
    except SystemExit as stop:
        raise SpecError(f"{spec}: importing {module_name} ends the program (exit {stop.code!r}).") from stop
    except Exception as error:
        raise AmpGraphError(
            f"{spec}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    public = [n for n in vars(module) if not n.startswith("_")]
    _check_known(spec, name, vars(module), public)
    return _of(spec, getattr(module, name))


def _of(spec: str, value: Any) -> ModelSpec:
    if inspect.isbuiltin(value):
        raise SpecError(f"{spec} is a built-in function; expected a model or a function that returns one.")
    if not isinstance(value, nn.Module) and callable(value):
        value = _built(spec, value)
    parts = value if isinstance(value, tuple) else (value,)
    model, args, kwargs = (*parts, None, None)[:3] if len(parts) <= 3 else (None, None, None)
    if not isinstance(model, nn.Module):
        raise SpecError(
            f"{spec} returned a {type(value).__name__}; expected a model, (model, args) or (model, args, "
            "kwargs)."
        )
    return ModelSpec(spec, model, *_examples(spec, model, args, kwargs))


def _examples(
    spec: str, model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None
) -> tuple[tuple | None, Mapping[str, Any]]:
    """Returns the example inputs that a function returned beside its model."""
    if isinstance(args, list):
        raise SpecError(
            f"{spec} returned (model, list), and the list may be the arguments or one argument: return "
            "(model, (x, y)), or (model, ([x, y],)) for a forward that takes a list."
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise SpecError(
            f"{spec} returned a {type(kwargs).__name__} as kwargs; expected a dict, (model, args, kwargs)."
        )
    if kwargs is None and isinstance(args, Mapping) and _are_keywords(model, args):
        return (), args
    return args if args is None or isinstance(args, tuple) else (args,), kwargs or {}


def _are_keywords(model: nn.Module, values: Mapping[Any, Any]) -> bool:
    """Whether values are forward's arguments by name, some of them wrong, and not one argument, a dict."""
    parameters = _parameters(model.forward).keys()
    if len(parameters) == 1 and not values.keys() <= parameters:
        return False
    return not values.keys().isdisjoint(parameters)


def _mismatch(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> TypeError | None:
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as mismatch:
        return mismatch
    except ValueError:  # a forward without a signature; the conversion tells more
        pass
    return None


def check_inputs(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Checks that forward takes the example inputs, before the work.

    Raises:
        SpecError: An argument is missing or unknown.
    """
    if (mismatch := _mismatch(model, args, kwargs)) is None:
        return
    signature = inspect.signature(model.forward)
    given = [type(value).__name__ for value in args]
    given += [f"{name}={type(value).__name__}" for name, value in kwargs.items()]
    near = "".join(did_you_mean(n, signature.parameters) for n in kwargs if n not in signature.parameters)
    raise SpecError(
        f"{type(model).__name__}.forward takes {signature}, but the example inputs are "
        f"({', '.join(given)}): {mismatch}.{near}"
    )


def _built(spec: str, build: Callable[[], Any]) -> Any:
    try:
        torch.manual_seed(0)
        return build()
    except SystemExit as stop:
        raise SpecError(f"{spec} ends the program (exit {stop.code!r}); expected a model.") from stop
    except Exception as error:
        needs = ""
        if isinstance(error, TypeError) and "required" in str(error):
            needs = " It is called without arguments: name a function that fills them in."
        raise AmpGraphError(f"{spec} could not be built: {type(error).__name__}: {error}.{needs}") from error


def _check_known(spec: str, name: str, known: Any, shown: Any = None) -> None:
    if name not in known:
        raise SpecError(
            f"{spec}: there is no {name!r}.{did_you_mean(name, shown if shown is not None else known)}"
        )


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SpecError(
            f"{package} cannot be imported: {error}. Install it with: pip install {package}"
        ) from error
    except Exception as error:  # a torchvision built for another torch raises what torch raises
        raise SpecError(
            f"{package} cannot be imported: {type(error).__name__}: {error}. Install what is built for "
            f"torch {torch.__version__}: pip install --upgrade {package} torchvision"
        ) from error


def _parameters(function: Callable) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters
