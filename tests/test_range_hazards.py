"""Values that may leave the low range: planted models are right, and harmless ones keep their plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import ampgraph
from ampgraph import AmpModule, NoLossScale, Policy
from ampgraph.plan import Decision, Plan
from ampgraph.report.replan import Replanner, replanned

from .helpers import Fn
from .planted_hazards import CASES, ROWS, WIDTH, Planted
from .zoo import models as zoo

F16, BF16 = torch.float16, torch.bfloat16
CLOSE = {F16: 2e-2, BF16: 6e-2}
LEVELS = ["O1", "O2"]

# In these the arithmetic stays in float32 anyway, or the values of the plant fit: they show that all is well.
SOUND = (
    "softmax_of_shares",
    "log_sum_exp",
    "info_nce",
    "cumulative_attention",
    "log_cosh",
    "l1_norm",
    "additive_mask",
    "masked_exponentials",
    "rotary_by_einsum",
)
# At O1 gray ops follow their float32 inputs: only O2 spoils these.
SOUND_AT_O1 = (
    "layer_norm_by_pow",
    "weight_standardised",
    "demodulated",
    "normalised_zero_rows",
    "var_and_eps",
    "softmax",
    "mixture_density",
    "dice_loss",
    "running_mean",
    "masked_mean",
    "sum_pooling",
    "student_kernel",
    "unit_vectors",
    "graph_degrees",
    "inverse_weights",
    "rotary_by_matmul",
    "rotary_by_multiplication",
    "fourier_features",
    "buckets",
    "lookups",
    "variance_of_moments",
)
SPOILT_IN_BFLOAT16 = {
    "O1": (
        "variance_of_moments",
        "focal_loss",
        "cross_entropy_of_probabilities",
        "rotary_by_matmul",
        "sharp_attention",
    ),
    "O2": (
        "variance_of_moments",
        "focal_loss",
        "cross_entropy_of_probabilities",
        "rotary_by_matmul",
        "rotary_by_multiplication",
        "fourier_features",
        "buckets",
        "lookups",
        "sharp_attention",
    ),
}
# Too little to be spoilt beyond the limit in float16.
FLOAT16_SUFFICES = ("rotary_by_matmul", "variance_of_moments")


class Case(NamedTuple):
    """One planted model, captured."""

    amp: AmpModule
    x: torch.Tensor
    expected: list[torch.Tensor]
    replanner: Replanner

    def under(self, policy: Policy) -> tuple[fx.GraphModule, Plan]:
        return self.replanner.under(policy)

    def error(self, policy: Policy) -> float:
        """The largest relative error of a floating output."""
        with torch.no_grad():
            actual = tree_leaves(self.under(policy)[0](self.x))
        errors = [float((a - e).norm() / e.norm()) for a, e in zip(actual, self.expected, strict=True)]
        return max(e if math.isfinite(e) else math.inf for e in errors)


@cache
def case(name: str) -> Case:
    torch.manual_seed(0)
    model, x = Planted(CASES[name]), torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        expected = tree_leaves(model(x))
    assert all(e.isfinite().all() for e in expected)
    amp = ampgraph.convert(model, (x,), policy=policy_of("O1", BF16), backend="eager")
    return Case(amp, x, expected, Replanner(amp.graph_module, amp.plan))


def policy_of(level: str, dtype: torch.dtype, **options) -> Policy:
    return Policy(level=level, dtype=dtype, loss_scale=NoLossScale(), **options)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CASES)
def test_planted_models_are_finite_and_close(name, level, dtype):
    assert case(name).error(policy_of(level, dtype)) <= CLOSE[dtype]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [n for n in CASES if n not in (*SOUND, *FLOAT16_SUFFICES)])
def test_without_the_analysis_float16_spoils_them(name, level):
    if level == "O1" and name in SOUND_AT_O1:
        level = "O2"
    assert case(name).error(policy_of(level, F16, hazards=False)) > 2 * CLOSE[F16]


@pytest.mark.parametrize(
    ("level", "name"), [(at, n) for at, names in SPOILT_IN_BFLOAT16.items() for n in names]
)
def test_without_the_analysis_bfloat16_spoils_some(level, name):
    assert case(name).error(policy_of(level, BF16, hazards=False)) > 2 * CLOSE[BF16]


# -- what is pinned, and why -------------------------------------------------------------------------------


def decisions(function: Callable, *inputs: torch.Tensor, **policy) -> dict[str, Decision]:
    model = function if isinstance(function, nn.Module) else Fn(function)
    policy = {"level": "O2", "dtype": F16, "loss_scale": NoLossScale(), **policy}
    amp = ampgraph.convert(model, inputs, policy=Policy(**policy), backend="eager")
    return dict(amp.plan.decisions)


def pinned(*args, **policy) -> dict[str, str]:
    found = decisions(*args, **policy)
    return {name: d.reason for name, d in found.items() if d.by == "hazard"}


X, SQUARE = torch.randn(4, 64), torch.randn(64, 64)


def low(x: torch.Tensor) -> torch.Tensor:
    return x @ SQUARE.to(x.device)


def test_the_set_reaches_up_to_where_the_value_is_in_range_again():
    def norm(x):
        y = low(x)
        return low(y / ((y * y).mean(-1, keepdim=True) * 3 + 1).sqrt()).relu()

    found = pinned(norm, X)
    assert set(found) == {"mul", "mean", "mul_1", "add", "sqrt"}
    assert found["mul"] == "a square that is summed: above 65504 from 256 on"
    assert found["mean"] == "reads 'mul': a square that is summed: above 65504 from 256 on"
    assert decisions(norm, X)["mean"].because == ("mul",)


def test_squares_of_a_local_response_norm_are_averaged_behind_a_pad():
    images = torch.randn(2, 3, 4, 4)
    weight = torch.randn(8, 3, 1, 1)
    found = pinned(lambda x: F.local_response_norm(F.conv2d(x, weight), 5), images)
    assert found["mul"] == "a square that is summed: above 65504 from 256 on"


REASONS = {
    "exp without the maximum subtracted: above 65504 from 11.1 on": lambda x: low(x).exp() * 2,
    "a power of 4: above 65504 from 16 on": lambda x: low(x) ** 4 * 2,
    "a power of 6: above 65504 from 6.35 on": lambda x: (low(x) ** 3) * (low(x) ** 3).square() * 2,
    "a product of 64 values: above 65504": lambda x: low(x).cumprod(-1) @ SQUARE,
    "a sum of 64 values: above 65504": lambda x: low(x).sum(-1) * 2,
    "a product with itself, which sums 64 squares: above 65504 from 32 on": lambda x: low(x) @ low(x).T * 2,
    "a sum of 64 products, divided by 64 only afterwards: above 65504": lambda x: low(x) @ x.T / 64,
    "the inverse of what may be as small as 1e-06: above 65504": lambda x: (
        (low(x).relu() + 1e-6).reciprocal() * 2
    ),
    "a division by what may be as small as 1e-06: above 65504": lambda x: (
        x.flip(0) / (low(x + 1).relu() + 1e-6) * 2
    ),
    "a product of two norms (a norm of 64 values): above 65504": lambda x: (
        low(x).norm(dim=-1) * x.norm(dim=-1) * 2
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_says_which_hazard_and_from_what_number_on(reason):
    function = REASONS[reason]
    if "with itself" in reason:
        function = lambda x: (y := low(x)) @ y.T * 2  # noqa: E731
    found = pinned(function, X).values()
    assert any(reason in why for why in found), found


def test_an_eps_below_the_smallest_number_is_named():
    found = pinned(lambda x: x / low(x).norm(dim=-1, keepdim=True).clamp(min=1e-12).expand_as(x), X)
    assert found["expand_as"] == "'clamp' may be as small as 1e-12, which is 0 in float16"


NOTHING_TO_PIN = {
    "softmax with its maximum subtracted": lambda y: (e := (y - y.amax(-1, True)).exp()) / e.sum(-1, True),
    "maximum with its index": lambda y: (y - y.max(-1, keepdim=True)[0]).exp() * 2,
    "maximum of two": lambda y: (y - torch.maximum(y, y.flip(0))).exp() * 2,
    "decay": lambda y: torch.exp(-y) * 2,
    "gaussian": lambda y: torch.exp(-(y**2) * 0.5) * 2,
    "bounded exponent": lambda y: torch.exp(y.clamp(max=4.0)) * 2,
    "attention": lambda y: ((y @ y.flip(0).T) / 8).softmax(-1) @ y,
    "squared activation": lambda y: low(y.relu() ** 2),
    "swish": lambda y: y * y.sigmoid(),
    "tanh gelu": lambda y: F.gelu(y, approximate="tanh") * 2,
    "squares that are bounded": lambda y: (y.tanh() * y.tanh()).mean(-1) * 2,
    "cube": lambda y: y**3 * 0.01,
    "high power of what is bounded": lambda y: y.tanh() ** 8 * 2,
    "product of probabilities": lambda y: y.sigmoid().cumprod(-1) @ SQUARE,
    "short product": lambda y: y[:, :3].prod(-1) * 2,
    "short sum": lambda y: y[:, :8].sum(-1) * 2,
    "bounded sum": lambda y: y.sigmoid().sum(-1) * 2,
    "mean": lambda y: y.mean(-1) * 2,
    "norm": lambda y: y / (y.norm(dim=-1, keepdim=True) + 1),
    "layer norm": lambda y: F.layer_norm(y, (64,)) * 2,
    "eps that fits": lambda y: y * (y.abs() + 1e-3).reciprocal(),
    "variance": lambda y: y.std(-1) * 2,
    "soft capping": lambda y: torch.tanh(F.linear(y, SQUARE) / 30) * 30,
    "logarithm": lambda y: torch.log(y.relu() + 1) * 2,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["timm/resnet50", "timm/vit_tiny_patch16_224", "transformers/bert", "transformers/gpt2"]
)
def test_nothing_is_pinned_on_known_models_at_o1(name):
    model, args, kwargs = zoo.get(name).seeded()
    for dtype in (F16, BF16):
        amp = ampgraph.convert(model.eval(), args, kwargs, policy=policy_of("O1", dtype), backend="eager")
        assert [n for n, d in amp.plan.decisions.items() if d.by == "hazard"] == []


@cache
def harmless(name: str) -> Replanner:
    model = Fn(lambda x: NOTHING_TO_PIN[name](low(x)))
    amp = ampgraph.convert(model, (X,), policy=policy_of("O1", BF16), backend="eager")
    return Replanner(amp.graph_module, amp.plan)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NOTHING_TO_PIN)
def test_nothing_is_pinned_that_needs_nothing(name, level):
    for dtype in (F16, BF16):
        plan = harmless(name).under(policy_of(level, dtype))[1]
        assert {n: d.reason for n, d in plan.decisions.items() if d.by == "hazard"} == {}


def test_o1_pins_only_what_would_be_low():
    """A node that follows a float32 value is float32 anyway: it gets no hazard."""
    found = pinned(lambda x: low((low(x).exp() * 2 + 1).log()), X, level="O1")
    assert found == {}
    assert set(pinned(lambda x: low((low(x).exp() * 2 + 1).log()), X, level="O2")) == {"mul", "add"}


class Decaying(nn.Module):
    """Weighs rows by what is left of the largest one, as recurrent attention does."""

    def __init__(self, scale: float | None):
        super().__init__()
        self.decay, self.scale = nn.Parameter(torch.full([64], 5.0)), scale

    def forward(self, x):
        rows, decay = low(x), -self.decay.exp()
        largest, total = rows[0], torch.zeros_like(rows[0])
        for i in (1, 2):
            row = rows[i] if self.scale is None else rows[i] * self.scale
            highest = torch.maximum(largest + decay, row)
            total = total + (largest - highest).exp()
            largest = highest
        return total


def test_o1_does_not_pin_what_moves_low_values_as_they_are():
    """A view of a low value loses nothing beside a large value; a product of one is rounded."""
    assert pinned(Decaying(None), X, level="O1") == {}
    found = pinned(Decaying(2.0), X, level="O1")
    assert set(found) == {"mul_1"}
    assert found["mul_1"].startswith("against 'maximum'")


DIVISIONS = {
    "by a large number": (lambda y: y / 1e5, True),
    "in place": (lambda y: y.div_(1e5), True),
    "rounded": (lambda y: torch.floor_divide(y, 1e5), True),
    "by a large tensor": (lambda y: y / torch.tensor([1e5, 2e5]), True),
    "of large values": (lambda y: (y + 1e6) / 1e5, False),
    "by a small number": (lambda y: y / 1e-6, False),
    "of a large number": (lambda y: 1e5 / y, False),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_what_a_large_divisor_made_is_small(name):
    divide, is_small = DIVISIONS[name]
    amp = ampgraph.convert(Fn(lambda x: F.linear(divide(low(x)[:, :2]), torch.ones(2, 2))), (X,), dtype=F16)
    last = [d for n, d in amp.plan.decisions.items() if n.startswith("linear")][-1]
    assert (last.dtype == F16) == is_small, last
    assert amp(X).isfinite().all()


def test_a_parameter_may_grow_in_training_and_a_buffer_does_not():
    class Scaled(nn.Module):
        def __init__(self, scale: float, trained: bool):
            super().__init__()
            value = torch.tensor([scale, scale])
            self.scale = nn.Parameter(value) if trained else nn.Buffer(value)

        def forward(self, x):
            return low(x)[:, :2] * self.scale.exp()

    assert pinned(Scaled(2.0, True), X) == {}
    assert pinned(Scaled(5.0, True), X) != {}
    assert pinned(Scaled(5.0, False), X) == {}
    assert pinned(Scaled(12.0, False), X) != {}


def test_a_rule_and_a_guard_stand_above():
    def square(x):
        y = low(x)
        return (y * y).mean(-1)

    assert pinned(square, X, rules={"node:mul": "low"}).keys() == {"mean"}

    def guarded(x):
        with ampgraph.fp16_guard():
            return square(x)

    assert pinned(guarded, X) == {}


def test_o3_and_what_is_low_in_the_source_are_left_alone():
    def square(x):
        y = x @ SQUARE.to(x.dtype)
        return (y * y).mean(-1) * 2

    assert pinned(square, X) != {}
    assert pinned(square, X, level="O3") == {}
    assert pinned(square, X.half()) == {}


def test_a_replanned_graph_knows_its_buffers():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.full((64,), 3.0))

        def forward(self, x):
            return low(x) * self.table.exp()

    for inputs in ((X,), None):
        torch._dynamo.reset()
        amp = ampgraph.convert(Table(), inputs, policy=policy_of("O2", F16), backend="eager")
        amp(X)
        again = replanned(amp.graph_module, amp.plan, amp.policy)[1]
        assert {n: d.by for n, d in again.decisions.items()} == {
            n: d.by for n, d in amp.plan.decisions.items()
        }


class Residual(nn.Module):
    """Something large enters a network: one product reads it, the others read norms."""

    def __init__(self, enters: Callable[[Residual, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.enters, self.codes = enters, nn.Embedding(64, 16)
        self.first, self.norms = nn.Linear(16, 16), nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.enters(self, x))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return x


def _squares(model: Residual, x: torch.Tensor) -> torch.Tensor:
    codes = model.codes.weight
    return (x**2).sum(1, keepdim=True) + (codes**2).sum(1) - 2 * x @ codes.t()


ENTERS: dict[str, Callable[[Residual, torch.Tensor], torch.Tensor]] = {
    "a nearest code": lambda model, x: model.codes(_squares(model, x).argmin(1)),
    "an indexed code": lambda model, x: model.codes.weight[_squares(model, x).argmin(1)],
    "the mean of near codes": lambda model, x: model.codes(_squares(model, x).topk(4)[1]).mean(1),
    "noise of any size": lambda model, x: x + x.exp() * x.flip(0),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ENTERS)
def test_one_product_at_most_reads_what_is_large(name, level):
    model, x = Residual(ENTERS[name]), torch.randn(32, 16)
    amp = ampgraph.convert(model, (x,), policy=level, dtype=torch.float16)
    decisions = amp.plan.decisions
    products = [d.dtype for d in decisions.values() if d.op_class == "white"]
    assert len(products) >= 4
    assert products.count(torch.float32) <= 1
