"""Every entry of torch's own autocast tests: the ATen op it reaches and its class in OpLists.torch()."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ampgraph._compat import VERSION
from ampgraph.ops.lists import OpClass, OpLists
from tests.autocast_entries import CPU_ONLY, RUNS_IN, Entry, entries

CUDA, CPU = list(entries("cuda")), list(entries("cpu"))
TORCH = OpLists.torch()

# Entries whose op is not simply aten.<name>.default: name (or id) -> overload.
OVERLOADS = {
    **{name: f"{name}.Tensor" for name in ("eq", "ge", "gt", "le", "lt", "ne", "add", "div", "mul")},
    **{f"__{name}__": f"{name}.Tensor" for name in ("eq", "ge", "gt", "le", "lt", "ne", "add", "div", "mul")},
    "__matmul__": "matmul.default",
    "__pow__": "pow.Tensor_Scalar",
    "conv_transpose2d": "conv_transpose2d.input",
    "conv_transpose3d": "conv_transpose3d.input",
    "cuda-torch_fp16-_convolution-1": "_convolution.deprecated",
    "cuda-torch_fp32-pow-1": "pow.Tensor_Tensor",
    "cuda-torch_fp32-pow-2": "pow.Tensor_Scalar",
    "cuda-torch_fp32-prod-2": "prod.dim_int",
    "cuda-torch_fp32-sum-2": "sum.dim_IntList",
    "log_softmax": "log_softmax.int",
    "norm": "linalg_vector_norm.default",
    "softmax": "softmax.int",
}

CLASS_OF_RUN = {"low": OpClass.WHITE, "fp32": OpClass.BLACK, "promote": OpClass.GRAY}
# Ops that autocast leaves to their own promotion and that move values; those CPU autocast alone lists.
CLASS_EXCEPTIONS = {
    "cat": OpClass.CLEAR,
    "stack": OpClass.CLEAR,
    "_addmm_activation": OpClass.GRAY,
    "_native_multi_head_attention": OpClass.GRAY,
    "avg_pool3d": OpClass.GRAY,
    "reflection_pad1d": OpClass.CLEAR,
}

# No CPU kernel; and one that returns a Python bool, which a trace cannot hold.
CANNOT_RUN = {"cudnn_convolution", "cudnn_convolution_transpose"}
CANNOT_TRACE = CANNOT_RUN | {"equal"}


def overload_of(entry: Entry) -> torch._ops.OpOverload:
    name = OVERLOADS.get(entry.id) or OVERLOADS.get(entry.op) or f"{entry.op}.default"
    packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def expected_class(entry: Entry) -> OpClass:
    return CLASS_EXCEPTIONS.get(entry.op) or CLASS_OF_RUN[RUNS_IN[entry.section]]


def without(names: set[str], listed: list[Entry]) -> list[Entry]:
    return [entry for entry in listed if entry.op not in names]


def first_tensor(result) -> torch.Tensor | None:
    return next((leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)), None)


def assert_equal(actual, expected):
    for one, other in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_the_lists_are_the_ones_we_know():
    on_cuda = 121 if VERSION >= (2, 13) else 120
    assert (len(CUDA), len(CPU)) == (on_cuda, 55)
    assert len({entry.id for entry in CUDA + CPU}) == on_cuda + 55
    assert {entry.op for entry in CPU} >= CPU_ONLY


@pytest.mark.parametrize("entry", CUDA + CPU, ids=lambda entry: entry.id)
def test_class(entry):
    assert TORCH.lookup(overload_of(entry)).cls is expected_class(entry)


@pytest.mark.parametrize("entry", without(CANNOT_TRACE, CUDA + CPU), ids=lambda entry: entry.id)
@pytest.mark.filterwarnings("ignore")
def test_entry_reaches_the_op(entry):
    module, tensors = entry.module()
    # Some entries mix dtypes that only autocast makes legal, so trace in float32.
    floats = [t.float() if t.is_floating_point() else t for t in tensors]
    graph = make_fx(lambda *args: module(*args), pre_dispatch=True)(*floats).graph
    targets = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert targets == [overload_of(entry)]


@pytest.mark.parametrize("entry", without(CANNOT_RUN, CUDA), ids=lambda entry: entry.id)
@pytest.mark.filterwarnings("ignore")
def test_reference_has_the_listed_dtype(entry):
    result = first_tensor(entry.reference())
    assert (result.dtype if result is not None else None) == entry.output_dtype


@pytest.mark.parametrize("entry", CPU, ids=lambda entry: entry.id)
@pytest.mark.filterwarnings("ignore")
def test_reference_equals_cpu_autocast(entry):
    with torch.autocast("cpu", dtype=entry.low):
        result = entry.run()
    assert_equal(result, entry.reference())
    assert first_tensor(result).dtype == entry.output_dtype
