"""`ampgraph.testing`: the cast map and the assertions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph.drawing import to_dot
from ampgraph.testing import (
    assert_casts,
    assert_close_to_fp32,
    assert_dtype,
    assert_no_casts_between,
    cast_map,
)

from .models import CastTwice

LOW = torch.float16


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.out = nn.Linear(8, 8), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = self.proj(x).split(4, -1)
        return left.exp() + right, self.out(right).softmax(-1)


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.fixture(scope="module")
def amp() -> ampgraph.AmpModule:
    return ampgraph.convert(Head(), (torch.randn(2, 8),), dtype=LOW)


def test_cast_map_of_one_op() -> None:
    amp = ampgraph.convert(One(), (torch.randn(2, 4),), dtype=LOW)
    assert (
        cast_map(amp)
        == "linear: f16 <- cast(x), cast(linear.weight), cast(linear.bias)\noutput <- cast(linear)"
    )


def test_cast_map_shows_widening_and_single_results(amp: ampgraph.AmpModule) -> None:
    assert cast_map(amp).splitlines() == [
        "linear: f16 <- cast(x), cast(proj.weight), cast(proj.bias)",
        "split: f16 <- linear",
        "exp: f32 <- cast(split[0])",
        "add: f32 <- exp, widen(split[1])",
        "linear_1: f16 <- split[1], cast(out.weight), cast(out.bias)",
        "softmax: f32 <- widen(linear_1)",
    ]


def test_cast_map_without_casts() -> None:
    fp32 = ampgraph.Policy(rules={"linear": "fp32"})
    amp = ampgraph.convert(One(), (torch.randn(2, 4),), policy=fp32, dtype=LOW)
    assert cast_map(amp) == "linear: f32 <- x, linear.weight, linear.bias"


def test_cast_map_numbers_casts_that_are_not_shared() -> None:
    amp = ampgraph.convert(CastTwice(), (torch.randn(1, 2), torch.randn(2, 2)), dtype=LOW)
    assert "cast(zeros), cast(w)" in cast_map(amp)
    assert "cast#2(zeros), cast(w)" in cast_map(amp)


def test_cast_map_shows_clamped_masks() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((4, 4), torch.finfo(torch.float32).min).triu(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x, self.mask)

    amp = ampgraph.convert(Masked(), (torch.randn(1, 4, 4),), dtype=LOW)
    assert "cast(x), cast(clamp(mask))" in cast_map(amp)
    (cast,) = [c for c in ampgraph.explain(amp).casts if c.clamped]
    assert (cast.tensor, cast.is_parameter) == ("mask", True)
    assert "invtrapezium" in to_dot(amp)
    assert [d["by"] for _, d in ampgraph.to_networkx(amp).nodes(data=True) if d["kind"] == "clamp"]


def test_bodies_of_cond_are_shown_and_checked() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda y: self.linear(y), lambda y: y.exp(), (x,))

    amp = ampgraph.convert(Branches(), (torch.randn(2, 4),), dtype=LOW)
    assert any(line.startswith("true_graph_0/linear: f16 <- cast(") for line in cast_map(amp).splitlines())
    assert_dtype(amp, "linear", LOW)
    assert_casts(amp, at_most=4)
    with pytest.raises(AssertionError, match="found 4"):
        assert_casts(amp, exactly=0)
    explanation = ampgraph.explain(amp)
    assert list(explanation.bodies) == ["true_graph_0", "false_graph_0"]
    assert explanation.totals.casts == 0
    assert explanation.bodies["true_graph_0"].totals.casts == 4
    assert "== true_graph_0 ==" in str(explanation)
    assert "\nnot counted: 4 casts and 1 low ops in 2 bodies" in str(explanation)
    assert "\nnot counted: 4 casts in 2 bodies" in str(explanation).partition("== true_graph_0 ==")[0]
    assert "not counted: 4 casts and 1 low ops in 2 bodies" in explanation.to_markdown()
    assert (explanation.body_casts, explanation.to_dict()["body_low_ops"]) == (4, 1)
    for name, body in (("exp", "false_graph_0"), ("linear", "true_graph_0")):
        with pytest.raises(ampgraph.AmpGraphError, match=rf"'{name}' is in a body: .*\.bodies\['{body}'\]"):
            explanation.why(name)
    assert explanation.to_dict()["bodies"]["false_graph_0"]["totals"]["casts"] == 0


def test_assert_dtype_by_node_module_and_glob(amp: ampgraph.AmpModule) -> None:
    assert_dtype(amp, "linear*", LOW)
    assert_dtype(amp, "proj", LOW)
    assert_dtype(amp, "exp", torch.float32)


def test_assert_dtype_takes_names(amp: ampgraph.AmpModule) -> None:
    assert_dtype(amp, "linear*", "fp16")
    assert_dtype(amp, "exp", "torch.float32")
    with pytest.raises(ampgraph.PolicyError, match=r"dtype='fp61' is not known.*Did you mean 'fp16'"):
        assert_dtype(amp, "exp", "fp61")


def test_assert_dtype_shows_the_offending_lines(amp: ampgraph.AmpModule) -> None:
    with pytest.raises(AssertionError) as error:
        assert_dtype(amp, "*d*", LOW)
    message = str(error.value)
    assert "add: f32 <- exp, widen(split[1])" in message
    assert "follows 'exp'" in message
    assert "linear: f16" not in message


def test_assert_dtype_without_a_match(amp: ampgraph.AmpModule) -> None:
    with pytest.raises(
        AssertionError, match=r"matches no floating-point op, no module\. Did you mean 'proj'"
    ):
        assert_dtype(amp, "prj", LOW)


def test_assert_casts_counts(amp: ampgraph.AmpModule) -> None:
    assert_casts(amp, 6)
    assert_casts(amp, at_most=7)
    assert_casts(amp, exactly=2, activations_only=True)
    assert_casts(amp, exactly=1, to=torch.float32)


def test_assert_casts_lists_the_casts(amp: ampgraph.AmpModule) -> None:
    with pytest.raises(AssertionError) as error:
        assert_casts(amp, at_most=1, activations_only=True)
    message = str(error.value)
    assert "expected at most 1 activation casts, found 2" in message
    assert "split[0]: f16[2, 4] -> f32[2, 4] for exp" in message
    assert "exp: f32 <- cast(split[0])" in message


@pytest.mark.parametrize("limits", [{}, {"exactly": 1, "at_most": 2}])
def test_assert_casts_takes_one_limit(amp: ampgraph.AmpModule, limits: dict[str, int]) -> None:
    with pytest.raises(TypeError, match="one of exactly= and at_most="):
        assert_casts(amp, **limits)


# -- what a failing message shows ------------------------------------------------------------------------


class Chain(nn.Module):
    """Six ops in a row, with a black one in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x).relu()
        return self.second(y.cumsum(-1).sigmoid()).relu(), self.norm(x)


