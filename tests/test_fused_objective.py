"""A training step never moves more than under the autocast rule; compiled backends place low if allowed."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import OpLists, Policy
from ampgraph.passes import place
from ampgraph.passes.analysis.facts import followed
from ampgraph.passes.analysis.graph_walk import is_zero_dim
from ampgraph.passes.analysis.precision import FP32, LOW
from ampgraph.passes.analysis.problem import Problem
from ampgraph.passes.place import _place_fused, _within_step
from ampgraph.passes.placement.labelling import (
    Placement,
    autocast_rule,
    place_low,
    without_idle_casts,
)
from ampgraph.passes.placement.step_cost import StepCost
from ampgraph.passes.placement.within import place_within
from ampgraph.testing import cast_map
from tests.brute_force import allowed, labellings
from tests.eager_bytes import eager_step
from tests.helpers import problem_of, random_graph
from tests.test_precision_property import fp32_reads_rounded

SEEDS = range(60)
LISTS = {
    "default": OpLists.default,
    "torch": OpLists.torch,
    "paddle": OpLists.paddle,
    "mindspore": OpLists.mindspore,
    "oneflow": OpLists.oneflow,
}


class Case(NamedTuple):
    """A random graph, its free nodes low, and the placements that the guards accept."""

    problem: Problem
    costs: StepCost
    low: Placement
    placed: Placement
    eager: Placement


@cache
def cases(level: str, lists: str) -> list[Case]:
    made = []
    for seed in SEEDS:
        policy = Policy(level=level, ops=LISTS[lists](), keep_io_dtypes=seed % 4 != 0)
        problem = problem_of(random_graph(seed, steps=8 + seed % 7), policy)
        costs = StepCost(problem)
        rule = autocast_rule(problem)
        baseline = costs.complete(rule, shared=False)
        placed = _place_fused(problem, costs, rule)
        eager = _within_step(costs, place_within(problem, baseline.activation_cast_bytes), rule, baseline)
        made.append(Case(problem, costs, place_low(problem), placed, eager))
    return made


EVERY = pytest.mark.parametrize(("level", "lists"), [*(("O1", lists) for lists in LISTS), ("O2", "default")])


@EVERY
def test_placements_keep_pins_and_constraints(level, lists):
    for seed, case in enumerate(cases(level, lists)):
        assert allowed(case.problem, case.low.labels), seed
        assert allowed(case.problem, case.placed.labels), seed


@EVERY
def test_no_other_legal_labelling_has_a_low_node_more(level, lists):
    compared = 0
    for case in cases(level, lists):
        if sum(v.pinned is None for v in case.problem.variables.values()) > 6:
            continue
        for labels in labellings(case.problem):
            compared += 1
            low = [n for n, label in labels.items() if label is LOW and not is_zero_dim(n)]
            assert all(case.low.labels[n] is LOW for n in low)
    assert compared > 20


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_numbers_follow_their_inputs(level):
    compared = 0
    for case in cases(level, "default"):
        facts = case.problem.facts
        for node, variable in case.problem.variables.items():
            if variable.pinned is not None or not is_zero_dim(node):
                continue
            for placement in (case.low, case.placed, case.eager):
                compared += 1
                labels = placement.labels
                is_wide = FP32 in [labels[n] for n in followed(node, facts)]
                assert labels[node] is FP32 or not is_wide or variable.narrowable
    assert compared


@pytest.mark.parametrize("objective", ["traffic", "fused"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_numbers_that_parameters_make_are_float32(level, objective):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return self.last(self.first(x) * (self.scale.sigmoid() * self.scale.relu()))

    policy = Policy(level, torch.bfloat16, objective=objective)
    decisions = ampgraph.convert(Scaled(), (torch.randn(4, 8),), policy=policy).plan.decisions
    numbers = decisions["sigmoid"], decisions["relu"], decisions["mul"]
    assert [decision.dtype for decision in numbers] == [torch.float32] * 3
    assert decisions["mul_1"].dtype is torch.bfloat16


@pytest.mark.parametrize("lists", LISTS)
def test_o1_rounds_no_float32_value_on_its_way_to_a_float32_consumer(lists):
    for seed, case in enumerate(cases("O1", lists)):
        assert fp32_reads_rounded(case.problem, case.placed.labels) == [], seed


@EVERY
def test_prediction_is_never_above_the_autocast_rule(level, lists):
    lower = 0
    for seed, case in enumerate(cases(level, lists)):
        rule = case.costs.fused(autocast_rule(case.problem).labels).moved
        found = case.costs.fused(case.placed.labels).moved
        assert found <= rule, seed
        lower += found < rule
    assert lower > 3 or level == "O1"


@EVERY
def test_eager_step_is_never_above_the_autocast_rule(level, lists):
    lower = 0
    for seed, case in enumerate(cases(level, lists)):
        rule = autocast_rule(case.problem)
        limit = case.costs.complete(rule, shared=False)
        found = case.costs.complete(case.eager)
        assert found.traffic + found.backward <= limit.traffic + limit.backward, seed
        assert found.activation_cast_bytes <= limit.activation_cast_bytes, seed
        lower += found.traffic + found.backward < limit.traffic + limit.backward
    assert lower > 20


@EVERY
def test_guard_takes_the_rule_where_low_nodes_move_more(level, lists):
    for case in cases(level, lists):
        rule = autocast_rule(case.problem)
        if case.costs.fused(case.low.labels).moved > case.costs.fused(rule.labels).moved:
            assert case.placed.labels == rule.labels


class Residual(nn.Module):
    """Where the eager optimum under torch's lists keeps the sums float32, although kernels could read low."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for norm, layer in zip(self.norms, self.layers[1:], strict=False):
            x = x + layer(norm(x))
        return self.layers[3](x)


