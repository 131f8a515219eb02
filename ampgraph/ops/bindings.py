"""Python functions that run the same ATen op as an overload of ``torch.ops``, with less work per call.

An overload resolves its arguments against a schema in Python; these are torch's own C bindings, which parse
them natively. `tests/test_eager_program.py` runs each on torch's operator samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import getitem
from typing import Any

import torch

aten = torch.ops.aten

# Overloads by the C function of the same name in ``torch``, in ``torch.Tensor`` and in ``torch._C._nn``.
_OF_TORCH = """
_foreach_add_.Scalar _foreach_copy_ _foreach_mul.Tensor _foreach_norm.Scalar _log_softmax
_log_softmax_backward_data _softmax _softmax_backward_data abs add.Tensor addmm amax bmm cat clamp clone
conv1d conv2d conv3d conv_transpose2d.input convolution cos cumsum div.Tensor div.Tensor_mode embedding
empty_like eq.Scalar eq.Tensor erf exp flatten.using_ints gather ge.Scalar group_norm gt.Scalar index_select
isfinite layer_norm le.Scalar log log_softmax.int logical_and logical_not lt.Scalar lt.Tensor matmul
max_pool2d maximum mean mean.dim minimum mm movedim.int mul.Tensor native_batch_norm native_dropout
native_group_norm native_layer_norm ne.Scalar neg ones_like permute pow.Tensor_Scalar relu reshape rms_norm
roll rsqrt rsub.Scalar select.int sigmoid sin softmax.int sqrt square squeeze.dim stack sub.Tensor sum
sum.dim_IntList t tanh transpose.int tril triu unbind.int unsqueeze where.self zeros_like
"""
_OF_TENSOR = """
contiguous copy_ detach expand expand_as masked_fill.Scalar masked_fill.Tensor mul_.Tensor relu_ repeat
to.dtype type_as view view_as
"""
_OF_NN = """
adaptive_avg_pool2d avg_pool2d elu gelu hardsigmoid hardswish hardtanh leaky_relu linear
pad scaled_dot_product_attention silu softplus
"""
_OTHERS: dict[str, Callable] = {
    "add_.Tensor": torch.Tensor.add_,
    "batch_norm": torch.batch_norm,
    "dropout": torch.dropout,
    "split.Tensor": torch._VF.split,  # type: ignore[attr-defined]
    "split_with_sizes": torch._VF.split_with_sizes,  # type: ignore[attr-defined]
    "sym_size.int": torch.Tensor.size,
}
# ``Tensor.to`` tries several signatures; these methods have none to try.
_CASTS: dict[Any, Callable] = {
    torch.bfloat16: torch.Tensor.bfloat16,
    torch.float16: torch.Tensor.half,
    torch.float32: torch.Tensor.float,
    torch.float64: torch.Tensor.double,
}
# Their binding tries another signature before it takes a list of sizes.
_SPREAD = (aten.view.default, aten.expand.default)


def call_of(op: Any, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Callable, tuple]:
    """Returns what runs an op in the least time, and its positional arguments; keywords stay as they are.

    Args:
        op: An overload of ``torch.ops``, or any other function, which stays.
        args: Its positional arguments, or what stands for them in a graph.
        kwargs: Its keyword arguments.
    """
    if op is aten.to.dtype and len(args) == 2 and not kwargs and args[1] in _CASTS:
        return _CASTS[args[1]], args[:1]
    if op is aten.to.dtype and len(args) > 4:
        return op, args  # the binding takes fewer
    if op is aten.slice.Tensor and not kwargs and (index := _index(*args[1:])):
        return getitem, (args[0], index)
    if op in _SPREAD and len(args) == 2 and args[1]:
        return BINDINGS[op], (args[0], *args[1])
    return BINDINGS.get(op, op), args


def _index(dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> tuple | None:
    """Returns the index of a slice; None if it counts its dimension from the end."""
    return None if dim < 0 else (*[slice(None)] * dim, slice(start, end, step))


def _table() -> dict[Any, Callable]:
    found = dict(_OTHERS)
    for names, module in ((_OF_TORCH, torch), (_OF_TENSOR, torch.Tensor), (_OF_NN, torch._C._nn)):
        found |= {name: getattr(module, name.partition(".")[0]) for name in names.split()}
    return {_overload(name): function for name, function in found.items()}


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


BINDINGS = _table()
