"""A registry of whole models, small enough to run and capture on a CPU in a test.

Every model has random weights and is built on request: importing this costs nothing, and a model's library is
imported only when the model is built. Same seed, same weights, same inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

Family = Literal["timm", "transformers", "torchvision", "diffusers", "own"]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def projection(output: Any) -> Tensor:
    """Returns the mean over a fixed random direction, summed over the floating-point tensors of any output.

    A plain sum, or a sum of squares, has gradients that cancel wherever a model ends in a normalisation; what
    is left of them is rounding.

    Args:
        output: A tensor, or any pytree of tensors; Hugging Face's outputs are pytrees.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    generator = torch.Generator().manual_seed(0)
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    floating = [leaf.float() for leaf in tensors if leaf.is_floating_point()]
    return sum(
        (leaf * torch.randn(leaf.shape, generator=generator).to(leaf.device)).mean() for leaf in floating
    )


@dataclass(frozen=True)
class ZooModel:
    """One model with inputs it accepts.

    Attributes:
        name: Unique name, ``family/model``.
        family: The library it comes from, or "own" where it is written here.
        kind: What sort of model it is, for grouping in tables.
        build: Makes the model, in train mode, as its library initialises it; deterministic under
            ``torch.manual_seed``.
        inputs: Makes its positional and keyword inputs; deterministic under ``torch.manual_seed``.
        loss: Turns an output into a scalar that reaches every output.
    """

    name: str
    family: Family
    kind: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    loss: Callable[[Any], Tensor] = projection

    def seeded(self, seed: int = 0) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """Returns the model with its positional and keyword inputs, the same for the same seed.

        The model is made lively: see ``_enliven``.
        """
        import torch

        torch.manual_seed(seed)
        model = self.build().train()
        args, kwargs = self.inputs()
        _enliven(model, args, kwargs)
        return model, args, kwargs


def _enliven(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Makes values and gradients of a fresh model ordinary, as those of a trained one are.

    Parameters that start as all zeros (heads, the last norm of a residual branch) cut off what is before
    them, and batch norm's initial running statistics let activations vanish in eval mode.
    """
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
        norms = [
            module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        ]
        if not norms:
            return
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 1.0
        model(*args, **kwargs)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


@functools.cache
def _registry() -> dict[str, ZooModel]:
    from tests.zoo import own_models, timm_models, torchvision_models, transformers_models

    families = (timm_models, torchvision_models, transformers_models, own_models)
    return {model.name: model for family in families for model in family.models()}


@functools.cache
def _more() -> dict[str, ZooModel]:
    from tests.zoo import diffusers_models, more_own, more_transformers, more_vision

    families = (more_own, diffusers_models, more_transformers, more_vision)
    return {model.name: model for family in families for model in family.models()}


def names(family: Family | None = None) -> list[str]:
    """Returns the names of all models that are measured in depth, or of one family's."""
    return _names(_registry(), family)


def more_names(family: Family | None = None) -> list[str]:
    """Returns the names of the models that are there for breadth alone, or of one family's."""
    return _names(_more(), family)


def _names(registry: dict[str, ZooModel], family: Family | None) -> list[str]:
    return [model.name for model in registry.values() if family in (None, model.family)]


def get(name: str) -> ZooModel:
    """Returns the model of that name.

    Raises:
        KeyError: No model has that name.
    """
    return (_registry() | _more())[name]