X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
TORCH = Policy(ops=OpLists.torch(), dtype=torch.bfloat16)


class Mixing(nn.Module):
    """Blocks of an MLP mixer, whose float32 norms tempt the forward to keep float32 sums."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(5))
        self.tokens = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.channels = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.stem = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for index in range(2):
            x = x + self.tokens[index](self.norms[2 * index](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.channels[index](self.norms[2 * index + 1](x))
        return self.norms[4](x).mean(1).square().sum()


def test_eager_plan_of_a_mixer_counts_its_backward(monkeypatch):
    x = torch.randn(64, 32, 64, generator=torch.Generator().manual_seed(0))

    def moved(policy: Policy) -> int:
        amp = ampgraph.convert(Mixing(), (x,), policy=policy.replace(weight_copies=False))
        step = eager_step(amp.training_graph, (x,))
        return step.forward + step.backward

    rule = moved(TORCH.replace(placement="autocast"))
    assert moved(TORCH) <= rule
    monkeypatch.setattr(place, "_within_step", lambda costs, placement, *_: placement)
    assert moved(TORCH) > rule  # the least forward alone


class Branches(nn.Module):
    """A residual block whose hidden values two ops read, and the norm's result two others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return (x + self.down(torch.relu(self.up(y)) * torch.sigmoid(y))).square().mean()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_estimate_of_a_backward_is_near_what_autograd_moves(level):
    x = torch.randn(512, 64, requires_grad=True)
    policy = Policy(level, torch.bfloat16, objective="traffic", weight_copies=False)
    amp = ampgraph.convert(Branches(), (x,), policy=policy)
    assert 0.7 < amp.plan.cost.backward / eager_step(amp.training_graph, (x,)).backward < 1.1


def test_backend_selects_the_objective():
    model = Residual()
    assert ampgraph.convert(model, (X,), policy=TORCH).policy.objective == "auto"
    assert ampgraph.convert(model, (X,), policy=TORCH, backend="aot_eager").policy.objective == "fused"
    named = TORCH.replace(objective="casts")
    assert ampgraph.convert(model, (X,), policy=named, backend="aot_eager").policy.objective == "casts"
    assert ampgraph.convert(model, backend="aot_eager").policy.objective == "fused"


def test_auto_on_eager_is_the_traffic_of_the_forward():
    auto, named = (
        ampgraph.convert(Residual(), (X,), policy=TORCH.replace(objective=objective)).plan
        for objective in ("auto", "traffic")
    )
    assert auto.cost == named.cost
    assert auto.gap == 0


def test_plan_again_keeps_the_objective_of_the_backend():
    amp = ampgraph.convert(Residual(), (X,), policy=TORCH, backend="aot_eager")
    assert "objective='fused'" in ampgraph.explain(amp).under("O2").policy
    assert "objective='casts'" in ampgraph.explain(amp).under(Policy(objective="casts")).policy


def test_explain_reports_both_costs_and_shares():
    explanation = ampgraph.explain(ampgraph.convert(Residual(), (X,), policy="O2"))
    totals, rule = explanation.totals, explanation.baselines["autocast"]
    for cost in (totals, rule, explanation.baselines["fp32"]):
        assert min(cost.backward, cost.saved, cost.fused_forward, cost.fused_backward, cost.fused_saved) > 0
    shares = explanation.shares()
    assert list(shares) == ["torch.autocast", "lists", "sharing", "placement"]
    moved = [t.traffic + t.backward for t in shares.values()]
    assert moved == sorted(moved, reverse=True)
    assert shares["lists"] == rule
    assert shares["placement"].fused_forward == totals.fused_forward
    text = explanation.table(peers=True)
    assert "fused forward" in text
    assert "+ shared casts" in text


