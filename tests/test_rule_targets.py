"""Rules for node names: a graph of another mode in which they match other ops causes a warning."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import NoLossScale, OpLists, Policy

X = torch.randn(4, 8)


class Scaled(nn.Module):
    """Has one product more in training, before the one that a rule names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        if self.training:
            y = y * 1.5
        return self.down(y * y)


def converted(rules: dict[str, str], training: bool) -> ampgraph.AmpModule:
    policy = Policy(dtype=torch.float16, level="O2", loss_scale=NoLossScale(), rules=rules)
    return ampgraph.convert(Scaled().train(training), (X,), policy=policy)


@pytest.mark.parametrize(
    ("rule", "training", "words"),
    [
        ("node:mul", False, "matches aten.mul.Tensor of the model .* .training mode., and aten.mul"),
        ("node:mul_1", True, "matches no op in this graph .evaluation mode., and aten.mul.Tensor"),
        ("mul*", True, "matches aten.mul.Tensor of the model .* in this graph"),
    ],
)
def test_a_name_that_means_another_op_in_another_mode_warns_once(rule, training, words) -> None:
    amp = converted({rule: "fp32"}, training).train(not training)
    with pytest.warns(UserWarning, match=words) as caught:
        amp(X)
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp(X)
        amp.train(training)(X)


@pytest.mark.parametrize("rules", [{"node:linear*": "fp32"}, {"up*": "fp32"}, {}])
@pytest.mark.parametrize("training", [False, True])
def test_names_and_modules_that_mean_the_same_do_not_warn(rules, training) -> None:
    amp = converted(rules, training)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp.train(not training)(X)
        amp(X[:2])


@pytest.mark.parametrize("args", [None, (X,)])
def test_a_low_rule_at_level_o0_warns(args) -> None:
    policy = Policy("O0", dtype=torch.float16, rules={"up": "low", "down": "fp32"})
    with pytest.warns(UserWarning, match=r"rule 'up' \(low\) decides nothing: level O0 changes nothing"):
        ampgraph.convert(Scaled(), args, policy=policy)(X)


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x.T).add_(1.0).softmax(-1).exp()


@pytest.mark.parametrize(
    ("listed", "usual"),
    [("aten._softmax", "aten.softmax"), ("aten.exp.out", "aten.exp"), ("aten.exp_", "aten.exp")],
)
@pytest.mark.parametrize("args", [None, (X,)])
def test_a_listed_op_that_graphs_spell_in_another_way_warns(listed, usual, args) -> None:
    policy = Policy(dtype=torch.bfloat16, ops=OpLists.default().with_black(listed))
    with pytest.warns(UserWarning, match=f"lists '{listed}' as black, .*It has '{usual}'") as caught:
        ampgraph.convert(InPlace(), args, policy=policy)(X)
    assert len(caught) == 1


@pytest.mark.parametrize(
    "listed",
    [
        ["aten.softmax"],
        ["aten.add.Scalar"],
        ["aten.gelu_"],
        ["aten.linear"],
        ["aten.add_", "aten.add.Tensor"],
    ],
)
def test_a_listed_op_that_may_be_in_other_graphs_does_not_warn(listed) -> None:
    policy = Policy(dtype=torch.bfloat16, ops=OpLists.default().with_black(*listed))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ampgraph.convert(InPlace(), (X,), policy=policy)
