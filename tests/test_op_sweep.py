"""One op of every kind from torch's operator tests, in every form; `tools/op_sweep.py` runs all of them."""

from __future__ import annotations

import pytest

from .cases import one_in
from .one_op import Unusable, cases_of, name_of, op_db
from .one_op_checks import Finding, KernelError, TorchError, check

# By what sets them apart: op class, kernel facts, results, layout.
OPS = [
    "mm",
    "nn.functional.linear",
    "nn.functional.conv2d",
    "nn.functional.scaled_dot_product_attention",
    "add",
    "atan2",
    "nn.functional.layer_norm",
    "native_layer_norm",
    "nn.functional.batch_norm",
    "mean",
    "nn.functional.rrelu",
    "exp",
    "softmax",
    "cumsum",
    "var",
    "linalg.norm",
    "nn.functional.grid_sample",
    "nn.functional.mse_loss",
    "index_add",
    "cat",
    "column_stack",
    "max.reduction_with_dim",
    "gather",
    "index_put",
    "split",
    "where",
    "masked_fill",
    "broadcast_tensors",
    "frexp",
    "round.decimals_3",
    "linalg.matrix_rank",
    "linalg.svd",
    "tensor_split",
    "sparse.mm.reduce",
    "nn.functional.embedding",
    "fft.fft",
    "argmax",
    "uniform",
    "bitwise_and",
]


@pytest.mark.parametrize("name", one_in(3, OPS))
def test_op(name):
    op = next(op for op in op_db() if name_of(op) == name)
    checked = 0
    for make, where in cases_of(op, samples=1):
        try:
            case = make()
        except Unusable:
            continue
        for level in ("O1", "O2"):
            try:
                check(case, level)
            except KernelError:
                pass  # torch's own kernel gives the very same values
            except TorchError:
                continue  # what torch exports for the source is wrong in itself
            except Finding as error:
                raise AssertionError(f"{where}, {level}: {error}") from error
            checked += 1
    assert checked
