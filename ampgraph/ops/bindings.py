"""Python functions that run the same ATen op as an overload of ``torch.ops``, with less work per call.

An overload resolves its arguments against a schema in Python; these are torch's own C bindings, which parse
them natively. `tests/test_eager_program.py` runs each on torch's operator samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

# Overloads by the C function of the same name in ``torch``.
_OF_TORCH = """
_log_softmax _softmax abs add.Tensor addmm bmm cat clamp clone conv1d conv2d conv3d convolution cos cumsum
div.Tensor div.Tensor_mode embedding eq.Scalar exp flatten.using_ints gather group_norm layer_norm log
log_softmax.int matmul mean.dim mm movedim.int mul.Tensor native_batch_norm native_dropout native_group_norm
native_layer_norm neg permute pow.Tensor_Scalar relu reshape rsqrt select.int sigmoid sin softmax.int
split.Tensor sqrt squeeze.dim stack sub.Tensor sum.dim_IntList t tanh transpose.int tril unbind.int unsqueeze
where.self
"""
_OF_TENSOR = """
contiguous detach expand expand_as masked_fill.Scalar masked_fill.Tensor to.dtype type_as view view_as
"""
_OTHERS: dict[str, Callable] = {
    "add_.Tensor": torch.Tensor.add_,
    "batch_norm": torch.batch_norm,
    "dropout": torch.dropout,
    "gelu": F.gelu,
    "linear": F.linear,
    "scaled_dot_product_attention": F.scaled_dot_product_attention,
    "sym_size.int": torch.Tensor.size,
}


# The number of positional arguments of the binding; the overload takes more.
MOST_POSITIONAL: dict[Any, int] = {torch.ops.aten.to.dtype: 4}


def _table() -> dict[Any, Callable]:
    found = {_overload(name): getattr(torch, name.partition(".")[0]) for name in _OF_TORCH.split()}
    found |= {_overload(name): getattr(torch.Tensor, name.partition(".")[0]) for name in _OF_TENSOR.split()}
    return found | {_overload(name): function for name, function in _OTHERS.items()}


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


BINDINGS = _table()
