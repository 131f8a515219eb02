"""The signature of a call: the captured graph that it fits, and the dimensions that changed."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..training.distributed import is_spread


class Signature(NamedTuple):
    """A call's arguments without their values.

    Attributes:
        kind: Structure, dtypes, devices, ranks, layouts and non-tensor values.
        shapes: Sizes of the tensors, in pytree order.
    """

    kind: Hashable
    shapes: tuple[tuple[int, ...], ...]


def signature_of(args: tuple, kwargs: dict[str, Any]) -> Signature:
    """Returns the signature of a call."""
    if not kwargs and all(type(a) is torch.Tensor for a in args):
        return Signature(
            tuple([(a.dtype, a.device, a.dim(), a.layout) for a in args]),
            tuple([tuple(a.shape) for a in args]),
        )
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if not kwargs and all(isinstance(a, torch.Tensor) for a in args):
        spec = None  # type: ignore[assignment]  # the same kind as the fast path's
    kinds: list[Hashable] = [] if spec is None else [spec]
    kinds += [_kind(leaf) if isinstance(leaf, torch.Tensor) else _constant(leaf) for leaf in leaves]
    return Signature(tuple(kinds), tuple(tuple(x.shape) for x in leaves if isinstance(x, torch.Tensor)))


def _kind(tensor: torch.Tensor) -> Hashable:
    """Returns the kind of a tensor; no graph of plain tensors fits a DTensor."""
    kind = tensor.dtype, tensor.device, tensor.dim(), tensor.layout
    return (*kind, "DTensor") if is_spread(tensor) else kind


# 0.0 equals -0.0, and NaN does not equal itself.
_SIGNED = (float, complex)
_CONSTANTS = (type(None), bool, int, str)


class Likeness:
    """Recognises a call whose arguments have the signature of an earlier one, at less cost.

    It may miss one: containers, subclasses of tensors and objects have no likeness.

    Args:
        args: The positional arguments of the earlier call.
        kwargs: Its keyword arguments.
    """

    __slots__ = ("_count", "_names", "_values")

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self._count, self._names = len(args), (*kwargs,)
        self._values = [_seen(value) for value in (*args, *kwargs.values())]

    def fits(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a call has the same signature for certain. Runs at every call."""
        if kwargs or self._names:
            if len(args) != self._count or (*kwargs,) != self._names:
                return False
            args = (*args, *kwargs.values())
        elif len(args) != self._count:
            return False
        try:
            for value, (cls, seen, device, shape, layout) in zip(args, self._values, strict=True):
                if type(value) is not cls:
                    return False
                if cls is not torch.Tensor:
                    is_same = value == seen
                else:
                    is_same = value.dtype is seen and value.device == device and value.shape == shape
                    is_same = is_same and value.layout is layout
                if not is_same:
                    return False
        except RuntimeError:  # a nested tensor has no sizes
            return False
        return True


def _seen(value: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Returns type, dtype or value, device, sizes and layout; None as the type of a value that never fits."""
    if type(value) is torch.Tensor:
        return torch.Tensor, value.dtype, value.device, value.shape, value.layout
    return (type(value) if type(value) in _CONSTANTS else None, value, None, None, None)


def _constant(leaf: object) -> Hashable:
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), id(leaf)
    return type(leaf), repr(leaf) if isinstance(leaf, _SIGNED) else leaf


def changed_dims(
    shapes: tuple[tuple[int, ...], ...], others: list[tuple[tuple[int, ...], ...]]
) -> list[set[int]]:
    """Returns, for each tensor, the dimensions whose size differs from one of the earlier calls'.

    Dimensions whose size is now 0 or 1 are excluded, because a capture keeps these sizes static.
    """
    return [
        {d for other in others for d, size in enumerate(shape) if size > 1 and other[i][d] != size}
        for i, shape in enumerate(shapes)
    ]
