"""Differences between plans, what flipping a node costs, and other policies on the same graph."""

from __future__ import annotations

import json
import sys
from unittest import mock

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import AmpGraphError, Explanation, OpLists, Policy, PolicyError
from ampgraph.report.comparison import compare_policies
from ampgraph.testing import cast_map

from .models import CastTwice
from .test_explain import attention
from .test_report import Encoder

LOW = torch.float16


@pytest.fixture(scope="module")
def amp() -> ampgraph.AmpModule:
    torch.manual_seed(0)
    return ampgraph.convert(Encoder(), (torch.randn(4, 16),), dtype=LOW)


@pytest.fixture(scope="module")
def explanation(amp: ampgraph.AmpModule) -> Explanation:
    return ampgraph.explain(amp)


def converted(**options: object) -> Explanation:
    torch.manual_seed(0)
    model, x = Encoder(), torch.randn(4, 16)
    return ampgraph.explain(ampgraph.convert(model, (x,), dtype=LOW, **options))  # type: ignore[call-overload]


def test_nothing_differs_from_itself(amp: ampgraph.AmpModule, explanation: Explanation) -> None:
    for other in (explanation, amp, amp.graph_module, amp.policy, "O1", converted()):
        difference = explanation.diff(other)
        assert not difference
        assert str(difference).startswith("no difference")


def test_what_a_rule_changes(explanation: Explanation) -> None:
    difference = explanation.diff(converted(policy=Policy(rules={"head": "fp32"})))
    assert [(c.node, c.before, c.after) for c in difference.dtypes] == [
        ("relu_1", "float16", "float32"),
        ("linear_2", "float16", "float32"),
    ]
    assert [c.tensor for c in difference.vanished] == ["mul", "head.weight", "head.bias", "linear_2"]
    assert difference.appeared == ()
    assert difference.casts == -4 == difference.totals[1].casts - difference.totals[0].casts
    text = str(difference)
    assert text.startswith("2 nodes in another dtype, 0 casts appeared, 4 casts vanished")
    assert "rule: rule 'head': 'fp32' matches 'head'" in text
    assert "- head.weight" in text


def test_the_other_way_round_is_the_opposite(explanation: Explanation) -> None:
    other = converted(policy="O2")
    there, back = explanation.diff(other), other.diff(explanation)
    assert there.appeared == back.vanished
    assert there.vanished == back.appeared
    assert [c.node for c in there.dtypes] == [c.node for c in back.dtypes]
    assert (there.casts, there.cast_bytes, there.traffic) == (-back.casts, -back.cast_bytes, -back.traffic)


def test_another_policy_without_another_capture(amp: ampgraph.AmpModule, explanation: Explanation) -> None:
    policy = Policy("O2", ops=OpLists.default().with_black("aten.gelu"))
    with mock.patch("torch.export.export", side_effect=AssertionError("captured again")):
        planned = explanation.under(policy)
        assert explanation.diff(policy) == explanation.diff(planned)
    direct = converted(policy=policy)
    assert (planned.nodes, planned.casts, planned.totals) == (direct.nodes, direct.casts, direct.totals)


def test_a_policy_that_does_not_fit_is_refused(explanation: Explanation) -> None:
    with pytest.raises(PolicyError, match="matches no module"):
        explanation.under(Policy(rules={"haed": "fp32"}))
    with pytest.raises(PolicyError, match="no policy 'O7'"):
        explanation.diff("O7")


def test_different_models_say_what_only_one_has(explanation: Explanation) -> None:
    difference = ampgraph.explain(attention()).diff(explanation)
    assert "softmax" in difference.only_before
    assert "cumsum" in difference.only_after
    assert "only in the second: " in str(difference)


def test_forms(explanation: Explanation) -> None:
    difference = explanation.diff("O2")
    assert json.loads(difference.to_json()) == difference.to_dict()
    assert difference.to_dict()["totals"][1]["casts"] == difference.totals[1].casts
    assert "## Nodes in another dtype" in difference.to_markdown()


def test_long_tables_are_cut_in_text_alone() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(25)))
    explanation = ampgraph.explain(ampgraph.convert(model, (torch.randn(2, 4),), dtype=LOW))
    difference = explanation.diff("O0")
    assert "(and 5 more)" in str(difference)
    assert "linear_24" in difference.to_markdown()


def test_a_tensor_that_is_cast_twice_counts_twice() -> None:
    amp = ampgraph.convert(CastTwice(), (torch.randn(1, 2), torch.randn(2, 2)), dtype=LOW)
    explanation = ampgraph.explain(amp)
    once = explanation.diff(ampgraph.Policy(rules={"matmul_1": "fp32"}))
    assert [c.tensor for c in explanation.casts].count("zeros") == 2
    assert [c.tensor for c in once.vanished].count("zeros") == 1


