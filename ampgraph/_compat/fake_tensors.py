"""Fake tensors: what a node yields, and of which dtype."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.utils._pytree import tree_map_only

from .modes import no_ambient_autocast, no_saved_tensor_hooks


def fake_mode_of(graph: Graph) -> FakeTensorMode | None:
    """Returns the fake mode that the graph was captured under, or None for a graph without tensors."""
    for node in graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else (values,):
            if isinstance(value, FakeTensor):
                return value.fake_mode
    return None


def evaluate(node: Node, mode: FakeTensorMode | None, one_step: bool = False) -> Any:
    """Runs one call_function node on its arguments' fake values; the authority on dtypes and shapes.

    With ``one_step``, recurrent layers run over one element of their sequence: enough to tell dtypes.
    """
    args, kwargs = tree_map_only(Node, lambda n: n.meta["val"], (node.args, dict(node.kwargs)))
    shape_env = mode.shape_env if mode else None
    fresh = shape_env.ignore_fresh_unbacked_symbols() if shape_env else contextlib.nullcontext()
    with (
        mode or contextlib.nullcontext(),
        enable_python_dispatcher(),
        fresh,
        no_ambient_autocast(),
        no_saved_tensor_hooks(),
    ):
        if one_step and node.target in _RECURRENT:
            batch_first = args[-1]
            args = (args[0].narrow(1 if batch_first else 0, 0, 1), *args[1:])
        return node.target(*args, **kwargs)  # type: ignore[operator]


_aten = torch.ops.aten
_RECURRENT = (_aten.lstm.input, _aten.gru.input, _aten.rnn_tanh.input, _aten.rnn_relu.input)


_dtype_cache: dict[Any, tuple[torch.dtype | None, ...]] = {}


def result_dtypes(node: Node, mode: FakeTensorMode | None) -> tuple[torch.dtype | None, ...]:
    """Returns the dtypes of what a call_function node yields, as FakeTensor finds them.

    A result's dtype follows from the op, its arguments' dtypes, which of them are 0-dim, and its
    non-tensor arguments, never from sizes; so one evaluation serves every node with the same key
    (sizes only tell how many results ``split`` has).
    """
    if node.target is operator.getitem:
        value = node.args[0].meta["val"][node.args[1]]  # type: ignore[union-attr,index]
        return dtypes_of(value)
    value = node.meta.get("val")
    if isinstance(value, (*py_sym_types, bool, int, float)):
        return (None,)  # what ``item`` reads is not known to FakeTensor
    count = len(value) if isinstance(value, (list, tuple)) else 1
    key = (node.target, count, _dtype_key(node.args), _dtype_key(node.kwargs))
    if key not in _dtype_cache:
        # A dtype has nothing to do with gradients; a parameter written under no_grad must be allowed to be.
        with torch.no_grad():
            values = evaluate(node, mode, one_step=True)
        _dtype_cache[key] = dtypes_of(values)
    return _dtype_cache[key]


def dtypes_of(value: Any) -> tuple[torch.dtype | None, ...]:
    """Returns the dtype of each result that a value stands for, None for what is no tensor."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(v.dtype if isinstance(v, torch.Tensor) else None for v in values)


def _dtype_key(argument: Any) -> Any:
    """Returns what an argument, a container included, can tell of a result's dtype."""
    if isinstance(argument, (list, tuple)):
        return type(argument), tuple([_dtype_key(item) for item in argument])
    if isinstance(argument, dict):
        return tuple([(name, _dtype_key(item)) for name, item in argument.items()])
    if isinstance(argument, Node):
        return _dtype_key(argument.meta.get("val"))
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.dim() == 0
    if isinstance(argument, (bool, str, torch.dtype)) or argument is None:
        return argument
    return type(argument)


def with_dtypes(value: Any, dtypes: tuple[torch.dtype | None, ...]) -> Any:
    """Returns the fake value(s) with other dtypes; the very same object where nothing differs."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    if len(values) != len(dtypes):
        raise ValueError(f"expected {len(values)} results, FakeTensor finds {len(dtypes)}")
    if all(not isinstance(v, torch.Tensor) or v.dtype == d for v, d in zip(values, dtypes, strict=True)):
        return value
    changed = [_with_dtype(v, d) for v, d in zip(values, dtypes, strict=True)]
    return type(value)(changed) if isinstance(value, (list, tuple)) else changed[0]


def _with_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, FakeTensor) or dtype is None or value.dtype == dtype:
        return value
    sizes = (*value.shape, *value.stride())
    if all(isinstance(s, int) for s in sizes):
        # The same as value.to(dtype) under the mode, at a tenth of the price.
        meta = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="meta")
        return FakeTensor(value.fake_mode, meta, value.device)
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)


@contextlib.contextmanager
def accept_real_constants(mode: FakeTensorMode | None) -> Iterator[None]:
    """Lets real tensors (constants in model code) mix with the fake ones of ``mode``."""
    if mode is None:
        yield
        return
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


@contextlib.contextmanager
def errors_raised_not_logged(is_here: Callable[[], bool]) -> Iterator[None]:
    """Keeps fake tensors from logging, traceback and all, the errors that they raise as well.

    Args:
        is_here: Whether what is logged comes from the code inside; other threads log as ever.
    """
    logger = logging.getLogger(fake_tensor.__name__)

    def keep(record: logging.LogRecord) -> bool:
        return record.exc_info is None or not is_here()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
