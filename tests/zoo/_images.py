"""What the vision models share: image inputs, and importing torchvision beside a torch of another build."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.zoo.models import Inputs


def allow_torchvision() -> None:
    """Makes ``import torchvision`` work beside a torch of another build."""
    from ampgraph.cli.torchvision_shim import allow_torchvision as allow

    allow()


def image(size: int = 64, batch: int = 2) -> Callable[[], Inputs]:
    """Returns a maker of one batch of square images."""

    def make() -> Inputs:
        import torch

        return (torch.randn(batch, 3, size, size),), {}

    return make