@pytest.fixture(scope="module")
def chain() -> ampgraph.AmpModule:
    return ampgraph.convert(Chain(), (torch.randn(2, 8),), dtype=LOW)


def test_assert_dtype_shows_a_few_nodes_around(chain: ampgraph.AmpModule) -> None:
    with pytest.raises(AssertionError) as error:
        assert_dtype(chain, "sigmoid", LOW)
    assert str(error.value) == (
        "1 of 1 ops that match 'sigmoid' are not torch.float16:\n"
        "  ...\n"
        "  relu: f16 <- linear\n"
        "  cumsum: f32 <- widen(relu)\n"
        "> sigmoid: f32 <- cumsum\n"
        "    propagation: gray: follows 'cumsum', which is float32\n"
        "  linear_1: f16 <- cast(sigmoid), cast(second.weight), cast(second.bias)\n"
        "  relu_1: f16 <- linear_1\n"
        "  ..."
    )


def test_assert_no_casts_between(chain: ampgraph.AmpModule) -> None:
    assert_no_casts_between(chain, "first", "sigmoid")
    assert_no_casts_between(chain, "second", "relu_1")
    with pytest.raises(AssertionError) as error:
        assert_no_casts_between(chain, "first", "second")
    message = str(error.value)
    assert message.startswith("1 casts on the way from 'first' to 'second':\n")
    assert "sigmoid: f32[2, 8] -> f16[2, 8] for linear_1" in message
    assert "> linear_1: f16 <- cast(sigmoid)" in message
    assert "second.weight: " not in message


