"""Planning a rewritten graph again gives what converting the model under that policy gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import OpLists, Plan, Policy, PolicyError
from ampgraph.passes.analysis.precision import Precision
from ampgraph.report.replan import Replanner, replanned, without_casts
from ampgraph.testing import cast_map

from .helpers import graph_lines
from .test_explain import CASES

LOW = torch.float16
POLICIES = {
    "O1": Policy(dtype=LOW),
    "O1 autocast": Policy(dtype=LOW, placement="autocast"),
    "O2": Policy("O2", dtype=LOW),
    "O3": Policy("O3", dtype=LOW),
    "torch": Policy(dtype=LOW, ops=OpLists.torch()),
}


class Everything(nn.Module):
    """Grad-mode and autocast regions, a guard, a clamped mask, a large weight, writes through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4, 4), torch.finfo(torch.float32).min).triu(1))
        self.large = nn.Parameter(torch.full((4,), 1e6))

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            x = self.linear(input).exp()
        with torch.autocast("cpu", enabled=False):
            y = self.linear(x)
        with ampgraph.fp32_guard():
            y = self.linear(y)
        y = nn.functional.scaled_dot_product_attention(y, y, y, self.mask)
        x = x.clone()
        x[:2] = y[:2]
        x.add_(1)
        return x @ y + y * self.large, y.sum(-1), y.view(-1)[:3].cumsum(0)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.linear(y).exp(), lambda y: y.exp() @ y, (x,))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **CASES,
    "everything": (Everything, (4, 4)),
    "branches": (Branches, (4, 4)),
    "lstm": (lambda: nn.LSTM(4, 4), (3, 2, 4)),
}


def facts(plan: Plan) -> tuple:
    return (
        dict(plan.decisions),
        plan.casts,
        plan.widened,
        dict(plan.dtype_args),
        plan.cost,
        dict(plan.baselines),
    )


def converted(name: str, policy: Policy, how: str) -> ampgraph.AmpModule:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(shape)
    if how == "ahead of time":
        return ampgraph.convert(model, (x,), policy=policy)
    amp = ampgraph.convert(model, policy=policy)
    with torch.no_grad():
        amp(x)
    return amp


CAPTURES = [(name, "ahead of time") for name in MODELS]
CAPTURES += [(name, "just in time") for name in MODELS if name not in ("branches", "lstm")]


@pytest.mark.parametrize(("name", "how"), CAPTURES)
def test_another_policy_on_a_graph_is_that_policy_on_the_model(name: str, how: str) -> None:
    amps = {}
    for key, policy in POLICIES.items():
        torch._dynamo.reset()
        amps[key] = converted(name, policy, how)
    for amp in amps.values():
        before = graph_lines(amp.graph_module)
        for key, policy in POLICIES.items():
            graph_module, plan = replanned(
                amp.graph_module, amp.plan, policy, stores_low=how == "ahead of time"
            )
            assert facts(plan) == facts(amps[key].plan)
            assert cast_map(graph_module) == cast_map(amps[key])
        assert graph_lines(amp.graph_module) == before


@pytest.mark.parametrize("name", ["everything", "branches"])
def test_many_policies_on_a_graph_without_casts_are_those_policies_on_the_graph(name: str) -> None:
    """No rewrite leaves a trace in the graph that all start from, nor in its bodies."""
    amp = converted(name, POLICIES["O1"], "ahead of time")
    replanner = Replanner(amp.graph_module, amp.plan)
    for policy in [*POLICIES.values(), *POLICIES.values()]:
        graph_module, plan = replanner.under(policy)
        expected, expected_plan = replanned(amp.graph_module, amp.plan, policy)
        assert facts(plan) == facts(expected_plan)
        assert cast_map(graph_module) == cast_map(expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_without_casts_computes_what_the_source_does(name: str) -> None:
    amp = converted(name, POLICIES["O2"], "ahead of time")
    x = torch.randn(MODELS[name][1])
    with torch.no_grad():
        found, expected = without_casts(amp.graph_module, amp.plan)(x), amp.source(x)
    leaves = torch.utils._pytree.tree_leaves
    for ours, theirs in zip(leaves(found), leaves(expected), strict=True):
        assert torch.equal(ours, theirs)


def test_nodes_tell_the_new_plans_reasons() -> None:
    amp = converted("conv", POLICIES["O1"], "ahead of time")
    graph_module, plan = replanned(amp.graph_module, amp.plan, amp.policy, pins=(("conv2d", Precision.FP32),))
    (conv,) = [n for n in graph_module.graph.nodes if n.name == "conv2d"]
    assert conv.meta["ampgraph"]["reason"] == plan["conv2d"].reason == "flipped, to see what changes"


def test_pins_stand_above_guards_rules_and_lists() -> None:
    amp = converted("everything", Policy(dtype=LOW, rules={"linear": "fp32"}), "ahead of time")
    assert amp.plan["linear_2"].by == "guard"
    for name in ("linear_2", "linear", "exp_1", "sum_1"):
        plan = replanned(amp.graph_module, amp.plan, amp.policy, pins=((name, Precision.LOW),))[1]
        assert (plan[name].dtype, plan[name].reason) == (LOW, "flipped, to see what changes")


def test_pins_do_not_stand_above_what_cannot_be() -> None:
    amp = converted("everything", POLICIES["O1"], "ahead of time")
    assert amp.plan["mul"].by == "range"
    assert (
        replanned(amp.graph_module, amp.plan, amp.policy, pins=(("mul", Precision.LOW),))[1]["mul"].by
        == "range"
    )


def test_rules_of_the_other_policy_are_checked() -> None:
    amp = converted("conv", POLICIES["O1"], "ahead of time")
    with pytest.raises(PolicyError, match="matches no module"):
        replanned(amp.graph_module, amp.plan, Policy(rules={"nowhere": "low"}), check_rules=True)
