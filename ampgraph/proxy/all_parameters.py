"""All parameters of a module, also where its class overrides ``parameters`` to train a part."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def all_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters that ``nn.Module.parameters`` would yield."""
    return (parameter for _, parameter in nn.Module.named_parameters(module))
