"""Prepares example arguments for a capture: no two tensors are the same object.

``torch.export`` creates one placeholder for equal tensor objects: two arguments, or an argument and a
parameter. The graph would then read one tensor for both, even if a later call passes two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_PLAIN = (torch.Tensor, nn.Parameter)


def distinct(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments with a separate tensor object for each position, on the same memory.

    The memory stays shared, so the analysis of writes sees all readers.
    """
    seen: set[int] = set()

    def own(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        is_first = id(leaf) not in seen
        seen.add(id(leaf))
        # A result of an op, or a tensor of a subclass, is not a parameter of the model.
        if is_first and not (leaf.is_leaf and type(leaf) in _PLAIN):
            return leaf
        return _alias(leaf)

    return pytree.tree_map(own, (args, kwargs))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_leaf:
        return tensor.detach().requires_grad_(tensor.requires_grad)
    with torch.enable_grad():
        return tensor.view_as(tensor)
