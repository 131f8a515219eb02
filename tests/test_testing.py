"""`ampgraph.testing`: the cast map and the assertions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph.drawing import to_dot
from ampgraph.testing import assert_casts, assert_dtype, cast_map

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
    class Written(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            buffer = torch.zeros(2, 2)
            buffer[:1] = x
            first = buffer @ w
            buffer[1:] = x
            return first + buffer @ w

    amp = ampgraph.convert(Written(), (torch.randn(1, 2), torch.randn(2, 2)), dtype=LOW)
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
    assert explanation.to_dict()["bodies"]["false_graph_0"]["totals"]["casts"] == 0


def test_assert_dtype_by_node_module_and_glob(amp: ampgraph.AmpModule) -> None:
    assert_dtype(amp, "linear*", LOW)
    assert_dtype(amp, "proj", LOW)
    assert_dtype(amp, "exp", torch.float32)


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
