"""Fake tensors: the results of a node and their dtypes. Tried on torch 2.11, 2.13, 2.14 and 2.15.

`evaluate` as it is now: on 2.13 alone. `forget_constant`: on 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType, NoneType
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.utils._pytree import tree_leaves, tree_map_only

from .modes import no_ambient_autocast, no_saved_tensor_hooks
from .quiet import errors_raised_not_logged

# The classes of the tensors on which a capture runs the model's code.
TRACED_TENSORS = (FakeTensor, FunctionalTensor)


def fake_mode_of(graph: Graph) -> FakeTensorMode | None:
    """Returns the fake mode that the graph was captured under, or None for a graph without tensors."""
    for node in graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else (values,):
            if isinstance(value, FakeTensor):
                return value.fake_mode
    return None


def fake_mode_of_dynamo() -> FakeTensorMode | None:
    """Returns the fake mode of the trace that Dynamo makes in this thread (tried on torch 2.13)."""
    context = TracingContext.try_get()
    return context.fake_mode if context is not None else None


def forget_constant(value: Any) -> None:
    """Separates a fake value from the real tensor whose value it knows: a write would run on that, too."""
    if isinstance(value, FakeTensor):
        value.constant = None


def evaluate(
    node: Node,
    mode: FakeTensorMode | None,
    one_step: bool = False,
    instead: Mapping[Node, torch.dtype] = MappingProxyType({}),
) -> Any:
    """Runs one call_function node on its arguments' fake values, to find dtypes and shapes.

    Args:
        node: The node.
        mode: The fake mode of its graph.
        one_step: Recurrent layers run over one element of their sequence, which is enough for dtypes.
        instead: Dtypes that replace the dtypes of some arguments.
    """
    args, kwargs = tree_map_only(Node, lambda n: _value(n, instead), (node.args, dict(node.kwargs)))
    if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
        _forget_constants((args, kwargs))
    shape_env = mode.shape_env if mode else None
    fresh = shape_env.ignore_fresh_unbacked_symbols() if shape_env else contextlib.nullcontext()
    with (
        no_saved_tensor_hooks(),  # first: it may have to import Dynamo, which no mode must see
        mode or contextlib.nullcontext(),
        enable_python_dispatcher(),
        fresh,
        no_ambient_autocast(),
    ):
        if one_step and node.target in _RECURRENT:
            batch_first = args[-1]
            args = (args[0].narrow(1 if batch_first else 0, 0, 1), *args[1:])
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    return _with_true_statistics(node.target, (args, kwargs), result)


def _forget_constants(arguments: Any) -> None:
    """Takes the real tensors from fake ones: a fake op would write to them (seen in torch 2.13)."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, FakeTensor):
            leaf.constant = None


def _with_true_statistics(target: Any, arguments: Any, result: Any) -> Any:
    """Corrects FakeTensor's dtype of the statistics that a norm saves on a CPU.

    FakeTensor returns the input's dtype. The kernels return float32 if one argument (a weight, the running
    statistics) is float32. Seen in torch 2.11 and 2.13.
    """
    if getattr(target, "overloadpacket", None) not in _NORMS or result[0].device.type != "cpu":
        return result
    widest = max((t.dtype for t in tree_leaves(arguments) if _is_floating(t)), key=lambda d: d.itemsize)
    return type(result)(
        _with_dtype(value, widest) if index and _is_floating(value) else value
        for index, value in enumerate(result)
    )


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


_aten = torch.ops.aten
_NORMS = frozenset(
    {
        _aten.native_batch_norm,
        _aten._native_batch_norm_legit,
        _aten._native_batch_norm_legit_no_training,
        _aten._native_batch_norm_legit_functional,
        _aten._batch_norm_with_update,
        _aten._batch_norm_with_update_functional,
        _aten._batch_norm_no_update,
        _aten._batch_norm_impl_index,
        _aten.native_layer_norm,
        _aten.native_group_norm,
    }
)
_RECURRENT = (_aten.lstm.input, _aten.gru.input, _aten.rnn_tanh.input, _aten.rnn_relu.input)