# -- flipping --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rule"), [("gelu", "fp32"), ("cumsum", "low"), ("linear_2", "fp32"), ("relu", "fp32")]
)
def test_flipping_is_what_a_rule_for_the_node_does(explanation: Explanation, name: str, rule: str) -> None:
    flip = explanation.flip(name)
    direct = converted(policy=Policy(rules={name: rule}))
    assert flip.totals == (explanation.totals, direct.totals)
    assert [(c.node, c.after) for c in flip.dtypes] == [
        (c.node, c.after) for c in explanation.diff(direct).dtypes
    ]
    assert name in [c.node for c in flip.dtypes]


def test_the_cost_of_flipping_is_said_in_one_line(explanation: Explanation) -> None:
    flip = explanation.flip("gelu")
    assert flip.costs() == "+2 casts, +768 B of casts, +1.0 KiB of modelled traffic"
    assert (flip.casts, flip.cast_bytes) == (2, 768)


def test_one_result_of_several_flips_its_op() -> None:
    explanation = ampgraph.explain(attention())
    assert "split" in [c.node for c in explanation.flip("split[1]").dtypes]


def test_what_cannot_be_flipped_says_why() -> None:
    class Cast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.half() @ x.half().t()).float()

    explanation = ampgraph.explain(ampgraph.convert(Cast(), (torch.randn(4, 4),), dtype=LOW))
    with pytest.raises(AmpGraphError, match=r"no policy can flip 'to' .*the source names this dtype"):
        explanation.flip("to")
    with pytest.raises(AmpGraphError, match=r"no policy can flip 'x' .*placeholder of the source model"):
        explanation.flip("x")
    with pytest.raises(AmpGraphError, match="Did you mean 'matmul'"):
        explanation.flip("matmull")


def test_asking_changes_nothing(amp: ampgraph.AmpModule, explanation: Explanation) -> None:
    before = cast_map(amp), amp.plan
    explanation.flip("gelu"), explanation.under("O2"), explanation.peers()
    assert (cast_map(amp), amp.plan) == before


def test_explaining_alone_plans_nothing_again(amp: ampgraph.AmpModule) -> None:
    module = sys.modules["ampgraph.report.read_graph"]
    with mock.patch.object(module, "replanned", side_effect=AssertionError("planned again")):
        explanation = ampgraph.explain(amp)
        assert str(explanation)
        assert explanation.to_json()
        assert explanation.why("mul")
        with pytest.raises(AssertionError, match="planned again"):
            explanation.peers()


# -- peers and policies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", ["torch", "paddle", "mindspore", "oneflow"])
def test_peers_are_the_autocast_rule_on_their_lists(explanation: Explanation, peer: str) -> None:
    policy = Policy(ops=OpLists.preset(peer), placement="autocast")
    assert explanation.peers()[peer] == converted(policy=policy).baselines["autocast"]


def test_peers_are_rows_of_the_totals(explanation: Explanation) -> None:
    rows = [line.split("  ")[0] for line in explanation.table(casts_only=True, peers=True).splitlines()]
    peers = ["torch lists", "paddle lists", "mindspore lists", "oneflow lists"]
    assert rows[rows.index("fp32") + 1 :][:4] == peers
    assert "paddle lists" not in str(explanation)


def test_policies_side_by_side(explanation: Explanation) -> None:
    torchs = Policy(ops=OpLists.torch(), placement="autocast")
    policies = {"O1": Policy(), "O2": Policy("O2"), "torch": torchs}
    comparison = compare_policies(explanation, policies)
    assert [row.name for row in comparison.rows] == ["fp32", "O1", "O2", "torch"]
    assert comparison.rows[1].totals == explanation.totals
    assert comparison.rows[2].totals == converted(policy="O2").totals
    assert comparison.rows[3].totals == explanation.peers()["torch"]
    assert comparison.rows[1].low_share == explanation.low_share == 0.6
    assert "60%" in str(comparison)
    assert json.loads(comparison.to_json()) == comparison.to_dict()
    assert "| O1 | " in comparison.to_markdown()


def test_the_autocast_rule_counts_casts_at_each_use() -> None:
    explanation = ampgraph.explain(attention())
    torchs = Policy(ops=OpLists.torch(), placement="autocast")
    row = compare_policies(explanation, {"torch": torchs}).rows[1]
    assert row.totals == explanation.peers()["torch"]
    assert row.totals.casts > explanation.under(torchs).totals.casts
