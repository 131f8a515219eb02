"""Example arguments as a capture takes them: no two tensors are one object.

``torch.export`` gives one placeholder to all that is the same tensor: two arguments, or an argument and a
parameter. The graph would then read one of them for both, whatever a later call passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_PLAIN = (torch.Tensor, nn.Parameter)


def distinct(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments with a tensor object for each place, over the memory of the given ones.

    The memory stays shared, so that the analysis of writes sees who else reads it.
    """
    seen: set[int] = set()

    def own(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        is_first = id(leaf) not in seen
        seen.add(id(leaf))
        # A result of other ops, or of a class of its own, is no parameter of the model.
        if is_first and not (leaf.is_leaf and type(leaf) in _PLAIN):
            return leaf
        return _alias(leaf)

    return pytree.tree_map(own, (args, kwargs))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_leaf:
        return tensor.detach().requires_grad_(tensor.requires_grad)
    with torch.enable_grad():
        return tensor.view_as(tensor)
