"""`check_numerics`: names the first node that is not finite, and gives rules that cure it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from ampgraph import Policy, check_numerics

pytestmark = pytest.mark.usefixtures("shared_captures")
F16 = torch.float16


class Energy(nn.Module):
    """Squares of values that fit, which do not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x) * 300
        return self.head(y / (y * y).mean(-1, keepdim=True).sqrt())


class Broken(Energy):
    """The same behind a graph break."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.up(x))
        torch._dynamo.graph_break()
        y = y * 300 + 1
        return self.head(y / (y * y).mean(-1, keepdim=True).sqrt())


class Apply(nn.Module):
    """A linear layer with a function before and after it."""

    def __init__(
        self, after: Callable[[Tensor], Tensor], before: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.after(self.first(self.before(x))))


class Branching(nn.Module):
    """Overflows in a branch, and in a branch of a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

    def inner(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > -1e9, lambda y: self.b(y * 30) * 30, lambda y: self.c(y), (x,))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > -1e9, lambda y: self.inner(self.a(y) * 300), lambda y: self.c(y), (x,))


def converted(model: nn.Module, x: Tensor, **given: object) -> ampgraph.AmpModule:
    given = {"level": "O2", "dtype": F16, "hazards": False, **given}
    capture = given.pop("capture", "auto")
    return ampgraph.convert(model, (x,), policy=Policy(**given), capture=capture, backend="eager")


