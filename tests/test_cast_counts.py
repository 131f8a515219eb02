"""The number of casts in small models, and the tensors that must not be cast: the table of known cases."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampgraph
from ampgraph import NoLossScale, OpLists, Policy

from .helpers import Fn, close, dtype_of, inserted, inserted_to, nodes_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def convert(model, *args, **policy):
    return ampgraph.convert(model, args, policy=Policy(**{"dtype": BF16, **policy}))


def widened(amp):
    return inserted_to(amp.graph_module, FP32)


def internal(graph_module):
    """Inserted casts other than those that give a graph output back its dtype."""
    output = next(iter(graph_module.graph.find_nodes(op="output")))
    return [n for n in inserted(graph_module) if set(n.users) != {output}]


# -- counts ---------------------------------------------------------------------------------------------


class Qkv(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return self.q(x), self.k(x), self.v(x)


def test_qkv_casts_the_input_once():
    amp = convert(Qkv(), torch.randn(4, 8))
    assert len(internal(amp.graph_module)) == 7
    assert amp.plan.baselines["autocast"].activation_casts - 3 == 3  # less the three outputs: x at each use


def test_tied_weight_is_cast_once():
    weight = nn.Parameter(torch.randn(8, 8))

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return F.linear(F.linear(x, self.weight), self.weight)

    amp = convert(Tied(), torch.randn(4, 8))
    assert len(internal(amp.graph_module)) == 2


def test_square_by_multiplication():
    amp = convert(Fn(lambda x, w: (x @ w) * (x @ w).sum()), torch.randn(4, 4), torch.randn(4, 4))
    assert len(internal(amp.graph_module)) <= 2
    alone = convert(Fn(lambda x: x * x), torch.randn(4, 4))
    assert inserted(alone.graph_module) == []


@pytest.mark.parametrize("objective", ["traffic", "cast_bytes", "casts"])
def test_matmul_gelu_matmul(objective):
    model = Fn(lambda x, a, b: F.gelu(x @ a) @ b)
    amp = convert(model, torch.randn(4, 8), torch.randn(8, 8), torch.randn(8, 8), objective=objective)
    assert len(inserted(amp.graph_module)) <= 4
    assert dtype_of(amp.graph_module, "gelu") == [BF16]


def test_attention():
    def attention(q, k, v):
        return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v

    x = [torch.randn(2, 4, 8) for _ in range(3)]
    amp = convert(Fn(attention), *x)
    assert len(inserted(amp.graph_module)) <= 6
    close(amp(*x), attention(*x))


def test_embedding_indices_are_never_cast():
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4))
    amp = convert(model, torch.tensor([[1, 2], [3, 4]]))
    assert all(n.args[0].meta["val"].dtype.is_floating_point for n in inserted(amp.graph_module))
    assert nodes_of(amp.graph_module, "embedding")[0].args[1].meta["val"].dtype == torch.int64


@pytest.mark.parametrize("split", ["split", "chunk", "unbind"])
def test_tuple_outputs(split):
    def f(x, w):
        y = x @ w
        parts = {
            "split": lambda: y.split(2, -1),
            "chunk": lambda: y.chunk(2, -1),
            "unbind": lambda: y.unbind(-1),
        }[split]()
        return parts[0].relu(), parts[1]

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    amp = convert(Fn(f), x, w)
    for actual, expected in zip(amp(x, w), f(x, w), strict=True):
        assert actual.dtype == FP32
        close(actual, expected)


def test_topk_returns_values_and_positions():
    model = nn.Sequential(nn.Linear(8, 8), Fn(lambda x: x.topk(2)))
    x = torch.randn(3, 8)
    values, positions = convert(model, x)(x)
    assert (values.dtype, positions.dtype) == (FP32, torch.int64)


def test_conv_then_softmax_widens_in_the_kernel():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Softmax(1))
    amp = convert(model, torch.randn(1, 3, 6, 6))
    assert widened(amp) == []
    assert [u.node for u in amp.plan.widened] == ["softmax"]
    assert dict(amp.plan.dtype_args) == {"softmax": "dtype"}
    assert dtype_of(amp.graph_module, "softmax") == [FP32]
    assert dtype_of(amp.graph_module, "conv2d") == [BF16]


def test_nothing_to_gain_leaves_the_graph_alone():
    def f(x):
        return torch.softmax(x, -1).sum() + torch.arange(4.0)

    amp = convert(Fn(f), torch.randn(3, 4))
    plain = torch.export.export(Fn(f), (torch.randn(3, 4),), strict=False).module(check_guards=False)
    targets = [n.target for n in amp.graph_module.graph.nodes if n.op == "call_function"]
    assert targets == [n.target for n in plain.graph.nodes if n.op == "call_function"]


def test_relu_conv_relu():
    """The input may be narrowed before its relu only where that moves no more bytes; the values stay."""
    model = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 3, 3, bias=False), nn.ReLU())
    x = torch.randn(1, 3, 8, 8)
    amp = convert(model, x)
    first, second = dtype_of(amp.graph_module, "relu")
    assert second == BF16
    assert amp.plan.cost.traffic <= amp.plan.baselines["autocast"].traffic
    assert len(inserted(amp.graph_module)) == 3
    autocast = ampgraph.convert(model, (x,), policy=Policy(dtype=BF16, placement="autocast"))
    assert dtype_of(autocast.graph_module, "relu")[0] == FP32
    assert torch.equal(amp(x), autocast(x))
    assert first in (FP32, BF16)


def test_encoder_layer_needs_fewer_casts_than_autocast():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    amp = convert(layer, torch.randn(2, 4, 16))
    assert len(inserted(amp.graph_module)) - 8 <= 10
    assert amp.plan.cost.casts <= amp.plan.baselines["autocast"].casts
    assert amp.plan.cost.cast_bytes <= amp.plan.baselines["autocast"].cast_bytes


# -- order ----------------------------------------------------------------------------------------------


def decisions_by_op(amp):
    return sorted((n.split("_")[0], str(d.dtype)) for n, d in amp.plan.decisions.items())


def test_operand_order_does_not_matter():
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    one = convert(Fn(lambda x, w: torch.add(x @ w, torch.exp(x))), x, w)
    two = convert(Fn(lambda x, w: torch.add(torch.exp(x), x @ w)), x, w)
    assert dtype_of(one.graph_module, "add") == dtype_of(two.graph_module, "add")
    assert decisions_by_op(one) == decisions_by_op(two)
    assert one.plan.cost == two.plan.cost


def test_output_order_does_not_matter():
    def f(x, w):
        y = x @ w
        return F.gelu(y), torch.exp(y), y.relu()

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    one, two = convert(Fn(f), x, w), convert(Fn(lambda x, w: f(x, w)[::-1]), x, w)
    assert decisions_by_op(one) == decisions_by_op(two)
    assert one.plan.cost == two.plan.cost


def test_node_order_does_not_matter():
    def forwards(x, a, b):
        p = F.gelu(x @ a)
        q = torch.exp(x @ b)
        return p + q

    def backwards(x, a, b):
        q = torch.exp(x @ b)
        p = F.gelu(x @ a)
        return p + q

    tensors = [torch.randn(4, 4) for _ in range(3)]
    one, two = convert(Fn(forwards), *tensors), convert(Fn(backwards), *tensors)
    assert decisions_by_op(one) == decisions_by_op(two)
    assert one.plan.cost == two.plan.cost


# -- other systems' plans --------------------------------------------------------------------------------


class PaddleNet(nn.Module):
    """Convolution, relu on a tensor that the user cast, flatten, linear, softmax, mean."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, bias=False)
        self.weight = nn.Parameter(torch.randn(96, 4))
        self.bias = nn.Parameter(torch.randn(4))
        self.offset = nn.Parameter(torch.randn(6, 1, 1))

    def forward(self, x):
        y = self.conv(x) + self.offset
        y = torch.relu(y.float()).flatten(1)
        y = torch.matmul(y, self.weight) + self.bias
        return torch.softmax(y, -1).mean()


