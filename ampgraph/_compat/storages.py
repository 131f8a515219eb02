"""Identifies the content of a gradient without keeping the gradient alive; counts what holds a storage.

The Python object of a storage lives as long as the storage, and keeps attributes.

Tried on torch 2.11, 2.13, 2.14 and 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_cdata = attrgetter("_cdata")


def has_content(tensor: Tensor) -> bool:
    """Whether the tensor, which no vmap has made, is plain and dense, with a version counter."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_inference()


def leave_note(tensor: Tensor, name: str, note: object) -> None:
    """Leaves a note of this name with the memory of a tensor that `has_content`; it goes with the memory."""
    setattr(tensor.untyped_storage(), name, (note, tensor._version, tensor.data_ptr()))


def note_of(tensor: Tensor, name: str) -> tuple[Any, bool] | None:
    """Returns the note with a tensor's memory, and whether the memory is as it was then; None without a note.

    No vmap has made the tensor.
    """
    if not has_content(tensor):
        return None
    left: tuple[Any, int, int] | None = getattr(tensor.untyped_storage(), name, None)
    if left is None or left[2] != tensor.data_ptr():
        return None
    return left[0], left[1] == tensor._version


def may_be_swapped(parameter: Tensor) -> bool:
    """Whether ``Module.to`` and ``to_empty`` swap the parameter's content, which weak references forbid."""
    return is_traceable_wrapper_subclass(parameter)


def current_backward() -> int | None:
    """Returns a unique number of the backward that runs in this thread; None outside."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def times_held(storages: Iterable[UntypedStorage]) -> list[int]:
    """Returns how many tensors and other objects hold each storage, of every thread and of autograd.

    Tried on torch 2.11, 2.13 and 2.14, which count the call itself.
    """
    return [*map(torch._C._storage_Use_Count, map(_cdata, storages))]
