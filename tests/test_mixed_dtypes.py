"""Ops whose operands or results do not all have one dtype, and ops that some kernel or layout sets apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampgraph
from ampgraph import NoLossScale, Policy
from ampgraph.testing import assert_dtype

from .helpers import Fn, close, inserted, nodes_of

X, W = torch.randn(4, 8), torch.randn(8, 8)


def converted(function, *args, low=torch.bfloat16, level="O1", **children):
    policy = Policy(level=level, dtype=low, loss_scale=NoLossScale())
    return ampgraph.convert(Fn(function, **children), args, policy=policy)


# -- results of several dtypes -----------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_op_that_returns_float32_and_low_keeps_both(level):
    amp = converted(lambda x, y: torch.broadcast_tensors(x, y), X, X.bfloat16(), level=level)
    wide, low = amp(X, X.bfloat16())
    assert (wide.dtype, low.dtype) == (torch.float32, torch.bfloat16)
    assert inserted(amp.graph_module) == []


def test_both_results_feed_low_and_float32_ops():
    def function(x, y, w):
        wide, low = torch.broadcast_tensors(x, y)
        return wide @ w, low.exp()

    args = (X, X.bfloat16(), W)
    amp = converted(function, *args)
    assert_dtype(amp, "matmul", torch.bfloat16)
    for got, wanted in zip(amp(*args), function(*args), strict=True):
        assert got.dtype == wanted.dtype
        close(got, wanted)


def test_positions_are_recorded_as_integers():
    amp = converted(lambda x, w: (x @ w).max(-1), X, W)
    results = nodes_of(amp.graph_module, "max")[0].users
    assert {n.args[1]: n.meta["val"].dtype for n in results} == {0: torch.bfloat16, 1: torch.int64}


@torch.library.custom_op("ampgraph_test::halves", mutates_args=())
def halves(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return x.sum(), [x[:2].clone(), x[2:].clone()]


@halves.register_fake
def _(x):
    return x.new_empty(()), [torch.empty_like(x[:2]), torch.empty_like(x[2:])]


def test_a_list_within_a_tuple_is_left_alone():
    amp = converted(lambda x: halves(x), X.bfloat16())
    total, parts = amp(X.bfloat16())
    assert [t.dtype for t in (total, *parts)] == [torch.bfloat16] * 3
    assert inserted(amp.graph_module) == []


# -- operands of several dtypes ----------------------------------------------------------------------------


def test_a_float32_weight_beside_a_low_input_stays():
    """The kernel takes both; rounding the weight would lose what the source keeps."""
    weight = torch.rand(8) + 1e-3
    amp = converted(lambda x, w: F.layer_norm(x, (8,), w), X.bfloat16(), weight)
    assert inserted(amp.graph_module) == []
    assert torch.equal(amp(X.bfloat16(), weight), F.layer_norm(X.bfloat16(), (8,), weight))


def test_zero_dim_members_of_a_list_promote():
    def function(x, w, scale):
        return torch.column_stack([(x @ w)[:1, 0], scale.sum()]) @ w[:2]

    amp = converted(function, X, W, X, level="O2")
    assert_dtype(amp, "column_stack", torch.bfloat16)
    close(amp(X, W, X), function(X, W, X))


# -- integer results ---------------------------------------------------------------------------------------


def test_an_integer_result_without_low_kernel_reads_float32():
    function = lambda x, w: torch.linalg.matrix_rank(x @ w)  # noqa: E731
    amp = converted(function, W, W)
    assert torch.equal(amp(W, W), function(W, W))


@torch.library.custom_op("ampgraph_test::count_large", mutates_args=())
def count_large(x: torch.Tensor) -> torch.Tensor:
    assert x.dtype == torch.float32
    return (x > 1).sum()


@count_large.register_fake
def _(x):
    return x.new_empty((), dtype=torch.int64)


def test_an_unlisted_op_reads_float32_whatever_it_returns():
    amp = converted(lambda x, w: count_large(x @ w), X, W)
    assert amp(X, W).dtype == torch.int64


# -- kernels, layouts, FakeTensor --------------------------------------------------------------------------


def test_a_kernel_may_be_missing_for_one_dtype():
    def function(x, w):
        return F.rrelu(x @ w, training=True)

    for low, dtype in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        amp = converted(function, X, W, low=low)
        amp(X, W)
        assert_dtype(amp, "rrelu", dtype)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_nothing_is_cast_for_an_op_that_reads_a_sparse_tensor(level):
    function = lambda s, x: torch.sparse.mm(s, x, "sum")  # noqa: E731
    args = (torch.eye(4).bfloat16().to_sparse_csr(), X.bfloat16())
    amp = converted(function, *args, level=level)
    assert torch.equal(amp(*args), X.bfloat16())


def test_an_op_that_reads_values_is_not_run_on_fake_tensors_again():
    parts = torch.tensor([1, 3])
    amp = converted(lambda x, w, p: torch.tensor_split(x @ w, p), X, W, parts)
    assert [t.shape[0] for t in amp(X, W, parts)] == [1, 2, 1]


def test_sampling_positions_stay_float32():
    """A column of a wide image lies between two bfloat16 numbers: rounding would sample beside it."""
    image = torch.arange(1024.0).expand(1, 1, 2, 1024)
    grid = torch.stack(torch.meshgrid(torch.linspace(-1, 1, 1024), torch.zeros(2), indexing="xy"), -1)[None]
    function = lambda i, g: F.grid_sample(i.bfloat16(), g.bfloat16(), align_corners=True)  # noqa: E731
    amp = converted(function, image, grid)
    assert_dtype(amp, "grid_sampler", torch.float32)


class NothingReads(nn.Module):
    """A result that nothing reads before a grad-mode region: torch.export forgets that it reads its input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        low = self.linear(x)
        low.cumsum(-1)
        with torch.no_grad():
            squared = low.pow(2)
        return low + squared