def test_casts_inside_a_part_are_not_between(chain: ampgraph.AmpModule) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain, self.last = Chain(), nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.chain(x)[0])

    amp = ampgraph.convert(Parts(), (torch.randn(2, 8),), dtype=LOW)
    assert_no_casts_between(amp, "chain", "last")


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("second", "first", "nothing leads from 'second' to 'first'"),
        ("norm", "second", "nothing leads"),
        ("frist", "second", r"'frist' matches no op, no module\. Did you mean 'first'"),
        ("first", "secnd", "Did you mean 'second'"),
    ],
)
def test_no_casts_between_what_is_not_connected(
    chain: ampgraph.AmpModule, first: str, second: str, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_no_casts_between(chain, first, second)


def test_long_messages_are_cut() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(25)))
    amp = ampgraph.convert(model, (torch.randn(2, 4),), dtype=LOW)
    with pytest.raises(AssertionError, match=r"expected exactly 0 casts, found 52(.|\n)*\(and 32 more\)\nin"):
        assert_casts(amp, exactly=0)
    with pytest.raises(AssertionError, match=r"25 of 25 ops(.|\n)*\(and 5 more\)$"):
        assert_dtype(amp, "linear*", torch.float32)


# -- closeness -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_good_conversion_is_close(level: str, dtype: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    x = torch.randn(4, 3, 8, 8)
    amp = ampgraph.convert(model, (x,), policy=level, dtype=dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert_close_to_fp32(amp, (x,))
    assert_close_to_fp32(amp.eval(), (x,))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_just_in_time_models_are_compared_too() -> None:
    assert_close_to_fp32(ampgraph.convert(nn.Linear(8, 8)), (torch.randn(2, 8),))


class Outputs(nn.Module):
    """One output within float16's range, one outside, one that is no floating point."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(64, 3, bias=False), nn.Linear(64, 3, bias=False)
        nn.init.constant_(self.small.weight, 1.0)
        nn.init.constant_(self.large.weight, 1000.0)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"good": self.small(x), "large": self.large(x), "best": x.argmax(-1)}


def test_a_far_output_is_named_with_its_error_and_the_tolerance() -> None:
    x = torch.full((2, 64), 2.0)
    amp = ampgraph.convert(Outputs(), (x,), dtype="float16")
    with pytest.raises(AssertionError) as error:
        assert_close_to_fp32(amp, (x,))
    assert str(error.value) == (
        "1 of 3 outputs are farther from float32 than 1.38e-03 (2 unit roundoffs of float16, 4.9e-04 each, "
        "by the square root of 2 roundings in a row):\n"
        "   output     shape  dtype    error\n"
        "-  ---------  -----  -------  ------------------------------\n"
        "   ['good']   2x3    float32  0.00e+00\n"
        ">  ['large']  2x3    float32  6 of 6 elements are not finite\n"
        "   ['best']   2      int64    0.00e+00"
    )


def test_a_given_tolerance_is_said() -> None:
    x = torch.randn(4, 64)
    amp = ampgraph.convert(nn.Linear(64, 64), (x,), dtype="bfloat16")
    assert_close_to_fp32(amp, (x,), tolerance=0.1)
    with pytest.raises(AssertionError, match=r"than 1.00e-06 \(as given\)"):
        assert_close_to_fp32(amp, (x,), tolerance=1e-6)


def test_other_outputs_must_be_equal() -> None:
    class Near(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ x.t() > 1.0001).long()

    x = torch.eye(2) * 1.0001
    amp = ampgraph.convert(Near(), (x,), dtype="bfloat16")
    with pytest.raises(AssertionError, match=r">  result  2x2 +int64  differs"):
        assert_close_to_fp32(amp, (x,))


def test_random_numbers_are_hinted_at() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    x = torch.randn(4, 64)
    amp = ampgraph.convert(model, (x,), dtype="bfloat16")
    with pytest.raises(AssertionError, match=r"draws random numbers \(aten.dropout\): compare in eval mode"):
        assert_close_to_fp32(amp, (x,), tolerance=0.0)
    with pytest.raises(AssertionError) as error:
        assert_close_to_fp32(amp.eval(), (x,), tolerance=0.0)
    assert "random" not in str(error.value)


def test_only_converted_models_are_compared(amp: ampgraph.AmpModule) -> None:
    with pytest.raises(ampgraph.AmpGraphError, match=r"what ampgraph\.convert returns; got a .*Module"):
        assert_close_to_fp32(amp.graph_module, (torch.randn(2, 8),))  # type: ignore[arg-type]
