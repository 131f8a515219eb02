"""Bodies of ``torch.cond`` and of loops: guards, autocast regions and rules decide there as elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop

import ampgraph
from ampgraph import Policy
from ampgraph._compat import VERSION
from ampgraph.passes.analysis.bodies import bodies_of

from .helpers import dtype_of

BF16, FP32 = torch.bfloat16, torch.float32
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
# torch 2.11 cannot lower a branch that calls modules.
JUST_IN_TIME = pytest.param("just in time", marks=pytest.mark.skipif(VERSION < (2, 13), reason="torch 2.11"))
CAPTURES = pytest.mark.parametrize("capture", ["ahead of time", JUST_IN_TIME])


def branches(model: Branches, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: model.a(y), lambda y: model.b(y), (x,))


def loop(model: Branches, x: Tensor) -> Tensor:
    return while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, model.a(y)), (torch.tensor(0), x))[1]


class Branches(nn.Module):
    def __init__(self, function: Callable[[Branches, Tensor], Tensor] = branches) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def exact_region(function: Callable) -> Callable:
    def inside(model: Branches, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return function(model, x)

    return inside


def of_bodies(model: nn.Module, capture: str, **rules: str) -> list[list[torch.dtype]]:
    """The dtypes of the linear layers in each body, of a graph that runs right."""
    torch._dynamo.reset()
    policy = Policy(dtype=BF16, rules=rules)
    amp = ampgraph.convert(model.eval(), (X,), policy=policy, capture=capture, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(amp(X), model(X), rtol=0.05, atol=0.05)
    return [dtypes for body in bodies_of(amp.graph_module) if (dtypes := dtype_of(body, "linear"))]


@CAPTURES
@pytest.mark.parametrize(("function", "expected"), [(branches, [[BF16], [BF16]]), (loop, [[BF16]])])
def test_bodies_follow_the_lists(function: Callable, expected: list, capture: str) -> None:
    assert of_bodies(Branches(function), capture) == expected


@CAPTURES
@pytest.mark.parametrize("function", [branches, loop])
def test_a_region_around_holds_inside(function: Callable, capture: str) -> None:
    found = of_bodies(Branches(exact_region(function)), capture)
    assert found == [[FP32]] * len(found) != []


@CAPTURES
def test_a_guard_inside_one_branch(capture: str) -> None:
    def guarded(model: Branches, x: Tensor) -> Tensor:
        def exact(y: Tensor) -> Tensor:
            with ampgraph.fp32_guard():
                return model.a(y)

        return torch.cond(x.sum() > 0, exact, lambda y: model.b(y), (x,))

    assert of_bodies(Branches(guarded), capture) == [[FP32], [BF16]]


@CAPTURES
@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"inner.a": "fp32"}, [[FP32], [BF16]]),
        ({"inner.b": "fp32"}, [[BF16], [FP32]]),
        ({"inner": "fp32"}, [[FP32], [FP32]]),
        ({"inner": "fp32", "inner.b": "low"}, [[FP32], [BF16]]),
    ],
)
def test_rules_find_modules_in_branches(rules: dict, expected: list, capture: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Branches()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 2

    assert of_bodies(Outer(), capture, **rules) == expected


def test_rules_for_the_op_that_runs_branches_warn() -> None:
    for name in ("cond", "getitem"):
        for value in ("fp32", "low"):
            with pytest.warns(UserWarning, match="decides nothing.*branches or a loop.*name their modules"):
                ampgraph.convert(Branches(), (X,), policy=Policy(dtype=BF16, rules={f"node:{name}": value}))


@pytest.mark.parametrize("value", ["fp32", "low"])
def test_rules_for_modules_around_branches_do_not_warn(value: str, recwarn: pytest.WarningsRecorder) -> None:
    def alone(model: Branches, x: Tensor) -> Tensor:
        return torch.cond((x > 0).any(), lambda y: model.a(y), lambda y: model.b(y), (x,))

    policy = Policy(dtype=BF16, rules={"0": value})
    ampgraph.convert(nn.Sequential(Branches(alone), nn.Tanh()), (X,), policy=policy)
    assert not [w for w in recwarn if "decides nothing" in str(w.message)]


def test_modules_of_bodies_inside_bodies() -> None:
    def nested(model: Branches, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > -1e4, lambda y: branches(model, y), lambda y: model.b(y), (x,))

    torch._dynamo.reset()
    policy = Policy(dtype=BF16, rules={"a": "fp32"})
    amp = ampgraph.convert(Branches(nested).eval(), (X,), policy=policy)
    outer, other = bodies_of(amp.graph_module)
    assert [dtype_of(body, "linear") for body in (*bodies_of(outer), other)] == [[FP32], [BF16], [BF16]]


def test_a_guard_around_one_of_the_ops_that_share_a_body_holds_for_the_body() -> None:
    """Dynamo shares a body where no gradient is needed. Float32 is right for both."""

    @torch.compiler.nested_compile_region
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.linear(x, weight).sin()

    def function(model: Branches, x: Tensor) -> Tensor:
        y = layer(x, model.a.weight)
        with ampgraph.fp32_guard():
            return layer(y, model.b.weight)

    torch._dynamo.reset()
    model = Branches(function).requires_grad_(False)
    amp = ampgraph.convert(model, policy=Policy(dtype=BF16), capture="just in time", backend="eager")
    torch.testing.assert_close(amp(X), model(X), rtol=0.05, atol=0.05)
    bodies = [body for graph in amp.graph_modules for body in bodies_of(graph)]
    assert [dtype_of(body, "linear") for body in bodies] == [[FP32]]
