"""Where a model is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")


def device_of(model: nn.Module, default: torch.device = CPU) -> torch.device:
    """Returns the device of the model's first parameter or buffer, or ``default`` if it has none."""
    return _first((*model.parameters(), *model.buffers()), default)


def device_of_arguments(args: Any, kwargs: Any) -> torch.device:
    """Returns the device of the first tensor among a call's arguments, the CPU if there is none."""
    return _first(tree_leaves((args, kwargs)), CPU)


def _first(values: Any, default: torch.device) -> torch.device:
    return next((value.device for value in values if isinstance(value, torch.Tensor)), default)
