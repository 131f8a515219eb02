"""`ampgraph.compare`: errors against brute force, streaming, and no change of the model."""

from __future__ import annotations

import gc
import json
import math
import operator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

import ampgraph
from ampgraph.errors import AmpGraphError
from ampgraph.numerics import compare as compare_file
from ampgraph.numerics.lockstep import Lockstep
from ampgraph.passes.insert_casts import is_inserted, is_inserted_cast
from ampgraph.report.replan import without_casts
from ampgraph.runtime.run_graph import flat_inputs
from tests.models import NormWithCasts

pytestmark = pytest.mark.usefixtures("shared_captures")
LEVELS = ("O1", "O2", "O3")
LOW = {"node:mul*": "low"}


class Block(nn.Module):
    """Norm, residual, branches that are split and joined, dropout, batch norm, softmax."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.drop, self.batch = nn.Dropout(drop), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = self.drop(hidden + torch.relu(self.norm(hidden)))
        left, right = hidden.chunk(2, -1)
        return self.batch(self.last(torch.cat([left * right, left], -1))).softmax(-1)


class Broken(Block):
    """The same with a graph break."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        torch._dynamo.graph_break()
        return self.batch(self.last(hidden)).softmax(-1)


class Squares(nn.Module):
    """A square that float16 does not hold, summed."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 300
        return y / (y * y).sum(-1, keepdim=True).sqrt()


class Writes(nn.Module):
    """Memory that is written in place, through views too, and read again."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gain = nn.Linear(8, 8), nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().sum(0))
        y = torch.zeros_like(x)
        y[:, :4] = self.fc(x)[:, :4] * self.gain
        y[:, 4:].add_(x[:, 4:] * 2)
        return self.fc(y) * y


def loss_of(y: Tensor) -> Tensor:
    return (y * torch.arange(y.shape[-1])).square().mean()


def converted(
    model: nn.Module, x: Tensor, level: str = "O2", jit: bool = False, rules: dict[str, str] | None = None
) -> ampgraph.AmpModule:
    scale = ampgraph.StaticLossScale(1024.0)
    policy = ampgraph.Policy(
        level=level, hazards=False, dtype=torch.float16, loss_scale=scale, rules=rules or {}
    )
    return ampgraph.convert(model, None if jit else (x,), policy=policy, backend="eager")


def error(found: Tensor, exact: Tensor) -> float:
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm())


