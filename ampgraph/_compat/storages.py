"""Identifies the content of a gradient without keeping the gradient alive.

Tried on torch 2.11, 2.13, 2.14 and 2.15.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Content:
    """The content of a dense tensor at one moment: storage, position in the storage, and version.

    No other storage gets the same address while this object exists.
    """

    __slots__ = ("_position", "_storage", "_version")

    def __init__(self, tensor: Tensor):
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._version, self._position = tensor._version, tensor.data_ptr()

    def is_of(self, tensor: Tensor) -> bool:
        """Whether the tensor, which no vmap has made, has the same storage and was not written since."""
        if not has_content(tensor) or tensor._version != self._version:
            return False
        if tensor.data_ptr() != self._position:
            return False
        return tensor.untyped_storage()._cdata == self._storage.cdata


def has_content(tensor: Tensor) -> bool:
    """Whether the tensor, which no vmap has made, is plain and dense, with a version counter."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_inference()


def may_be_swapped(parameter: Tensor) -> bool:
    """Whether ``Module.to`` and ``to_empty`` swap the parameter's content, which weak references forbid."""
    return is_traceable_wrapper_subclass(parameter)


def current_backward() -> int | None:
    """Returns a unique number of the backward that runs in this thread; None outside."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number