def test_report_with_all_costs_survives_json():
    explanation = ampgraph.explain(ampgraph.convert(Residual(), (X,)))
    again = ampgraph.Explanation.from_dict(explanation.to_dict())
    assert again.totals == explanation.totals


def test_evaluation_has_no_backward():
    model = Residual().requires_grad_(False)
    cost = ampgraph.convert(model, (X,)).plan.cost
    assert (cost.backward, cost.saved, cost.fused_backward, cost.fused_saved) == (0, 0, 0, 0)
    assert cost.fused_forward > 0


def test_float32_costs_more_than_low_on_matrix_products():
    problem = problem_of(ampgraph.convert(Residual(), (X,), policy="O0").graph_module, Policy(level="O2"))
    costs, low = StepCost(problem), place_low(problem)
    wide = dict.fromkeys(problem.variables, FP32)
    assert costs.fused(low.labels).saved < costs.fused(wide).saved


class Normalized(nn.Module):
    """A norm whose result goes to products alone, or to a sum of another kernel as well."""

    def __init__(self, is_added: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8)
        self.is_added = is_added

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(self.first(x))
        return self.second(normed) + normed if self.is_added else self.second(normed.view(2, 2, 8))


def converted_for_kernels(model: nn.Module, **options) -> ampgraph.AmpModule:
    policy = Policy(dtype=torch.bfloat16, objective="fused", loss_scale=ampgraph.NoLossScale(), **options)
    return ampgraph.convert(model, (torch.randn(4, 8),), policy=policy)


@pytest.mark.parametrize("options", [{}, {"weight_copies": False}, {"level": "O2"}])
def test_norms_of_products_keep_their_parameters(options):
    amp = converted_for_kernels(Normalized(), **options)
    assert "rms_norm: f32 <- cast(linear), norm.weight\nview: bf16 <- cast(rms_norm)" in cast_map(amp)
    assert "its parameters are not rounded" in ampgraph.explain(amp).why("rms_norm")


def test_norms_that_others_read_are_low():
    amp = converted_for_kernels(Normalized(is_added=True))
    assert "rms_norm: bf16 <- linear, cast(norm.weight)" in cast_map(amp)


def test_eager_norms_cast_their_parameters():
    policy = Policy(dtype=torch.bfloat16, loss_scale=ampgraph.NoLossScale())
    amp = ampgraph.convert(Normalized(), (torch.randn(4, 8),), policy=policy)
    assert "rms_norm: bf16 <- linear, cast(norm.weight)" in cast_map(amp)


class Biased(nn.Module):
    """Attention with a learned bias for each pair of positions, and masked keys, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.inner, self.outer = nn.Embedding(7, 2), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        q = self.inner(x).view(2, 4, 2, 4).transpose(1, 2)
        distance = torch.arange(4)[:, None] - torch.arange(4) + 3
        mask = torch.where(keep, self.bias(distance).permute(2, 0, 1)[None], torch.finfo(torch.float32).min)
        found = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return nn.functional.layer_norm(self.outer(found.transpose(1, 2).flatten(2)) + x, (8,)).sum()


def test_a_value_between_float32_values_of_its_kernel_is_not_cast():
    policy = Policy(level="O2", dtype=torch.bfloat16, objective="fused", loss_scale=ampgraph.NoLossScale())
    keep = torch.ones(2, 1, 1, 4, dtype=torch.bool)
    amp = ampgraph.convert(Biased(), (torch.randn(2, 4, 8), keep), policy=policy)
    assert "embedding: f32 <- bias.weight, add" in cast_map(amp)
    assert "stays inside a kernel" in ampgraph.explain(amp).why("embedding")


@EVERY
def test_fewer_casts_inside_kernels_move_the_same_bytes(level, lists):
    for seed, case in enumerate(cases(level, lists)):
        costs, low = case.costs, case.low
        placed = without_idle_casts(case.problem, costs.kernels, costs.decides_bytes, low)
        assert allowed(case.problem, placed.labels), seed
        assert costs.fused(placed.labels) == costs.fused(low.labels), seed
        assert costs.eager(placed).casts <= costs.eager(low).casts, seed
