"""`Policy` as a value: legal values, repr, hash, and the precedence of everything it can say."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import OpLists, Policy, PolicyError
from ampgraph.passes.precedence import PRECEDENCE
from ampgraph.plan import Decision

from .helpers import Fn, dtype_of, inserted

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

POLICIES = [
    Policy(),
    Policy(level="O2", dtype=FP16),
    Policy(rules={"head.*": "fp32", "relu": "low"}, use_fp16_guard=False),
    Policy(ops=OpLists.default().with_black("aten.gelu").with_white("aten.softmax.int")),
    Policy(level="O0", placement="autocast", objective="casts", keep_io_dtypes=False),
    Policy(ops=OpLists.paddle("O2"), level="O3"),
    Policy(ops=OpLists(white=["aten.linear"], clear=("aten.relu",))),
]


@pytest.mark.parametrize("policy", POLICIES, ids=range(len(POLICIES)))
def test_repr_builds_an_equal_policy(policy):
    again = eval(repr(policy), {"Policy": Policy, "OpLists": OpLists, "torch": torch})
    assert again == policy
    assert hash(again) == hash(policy)
    assert repr(again) == repr(policy)


@pytest.mark.parametrize("policy", POLICIES, ids=range(len(POLICIES)))
def test_copies_are_equal(policy):
    assert copy.deepcopy(policy) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(pickle.loads(pickle.dumps(policy))) == hash(policy)


def test_policies_differ_by_every_field():
    assert len(set(POLICIES)) == len(POLICIES)


def test_frozen():
    policy = Policy(rules={"a": "low"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.level = "O2"
    with pytest.raises(TypeError):
        policy.rules["b"] = "low"


def test_later_changes_to_the_given_dict_do_not_reach_the_policy():
    rules = {"a": "low"}
    policy = Policy(rules=rules)
    rules["b"] = "fp32"
    assert dict(policy.rules) == {"a": "low"}


BAD = [
    ({"level": "O4"}, "O1"),
    ({"level": "o1"}, "O1"),
    ({"level": None}, "O1"),
    ({"level": 1}, "O1"),
    ({"level": "auto"}, "O1"),
    ({"dtype": torch.float32}, "float16"),
    ({"dtype": torch.float64}, "bfloat16"),
    ({"dtype": torch.int8}, "float16"),
    ({"dtype": "float"}, "float16"),
    ({"placement": "greedy"}, "optimal"),
    ({"objective": "time"}, "traffic"),
    ({"rules": {"a": "fp16"}}, "low"),
    ({"rules": {"a": None}}, "low"),
    ({"rules": {1: "low"}}, "glob"),
    ({"rules": ["a"]}, "dict"),
    ({"rules": None}, "dict"),
    ({"ops": {"white": []}}, "OpLists"),
    ({"ops": None}, "OpLists"),
    ({"use_fp16_guard": "yes"}, "True"),
    ({"keep_io_dtypes": "no"}, "True"),
    ({"weight_copies": None}, "True"),
    ({"save_norms_low": "auto"}, "True, False"),
    ({"save_softmax_low": 1}, "True, False"),
    ({"wide_weight_gradients": None}, "True, False"),
    ({"level": ["O1"]}, "O1"),
]


@pytest.mark.parametrize(("fields", "legal"), BAD, ids=lambda v: str(v))
def test_bad_values_name_the_legal_ones(fields, legal):
    with pytest.raises(PolicyError, match=legal):
        Policy(**fields)


def test_policy_errors_are_value_errors_with_a_near_match():
    with pytest.raises(ValueError, match="Did you mean 'traffic'"):
        Policy(objective="trafic")
    with pytest.raises(PolicyError, match="level"):
        Policy().replace(levle="O1")


@pytest.mark.parametrize("policy", [3, object(), ["O1"], {"level": "O1"}, Policy])
def test_convert_takes_a_policy_or_a_level(policy):
    with pytest.raises(PolicyError, match="Policy"):
        ampgraph.convert(nn.ReLU(), policy=policy)


def test_dtype_beside_a_policy_fills_in_or_contradicts():
    assert Policy.of("O2", FP16) == Policy(level="O2", dtype=FP16)
    assert Policy.of(Policy(level="O2"), FP16).dtype == FP16
    assert Policy.of(Policy(dtype=FP16), FP16).dtype == FP16
    with pytest.raises(PolicyError, match="contradicts"):
        Policy.of(Policy(dtype=FP16), BF16)


def test_low_dtype_follows_the_device():
    assert Policy().resolved("cpu").low_dtype == BF16
    assert Policy().resolved("cuda:0").low_dtype == FP16
    assert Policy(dtype=BF16).resolved("cuda").low_dtype == BF16
    with pytest.raises(PolicyError, match="resolved"):
        _ = Policy().low_dtype


def test_op_lists_are_checked_when_built():
    with pytest.raises(PolicyError, match="softmax"):
        OpLists.default().with_black("aten.softmx")
    with pytest.raises(PolicyError, match="two classes"):
        OpLists(white=["aten.gelu"], black=["aten.gelu"])


# -- precedence: user cast > guard > rule > lists > propagation ----------------------------------------------


class Precedence(nn.Module):
    """``relu(inner(x))`` where a guard and a user's cast may stand around the linear layer."""

    def __init__(self, guard=None, cast=None, op=torch.nn.functional.linear):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.guard, self.cast = guard, cast

    def forward(self, x):
        if self.guard is None:
            return self.inner(x)
        with self.guard():
            y = self.inner(x)
            return y if self.cast is None else y.to(self.cast) * 2


