"""The kernel facts, proven on real tensors: every row of every table is run."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ampgraph._compat import VERSION
from ampgraph.ops import kernel_tables, kernels
from ampgraph.ops.op_versions import VERSIONS, is_in_torch, where_it_is

aten = torch.ops.aten
LOW = (torch.float16, torch.bfloat16)


def find(name: str) -> torch._ops.OpOverloadPacket | torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    found = getattr(aten, packet)
    return getattr(found, overload) if overload else found


def table_names() -> set[str]:
    tables = (
        kernel_tables.FP32_SLOTS,
        kernel_tables.FOLLOW_SLOTS,
        kernel_tables.PROMOTES,
        kernel_tables.DTYPE_ARG,
        kernel_tables.ROUNDS_ONCE,
        kernel_tables.ROUNDS_ONCE_BEFORE_2_14,
        kernel_tables.FP32_ONLY,
        kernel_tables.ANY_SLOTS,
        *kernel_tables.FP32_ONLY_ON.values(),
    )
    return set().union(*tables)


@pytest.mark.parametrize("name", sorted(table_names()))
def test_every_row_names_an_op_of_the_torch_that_it_says(name):
    if is_in_torch(name):
        find(name)
        return
    with pytest.raises(AttributeError):
        find(name)


@pytest.mark.parametrize("name", VERSIONS)
def test_versions_are_those_of_the_installed_torch(name):
    assert hasattr(torch.ops.aten, name) is is_in_torch(name)


def test_versions_are_half_open_ranges():
    assert [is_in_torch("qr", v) for v in ((2, 13), (2, 14))] == [True, False]
    assert [is_in_torch("linalg_polar.out", v) for v in ((2, 13), (2, 14))] == [False, True]
    assert is_in_torch("linalg_qr", (2, 11))
    assert (where_it_is("qr"), where_it_is("linalg_polar"), where_it_is("mm")) == (
        "torch < 2.14",
        "torch >= 2.14",
        "",
    )


@pytest.mark.parametrize(
    "table", [kernel_tables.FP32_SLOTS, kernel_tables.FOLLOW_SLOTS, kernel_tables.ANY_SLOTS]
)
def test_every_slot_is_an_argument(table):
    for name, slots in table.items():
        found = find(name)
        overloads = (
            [found] if isinstance(found, torch._ops.OpOverload) else [getattr(found, found.overloads()[0])]
        )
        for overload in overloads:
            arguments = {argument.name for argument in overload._schema.arguments}
            assert set(slots) <= arguments, name


# -- promotion ---------------------------------------------------------------------------------------------

LISTS = {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "row_stack", "column_stack"}
NO_GRADIENT = {"floor_divide"}


def promote_call(name: str):
    op = find(name)
    if name in LISTS:
        return lambda x, y: op([x, y])
    if name == "block_diag":
        return lambda x, y: op([x, y])
    if name == "where":
        mask = torch.tensor([[True, False, True]] * 4)
        return lambda x, y: op(mask, x, y)
    if name == "outer":
        return lambda x, y: op(x.flatten(), y.flatten())
    return op


def run_with_gradients(call, inputs, backward):
    leaves = [x.detach().clone().requires_grad_(backward) for x in inputs]
    result = call(*leaves)
    if not result.requires_grad:
        return result, [None] * len(leaves)
    weights = torch.linspace(0.3, 1.7, result.numel()).reshape(result.shape)
    result.backward(weights.to(result.dtype))
    return result, [leaf.grad for leaf in leaves]


def assert_same(actual, expected):
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", sorted(kernel_tables.PROMOTES))
def test_promoting_kernel_equals_casting_by_hand(name, low):
    torch.manual_seed(0)
    call = promote_call(name)
    backward = name not in NO_GRADIENT
    x, y = torch.rand(4, 3) + 0.3, torch.rand(4, 3) + 0.4
    for mixed in ((x.to(low), y), (x, y.to(low))):
        result, gradients = run_with_gradients(call, mixed, backward)
        expected, by_hand = run_with_gradients(call, [t.float() for t in mixed], backward)
        assert_same(result, expected)
        for leaf, gradient, wanted in zip(mixed, gradients, by_hand, strict=True):
            assert (gradient is None) == (wanted is None)
            if gradient is not None:
                assert_same(gradient, wanted.to(leaf.dtype))


@pytest.mark.parametrize("name", ["atan2", "addcdiv", "pow.Tensor_Tensor"])
def test_ops_left_out_lose_gradient_precision(name):
    torch.manual_seed(0)
    op = find(name)
    tensors = [torch.rand(64) + 0.4 for _ in range(3 if name == "addcdiv" else 2)]
    differs = False
    for which in range(1, len(tensors)):
        mixed = [t.half() if i == which else t for i, t in enumerate(tensors)]
        _, gradients = run_with_gradients(op, mixed, True)
        _, by_hand = run_with_gradients(op, [t.float() for t in mixed], True)
        pairs = zip(mixed, gradients, by_hand, strict=True)
        differs |= any(not torch.equal(got, want.to(x.dtype)) for x, got, want in pairs)
    assert differs, "the backward formula is exact now: add the op to PROMOTES"


# -- dtype arguments ---------------------------------------------------------------------------------------

LOW_BACKWARD = {"cumsum", "cumprod"}  # round the gradient first, as torch.autocast lets them
DIM_FIRST = {"softmax.int", "log_softmax.int", "special_softmax", "special_log_softmax", "cumsum", "cumprod"}


def dtype_arguments(name: str) -> tuple:
    if name in DIM_FIRST or name == "prod.dim_int":
        return (1,)
    if name in {"sum.dim_IntList", "mean.dim", "nansum", "nanmean"}:
        return ([1],)
    if name == "linalg_vector_norm":
        return (2, [1])
    return ()


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", sorted(kernel_tables.DTYPE_ARG))
def test_dtype_argument_equals_casting_by_hand(name, low):
    torch.manual_seed(0)
    op, arguments, keyword = find(name), dtype_arguments(name), kernel_tables.DTYPE_ARG[name]
    x = torch.randn(5, 77).to(low)
    widened, (gradient,) = run_with_gradients(
        lambda t: op(t, *arguments, **{keyword: torch.float32}), [x], True
    )
    by_hand, (wanted,) = run_with_gradients(lambda t: op(t, *arguments), [x.float()], True)
    assert widened.dtype == torch.float32
    assert_same(widened, by_hand)
    if name in LOW_BACKWARD:
        torch.testing.assert_close(gradient, wanted.to(low), rtol=0.1, atol=0.5)
    else:
        assert_same(gradient, wanted.to(low))


@pytest.mark.parametrize("order", [0, 1, 2, 3, 4, float("inf")])
def test_orders_whose_backward_computes_in_float32(order):
    op, x = aten.linalg_vector_norm.default, torch.randn(2, 5).mul(200).half()
    widened, (gradient,) = run_with_gradients(lambda t: op(t, order, [1], dtype=torch.float32), [x], True)
    _, (wanted,) = run_with_gradients(lambda t: op(t, order, [1]), [x.float()], True)
    name, orders = kernels.dtype_arg_needs(op)
    assert (name, widened.dtype) == ("ord", torch.float32)
    exact = gradient is wanted or torch.allclose(gradient.float(), wanted, rtol=2e-3)
    assert exact == (order in orders)


# -- one rounding ------------------------------------------------------------------------------------------

REDUCING = {
    "softmax": lambda x: aten.softmax.int(x, -1),
    "_softmax": lambda x: aten._softmax(x, -1, False),
    "rms_norm": lambda x: aten.rms_norm(x, [x.shape[-1]]),
    "glu": lambda x: aten.glu(x, -1),
    "sum": lambda x: aten.sum.dim_IntList(x, [1]),
    "nansum": lambda x: aten.nansum(x, [1]),
    "mean": lambda x: aten.mean.dim(x, [1]),
    "var": lambda x: aten.var.correction(x, [1]),
    "std": lambda x: aten.std.correction(x, [1]),
    "avg_pool1d": lambda x: aten.avg_pool1d(x, [3]),
    "avg_pool2d": lambda x: aten.avg_pool2d(x.reshape(1, 4, 8, -1), [3, 3]),
    "adaptive_avg_pool2d": lambda x: aten.adaptive_avg_pool2d(x.reshape(1, 4, 8, -1), [3, 3]),
}


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All finite values of a 16-bit dtype."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()]


ROUNDS_ONCE = kernel_tables.ROUNDS_ONCE | (
    kernel_tables.ROUNDS_ONCE_BEFORE_2_14 if VERSION < (2, 14) else frozenset()
)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", sorted(ROUNDS_ONCE - REDUCING.keys()))
def test_pointwise_kernel_rounds_once(name, low):
    op, x = find(name), every_value(low)
    assert_same(op(x), op(x.float()).to(low))


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", sorted(REDUCING))
def test_reducing_kernel_rounds_once(name, low):
    call = REDUCING[name]
    for seed, width, scale in itertools.product(range(2), (32, 1024), (0.1, 8.0)):
        torch.manual_seed(seed)
        x = (torch.randn(32, width) * scale).to(low)
        assert_same(call(x), call(x.float()).to(low))


# -- no low kernel -----------------------------------------------------------------------------------------


SPD = torch.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, 0.25], [0.5, 0.25, 2.0]])
TAU, PIVOTS = torch.full((3,), 0.5), torch.tensor([1, 2, 3], dtype=torch.int32)
VIDEO, IMAGE = torch.ones(1, 1, 4, 4, 4), torch.ones(1, 1, 4, 4)
ONE, TARGET = torch.tensor([1]), torch.tensor([[0, 1, -1]] * 3)
TWO_MATRICES = {
    "cdist",
    "cholesky_solve",
    "linalg_lstsq",
    "linalg_solve",
    "linalg_solve_ex",
    "polar",
    "special_zeta",
    "triangular_solve",
}
REFUSED_CALLS = {
    "avg_pool3d": (VIDEO, [2, 2, 2]),
    "_upsample_bilinear2d_aa": (IMAGE, [2, 2], False),
    "_upsample_bicubic2d_aa": (IMAGE, [2, 2], False),
    "_upsample_lanczos2d_aa": (IMAGE, [2, 2], False),
    "ctc_loss": (torch.zeros(5, 1, 3).log_softmax(2), ONE[None], torch.tensor([5]), ONE),
    "histogram": (SPD, 3),
    "histogramdd": (SPD, [3, 3, 3]),
    "linalg_householder_product": (SPD, TAU),
    "linalg_ldl_solve": (SPD, PIVOTS, SPD),
    "linalg_lu_solve": (SPD, PIVOTS, SPD),
    "linalg_solve_triangular": (SPD, SPD),
    "linalg_tensorinv": (SPD, 1),
    "linalg_tensorsolve": (SPD, TAU),
    "lu_solve": (SPD, SPD, PIVOTS),
    "multi_margin_loss": (SPD, torch.tensor([0, 1, 2])),
    "multilabel_margin_loss": (SPD, TARGET),
    "nanquantile": (SPD, 0.5),
    "ormqr": (SPD, TAU, SPD),
    "quantile": (SPD, 0.5),
    "stft": (torch.ones(64), 16, None, None, torch.ones(16), False, True, True),
}


def refused_arguments(name: str) -> tuple:
    if name in REFUSED_CALLS:
        return REFUSED_CALLS[name]
    if name in TWO_MATRICES or "_polynomial_" in name:
        return SPD, SPD
    return (SPD,)


@pytest.mark.skipif(VERSION < (2, 14), reason="torch.polar refuses low dtypes")
def test_polar_has_a_low_kernel_whose_result_few_ops_take():
    """It stays in float32: torch calls complex32 experimental."""
    low = torch.ones(2, dtype=torch.float16)
    assert torch.polar(low, low).dtype == torch.complex32
    assert kernels.fp32_only(torch.ops.aten.polar.default, "cpu", torch.float16)


# torch.polar has a test of its own where it takes low dtypes.
REFUSING = sorted(
    name
    for name in kernel_tables.FP32_ONLY | kernel_tables.FP32_ONLY_ON["cpu"]
    if is_in_torch(name) and (name != "polar" or VERSION < (2, 14))
)


@pytest.mark.parametrize("name", REFUSING)
def test_no_low_kernel_means_an_error_on_cpu(name):
    op, arguments = find(name), refused_arguments(name)
    keywords = {"upper": True} if name == "linalg_solve_triangular" else {}
    op(*arguments, **keywords)
    for low in LOW:
        with pytest.raises((RuntimeError, ValueError)):
            op(*(narrowed(argument, low) for argument in arguments), **keywords)


# tests/test_cpu_kernels.py holds the sampling kernels against float32; they need a grid.
BROKEN = sorted(name for name in kernel_tables.BROKEN_ON["cpu"] if "grid_sampler" not in name)
WORKS_SINCE = {"special_i1": (2, 15), "special_i1e": (2, 15)}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_still_broken_on_cpu(name, low):
    x = 0.1 * torch.randn(3, 4, 4)
    op = find(name)
    result = op(x.to(low).requires_grad_())
    if WORKS_SINCE.get(name, (math.inf,)) <= VERSION:
        result.sum().backward()
    elif torch.allclose(result.float(), op(x), rtol=0.5, atol=0.5):
        with pytest.raises(NotImplementedError, match="not implemented for"):
            result.sum().backward()
    assert kernels.fp32_only(op.default, "cpu", low)
    assert not kernels.fp32_only(op.default, "cuda", low)


def narrowed(value, low):
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(low) if floating else value


# -- float32 slots and free slots --------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("low", LOW)
def test_batch_norm_takes_low_input_with_float32_state(low, training):
    weight, bias = torch.ones(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    mean, var = torch.zeros(4), torch.ones(4)
    x = torch.randn(2, 4, 5, 5).to(low).requires_grad_()
    for op in (aten.batch_norm, aten.instance_norm):
        result = op(x, weight, bias, mean, var, training, 0.1, 1e-5, True)
        result.sum().backward()
        assert result.dtype == low
        assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize("low", LOW)
def test_free_slots_do_not_decide_the_result(low):
    wide, narrow, mask = torch.ones(3), torch.ones(3).to(low), torch.ones(3, dtype=torch.bool)
    assert aten.copy_(torch.zeros(3), narrow).dtype == torch.float32
    assert aten.expand_as(narrow, wide).dtype == low
    assert aten.view_as(narrow, wide).dtype == low
    assert aten.reshape_as(narrow, wide).dtype == low
    assert aten.type_as(narrow, wide).dtype == torch.float32
    assert aten.masked_fill.Tensor(narrow, mask, torch.tensor(2.0)).dtype == low


# -- questions the passes ask ------------------------------------------------------------------------------


def test_names():
    assert kernels.overload_name(aten.softmax.int) == "aten.softmax.int"
    assert kernels.overload_name(aten.relu.default) == "aten.relu.default"
    assert kernels.packet_name(aten.softmax.int) == "aten.softmax"


def test_in_place_falls_back_to_functional():
    assert kernels.lookup_names(aten.add_.Tensor) == (
        "aten.add_.Tensor",
        "aten.add_",
        "aten.add.Tensor",
        "aten.add",
    )
    assert kernels.promotes(aten.add_.Tensor)
    assert kernels.rounds_once(aten.sigmoid_.default)


def test_overload_before_packet():
    assert kernels.promotes(aten.max.other)
    assert not kernels.promotes(aten.max.dim)
    assert kernels.dtype_arg(aten.softmax.int) == "dtype"
    assert kernels.dtype_arg(aten.nuclear_norm.default) is None


def test_slots():
    assert kernels.fp32_slots(aten.batch_norm.default) == ("weight", "bias", "running_mean", "running_var")
    assert kernels.fp32_slots(aten.layer_norm.default) == ()
    assert kernels.follow_slots(aten.layer_norm.default) == ("input",)
    assert kernels.follow_slots(aten.add.Tensor) is None
    assert kernels.any_slots(aten.copy_.default) == ("src",)


def test_fp32_only_by_dtype():
    assert kernels.fp32_only(aten.rrelu.default, "cpu", torch.float16)
    assert not kernels.fp32_only(aten.rrelu.default, "cpu", torch.bfloat16)
    assert not kernels.fp32_only(aten.rrelu.default, "cpu")
    assert kernels.fp32_only(aten.embedding_bag.padding_idx, "cuda", torch.bfloat16)
    assert not kernels.fp32_only(aten.embedding_bag.padding_idx, "cuda", torch.float16)
    assert kernels.fp32_only(aten.cdist.default, "cpu", torch.float16)


FOR_ONE_DTYPE = {
    "rrelu": (SPD, 0.1, 0.3, True),
    "rrelu_with_noise": (SPD, SPD, 0.1, 0.3, True),
    "rrelu_with_noise_functional": (SPD, SPD, 0.1, 0.3, True),
}


@pytest.mark.parametrize("name", sorted(kernel_tables.FP32_ONLY_FOR["cpu", torch.float16]))
def test_a_kernel_for_one_low_dtype_only(name):
    op, arguments = find(name), FOR_ONE_DTYPE[name]
    op(*(narrowed(argument, torch.bfloat16) for argument in arguments))
    with pytest.raises((RuntimeError, NotImplementedError)):
        op(*(narrowed(argument, torch.float16) for argument in arguments))


@pytest.mark.parametrize("name", ["copy_.default", "uniform_.default", "zero_.default"])
def test_functional_forms_without_the_derivative(name):
    assert not kernels.has_functional_form(find(name))
    assert kernels.has_functional_form(aten.add_.Tensor)


def test_fp32_only_by_device():
    assert kernels.fp32_only(aten.linalg_svd.default)
    assert kernels.fp32_only(aten.avg_pool3d.default, "cpu")
    assert not kernels.fp32_only(aten.avg_pool3d.default, "cuda")
    assert not kernels.fp32_only(aten.mm.default)


@pytest.mark.parametrize(
    "name",
    [
        "_unsafe_view.default",
        "as_strided.default",
        "chunk.default",
        "contiguous.default",
        "detach.default",
        "expand.default",
        "flatten.using_ints",
        "permute.default",
        "reshape.default",
        "select.int",
        "slice.Tensor",
        "split.Tensor",
        "squeeze.dim",
        "unbind.int",
        "view.default",
    ],
)
def test_views(name):
    assert kernels.is_view(find(name))


@pytest.mark.parametrize(
    "name", ["to.dtype", "clone.default", "relu.default", "add_.Tensor", "type_as.default"]
)
def test_not_views(name):
    assert not kernels.is_view(find(name))
