"""Rules: globs over module paths and node names."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampgraph
from ampgraph import Policy, PolicyError
from ampgraph.testing import assert_dtype

from .helpers import dtype_of, nodes_of, warnings_of_ours

BF16, FP32 = torch.bfloat16, torch.float32
CAPTURES = ["ahead of time", "just in time"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.fc(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return torch.relu(self.head(x))


def converted(rules, how="ahead of time", model=None, **policy):
    x = torch.randn(3, 8)
    model = model or Net()
    amp = ampgraph.convert(
        model, (x,) if how == "ahead of time" else None, policy=Policy(dtype=BF16, rules=rules, **policy)
    )
    amp(x)
    return amp


def linears(amp):
    return dtype_of(amp.graph_module, "linear")


@pytest.mark.parametrize("how", CAPTURES)
def test_module_path(how):
    assert linears(converted({"head": "fp32"}, how)) == [BF16, BF16, FP32]


@pytest.mark.parametrize("how", CAPTURES)
def test_glob(how):
    assert linears(converted({"blocks.*.fc": "fp32"}, how)) == [FP32, FP32, BF16]
    assert linears(converted({"blocks.1*": "fp32"}, how)) == [BF16, FP32, BF16]
    assert linears(converted({"blocks.[0]": "fp32"}, how)) == [FP32, BF16, BF16]


@pytest.mark.parametrize("how", CAPTURES)
def test_a_module_contains_its_children(how):
    amp = converted({"blocks.0": "fp32"}, how)
    assert linears(amp) == [FP32, BF16, BF16]
    assert dtype_of(amp.graph_module, "layer_norm")[0] == FP32


@pytest.mark.parametrize("how", CAPTURES)
def test_innermost_module_wins(how):
    assert linears(converted({"blocks.0": "fp32", "blocks.0.fc": "low"}, how)) == [BF16, BF16, BF16]
    assert linears(converted({"blocks.*": "fp32", "head": "fp32"}, how)) == [FP32, FP32, FP32]


def test_node_name_over_module_path():
    assert linears(converted({"linear_2": "low", "head": "fp32"})) == [BF16, BF16, BF16]
    assert linears(converted({"linear_1": "fp32"})) == [BF16, FP32, BF16]


class Named(nn.Module):
    """The module ``linear`` is node ``linear_1``: the node ``linear`` is another layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.linear = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.linear(self.first(x)))


@pytest.mark.parametrize("how", CAPTURES)
def test_a_name_of_a_module_and_of_a_node(how):
    """It is the module's; the prefix makes it the node's."""
    assert linears(converted({"linear": "fp32"}, how, Named())) == [BF16, FP32, BF16]
    assert linears(converted({"node:linear": "fp32"}, how, Named())) == [FP32, BF16, BF16]
    assert linears(converted({"node:linear": "fp32", "linear": "fp32"}, how, Named())) == [FP32, FP32, BF16]
    assert linears(converted({"linear": "low", "linear*": "low", "node:linear": "fp32"}, how, Named())) == [
        FP32,
        BF16,
        BF16,
    ]


@pytest.mark.parametrize("how", CAPTURES)
def test_a_glob_that_fits_a_module_is_none_of_node_names(how):
    assert linears(converted({"lin*": "fp32"}, how, Named())) == [BF16, FP32, BF16]
    assert linears(converted({"linear_*": "fp32"}, how, Named())) == [BF16, FP32, FP32]
    assert linears(converted({"node:lin*": "fp32"}, how, Named())) == [FP32, FP32, FP32]


def test_a_module_that_does_not_run_keeps_its_name():
    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

    assert linears(converted({"linear": "fp32"}, model=Unused())) == [BF16, BF16, BF16]


def test_a_node_above_its_module():
    assert linears(converted({"node:linear_2": "low", "head": "fp32"})) == [BF16, BF16, BF16]
    assert linears(converted({"head": "low", "node:linear_2": "fp32"})) == [BF16, BF16, FP32]


def test_an_exported_program_knows_its_modules():
    program = torch.export.export(Named(), (torch.randn(3, 8),), strict=False)
    for rules, expected in (
        ({"linear": "fp32"}, [BF16, FP32, BF16]),
        ({"node:linear": "fp32"}, [FP32, BF16, BF16]),
    ):
        module = ampgraph.convert(program, policy=Policy(dtype=BF16, rules=rules)).module()
        assert dtype_of(module, "linear") == expected


@pytest.mark.parametrize("rule", ["linear", "node:linear"])
def test_the_backend_of_torch_compile_takes_the_modules_from_the_graph(rule):
    torch._dynamo.reset()
    found = []

    def keep(graph_module, inputs):
        found.append(graph_module)
        return graph_module

    policy = Policy(dtype=BF16, rules={rule: "fp32"})
    model = torch.compile(Named(), backend="ampgraph", options={"policy": policy, "backend": keep})
    with torch.no_grad():
        model(torch.randn(3, 8))
    expected = [BF16, FP32, BF16] if rule == "linear" else [FP32, BF16, BF16]
    assert dtype_of(found[0], "linear") == expected


