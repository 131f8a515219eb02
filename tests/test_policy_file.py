"""Policies as JSON: round trips, and errors that name the fault."""

from __future__ import annotations

import json

import pytest
import torch

from ampgraph import DynamicLossScale, NoLossScale, OpLists, Policy, PolicyError, StaticLossScale

POLICIES = [
    Policy(),
    Policy("O2", dtype=torch.float16, placement="autocast", objective="casts", keep_io_dtypes=False),
    Policy(rules={"head.*": "fp32", "linear": "low"}, use_fp16_guard=False),
    Policy(ops=OpLists.torch()),
    Policy(ops=OpLists.paddle("O2").with_black("aten.gelu")),
    Policy(ops=OpLists.default().with_white("aten.softmax").with_black("aten.softmax.int")),
    Policy(ops=OpLists.default().with_white("aten.softmax.int").with_black("aten.softmax")),
    Policy(ops=OpLists.mindspore().with_gray("aten.exp").with_clear("aten.relu").with_gray("aten.relu")),
    Policy(ops=OpLists(white=["aten.linear"], black=["aten.exp"])),
    Policy(loss_scale=StaticLossScale(1024.0, skip_on_overflow=False)),
    Policy(loss_scale=DynamicLossScale(growth_interval=7, hysteresis=2)),
    Policy(loss_scale=NoLossScale()),
    Policy(weight_copies=False),
    Policy(save_norms_low=False),
    Policy(save_softmax_low=False),
    Policy(wide_weight_gradients=False),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: repr(p)[:60])
def test_round_trip(policy: Policy) -> None:
    assert Policy.from_dict(policy.to_dict()) == policy
    assert Policy.from_json(policy.to_json()) == policy
    assert json.loads(policy.to_json()) == policy.to_dict()


def test_the_file_is_readable() -> None:
    policy = Policy(dtype=torch.float16, ops=OpLists.torch().with_black("aten.gelu"), rules={"head": "fp32"})
    assert policy.to_dict() == {
        "level": "O1",
        "dtype": "float16",
        "ops": {"preset": "torch", "black": ["aten.gelu"]},
        "rules": {"head": "fp32"},
        "use_fp16_guard": None,
        "placement": "optimal",
        "objective": "auto",
        "loss_scale": None,
        "keep_io_dtypes": True,
        "hazards": True,
        "weight_copies": True,
        "save_norms_low": True,
        "save_softmax_low": True,
        "wide_weight_gradients": True,
    }


def test_what_is_left_out_has_its_default() -> None:
    assert Policy.from_json('{"level": "O2", "ops": "torch", "dtype": "bf16"}') == Policy(
        "O2", ops=OpLists.torch(), dtype=torch.bfloat16
    )
    assert Policy.from_dict({"ops": {"black": ["aten.gelu"]}}).ops == OpLists.default().with_black(
        "aten.gelu"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"levle": "O1"}', "policy: key 'levle' is not known; legal: level, dtype.* Did you mean 'level'"),
        ('{"level": "O9"}', "level='O9' is not legal"),
        ('{"dtype": "float61"}', "Did you mean 'float16'"),
        ('{"rules": {"a": "fp16"}}', "rule 'a'='fp16' is not legal"),
        ('{"rules": ["a"]}', "policy: rules must be an object"),
        ('{"ops": "troch"}', "no op lists 'troch'.*Did you mean 'torch'"),
        ('{"ops": {"preset": 3}}', "no op lists 3"),
        ('{"ops": {"blakc": []}}', "policy: ops: key 'blakc' is not known.*Did you mean 'black'"),
        ('{"ops": {"black": "aten.gelu"}}', "'black' must be a list of op names"),
        ('{"ops": {"black": ["aten.geluu"]}}', "Did you mean 'aten.gelu'"),
        ('{"ops": {"black": ["aten.gelu"], "white": ["aten.gelu"]}}', "is in two classes"),
        ('{"loss_scale": {"type": "dynamc"}}', "Did you mean 'dynamic'"),
        ('{"loss_scale": {"type": "static", "valu": 2}}', "loss_scale: key 'valu' is not known.*'value'"),
        ('{"loss_scale": 1024}', "loss_scale must be an object"),
        ('{"keep_io_dtypes": "yes"}', "keep_io_dtypes='yes'"),
        ('{"weight_copies": "auto"}', "weight_copies='auto'"),
        ('{"level": "O1", "level": "O2"}', "key 'level' occurs twice"),
        ("[]", r"policy must be an object with keys, got \[\]"),
        ("level: O1", "not valid JSON"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Policy.from_json(text)
