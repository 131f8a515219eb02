"""Shows every call of torch in forward to what watches it during a capture."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from .._compat import FakeTensor
from .kept_tensors import KeptTensors
from .lost import LostBackwards
from .questions import STATE_READERS
from .random_numbers import RandomNumbers, users_line
from .reads import Reads
from .real_writes import RealWrites
from .replaced import SET_DATA, Replaced
from .user_code import frames, is_asked_by_model

_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_GRAD_FN = inspect.getattr_static(torch.Tensor, "grad_fn").__get__
# Most calls read shapes, dtypes and devices: one look-up sorts these out.
_REQUIRES = {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
# What returns values of a tensor as Python's.
_VALUE_NAMES = (
    *("item", "tolist", "numpy", "equal", "allclose", "__float__", "__int__", "__bool__", "__index__"),
    *("__complex__", "__contains__", "__format__", "__array__", "is_nonzero"),
)
_VALUE_READERS = frozenset(
    {*(getattr(torch.Tensor, name) for name in _VALUE_NAMES), torch.equal, torch.allclose, torch.is_nonzero}
)
# Those that take one element, and raise an error of several in a call too.
_OF_ONE = frozenset(
    getattr(torch.Tensor, name) for name in ("__float__", "__int__", "__bool__", "__index__", "__complex__")
)
_WATCHED = STATE_READERS | _VALUE_READERS | _REQUIRES | {_DATA, SET_DATA, _GRAD_FN}


class WatchedCalls(TorchFunctionMode):
    """Captures ``x.data``, which tracing does not see, as ``x.detach()``: the same memory, no gradients.

    Records what a graph does not compute: the state of autograd, the memory layout, draws from generators.
    One mode for all of it: a capture of three layers makes 700 calls, and each pays for each mode.

    Attributes:
        failed: The reads of values by the model's code that raised an error, in words. If the code catches
            it, the graph has the branch of the error, which a call may not take: ``try: n = int(x.sum())``.
    """

    def __init__(
        self,
        reads: Reads,
        replaced: Replaced,
        kept: KeptTensors,
        lost: LostBackwards,
        random_numbers: RandomNumbers,
        real_writes: RealWrites,
    ) -> None:
        super().__init__()
        self._reads, self._replaced, self._kept = reads, replaced, kept
        self._lost, self._random_numbers, self._real_writes = lost, random_numbers, real_writes
        self.failed: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:
            self._random_numbers.note_draw(kwargs["generator"])
        # Dynamo, which captures the bodies of torch.cond, cannot compare functions; it sees ``data`` itself.
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        is_watched = func in _WATCHED
        if is_watched:
            if func == _DATA:
                self._reads.note_tensors(args[:1])
                return args[0].detach()
            if func in _VALUE_READERS:
                self._reads.note_values(tree_leaves((args, kwargs)))
            elif func in _REQUIRES:
                self._lost.note_required(*args, **kwargs, is_made=self._kept.has_made(args[0]))
            self._reads.asks.note_call(func)
            self._replaced.note_call(func, args)
        self._real_writes.note(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception:
            may_pass = func in _VALUE_READERS and not (func in _OF_ONE and _has_several(args[0]))
            if may_pass and is_asked_by_model(sys._getframe(1), func):
                self.failed.append(f"{resolve_name(func)}{users_line(frames())}")
            raise
        if _computes(func, result):
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self._kept.note(func, result, read)
            self._lost.note_read(read)
            self._reads.note_tensors(read)
            self._reads.ran.note(sys._getframe(1))
            if kwargs.get("requires_grad"):
                self._lost.note_made(result)
        return self._lost.watched(result) if is_watched and func == _GRAD_FN else result


def _has_several(tensor: torch.Tensor) -> bool:
    return any(type(size) is int and size != 1 for size in tensor.shape)


def _computes(function: Any, result: Any) -> bool:
    """Whether a function returned tensors, or nothing (``y[i] = w``), and no sizes or strides.

    ``torch.export`` asks for attributes of inputs, and of what these are views of.
    """
    if isinstance(result, (tuple, list)):
        return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))
    if result is None:
        return getattr(function, "__name__", "") != "__get__"
    return isinstance(result, FakeTensor)