def _value(node: Node, instead: Mapping[Node, torch.dtype]) -> Any:
    value = node.meta.get("val")
    return with_dtypes(value, (instead[node],)) if node in instead else value


# The types of numbers among the values of nodes.
NUMBERS = (*py_sym_types, bool, int, float)
_KEPT_IN_KEY = (bool, str, torch.dtype, NoneType)
_dtype_cache: dict[Any, tuple[torch.dtype | None, ...]] = {}


def result_dtypes(
    node: Node, mode: FakeTensorMode | None, instead: Mapping[Node, torch.dtype] = MappingProxyType({})
) -> tuple[torch.dtype | None, ...]:
    """Returns the dtypes of a call_function node's results, from FakeTensor.

    A result's dtype follows from the op, its arguments' dtypes and devices, which of them are 0-dim,
    its non-tensor arguments and the default dtype, never from sizes; so one evaluation serves every node with
    the same key (sizes only tell how many results ``split`` has). ``instead`` is as for `evaluate`.
    """
    if node.target is operator.getitem:
        value = node.args[0].meta["val"][node.args[1]]  # type: ignore[union-attr,index]
        return dtypes_of(value)
    value = node.meta.get("val")
    if isinstance(value, NUMBERS):
        return (None,)  # FakeTensor does not know the value that ``item`` reads
    count = len(value) if isinstance(value, (list, tuple)) else 1
    arguments = [_dtype_key(argument, instead) for argument in node.args]
    named = _dtype_key(node.kwargs, instead) if node.kwargs else ()
    key = (node.target, count, torch.get_default_dtype(), named, *arguments)
    if (known := _dtype_cache.get(key)) is None:
        here = threading.get_ident()
        # Dtypes do not depend on gradients, and a parameter may be written under no_grad.
        with torch.no_grad(), errors_raised_not_logged(lambda: threading.get_ident() == here):
            values = evaluate(node, mode, one_step=True, instead=instead)
        known = _dtype_cache[key] = dtypes_of(values)
    return known


def dtypes_of(value: Any) -> tuple[torch.dtype | None, ...]:
    """Returns the dtype of each result in a value; None for a result that is not a tensor."""
    if isinstance(value, torch.Tensor):
        return (value.dtype,)
    values = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(v.dtype if isinstance(v, torch.Tensor) else None for v in values)


def _dtype_key(argument: Any, instead: Mapping[Node, torch.dtype]) -> Any:
    """Returns the properties of an argument that affect a result's dtype."""
    if isinstance(argument, Node):
        value = argument.meta.get("val")
        if isinstance(value, FakeTensor):  # the same key, without a tensor for it
            return instead.get(argument, value.dtype), value.dim() == 0, value.fake_device
        argument = value
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.dim() == 0, argument.device
    if isinstance(argument, _KEPT_IN_KEY):
        return argument
    if isinstance(argument, (list, tuple)):
        return type(argument), tuple([_dtype_key(item, instead) for item in argument])
    if isinstance(argument, dict):
        return tuple([(name, _dtype_key(item, instead)) for name, item in argument.items()])
    return type(argument)


def with_dtypes(value: Any, dtypes: tuple[torch.dtype | None, ...]) -> Any:
    """Returns the fake value(s) with other dtypes; the same object if nothing differs."""
    if isinstance(value, FakeTensor) and len(dtypes) == 1:
        return _with_dtype(value, dtypes[0])
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
    shape, stride = value.shape, value.stride()
    if not value._has_symbolic_sizes_strides:
        # The same as value.to(dtype) under the mode, at a tenth of the cost.
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(value.fake_mode, meta, value.fake_device)
    with value.fake_mode:
        return torch.empty_strided(shape, stride, dtype=dtype, device=value.device)


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
