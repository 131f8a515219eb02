"""`Layouts`: the memory layout of the tensors that a call reads, for models whose code reads strides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..proxy.all_parameters import all_parameters

_DESCRIBING = (torch.Tensor.size, torch.Tensor.stride, torch.Tensor.is_conj, torch.Tensor.is_neg)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Layouts:
    """The strides of arguments, parameters and buffers at capture.

    Args:
        source: The model.
        args: The positional arguments of the capture.
        kwargs: Its keyword arguments.
        with_offsets: Whether the storage offset of a tensor also matters.
    """

    def __init__(self, source: nn.Module, args: tuple, kwargs: dict[str, Any], with_offsets: bool) -> None:
        self._source, self._with_offsets = source, with_offsets
        self._own = self._own_now()
        tensors = self._tensors(args, kwargs)
        self._seen = [*map(_layout, tensors)]
        self._offsets = self._offsets_of(tensors)
        self._known = _described(tensors)

    def seen(self) -> list[Any]:
        """Returns the layouts at capture, to compare with those of another model."""
        return [self._seen, self._offsets]

    def fits(self, args: tuple, kwargs: dict[str, Any], is_untouched: bool = False) -> bool:
        """Whether all layouts are as at capture, for the present sizes. Runs at every call.

        Args:
            args: The positional arguments.
            kwargs: The keyword arguments.
            is_untouched: Whether nothing was written to the dict of a module since they were as at capture.
        """
        if not is_untouched:
            self._own = self._own_now()
        tensors = self._tensors(args, kwargs)
        known = _described(tensors)
        if known is None or known != self._known:
            if [*map(_layout, tensors)] != self._seen:
                return False
            self._known = known  # other sizes of this layout
        return self._offsets == self._offsets_of(tensors)

    def _offsets_of(self, tensors: list[torch.Tensor]) -> list[int | torch.SymInt]:
        strided = [t for t in tensors if t.layout == torch.strided] if self._with_offsets else []
        return [t.storage_offset() for t in strided]

    def _own_now(self) -> list[torch.Tensor]:
        return [*all_parameters(self._source), *self._source.buffers()]

    def _tensors(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)] + self._own


def _described(tensors: list[torch.Tensor]) -> tuple[Any, ...] | None:
    """Returns sizes, strides and lazy bits by a few calls of C functions; None for sparse tensors."""
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return None
    return (*([*map(get, tensors)] for get in _DESCRIBING),)


def _layout(tensor: torch.Tensor) -> object:
    """Returns the memory format, which gives the strides for any sizes, or the strides; and what is lazy."""
    if tensor.layout != torch.strided:
        return tensor.layout
    return _format(tensor), tensor.is_conj(), tensor.is_neg()


def _format(tensor: torch.Tensor) -> object:
    strides = tensor.stride()
    if strides == _dense(tensor.shape, range(tensor.dim())):
        return torch.contiguous_format
    channels_last = (0, *range(2, tensor.dim()), 1)
    if tensor.dim() in _FORMATS and strides == _dense(tensor.shape, channels_last):
        return _FORMATS[tensor.dim()]
    return strides


def _dense(shape: torch.Size, order: Iterable[int]) -> tuple[int, ...]:
    """Returns the strides of a tensor without gaps, for a given order of dimensions."""
    strides, step = [1] * len(shape), 1
    for dim in reversed(list(order)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