class Keeps(Interpreter):
    """Runs a graph and keeps every value, with the gradients that reach it."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module)
        self.kept: dict[str, Tensor] = {}

    def run_node(self, n: Node) -> object:
        value = super().run_node(n)
        self.kept[n.name] = value
        if isinstance(value, Tensor) and value.requires_grad:
            value.retain_grad()
        return value


def kept(graph_module: GraphModule, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    run = Keeps(graph_module)
    result = run.run(*flat_inputs(graph_module, (x,)))
    return run.kept, result


def root_of(node: Node) -> str:
    while is_inserted(node):
        node = node.args[0]
    return node.name


@pytest.mark.parametrize("level", LEVELS)
def test_forward_errors_equal_brute_force(level: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 8)
    amp = converted(Block().eval(), x, level)
    exact, _ = kept(without_casts(amp.graph_module, amp.plan), x) if level != "O3" else ({}, None)
    if level == "O3":  # the source reads what is stored low, in float32
        widened = {n: v.float() if v.is_floating_point() else v for n, v in amp.source.state_dict().items()}
        fresh = Block().eval()
        fresh.load_state_dict(widened)
        other = converted(fresh, x, "O1")
        exact, _ = kept(without_casts(other.graph_module, other.plan), x)
    low, _ = kept(amp.graph_module, x)
    found = ampgraph.compare(amp, (x,))
    checked = 0
    for node in amp.graph_module.graph.nodes:
        if (
            node.op != "call_function"
            or not isinstance(low[node.name], Tensor)
            or node.target is operator.getitem
        ):
            continue
        row, true = found[node.name], exact[root_of(node)]
        assert row.accumulated == pytest.approx(error(low[node.name], true), rel=1e-6), node
        if low[node.name].dtype == torch.float32:
            assert row.own == 0 or is_inserted_cast(node)
            continue
        if amp.plan.decisions.get(node.name) and amp.plan[node.name].op_class == "clear":
            assert row.own == 0
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: exact[root_of(n)].to(low[n.name].dtype))
        assert row.own == pytest.approx(error(node.target(*args, **kwargs), true), rel=1e-6), node
        assert 0 < row.own < 2e-3
        assert row.largest == float(true.detach().abs().max())
        checked += 1
    assert checked >= 4


def test_gradients_equal_autograd_over_whole_graphs() -> None:
    torch.manual_seed(0)
    model, x = Block().train(), torch.randn(32, 8, requires_grad=True)
    amp = converted(model, x)
    scale = amp.scaler.get_scale()
    found = ampgraph.compare(amp, (x,), loss=loss_of)
    sides = []
    for graph_module, factor in ((without_casts(amp.graph_module, amp.plan), 1.0), (amp.graph_module, scale)):
        values, result = kept(graph_module, x)
        (loss_of(result) * factor).backward()
        sides.append(
            {n: v.grad / factor for n, v in values.items() if isinstance(v, Tensor) and v.grad is not None}
        )
        parameters = {
            n.name: operator.attrgetter(n.target)(graph_module)
            for n in graph_module.graph.nodes
            if n.op == "get_attr"
        }
        sides[-1] |= {n: p.grad / factor for n, p in parameters.items() if p.grad is not None}
        sides[-1]["x"] = x.grad / factor
        model.zero_grad()
        x.grad = None
    exact, low = sides
    checked = 0
    for row in found.rows:
        if row.direction == "forward" or row.negligible or row.node not in exact or row.op == "aten.chunk":
            continue
        assert row.accumulated == pytest.approx(error(low[row.node], exact[row.node]), rel=1e-3), row.node
        assert row.largest == pytest.approx(float(exact[row.node].abs().max()) * scale, rel=1e-5)
        checked += 1
    assert checked >= 12
    assert found.row("last.bias", "backward").negligible  # a batch norm takes it away
    assert found.worst(len(found.rows))[-1].label == "last.bias"


def test_own_error_of_a_gradient_is_one_op() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4, bias=False), torch.randn(16, 8)
    amp = converted(model, x)
    found = ampgraph.compare(amp, (x,), loss=loss_of)
    result = model(x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(result), result)
    scaled = (gradient * found.scale).half()
    row = found.row("weight", "backward")
    assert row.own == pytest.approx(
        error((scaled.T @ x.half()).float() / found.scale, gradient.T @ x), rel=1e-6
    )
    assert row.kind == "parameter"
    assert row.own != row.accumulated  # the converted model's own loss starts from rounded values


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_model_stays_as_it_was(level: str, jit: bool) -> None:
    torch.manual_seed(0)
    model, x = Broken(0.5).train() if jit else Block(0.5).train(), torch.randn(16, 8)
    amp = converted(model, x, level, jit)
    model.first.weight.grad = torch.ones(16, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, scale = torch.get_rng_state(), amp.scaler.state_dict()
    for loss in (None, loss_of):
        found = ampgraph.compare(amp, (x,), loss=loss)
        assert found.rows
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert amp.scaler.state_dict() == scale
    assert torch.equal(model.first.weight.grad, torch.ones(16, 8))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "first.weight")
    assert x.grad is None


def test_dropout_has_one_mask() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    amp = converted(Block(0.5).train(), x)
    found = ampgraph.compare(amp, (x,), loss=loss_of)
    for row in (found["dropout"], found.row("dropout", "backward"), found["softmax"]):
        assert row.accumulated < 5e-3
    assert found["dropout"].zeroed == 0


def test_random_numbers_of_a_low_dtype_are_float32s_rounded() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x @ x) + torch.rand_like(x @ x)

    amp = converted(Noise(), torch.randn(8, 8))
    found = ampgraph.compare(amp, (torch.randn(8, 8),))
    noise = next(row for row in found.rows if "rand_like" in row.op)
    assert noise.accumulated < 1e-3


@pytest.mark.parametrize("level", LEVELS)
def test_memory_that_is_written(level: str) -> None:
    torch.manual_seed(0)
    model, x = Writes().train(), torch.randn(4, 8)
    amp = converted(model, x, level)
    found = ampgraph.compare(amp, (x,), loss=loss_of)
    assert not model.seen.any()
    assert all(row.accumulated < 5e-3 for row in found.rows)
    source, result = without_casts(amp.graph_module, amp.plan), None
    result = source(x)
    loss_of(result).backward()
    for name, parameter in model.named_parameters():
        peak = float(parameter.grad.abs().max()) * found.scale
        assert found.row(name, "backward").largest == pytest.approx(peak, rel=1e-5), name


@pytest.mark.parametrize("level", LEVELS[:2])
@pytest.mark.parametrize("write", [lambda old, new: old.mul_(0.9).add_(new), Tensor.copy_])
def test_buffers_written_just_in_time_are_compared_as_ahead_of_time(write, level: str) -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.register_buffer("average", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            write(self.average, y.mean(0).detach() * 0.1)
            return self.fc(y + self.average)

    torch.manual_seed(0)
    model, x = Average(), torch.randn(4, 8)
    ours, theirs = (
        ampgraph.compare(converted(model, x, level, jit=jit), (x,), loss=loss_of) for jit in (True, False)
    )
    names = [(row.op, row.direction) for row in ours.rows if row.kind == "op"]
    assert names == [(row.op, row.direction) for row in theirs.rows if row.kind == "op"]
    assert all(row.accumulated < 5e-3 for row in ours.rows)


def test_just_in_time_compares_each_graph() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    amp = converted(Broken().train(), x, jit=True)
    found = ampgraph.compare(amp, (x,), loss=loss_of)
    assert {row.graph for row in found.rows} == {1, 2}
    assert {row.graph for row in found.rows if row.direction == "backward"} == {1, 2}
    assert found.loss[0] == pytest.approx(loss_of(amp.source(x)).item())
    assert all(row.accumulated < 5e-3 for row in found.rows if not row.negligible)
    second = [row for row in found.rows if row.graph == 2 and row.direction == "forward"]
    assert second[0].accumulated == second[0].own  # its input is float32's


def test_higher_order_op_is_one_node() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda t: self.fc(t).sin(), lambda t: self.fc(t) * 3, (x,))

    torch.manual_seed(0)
    x = torch.randn(4, 8)
    amp = converted(Branches(), x)
    found = ampgraph.compare(amp, (x,))
    row = next(row for row in found.rows if row.op == "cond")
    assert 0 < row.own < 2e-3
    with torch.no_grad():
        assert row.accumulated == pytest.approx(error(amp(x), amp.source(x)))


def test_casts_of_the_model_that_the_rewritten_graph_reads_past() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    amp = converted(NormWithCasts(), x, level="O2", rules={"mul": "low"})
    found = ampgraph.compare(amp, (x,), loss=lambda y: y.square().sum())
    row = next(row for row in found.rows if (row.node, row.direction) == ("mul_1", "forward"))
    assert 0 < row.own <= row.accumulated + 1e-3 < 1e-2


def test_overflow_is_named_first() -> None:
    amp = converted(Squares(), torch.randn(4, 64), rules=LOW)
    found = ampgraph.compare(amp, (torch.randn(4, 64),))
    worst = found.worst(1)[0]
    assert (worst.op, worst.own) == ("aten.mul.Tensor", math.inf)
    assert worst.headroom > 1
    assert worst.own_nonfinite == worst.nonfinite > 0
    assert worst in found.worst(2, by="nonfinite")
    assert worst.largest > torch.finfo(torch.float16).max
    assert sum(n for e, n in worst.exponents.items() if e > 15) >= worst.nonfinite
    assert worst.line.startswith("tests/test_compare.py:")


def test_underflow_is_counted() -> None:
    class Tiny(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * x).sqrt()

    x = torch.tensor([[1e-4, 0.0, 200.0, -1e-4]])
    found = ampgraph.compare(converted(Tiny(), x, rules=LOW), (x,))
    assert found["mul"].zeroed == pytest.approx(2 / 3)
    assert found.worst(1, by="zeroed")[0].node == "mul"
    assert found["mul"].nonfinite == 0


def test_json_round_trip_keeps_everything() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64)
    for model, loss, rules in ((Squares(), None, LOW), (nn.Linear(64, 4), loss_of, {})):
        found = ampgraph.compare(converted(model, x, rules=rules), (x,), loss=loss)
        text = found.to_json()
        assert ampgraph.NumericComparison.from_json(text) == found
        json.loads(text, parse_constant=pytest.fail)  # no NaN and Infinity, which other readers refuse
    with pytest.raises(AmpGraphError, match="not the JSON"):
        ampgraph.NumericComparison.from_json('{"rows": []}')


def test_text_names_the_worst() -> None:
    x = torch.randn(4, 64)
    found = ampgraph.compare(converted(Squares(), x, rules=LOW), (x,))
    first, _, heading, _, row, *_ = str(found).splitlines()
    assert first.startswith("Squares in float16 beside float32: 5 nodes, ")
    assert heading.split()[:2] == ["node", "of"]
    assert row.split()[0] == found.worst(1)[0].node
    assert found.to_markdown().count("\n| ") == len(found.rows) + 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.worst(by="owm"), "by='owm' is not a column; legal: .* Did you mean 'own'"),
        (lambda c: c.worst(direction="back"), "direction='back'"),
        (lambda c: c.worst(-1), "n=-1"),
        (lambda c: c["nul"], "graph 1 has no forward row of 'nul'"),
        (lambda c: c.values("speed"), "by='speed'"),
        (lambda c: c.histogram("x.png"), "ends in .svg or .txt"),
    ],
)
def test_wrong_questions_are_refused(call, message: str) -> None:
    x = torch.randn(4, 64)
    found = ampgraph.compare(converted(Squares(), x, rules=LOW), (x,))
    with pytest.raises(AmpGraphError, match=message):
        call(found)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (3, "loss=3"),
        (lambda y: 1.0, "loss returned a float"),
        (lambda y: y, "loss returned a tensor of 16 elements"),
        (lambda y: y.detach().sum(), "loss returned a constant"),
    ],
)
def test_no_loss_is_refused(loss, message: str, jit: bool) -> None:
    x = torch.randn(4, 8)
    with pytest.raises(AmpGraphError, match=message):
        ampgraph.compare(converted(nn.Linear(8, 4), x, jit=jit), (x,), loss=loss)


def test_other_things_are_refused() -> None:
    with pytest.raises(AmpGraphError, match=r"ampgraph\.convert"):
        ampgraph.compare(nn.Linear(2, 2), (torch.ones(1, 2),))


def test_values_are_dropped_as_both_graphs_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live tensors at every node: what the rest of both graphs reads, and a few of the node itself."""
    width, layers = 64, 40
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
    x = torch.randn(width, width)
    amp = converted(model.eval(), x)
    counts, weights = [], {p.data_ptr() for p in model.parameters()}

    class Watched(Lockstep):
        def _measure(self, node: Node, own: object) -> None:
            super()._measure(node, own)
            held = [v for run in (self.exact, self.low) for v in run.values.values() if isinstance(v, Tensor)]
            counts.append(sum(v.shape == x.shape and v.data_ptr() not in weights for v in held))

    monkeypatch.setattr(compare_file, "Lockstep", Watched)
    gc.collect()
    before = sum(isinstance(o, Tensor) for o in gc.get_objects())
    found = ampgraph.compare(amp, (x,))
    gc.collect()
    assert len(counts) > 3 * layers
    assert max(counts) <= 6  # of 320; a weight and its cast, a value and the one before, on both sides
    assert sum(isinstance(o, Tensor) for o in gc.get_objects()) <= before
    assert len(found.rows) == len(counts)


def test_a_model_without_floating_point_values() -> None:
    class Signs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x > 0).sum(-1)

    x = torch.ones(2, 3)
    amp = converted(Signs(), x)
    title = ampgraph.compare(amp, (x,)).table().splitlines()[0]
    assert title.endswith(" beside float32: no floating-point values.")