def low_calls(amp):
    ops = {
        "conv": "conv2d",
        "add": "add",
        "relu": "relu",
        "matmul": "matmul",
        "softmax": "softmax",
        "mean": "mean",
    }
    return {name: dtype_of(amp.graph_module, op).count(BF16) for name, op in ops.items()}


def test_paddle_o1_call_counts():
    """Paddle decides op by op from the inputs, as the autocast rule does."""
    model, x = PaddleNet(), torch.randn(2, 1, 6, 6)
    expected = {"conv": 1, "add": 0, "relu": 0, "matmul": 1, "softmax": 0, "mean": 0}
    assert low_calls(convert(model, x, ops=OpLists.paddle(), placement="autocast")) == expected
    # Optimal placement narrows before the relu instead of after it: the same values, fewer bytes.
    assert low_calls(convert(model, x, ops=OpLists.paddle())) == {**expected, "relu": 1}


def test_paddle_o2_call_counts():
    """Paddle's outputs are low and its parameters too; a clear relu between low ops is low here."""
    policy = {"ops": OpLists.paddle("O2"), "level": "O2", "keep_io_dtypes": False}
    policy["loss_scale"] = NoLossScale()
    amp = convert(PaddleNet(), torch.randn(2, 1, 6, 6), **policy)
    assert low_calls(amp) == {"conv": 1, "add": 2, "relu": 1, "matmul": 1, "softmax": 1, "mean": 1}