def test_a_result_that_nothing_reads():
    model = NothingReads()
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16)
    close(amp(X), model(X))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_bits_are_read_of_the_source_dtype(low, level):
    """The sign bit of a float32 value; a low one has other bits, and fewer of them."""

    def signs(x, w):
        return (x @ w).view(torch.int32) >> 31, (x @ w).to(low).view(torch.int16) >> 15

    args = X, torch.eye(8)  # a sum near zero may round to either sign
    for ours, theirs in zip(converted(signs, *args, low=low, level=level)(*args), signs(*args), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize(("low", "other"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_the_other_low_dtype_widens_with_this_one(low, other, level):
    """float16 and bfloat16 together make float32, whatever the plan would save."""
    layer = nn.Linear(8, 8)

    def function(x, lower):
        cast = x.to(other)
        return cast + lower, layer(x) + cast, torch.cat([cast, layer(x)])

    x, policy = torch.randn(4, 8), Policy(level=level, dtype=low)
    args, model = (x, x.to(low)), Fn(function, layer=layer)
    with torch.no_grad():
        wanted = model(*args)
        for got in (ampgraph.convert(model, args, policy=policy), ampgraph.convert(model, policy=policy)):
            for a, b in zip(got(*args), wanted, strict=True):
                assert a.dtype == b.dtype
                close(a, b)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("tells", [torch.lt, torch.ne, torch.gt])
def test_a_low_value_equals_its_view_and_its_cast(tells, level):
    """The sum runs in float32. What the model returns is rounded, and so is all that a comparison reads."""

    class Compares(nn.Module):
        def forward(self, low):
            total = low.sum(-1, keepdim=True)
            view = total[..., :1]
            return total, view, tells(total, view), tells(view, total.clone())

    low = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    policy = Policy(level, dtype=torch.bfloat16, loss_scale=NoLossScale())
    _, _, *found = ampgraph.convert(Compares(), (low,), policy=policy, backend="eager")(low)
    assert not any(mask.any() for mask in found)
