"""The device of models and tensors."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..proxy.all_parameters import all_parameters

CPU = torch.device("cpu")


def device_of(model: nn.Module, default: torch.device = CPU) -> torch.device:
    """Returns the device of the model's first parameter or buffer, or ``default`` if it has none."""
    tensors = chain(all_parameters(model), model.buffers())
    return next((tensor.device for tensor in tensors), default)


def device_of_tensors(values: Any) -> torch.device:
    """Returns the device of the first tensor in nested containers, or the CPU if there is none."""
    return next((leaf.device for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)), CPU)
