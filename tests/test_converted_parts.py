"""A model is converted that contains converted parts: their guards, policies and loss scales hold."""

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import CaptureError, NoLossScale, Policy

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
X = torch.randn(8, 16)


class Part(nn.Module):
    """Its values leave the range of float16 inside the guard."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        hidden = self.up(x)
        with ampgraph.fp32_guard():
            return self.down(hidden * 300 * 300) * 1e-5


class Whole(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part, self.head = part, nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.part(x))


def dtypes(amp):
    nodes = amp.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    return [node.meta["val"].dtype for node in nodes]


@pytest.mark.parametrize("args", [(X,), None], ids=["ahead of time", "just in time"])
def test_guards_and_rules_hold_inside_a_part_of_the_same_policy(args):
    amp = ampgraph.convert(Whole(ampgraph.convert(Part(), args, dtype=F16)), (X,), dtype=F16)
    assert dtypes(amp) == [F16, F32, F16]
    assert amp(X).isfinite().all()
    policy = Policy(dtype=F16, rules={"part.up": "fp32"})
    amp = ampgraph.convert(Whole(ampgraph.convert(Part(), args, dtype=F16)), (X,), policy=policy)
    assert dtypes(amp) == [F32, F32, F16]
    policy, part = Policy(dtype=F16, rules={"part.below": "fp32"}), ampgraph.convert(Part(), args, dtype=F16)
    with pytest.raises(ampgraph.PolicyError, match=r"part\.below"):
        ampgraph.convert(Whole(part), (X,), policy=policy)


OTHER_POLICIES = [
    Policy(dtype=BF16, rules={"*": "fp32"}),
    Policy("O0", dtype=BF16),
    Policy("O2", dtype=BF16),
    Policy(dtype=BF16, ops=ampgraph.OpLists.default().with_black("aten.linear")),
    Policy("O2", dtype=F16, loss_scale=NoLossScale()),
]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("policy", OTHER_POLICIES, ids=range(len(OTHER_POLICIES)))
def test_a_part_of_another_policy_keeps_its_dtypes(policy, level):
    """A container calls the part in a loop. Just in time, Dynamo would capture nothing of such a loop."""
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Softmax(-1))
    part, head = ampgraph.convert(source, (X,), policy=policy), nn.Linear(16, 4)
    whole = Policy(level, dtype=BF16)
    amp = ampgraph.convert(nn.Sequential(part, head), (X,), policy=whole, capture="ahead of time")
    expected = ampgraph.convert(head, (X,), policy=whole)(part(X))
    near = 0.002 if level < policy.level else 0.0  # what runs low in the part may be float32 at O1
    torch.testing.assert_close(amp(X), expected, rtol=0, atol=near)
    program = ampgraph.export(nn.Sequential(part, head), (X,), policy=whole)
    torch.testing.assert_close(program.module()(X), expected, rtol=0, atol=near)


def test_a_part_whose_graph_was_edited_runs_as_edited():
    part = ampgraph.convert(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), (X,), dtype=BF16)
    relu = next(n for n in part.graph_module.graph.nodes if n.target is torch.ops.aten.relu.default)
    relu.target = torch.ops.aten.neg.default
    part.graph_module.recompile()
    model = Whole(part)
    amp = ampgraph.convert(model, (X,), dtype=BF16)
    expected = ampgraph.convert(model.head, (X,), dtype=BF16)(part(X))
    torch.testing.assert_close(amp(X), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("policy", "args", "differs"),
    [
        (Policy(dtype=F16), (X,), r"dtype=torch.float16, not torch.bfloat16; a loss scale"),
        (Policy("O2", dtype=BF16), None, "level='O2', not 'O1'"),
    ],
)
def test_a_part_that_would_lose_something_stays_a_graph_of_its_own(policy, args, differs):
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    model = Whole(ampgraph.convert(part, args, policy=policy))
    model(X)
    with pytest.raises(CaptureError, match=f"Sequential was converted with another policy.*{differs}"):
        ampgraph.convert(model, (X,), dtype=BF16, capture="ahead of time")
    with pytest.raises(CaptureError, match=differs):
        ampgraph.export(model, (X,), dtype=BF16)
    with pytest.warns(UserWarning, match=f"{differs}.*just in time"):
        amp = ampgraph.convert(model, (X,), dtype=BF16)
    head = ampgraph.convert(model.head, (X,), dtype=BF16)
    torch.testing.assert_close(amp(X), head(model.part(X)), rtol=0, atol=0)


def test_the_sizes_of_a_model_with_parts_stay_dynamic():
    sizes = {"x": {0: torch.export.Dim("rows", max=64)}}
    source = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    part = ampgraph.convert(source, (X,), dtype=BF16)
    program = ampgraph.export(Whole(part), (X,), dtype=BF16, dynamic_shapes=sizes)
    assert program.module()(torch.randn(3, 16)).shape == (3, 4)
    part = ampgraph.convert(source, (X,), policy="O2", dtype=BF16)
    with pytest.raises(CaptureError, match="level='O2', not 'O1'"):
        ampgraph.export(Whole(part), (X,), dtype=BF16, dynamic_shapes=sizes)


def test_a_guarded_part_does_not_leave_the_whole_in_float32():
    class Guarded(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            with ampgraph.fp16_guard():
                return self.linear(x)

    model = Whole(ampgraph.convert(Guarded(), (X,), dtype=BF16))
    with pytest.warns(UserWarning, match="an fp16_guard"):
        amp = ampgraph.convert(model, (X,), dtype=BF16)
    amp(X)
    assert dtypes(amp) == [BF16]  # the head


def test_small_gradients_reach_a_part_with_a_loss_scale():
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    model = Whole(part)
    (model(X).mean() * 1e-6).backward()
    exact, part[0].weight.grad = part[0].weight.grad, None
    model.part = ampgraph.convert(part, (X,), dtype=F16)
    with pytest.warns(UserWarning, match="just in time"):
        amp = ampgraph.convert(model, (X,), dtype=BF16)
    (amp(X).mean() * 1e-6).backward()
    assert (part[0].weight.grad - exact).norm() < 0.01 * exact.norm()


def test_converted_blocks_inside_a_converted_model():
    torch.manual_seed(0)
    model = Whole(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)))
    policy = Policy(dtype=F16, loss_scale=NoLossScale())
    whole = ampgraph.convert(model, (X,), policy=policy)(X)
    ampgraph.convert_blocks(model, "part.*", policy=policy)
    amp = ampgraph.convert(model, (X,), policy=policy)
    assert dtypes(amp) == [F16] * 3
    torch.testing.assert_close(amp(X), whole, rtol=0, atol=0)


def test_hooks_and_attributes_of_a_part():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.factor = nn.Linear(16, 16), 2.0

        def forward(self, x):
            return self.linear(x) * self.factor

    source = Scaled()
    part = ampgraph.convert(source, (X,), dtype=BF16)
    source.register_forward_hook(lambda _, __, out: out + 1)
    part.register_forward_hook(lambda _, __, out: out * 3)
    model = Whole(part)
    amp = ampgraph.convert(model, (X,), dtype=BF16)
    for factor in (2.0, 5.0):
        source.factor = factor
        expected = model.head((nn.functional.linear(X, *source.linear.parameters()) * factor + 1) * 3)
        assert (amp(X) - expected).norm() < 0.02 * expected.norm()
