"""Identifies the content of a gradient without keeping the gradient alive.

Tried on torch 2.11, 2.13, 2.14 and 2.15.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .modes import is_batched


class Content:
    """The content of a dense tensor at one moment: storage, position in the storage, and version.

    No other storage gets the same address while this object exists.
    """

    __slots__ = ("_geometry", "_storage", "_version")

    def __init__(self, tensor: Tensor):
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._version, self._geometry = tensor._version, _geometry(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether the tensor has the same storage and was not written since."""
        if not has_content(tensor) or tensor._version != self._version:
            return False
        return tensor.untyped_storage()._cdata == self._storage.cdata and _geometry(tensor) == self._geometry


def has_content(tensor: Tensor) -> bool:
    """Whether the tensor is plain and dense, with a version counter."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_plain and not tensor.is_inference() and not is_batched(tensor)


def may_be_swapped(parameter: Tensor) -> bool:
    """Whether ``Module.to`` and ``to_empty`` swap the parameter's content, which weak references forbid."""
    return is_traceable_wrapper_subclass(parameter)


def current_backward() -> int | None:
    """Returns a unique number of the backward that runs in this thread; None outside."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.stride(), tensor.dtype