@pytest.mark.parametrize("rule", ["liner", "node:liner"])
def test_the_backend_of_torch_compile_warns_of_a_rule_that_matches_nothing(rule):
    torch._dynamo.reset()
    model = torch.compile(Named(), backend="ampgraph", options={"dtype": BF16, "rules": {rule: "fp32"}})
    with pytest.warns(UserWarning, match=f"{rule!r} .*matches no module.*Did you mean"):
        model(torch.randn(3, 8))


def test_the_backend_of_torch_compile_warns_of_a_loss_scale():
    torch._dynamo.reset()
    options = {"dtype": torch.float16, "loss_scale": ampgraph.DynamicLossScale()}
    with pytest.warns(UserWarning, match=r"loss_scale=DynamicLossScale.* has no effect.*GradScaler"):
        torch.compile(Named(), backend="ampgraph", options=options)(torch.randn(3, 8))


@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
@pytest.mark.parametrize(
    ("rule", "expected"), [("block[[]0]", [FP32, BF16, BF16]), ("block.0", [BF16, FP32, BF16])]
)
def test_names_with_brackets_are_their_own(capture, rule, expected):
    class Brackets(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("block[0]", nn.Linear(8, 8))
            self.block = nn.ModuleList([nn.Linear(8, 8)])
            self.add_module("x['y']", nn.Linear(8, 8))

        def forward(self, x):
            return getattr(self, "x['y']")(self.block[0](getattr(self, "block[0]")(x)))

    torch._dynamo.reset()
    x, policy = torch.randn(3, 8), Policy(dtype=BF16, rules={rule: "fp32"})
    amp = ampgraph.convert(Brackets(), (x,), policy=policy, capture=capture)
    amp(x)
    assert linears(amp) == expected
    modules = [row.module for row in ampgraph.explain(amp).nodes if row.op == "aten.linear"]
    assert modules == ["block[0]", "block.0", "x['y']"]


def test_a_body_of_a_branch_knows_the_modules_of_the_whole():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            x = x + 1
            twice = lambda x: F.linear(F.linear(x, torch.eye(8)), torch.eye(8))  # noqa: E731
            return torch.cond(x.sum() > 0, twice, torch.relu, (self.linear(x),))

    amp = ampgraph.convert(
        Branches(), (torch.randn(3, 8),), policy=Policy(dtype=BF16, rules={"linear": "fp32"})
    )
    assert linears(amp) == [FP32]
    assert dtype_of(amp.graph_module.true_graph_0, "linear") == [BF16, BF16]


def test_a_node_that_is_not_there_names_a_near_one():
    with pytest.raises(PolicyError, match=r"'node:liner' matches no node.*Did you mean 'node:linear'"):
        converted({"node:liner": "fp32"})
    with pytest.raises(PolicyError, match=r"'node:head' matches no node"):
        converted({"node:head": "fp32"})


def test_rules_for_one_node_that_contradict_each_other():
    with pytest.raises(PolicyError, match=r"contradictory.*'linear'"):
        converted({"node:linear": "low", "node:lin*": "fp32"})


def test_assertions_take_the_prefix_too():
    amp = converted({"node:linear": "fp32"}, model=Named())
    assert_dtype(amp, "node:linear", FP32)
    assert_dtype(amp, "node:linear_*", BF16)
    with pytest.raises(AssertionError, match="matches no floating-point op"):
        assert_dtype(amp, "node:first", FP32)


def test_low_rule_on_a_gray_and_on_a_black_op():
    amp = converted({"blocks.1.norm": "low"}, model=Net())
    assert dtype_of(amp.graph_module, "layer_norm")[1] == BF16
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
    assert dtype_of(converted({"1": "low"}, model=model).graph_module, "softmax") == [BF16]


def test_rule_decision_says_which_rule():
    amp = converted({"hea*": "fp32"})
    node = nodes_of(amp.graph_module, "linear")[2]
    assert amp.plan[node.name].by == "rule"
    assert "hea*" in amp.plan[node.name].reason


def test_contradictory_rules():
    with pytest.raises(PolicyError, match=r"contradictory.*head"):
        converted({"head": "low", "hea*": "fp32"})


def test_rules_that_agree_are_fine():
    assert linears(converted({"head": "fp32", "h*": "fp32"})) == [BF16, BF16, FP32]


@pytest.mark.parametrize("how", CAPTURES)
def test_rule_without_a_match_names_a_near_one(how):
    with pytest.raises((PolicyError, RuntimeError), match=r"blocks\.0\.f.*Did you mean"):
        converted({"blocks.0.f": "fp32"}, how)


def test_rule_without_a_match_just_in_time_is_a_policy_error():
    with pytest.raises(PolicyError, match="matches no module"):
        converted({"nonsense": "fp32"}, "just in time")


def test_failed_rule_leaves_the_model_alone():
    model = Net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(PolicyError):
        converted({"nonsense": "fp32"}, model=model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert set(vars(model)) == set(vars(Net()))


def test_rule_for_a_module_that_does_not_run_is_fine():
    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(2, 2)

    assert linears(converted({"spare": "fp32"}, model=Unused())) == [BF16, BF16, BF16]


def test_sequential_paths():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    for how in CAPTURES:
        assert linears(converted({"1.0": "fp32"}, how, model=model)) == [BF16, FP32]


def test_whole_model_by_star():
    assert linears(converted({"*": "fp32"})) == [FP32, FP32, FP32]


class Shared(nn.Module):
    """One linear under three names, one of them in a list, and a module of which another method is called."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = self.a
        self.heads = nn.ModuleList([self.a])
        self.code = Codes()

    def forward(self, x):
        return self.code.encode(self.heads[0](self.b(self.a(x))))


class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def encode(self, x):
        return self.inner(x)


@pytest.mark.parametrize("how", CAPTURES)
@pytest.mark.parametrize("name", ["a", "b", "heads.0", "heads.*"])
def test_rule_on_a_shared_module(name, how):
    assert linears(converted({name: "fp32"}, how, Shared())) == [FP32, FP32, FP32, BF16]


def test_rules_for_two_names_of_one_module_contradict_each_other():
    with pytest.raises(PolicyError, match="contradictory rules"):
        converted({"a": "fp32", "b": "low"}, model=Shared())


@pytest.mark.parametrize("how", CAPTURES)
def test_rule_on_a_module_of_which_another_method_is_called(how):
    assert linears(converted({"code": "fp32"}, how, Shared())) == [BF16, BF16, BF16, FP32]


@pytest.mark.parametrize("how", CAPTURES)
def test_rule_on_a_list_of_modules(how):
    assert linears(converted({"blocks": "fp32"}, how)) == [FP32, FP32, BF16]
    assert linears(converted({"blocks": "fp32", "blocks.1": "low"}, how)) == [FP32, BF16, BF16]


class Twice(torch.nn.Module):
    """Two graphs just in time, and other nodes in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.fc(x).relu()
        torch._dynamo.graph_break()
        return (y * 2).sin() if self.training else y * 2


def test_a_rule_for_a_node_of_one_of_several_graphs():
    model, x = Twice(), torch.randn(2, 8)
    policy = ampgraph.Policy(rules={"node:linear": "fp32", "node:mul": "fp32"})
    amp = ampgraph.convert(model, policy=policy, backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*rule.*")
        amp(x)
    by = [{name: d.by for name, d in g.meta["ampgraph"].plan.decisions.items()} for g in amp.graph_modules]
    assert [b.get("linear") or b["mul"] for b in by] == ["rule", "rule"]


def test_a_rule_for_a_node_of_no_graph_warns_just_in_time():
    policy = ampgraph.Policy(rules={"node:linaer": "fp32"})
    amp = ampgraph.convert(Twice(), policy=policy, backend="eager")
    with pytest.warns(UserWarning, match="'node:linaer' matches no op of its 2 graphs.*'node:linear'"):
        amp(torch.randn(2, 8))


def test_a_rule_for_a_node_that_another_mode_has_not():
    model, x = Twice(), torch.randn(2, 8)
    policy = ampgraph.Policy(rules={"node:sin": "fp32"})
    amp = ampgraph.convert(model, (x,), policy=policy, backend="eager", capture="ahead of time")
    amp.eval()(x)
    assert len(amp.graph_modules) == 2


class Decided(nn.Module):
    """Decides more than rules may."""

    def __init__(self):
        super().__init__()
        self.rnn, self.exact = nn.LSTM(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.rnn(x)[0]
        with ampgraph.fp32_guard():
            x = self.exact(x)
        return x, x.argmax(-1)


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({"exact": "low"}, "linear is float32 (guard"),
        ({"node:linear": "low"}, "linear is float32 (guard"),
        ({"getitem": "fp32"}, "It is an element of lstm: name that op"),
        ({"argmax": "low"}, "argmax is of a dtype that stays"),
    ],
)
@pytest.mark.parametrize("how", CAPTURES)
def test_a_rule_that_decides_nothing_is_told(rules, why, how):
    with pytest.warns(UserWarning, match="decides nothing") as told:
        converted(rules, how, Decided())
    assert [why in text for text in warnings_of_ours(told)] == [True]


@pytest.mark.parametrize("rules", [{"exact": "fp32"}, {"rnn": "fp32"}, {"node:lstm": "low"}, {"*": "low"}])
@pytest.mark.parametrize("how", CAPTURES)
def test_a_rule_that_agrees_with_a_guard_is_no_reason_to_warn(rules, how, recwarn):
    converted(rules, how, Decided())
    assert not warnings_of_ours(recwarn)


@pytest.mark.parametrize("name", ["x", "node:head_weight", "output"])
def test_a_rule_for_what_is_no_op(name):
    with pytest.raises(PolicyError, match="rules decide the dtypes of ops"):
        converted({name: "low"})