def rows(seed: int = 0, *shape: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(shape or (8, 16))


def cured(amp: ampgraph.AmpModule, finding: ampgraph.Finding, x: Tensor) -> ampgraph.AmpModule:
    """The model converted with the remedy, as a user would."""
    policy = amp.policy.replace(rules=finding.remedy)
    return ampgraph.convert(amp.source, (x,), policy=policy, capture=amp.options.capture, backend="eager")


# -- forward ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_names_the_node_and_cures_it(level, capture):
    torch.manual_seed(0)
    model, x = Energy(), rows(1, 8, 64)
    amp = converted(model, x, level=level, capture=capture)
    assert not torch.allclose(amp(x), model(x), rtol=0.1, atol=0.1)  # finite, since y / inf is 0
    found = check_numerics(amp, (x,))
    assert (found.node, found.op, found.direction) == ("mul_1", "aten.mul.Tensor", "forward")
    assert found.line.startswith(__file__)
    assert [one.name for one in found.inputs] == ["mul"]
    assert 300 < found.inputs[0].most < 3000
    again = cured(amp, found, x)
    torch.testing.assert_close(again(x), model(x), rtol=2e-2, atol=2e-2)
    assert check_numerics(again, (x,)) is None


def test_text_is_ten_lines_at_most():
    x = rows(1, 8, 64)
    found = check_numerics(converted(Energy(), x), (x,))
    assert len(str(found).splitlines()) <= 10
    assert "mul_1" in str(found)
    assert "65504" in str(found)


@pytest.mark.parametrize("dtype", [F16, torch.bfloat16])
def test_healthy_model_has_no_finding(dtype):
    model, x = Apply(torch.nn.functional.gelu), rows()
    amp = converted(model, x, dtype=dtype)
    assert check_numerics(amp, (x,), loss=lambda y: y.square().mean()) is None


def test_masks_are_no_finding():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(16, 16)
            self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            scores = (y @ y.T).masked_fill(torch.eye(8, dtype=torch.bool).roll(1, 1), -torch.inf) + self.mask
            return scores.softmax(-1) @ y

    x = rows()
    assert check_numerics(converted(Masked(), x), (x,), loss=lambda y: y.square().mean()) is None


def test_masked_result_is_no_finding():
    model, x = Apply(lambda y: y), rows()
    model.last = nn.Identity()
    masked = Apply(lambda y: y.masked_fill(torch.eye(16, dtype=torch.bool)[:8], -torch.inf))
    masked.last = nn.Identity()
    assert check_numerics(converted(masked, x), (x,)) is None


@pytest.mark.parametrize(
    "after",
    [
        lambda y: y / (y * 1e-6).square().mean(-1, keepdim=True),  # division by what is rounded to zero
        lambda y: (y * 1e-4 * 1e-4 + 1e-9).abs().log(),
        lambda y: (y * 12).exp() / (y * 12).exp().sum(-1, keepdim=True),
        lambda y: (y.square().mean(-1, keepdim=True) - y.mean(-1, keepdim=True).square() * 0.999).sqrt() * y,
        lambda y: (y + 5).cumsum(-1) * 900 / 1e3,
        lambda y: (y[:, :, None] * 200 * y[:, None, :] * 200).sum(-1) * 1e-4,
        lambda y: torch.cat([y * 3e4, y], -1).view(8, 2, 16)[:, 0].relu() * 1e-4,
    ],
)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_faults_are_cured(after, level):
    model, x = Apply(after), rows()
    amp = converted(model, x, level=level)
    assert model(x).isfinite().all()
    found = check_numerics(amp, (x,))
    if found is None:
        assert amp(x).isfinite().all()
        return
    assert found.remedy
    assert cured(amp, found, x)(x).isfinite().all()


def test_weight_that_does_not_fit():
    model, x = Apply(lambda y: y), rows() * 1e-3
    amp = converted(model, x)
    with torch.no_grad():
        model.first.weight[3, 4] = 1e5
    found = check_numerics(amp, (x,))
    assert (found.node, found.op, found.inputs) == ("first_weight", "get_attr", ())
    assert cured(amp, found, x)(x).isfinite().all()


def test_behind_a_graph_break():
    torch.manual_seed(0)
    model, x = Broken(), rows(1, 8, 64)
    amp = converted(model, x, capture="just in time")
    amp(x)
    assert len(amp.graph_modules) == 2
    found = check_numerics(amp, (x,), loss=lambda y: y.square().mean())
    assert found.op == "aten.mul.Tensor"
    torch.testing.assert_close(cured(amp, found, x)(x), model(x), rtol=2e-2, atol=2e-2)


def test_policy_rules_stay_and_give_way():
    """A rule that asks for low by glob would contradict the remedy."""
    model, x = Energy(), rows(1, 8, 64)
    amp = converted(model, x, rules={"mul*": "low", "head": "fp32"})
    found = check_numerics(amp, (x,))
    assert found.remedy["head"] == "fp32"
    assert found.remedy["node:mul"] == "low"
    assert found.remedy["node:mul_1"] == "fp32"
    assert cured(amp, found, x)(x).isfinite().all()


def test_no_rule_stands_above_a_cast_of_the_model():
    model, x = Apply(lambda y: (y * 3e5).half().float() * 1e-6), rows()
    found = check_numerics(converted(model, x, level="O1"), (x,))
    assert found.op.startswith("aten.to")
    assert found.in_float32
    assert not found.remedy


def test_what_is_broken_in_float32_too():
    model, x = Apply(lambda y: (y * 100).exp().log()), rows()
    found = check_numerics(converted(model, x), (x,))
    assert found.in_float32
    assert found.node == "exp"
    assert not found.remedy
    assert "float32" in str(found)


class NotFinite(nn.Module):
    """A value that is not finite in float32 either, in a place of choice."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.first, self.last = place, nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("factors", torch.tensor([1.0] * 7 + [math.inf if place == "buffer" else 1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.place == "row that is hidden":
            x = x.masked_fill(x < 1e9, -math.inf).softmax(-1)
        if self.place == "write":
            x = x.clone()
            x[:, 0] = x[:, 0] * 1e30 * 1e30
        return self.last(self.norm(x * self.factors))


@pytest.mark.parametrize(
    ("place", "node"),
    [("row that is hidden", "softmax"), ("write", "mul_1"), ("buffer", "layer_norm")],
)
def test_infinities_that_are_meant_and_become_nan(place: str, node: str) -> None:
    x = torch.randn(4, 8)
    found = ampgraph.check_numerics(ampgraph.convert(NotFinite(place), (x,), dtype=torch.float16), (x,))
    assert found is not None
    assert (found.node, found.in_float32) == (node, True)


def test_input_that_is_not_finite():
    model, x = Apply(lambda y: y), rows()
    found = check_numerics(converted(model, x), (x / 0,))
    assert found.in_float32
    assert found.node == "x"


def test_dropout_draws_the_same_in_each_run():
    model, x = Apply(lambda y: nn.functional.dropout(y * 100, 0.5).square()), rows()
    found = check_numerics(converted(model.train(), x), (x,))
    assert found.remedy


def test_parameters_stored_low():
    model, x = Apply(lambda y: (y * 300).square().mean(-1, keepdim=True) * 1e-6 * y).eval(), rows()
    amp = converted(model, x, level="O3")
    assert amp.stored_low
    found = check_numerics(amp, (x,))
    assert found.remedy
    assert found.direction == "forward"


# -- backward --------------------------------------------------------------------------------------------


def steps_until_finite(amp: ampgraph.AmpModule, x: Tensor, loss: Callable[[Tensor], Tensor]) -> float:
    """The scale at which a real loop takes its first step."""
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.0)
    amp.scaler.attach(optimizer)
    for _ in range(40):
        optimizer.zero_grad()
        loss(amp(x)).backward()
        scale = amp.scaler.get_scale()
        if all(p.grad.isfinite().all() for p in amp.parameters()):
            return scale
        optimizer.step()
    return 0.0


@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
def test_scale_that_settles(capture):
    model, x = Apply(torch.nn.functional.gelu), rows()

    def loss(y: Tensor) -> Tensor:
        return y.square().sum() * 3

    amp = converted(model, x, capture=capture)
    found = check_numerics(amp, (x,), loss=loss)
    assert found.direction == "backward"
    assert not found.remedy
    assert "nothing to fix" in str(found)
    assert found.settles_at == steps_until_finite(amp, x, loss)


def test_gradient_that_no_scale_saves():
    """A row of zeros in a norm with a tiny eps."""
    model, x = Apply(lambda y: nn.functional.layer_norm(y, (16,), eps=1e-12)), rows()
    x[3] = 0
    nn.init.zeros_(model.first.bias)
    amp = converted(model, x)

    def loss(y: Tensor) -> Tensor:
        return y.square().sum()

    assert amp(x).isfinite().all()
    found = check_numerics(amp, (x,), loss=loss)
    assert found.direction == "backward"
    assert found.settles_at is None
    assert found.remedy
    assert steps_until_finite(amp, x, loss) == 0.0
    assert steps_until_finite(cured(amp, found, x), x, loss) >= found.least_scale


def test_gradient_that_is_broken_in_float32_too():
    model, x = Apply(lambda y: (y - y).sqrt()), rows()
    found = check_numerics(converted(model, x), (x,), loss=lambda y: y.square().mean())
    assert found.in_float32
    assert (found.direction, found.op) == ("backward", "aten.sqrt")


def test_loss_that_is_broken_in_float32_too():
    model, x = Apply(lambda y: y), rows()
    found = check_numerics(converted(model, x), (x,), loss=lambda y: (y - 100).log().mean())
    assert found.in_float32
    assert "the loss" in str(found)


# -- what stays as it was --------------------------------------------------------------------------------


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x.mul_(1.0)
        y = self.norm(self.first(x)) * 200
        return self.last(nn.functional.dropout(y * y, 0.5))


@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
def test_leaves_everything_as_it_was(capture):
    model, x = Stateful().train(), rows()
    amp = converted(model, x, capture=capture)
    for parameter in amp.parameters():
        parameter.grad = torch.ones_like(parameter)
    amp(x.clone())
    state = {name: value.clone() for name, value in amp.state_dict().items()}
    scaler, calls, random, kept = amp.scaler.state_dict(), model.calls, torch.get_rng_state(), x.clone()
    graphs = len(amp.graph_modules)
    found = check_numerics(amp, (x,), loss=lambda y: y.square().mean())
    assert found is not None
    assert torch.equal(x, kept)
    assert amp.scaler.state_dict() == scaler
    assert amp.scaler.last_overflow is None
    assert model.calls == calls
    assert torch.equal(torch.get_rng_state(), random)
    assert len(amp.graph_modules) == graphs
    for name, value in amp.state_dict().items():
        assert torch.equal(value, state[name]), name
    for parameter in amp.parameters():
        assert torch.equal(parameter.grad, torch.ones_like(parameter))


# -- wrong use -------------------------------------------------------------------------------------------


def test_refuses_what_is_no_converted_model():
    with pytest.raises(ampgraph.AmpGraphError, match="got a Linear"):
        check_numerics(nn.Linear(2, 2), (torch.ones(1, 2),))


def test_refuses_a_loss_that_is_no_number():
    x = rows()
    with pytest.raises(ampgraph.AmpGraphError, match=r"0-dim tensor; got one of shape \(8, 16\)"):
        check_numerics(converted(Apply(lambda y: y), x), (x,), loss=lambda y: y)


@pytest.mark.parametrize("tool", [ampgraph.check_numerics, ampgraph.compare])
def test_refuses_a_model_of_which_nothing_is_captured(tool: Callable) -> None:
    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    amp = ampgraph.convert(Left(), dtype=torch.float16, capture="just in time", backend="eager")
    with pytest.raises(ampgraph.AmpGraphError, match="Left: the call ran no converted graph"):
        tool(amp, (rows(),), loss=lambda y: y.square().mean())


def test_a_fault_in_a_branch_is_fixed_by_rules_for_modules() -> None:
    torch.manual_seed(0)
    model, x = Branching(), torch.rand(8, 16)
    with torch.no_grad():
        model.a.weight.mul_(10)
    amp = converted(model, x, level="O1")
    finding = check_numerics(amp, (x,), loss=lambda y: y.square().mean())
    assert finding is not None
    assert (finding.op, finding.direction) == ("cond", "forward")
    assert "rules for modules reach it" in finding.reason
    assert finding.pinned == ()
    assert "c" not in finding.modules
    assert finding.remedy == dict.fromkeys(finding.modules, "fp32")
    assert "module" in str(finding)
    assert all(f"{path!r}: 'fp32'" in str(finding) for path in finding.modules)
    assert json.loads(json.dumps(finding.to_dict()))["modules"] == list(finding.modules)
    fixed = converted(model, x, level="O1", rules=finding.remedy)
    assert fixed(x).isfinite().all()
    assert check_numerics(fixed, (x,)) is None


def test_modules_in_branches_that_rules_want_low_stay_low() -> None:
    torch.manual_seed(0)
    model, x = Branching(), torch.rand(8, 16)
    with torch.no_grad():
        model.a.weight.mul_(10)
    amp = converted(model, x, level="O1", rules={"[a-z]": "low"})
    finding = check_numerics(amp, (x,))
    assert finding is not None
    assert finding.remedy == {}
    assert "rules for modules reach it" in str(finding)