def test_only_the_guarded_layer_is_low():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            with ampgraph.fp16_guard():
                x = self.a(x)
            return self.b(x)

    amp = convert(Two(), torch.randn(4, 8), ops=OpLists.paddle("O2"), level="O2")
    assert dtype_of(amp.graph_module, "linear") == [BF16, FP32]


def test_conv_relu_conv():
    model = nn.Sequential(nn.Conv2d(3, 3, 3, bias=False), nn.ReLU(), nn.Conv2d(3, 3, 3, bias=False))
    amp = convert(model, torch.randn(1, 3, 8, 8))
    assert dtype_of(amp.graph_module, "relu") == [BF16]
    assert len(inserted(amp.graph_module)) == 4  # the input, two weights, the output
    assert len(widened(amp)) == 1


def test_gemm_add_silu():
    model = Fn(lambda x, w, b: F.silu(x @ w + b))
    amp = convert(model, torch.randn(4, 8), torch.randn(8, 8), torch.randn(8))
    assert dtype_of(amp.graph_module, "matmul") == [BF16]
    # b is float32: the sum, and silu after it, follow it
    assert dtype_of(amp.graph_module, "add") == [FP32]
    assert dtype_of(amp.graph_module, "silu") == [FP32]
    assert widened(amp) == []


def test_concat_matmul_with_fewest_casts():
    """One cast after the join instead of one for each part; for bytes, whatever moves fewer."""
    model = Fn(lambda a, b, w: torch.cat([a, b], 1) @ w)
    tensors = torch.randn(4, 4), torch.randn(4, 4), torch.randn(8, 8)
    casts, traffic = (convert(model, *tensors, objective=o) for o in ("casts", "traffic"))
    assert dtype_of(casts.graph_module, "cat") == [FP32]
    assert len(inserted(casts.graph_module)) == 3  # the join, the weight, the output
    assert traffic.plan.cost.traffic <= casts.plan.cost.traffic
    assert torch.equal(casts(*tensors), traffic(*tensors))


def test_input_of_conv_and_softmax_is_cast_for_the_conv_alone():
    conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
    amp = convert(Fn(lambda x: conv(x) + torch.softmax(x, 1)), torch.randn(1, 3, 8, 8))
    softmax = nodes_of(amp.graph_module, "softmax")[0]
    assert softmax.args[0].op == "placeholder"


@pytest.mark.parametrize("f", [
    lambda x: torch.split(x, 2)[0],
    lambda x: x[::2, 1:3],
    lambda x: x.double() * 2,
    lambda x: x.to(torch.int64) + 1,
    lambda x: torch.complex(x, x),
], ids=["tuple get", "strided slice", "float64", "int64", "complex"])  # fmt: skip
def test_untouched(f):
    x = torch.randn(4, 4)
    amp = convert(Fn(f), x)
    assert inserted(amp.graph_module) == []
    assert torch.equal(amp(x), f(x))


# -- constants ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ahead of time", "just in time"])
def test_large_weight_pins_its_op_in_fp16(how):
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, 1e6)
    x = torch.rand(2, 4)
    amp = ampgraph.convert(model, (x,) if how == "ahead of time" else None, dtype=FP16)
    assert torch.isfinite(amp(x)).all()
    assert inserted(amp.graph_module) == []


def test_large_weight_fits_bf16():
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, 1e6)
    assert dtype_of(convert(model, torch.rand(2, 4)).graph_module, "linear") == [BF16]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_large_scalar_pins_its_op_in_fp16(level):
    x, w = torch.rand(2, 4), torch.rand(4, 4)
    f = lambda x, w: ((x @ w) * 1e10) * 1e-10  # noqa: E731
    amp = convert(Fn(f), x, w, dtype=FP16, level=level)
    close(amp(x, w), f(x, w), 0.01)


class Masked(nn.Module):
    """Scores with a mask added or filled in, then softmax."""

    def __init__(self, value: float, how: str):
        super().__init__()
        self.value, self.how = value, how
        keep = torch.ones(4, 4, dtype=torch.bool).tril()
        self.register_buffer("keep", keep)
        self.register_buffer("bias", torch.zeros(4, 4).masked_fill(~keep, value))

    def forward(self, q, k):
        scores = q @ k.transpose(-1, -2)
        if self.how == "add buffer":
            scores = scores + self.bias
        elif self.how == "masked_fill":
            scores = scores.masked_fill(~self.keep, self.value)
        elif self.how == "where":
            scores = torch.where(self.keep, scores, torch.full((), self.value))
        elif self.how == "where full":
            scores = torch.where(self.keep, scores, torch.full_like(scores, self.value))
        else:
            scores = scores + (1.0 - self.keep.float()) * self.value
        return torch.softmax(scores, -1) @ q