def linear_dtype(model, x=None, **policy):
    x = torch.randn(4, 8) if x is None else x
    amp = ampgraph.convert(model, (x,), policy=Policy(dtype=BF16, **policy))
    return dtype_of(amp.graph_module, "linear")[0]


def test_user_cast_over_guard():
    """In an fp16 guard the user's float32 cast stays; in an fp32 guard the user's low cast stays."""
    x = torch.randn(4, 8)
    for guard, cast in ((ampgraph.fp16_guard, FP32), (ampgraph.fp32_guard, BF16)):
        amp = ampgraph.convert(Precedence(guard, cast), (x,), policy=Policy(dtype=BF16))
        kept = [
            n
            for n in amp.graph_module.graph.nodes
            if "to" in str(n.target) and n not in inserted(amp.graph_module)
        ]
        assert [n.meta["val"].dtype for n in kept] == [cast]
        assert amp.plan[kept[0].name].by == "user cast"


def test_guard_over_rule():
    assert linear_dtype(Precedence(ampgraph.fp32_guard), rules={"inner": "low"}) == FP32
    assert linear_dtype(Precedence(ampgraph.fp16_guard), rules={"inner": "fp32"}) == BF16


def test_guard_over_lists():
    black = OpLists.default().with_black("aten.linear")
    assert linear_dtype(Precedence(ampgraph.fp16_guard), ops=black) == BF16
    assert linear_dtype(Precedence(ampgraph.fp32_guard)) == FP32


def test_rule_over_lists():
    black = OpLists.default().with_black("aten.linear")
    assert linear_dtype(Precedence(), ops=black, rules={"inner": "low"}) == BF16
    assert linear_dtype(Precedence(), rules={"inner": "fp32"}) == FP32


def test_user_cast_over_rule_and_lists():
    model = nn.Sequential(Fn(lambda x: x.to(BF16)), nn.ReLU())
    amp = ampgraph.convert(model, (torch.randn(4, 8),), policy=Policy(dtype=BF16, rules={"0": "fp32"}))
    assert [d.by for n, d in amp.plan.decisions.items() if n.startswith("to")] == ["user cast"]
    assert amp(torch.randn(4, 8)).dtype == BF16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_lists_over_propagation(level):
    """A black op stays float32 between low neighbours, a white one low between float32 ones."""
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    amp = ampgraph.convert(
        Fn(lambda x, w: torch.cumsum(x @ w, 0) @ w), (x, w), policy=Policy(level=level, dtype=BF16)
    )
    assert dtype_of(amp.graph_module, "cumsum") == [FP32]
    assert dtype_of(amp.graph_module, "matmul") == [BF16, BF16]


def test_propagation_decides_the_rest():
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    amp = ampgraph.convert(
        Fn(lambda x, w: torch.nn.functional.gelu(x) @ w), (x, w), policy=Policy(dtype=BF16)
    )
    assert dtype_of(amp.graph_module, "gelu") == [FP32]
    assert amp.plan["gelu"].by == "propagation"


def test_the_docs_print_the_precedence():
    """`docs/policy.md` holds the table that the code's own rules print."""
    page = (Path(__file__).resolve().parent.parent / "docs" / "policy.md").read_text()
    rows = [f"| {i} | {rule.name} | {rule.dtype} | `{rule.by}` |" for i, rule in enumerate(PRECEDENCE, 1)]
    table = "\n".join(["| | applies to | dtype | `by` |", "|---|---|---|---|", *rows])
    assert f"\n\n{table}\n\n" in page


def test_every_rule_of_the_precedence_says_by_whom():
    """Each ``by`` of a `Decision` that a rule makes stands in the docstring that lists them."""
    assert all(f'``"{rule.by}"``' in (Decision.__doc__ or "") for rule in PRECEDENCE)
    assert len({rule.name for rule in PRECEDENCE}) == len(PRECEDENCE)
