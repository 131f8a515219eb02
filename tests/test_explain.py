"""`ampgraph.explain`: its numbers are those of the graph, its words those of the plan."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph.errors import AmpGraphError, CaptureError
from ampgraph.origin import user_line

LOW = torch.float16


class Attention(nn.Module):
    """Shared casts, a tuple result, in-kernel widening and a widening cast in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        scores = (self.q(x) @ self.k(x).transpose(-1, -2)).softmax(-1)
        left, right = (scores @ self.v(x)).split(8, -1)
        return left.exp() + right


class Undone(nn.Module):
    """The user widens a low value that a low op reads next: the clean-up removes a planned cast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).float())


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        buffer = torch.zeros(4, 8)
        buffer[:2] = self.linear(x)
        return self.linear(buffer)


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 5)
    )


CASES = {
    "attention": (Attention, (2, 8, 16)),
    "undone": (Undone, (2, 8)),
    "in place": (InPlace, (2, 8)),
    "conv": (conv, (2, 3, 8, 8)),
}


@pytest.fixture(
    scope="module", params=[(case, level) for case in CASES for level in ("O0", "O1", "O2")], ids=str
)
def amp(request: pytest.FixtureRequest) -> ampgraph.AmpModule:
    case, level = request.param
    build, shape = CASES[case]
    return ampgraph.convert(build(), (torch.randn(shape),), policy=level, dtype=LOW)


def attention(**options: object) -> ampgraph.AmpModule:
    return ampgraph.convert(Attention(), (torch.randn(2, 8, 16),), dtype=LOW, **options)  # type: ignore[arg-type]


def counted(graph_module: torch.fx.GraphModule) -> tuple[int, int, int, int]:
    """Counts inserted casts by other means: (casts, bytes, activation casts, activation bytes)."""
    casts = moved = activations = activation_bytes = 0
    for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.to.dtype):
        if "inserted" not in node.meta.get("ampgraph", {}):
            continue
        value = node.meta["val"]
        size = value.numel() * (2 + 4)
        casts, moved = casts + 1, moved + size
        if node.args[0].op != "get_attr":
            activations, activation_bytes = activations + 1, activation_bytes + size
    return casts, moved, activations, activation_bytes


def test_totals_are_what_the_graph_has(amp: ampgraph.AmpModule) -> None:
    totals = ampgraph.explain(amp).totals
    found = (totals.casts, totals.cast_bytes, totals.activation_casts, totals.activation_cast_bytes)
    assert found == counted(amp.graph_module)
    assert totals.parameter_casts + totals.activation_casts == totals.casts
    assert totals.parameter_cast_bytes + totals.activation_cast_bytes == totals.cast_bytes


def test_sizes_are_of_no_module() -> None:
    class Sizes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(x.shape[0] * x.shape[1], -1) * x.shape[1]

    x, sizes = torch.randn(2, 3, 4), ({0: torch.export.Dim("b"), 1: torch.export.Dim("s", max=64)},)
    found = ampgraph.explain(ampgraph.convert(Sizes(), (x,), dtype=LOW, dynamic_shapes=sizes))
    assert any("sym_size" in row.name for row in found.nodes)
    assert {row.module for row in found.nodes} == {""}


def test_cast_bytes_are_those_stamped_on_the_nodes(amp: ampgraph.AmpModule) -> None:
    nodes = {n.name: n for n in amp.graph_module.graph.nodes}
    for cast in ampgraph.explain(amp).casts:
        assert cast.bytes == nodes[cast.name].meta["ampgraph"]["bytes"]
        assert len(cast.users) == len(nodes[cast.name].users)


def test_every_node_is_listed_with_its_dtype(amp: ampgraph.AmpModule) -> None:
    explanation = ampgraph.explain(amp)
    names = [n.name for n in amp.graph_module.graph.nodes]
    assert sorted(names) == sorted([n.name for n in explanation.nodes] + [c.name for c in explanation.casts])
    values = {n.name: n.meta.get("val") for n in amp.graph_module.graph.nodes}
    for row in explanation.nodes:
        if isinstance(values[row.name], torch.Tensor):
            assert row.dtype == str(values[row.name].dtype).removeprefix("torch.")
        if row.kind == "op":
            assert row.by
            assert row.reason


def test_traffic_follows_casts_that_the_clean_up_removed() -> None:
    amp = ampgraph.convert(Undone(), (torch.randn(2, 8),), dtype=LOW)
    totals, planned = ampgraph.explain(amp).totals, amp.plan.cost
    assert totals.casts < planned.casts
    assert planned.traffic - totals.traffic == planned.cast_bytes - totals.cast_bytes


def test_baselines_are_the_plan_s() -> None:
    amp = attention()
    explanation = ampgraph.explain(amp)
    assert explanation.totals.traffic == amp.plan.cost.traffic
    assert explanation.baselines["autocast"].cast_bytes == amp.plan.baselines["autocast"].cast_bytes
    assert explanation.baselines["fp32"].casts == 0
    assert explanation.optimal == amp.plan.optimal


def test_in_kernel_widening_is_counted_and_named() -> None:
    explanation = ampgraph.explain(attention())
    assert explanation.widened == 1
    (row,) = [n for n in explanation.nodes if n.widens]
    assert (row.name, row.widens) == ("add", ("split[1]",))


def test_text_shows_every_cast_and_the_totals() -> None:
    explanation = ampgraph.explain(attention())
    text = str(explanation)
    assert "layer_norm" in text
    assert "test_explain.py:" in text
    assert "proven optimal" in text
    assert "autocast rule" in text
    for cast in explanation.casts:
        assert cast.tensor in text
    assert "layer_norm  float32  float16" in explanation.table(casts_only=True)
    assert "transpose" not in explanation.table(casts_only=True)
    assert max(map(len, text.splitlines())) < 260


def test_dict_and_json_are_plain_and_stable() -> None:
    first, second = (ampgraph.explain(attention()) for _ in range(2))
    assert first.to_json() == second.to_json()
    assert json.loads(first.to_json()) == first.to_dict()
    assert isinstance(first.to_dict()["totals"]["cast_bytes"], int)
    assert [c["tensor"] for c in first.to_dict()["casts"]] == [c.tensor for c in first.casts]


def test_why() -> None:
    explanation = ampgraph.explain(attention())
    assert "decided by list: white" in explanation.why("linear")
    assert "reads q.weight cast from float32 to float16" in explanation.why("linear")
    assert "widens split[1]" in explanation.why("add")
    assert "linear, linear_1, linear_2" in explanation.why(explanation.casts[0].name)
    assert explanation.why("q") == explanation.why("linear")  # a module path
    with pytest.raises(AmpGraphError, match="Did you mean 'linear"):
        explanation.why("lineer")


def test_takes_a_rewritten_graph_module() -> None:
    amp = attention()
    explanation = ampgraph.explain(amp.graph_module)
    assert explanation.casts == ampgraph.explain(amp).casts
    assert explanation.policy == repr(amp.policy)


def test_just_in_time_model_is_explained_after_a_call() -> None:
    amp = ampgraph.convert(nn.Linear(4, 4), dtype=torch.bfloat16)
    with pytest.raises(CaptureError, match="not captured yet"):
        ampgraph.explain(amp)
    amp(torch.randn(2, 4))
    assert ampgraph.explain(amp).totals.parameter_casts == 2


def test_dynamic_shapes_count_with_their_hints() -> None:
    shapes = ({0: torch.export.Dim("batch", min=2)},)
    amp = ampgraph.convert(nn.Linear(4, 4), (torch.randn(6, 4),), dtype=LOW, dynamic_shapes=shapes)
    totals = ampgraph.explain(amp).totals
    assert totals.cast_bytes == amp.plan.cost.cast_bytes
    assert totals.activation_cast_bytes == sum(c.bytes for c in amp.plan.casts if not c.is_parameter)


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), torch.fx.symbolic_trace(nn.ReLU()), None])
def test_refuses_what_is_not_converted(wrong: object) -> None:
    with pytest.raises(AmpGraphError, match=r"what ampgraph\.convert returns"):
        ampgraph.explain(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gap", "claim"),
    [(0, "proven optimal"), (512, "within 512 B of the optimum"), (None, "not proven optimal")],
)
def test_the_proof_is_claimed_only_where_it_is_complete(gap, claim) -> None:
    amp = attention()
    plan = pickle.loads(pickle.dumps(dataclasses.replace(amp.plan, gap=gap)))
    assert (plan.gap, plan.optimal) == (gap, gap == 0)
    explanation = dataclasses.replace(ampgraph.explain(amp), gap=gap)
    assert f"placement: {claim}" in str(explanation)
    read = ampgraph.Explanation.from_dict(explanation.to_dict())
    assert (read.gap, read.optimal) == (gap, gap == 0)
    with pytest.raises(AmpGraphError, match="gap"):
        ampgraph.Explanation.from_dict({**explanation.to_dict(), "gap": -1})


# -- reasons ------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Black ops only: nothing of it may go low below O3."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp().sum(-1)


def decided(level: str, model: nn.Module | None = None) -> dict[str, tuple[str, str]]:
    policy = ampgraph.Policy(level, dtype=LOW, loss_scale=ampgraph.NoLossScale())
    amp = ampgraph.convert(model or Plain(), (torch.randn(4, 8),), policy=policy, backend="eager")
    return {row.name: (row.by, row.reason) for row in ampgraph.explain(amp).nodes if row.kind == "op"}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_where_nothing_may_go_low_the_lists_are_the_reason(level):
    found = decided(level)
    assert {by for by, _ in found.values()} == {"list"}
    assert found["exp"][1].startswith("black: ")


def test_o0_is_the_reason_at_o0_alone():
    assert set(decided("O0").values()) == {("source", "O0 changes nothing")}


def test_o3_runs_black_ops_low_whatever_is_beside_them():
    class Beside(Plain):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return super().forward(x) + self.linear(x).sum()

    alone, beside = decided("O3"), decided("O3", Beside())
    assert alone["exp"] == beside["exp"] == ("list", "O3 runs everything low")


def test_where_nothing_may_go_low_the_graph_stays_as_it_was():
    amp = ampgraph.convert(Plain(), (torch.randn(4, 8),), policy="O1", dtype=LOW, backend="eager")
    assert amp.plan.casts == ()
    assert all(d.dtype != LOW for d in amp.plan.decisions.values())
    assert amp.plan.cost == amp.plan.baselines["fp32"]


def test_a_flip_is_no_rule():
    amp = ampgraph.convert(conv(), (torch.randn(2, 3, 8, 8),), policy="O1", dtype=LOW, backend="eager")
    (change, *_) = [c for c in ampgraph.explain(amp).flip("conv2d").dtypes if c.node == "conv2d"]
    assert change.reason == "what if: flipped, to see what changes"


def test_the_line_of_a_batch_norm_is_the_models() -> None:
    """The capture replaces batch norm's forward: its own file is not the user's line."""

    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(8, momentum=None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x)

    amp = ampgraph.convert(Normed(), (torch.randn(4, 8),))
    (node,) = (n for n in amp.graph_module.graph.nodes if n.name.startswith("batch_norm"))
    assert "test_explain.py" in user_line(node)


def test_the_line_of_a_library_beside_torch_is_the_users():
    node = torch.fx.Graph().placeholder("x")
    torch_file = torch.nn.modules.linear.__file__
    beside = torch_file.replace("/torch/nn/", "/torchmodels/nn/")
    node.meta["stack_trace"] = f'File "{beside}", line 7\nFile "{torch_file}", line 9\n'
    assert user_line(node) == f"{beside}:7"
    node.meta["stack_trace"] = f'File "{ampgraph.origin.__file__}", line 3\n'
    assert user_line(node) == ""
    node.meta["stack_trace"] += 'File "<eval_with_key>.12", line 4\n'  # its number differs from run to run
    assert user_line(node) == ""


class Heads(nn.Module):
    """Attention by hand: its reshape after the transpose copies, the one before it does not."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        q, k, v = (t.reshape(2, 6, 4, 4).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) * 0.5).softmax(-1)
        return x + self.out((scores @ v).transpose(1, 2).reshape(2, 6, 16)).contiguous()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_same_policy_once_more_costs_the_same(level):
    amp = ampgraph.convert(Heads(), (torch.randn(2, 6, 16),), policy=level, dtype=torch.bfloat16)
    explanation = ampgraph.explain(amp)
    again = explanation.under(amp.policy)
    assert (again.totals, again.baselines) == (explanation.totals, explanation.baselines)


def test_a_model_whose_parts_changed_explains_its_last_graph():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    amp = ampgraph.convert(model, (torch.ones(2, 8),), dtype=torch.bfloat16)
    assert ampgraph.explain(amp).graph == "1 of 1"
    model[0] = nn.Linear(8, 8, bias=False)
    assert ampgraph.explain(amp).graph == ""
    amp(torch.ones(2, 8))
    assert ampgraph.explain(amp).graph == "1 of 1"