HOWS = ["add buffer", "masked_fill", "where", "where full", "multiplied"]


@pytest.mark.parametrize("low", [FP16, BF16])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    "value", [float("-inf"), -1e9, torch.finfo(FP32).min], ids=["inf", "1e9", "finfo.min"]
)
def test_masks_give_no_nan(value, how, level, low):
    if how == "multiplied" and math.isinf(value):
        pytest.skip("0 * inf is NaN in every dtype")
    model, q = Masked(value, how), torch.randn(2, 4, 4)
    amp = convert(model, q, q, dtype=low, level=level)
    close(amp(q, q), model(q, q), 0.03)


@pytest.mark.parametrize("low", [FP16, BF16])
def test_infinite_mask_constant_stays_infinite(low):
    mask = torch.full((4, 4), float("-inf")).triu(1)
    model = Fn(lambda x, w: (x @ w) + mask)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    for level in ("O1", "O2", "O3"):
        assert torch.equal(
            torch.isneginf(convert(model, x, w, dtype=low, level=level)(x, w)), torch.isneginf(mask)
        )


def test_row_that_is_masked_whole_stays_uniform():
    """With a finite mask a wholly masked row is uniform in float32; an overflow to -inf would make it NaN."""
    scale = torch.finfo(FP32).min
    model = Fn(lambda x, w: torch.softmax((x @ w).masked_fill(torch.ones(4, 4, dtype=torch.bool), scale), -1))
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    for low, level in itertools.product((FP16, BF16), ("O1", "O2", "O3")):
        amp = convert(model, x, w, dtype=low, level=level)
        assert torch.equal(amp(x, w), torch.full((4, 4), 0.25))


# -- hazards --------------------------------------------------------------------------------------------

HAZARDS = {
    "exp feeding a sum": lambda y: torch.exp(y * 4).sum(-1),
    "softmax by hand": lambda y: torch.exp(y) / torch.exp(y).sum(-1, keepdim=True),
    "x / (y + eps)": lambda y: 1 / (y.abs().amin(-1) * 1e-9 + 1e-8),
    "rsqrt(v + eps)": lambda y: torch.rsqrt(y.var(-1) * 1e-12 + 1e-8),
    "rms norm by hand": lambda y: y * torch.rsqrt((y * 300).pow(2).mean(-1, keepdim=True) + 1e-6),
    "log(softmax(x))": lambda y: torch.log(torch.softmax(y * 5, -1)),
    "long cumsum": lambda y: torch.cumsum(y.abs().repeat(1, 512), -1)[:, -1],
    "long mean": lambda y: (y.abs() * 100).repeat(1, 4096).mean(-1),
    "cos of a large angle": lambda y: torch.cos(torch.arange(4096.0)[None] * y.detach().sign()[:, :1]),
    "variance by hand": lambda y: (
        ((y * 100 + 200).pow(2).mean(-1) - (y * 100 + 200).mean(-1).pow(2)).abs().sqrt()
    ),
    "logsumexp": lambda y: torch.logsumexp(y * 20, -1),
    "norm": lambda y: torch.linalg.vector_norm(y * 1000, dim=-1),
}


@pytest.mark.parametrize("name", HAZARDS)
def test_hazards_stay_close_in_fp16(name):
    """fp16 at O1 against float32 code on the matrix product rounded to fp16, as torch.autocast rounds."""
    f = HAZARDS[name]
    x, w = torch.randn(8, 16), torch.randn(16, 16) / 4
    amp = convert(Fn(lambda x, w: f(x @ w)), x, w, dtype=FP16)
    expected = f((x.half() @ w.half()).float())
    actual = amp(x, w)
    assert torch.isfinite(actual).all()
    close(actual, expected, 0.01)


def test_rotary_table_stays_fp32():
    inverse = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))

    def f(x, w, positions):
        angles = positions[:, None].float() * inverse
        return (x @ w)[:, :4] * torch.cos(angles)

    tensors = torch.randn(16, 8), torch.randn(8, 8), torch.arange(4000, 4016)
    for level in ("O1", "O2"):
        amp = convert(Fn(f), *tensors, level=level)
        assert dtype_of(amp.graph_module, "cos") == [FP32]
        close(amp(*tensors), f(*tensors), 0.02)
