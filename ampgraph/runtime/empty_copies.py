"""`empty_copies`: memory for the low copies of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def empty_copies(masters: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns tensors like parameters, in another dtype.

    Parameters on CUDA that fill one memory get copies that fill one memory in the same order. A recurrent
    layer keeps its weights in this form for cuDNN. If they lie apart, cuDNN packs them in each call.
    """
    by_memory: dict[int, list[Tensor]] = {}
    for master in masters:
        if master.is_cuda and master.numel():
            by_memory.setdefault(master.untyped_storage().data_ptr(), []).append(master)
    made: dict[int, Tensor] = {}
    for alike in by_memory.values():
        if _fill_one_memory(alike):
            made |= zip(map(id, alike), _in_one_memory(alike, dtype), strict=True)
    return [
        made[id(m)] if id(m) in made else torch.empty_like(m, dtype=dtype, requires_grad=False)
        for m in masters
    ]


def _fill_one_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether several contiguous tensors take all of their memory, none of it twice."""
    ends = [0]
    for tensor in sorted(tensors, key=Tensor.storage_offset):
        if not tensor.is_contiguous() or tensor.storage_offset() != ends[-1]:
            return False
        ends.append(ends[-1] + tensor.numel())
    return len(tensors) > 1 and ends[-1] * tensors[0].element_size() == tensors[0].untyped_storage().nbytes()


def _in_one_memory(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns tensors with version counters of their own, unlike views."""
    whole = torch.empty(sum(t.numel() for t in tensors), dtype=dtype, device=tensors[0].device)
    memory = whole.untyped_storage()
    return [whole.new_empty(0).set_(memory, t.storage_offset(), t.shape, t.stride()) for t in tensors]
