"""Positions, angles and decisions stay exact until a low op feeds them: models that are spoilt otherwise."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import ampgraph
from ampgraph import AmpModule, NoLossScale, OpLists, Policy
from ampgraph.passes.analysis.products import terms
from ampgraph.plan import Plan
from ampgraph.report.replan import Replanner, replanned

from .exact_integers import differing_in
from .helpers import Fn

DTYPES = (torch.float16, torch.bfloat16)
LENGTH, WIDTH = 2048, 16


class Model(nn.Module):
    """Something low, and a function of it and of the inputs.

    ``torch.autocast`` casts the input of the layers at each, so placement has bytes of casts to spend.
    """

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("frequencies", 100.0 * 1000.0 ** -torch.linspace(0, 1, WIDTH // 2))
        self.register_buffer("edges", torch.linspace(0, 1000, 1001))
        self.table = nn.Parameter(torch.randn(1024, WIDTH))
        self.function = function

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> object:
        return self.function(self, sum(layer(x) for layer in self.layers), *rest)


def rotate(y: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    a, b = y.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def positions(y: torch.Tensor) -> torch.Tensor:
    return torch.arange(y.shape[-2])


def drawn_out(t: torch.Tensor) -> torch.Tensor:
    """Much arithmetic that changes nothing: in low it would move fewer bytes than its casts."""
    for _ in range(4):
        t = (t * 1.25 + 0.5) * 0.8 - 0.4
    return t


# -- values: y is what a low op made -----------------------------------------------------------------------


def rotary_einsum(self, y):
    return rotate(y, torch.einsum("i,j->ij", positions(y).float(), self.frequencies))


def rotary_matmul(self, y):
    return rotate(y, positions(y).float()[:, None] @ self.frequencies[None])


def rotary_multiply(self, y):
    return rotate(y, drawn_out(positions(y)[:, None] * self.frequencies))


def sinusoidal(self, y):
    angles = drawn_out((positions(y).float() * 3.0)[:, None] * self.frequencies)
    return y + torch.cat([angles.sin(), angles.cos()], -1)


def fourier_features(self, y, times):
    angles = drawn_out(times[:, None] * self.frequencies * (2 * math.pi))
    return y + torch.cat([angles.sin(), angles.cos()], -1)


def rotated_grid(self, y):
    turn = torch.tensor([[0.8, -0.6], [0.6, 0.8]])
    grid = torch.stack(torch.meshgrid(positions(y).float(), torch.arange(8.0), indexing="ij"), -1) @ turn
    return y * grid.flatten(1).sin()


def alibi(self, y):
    distance = (positions(y)[None] - positions(y)[:64, None]).abs()
    slopes = 2.0 ** -torch.arange(1, 3).float()
    bias = drawn_out(distance * slopes[:, None, None])
    return (bias.cumsum(-1) - bias.amax(-1, keepdim=True)).softmax(-1) @ y


# -- integers ----------------------------------------------------------------------------------------------


def t5_buckets(self, y):
    distance = (positions(y)[None] - positions(y)[:8, None]).abs()
    large = 16 + (torch.log(drawn_out(distance.float().clamp(min=1)) / 16) / math.log(128 / 16) * 16).to(
        torch.long
    )
    return F.embedding(torch.where(distance < 16, distance, large.clamp(max=31)), self.table) + y.mean()


def deberta_buckets(self, y):
    distance = positions(y)[None] - positions(y)[:8, None]
    middle, sign = 128, torch.sign(distance)
    inside = (distance < middle) & (distance > -middle)
    absolute = torch.where(inside, torch.tensor(middle - 1).type_as(distance), torch.abs(distance))
    log = torch.ceil(torch.log(drawn_out(absolute / middle)) / math.log(511 / middle) * (middle - 1)) + middle
    where = torch.where(absolute <= middle, distance.type_as(log), log * sign)
    return F.embedding((where + 512).long().clamp(0, 1023), self.table) + y.mean()


def rounded_times(self, y, times):
    return F.embedding((times * 100.3 + 0.1).round().long().clamp(0, 1023), self.table) + y


def cells(self, y, times):
    at = times * 99.7
    low, high = torch.floor(at), torch.ceil(at)
    return F.embedding(low.long(), self.table) * (high - at)[:, None] + y


def bucketized(self, y, times):
    return F.embedding(torch.bucketize(drawn_out(times * 97.1), self.edges), self.table) + y


def searched(self, y, times):
    return F.embedding(torch.searchsorted(self.edges * 1.1, drawn_out(times * 97.1)), self.table) + y


def anchors(self, y):
    centers = torch.linspace(0, 1, y.shape[-2])[:, None] * 800 + torch.linspace(0, 1, 8) * 13
    inside = (centers > 3.3) & (centers < 790.7)
    return inside, (centers / 16).long(), y * inside.all()


def swin_coordinates(self, y):
    span = torch.arange(-15, 16).float()
    table = torch.stack(torch.meshgrid(span, span, indexing="ij"), -1) / 15 * 8
    table = torch.sign(table) * torch.log2(table.abs() + 1.0) / math.log2(8)
    return (table * 1000).long(), y


def nearest(self, y, times):
    far = (times[:, None] * 9.7 - self.edges[:64] * 0.11) * 1.3
    return far.abs().argmin(-1), (far * 1.7).topk(3).indices, (far * 1.1).max(-1).indices, y


def sorted_times(self, y, times):
    return (times * 9.7 + 1.0).sort().indices, y


def through_memory(self, y, times):
    marks = torch.zeros(y.shape[-2])
    marks[1:] = times[1:] * 100.3
    return marks.round().long(), y


def compared(self, y, times):
    return (times * 1.001 + 0.1) == (times * 1.001 + 0.1004), y


def double(self, y, times):
    return drawn_out(times * 1.001).double() - times.double(), y


VALUES = (
    rotary_einsum, rotary_matmul, rotary_multiply, sinusoidal, fourier_features, rotated_grid, alibi, double,
)  # fmt: skip
INTEGERS = (
    t5_buckets, deberta_buckets, rounded_times, cells, bucketized, searched, anchors, swin_coordinates,
    nearest, sorted_times, through_memory, compared,
)  # fmt: skip
PRODUCTS = (rotary_matmul, rotated_grid)
# A few roundings; what is spoilt is wrong by twenty times as much.
CLOSE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
SPOILT = 20


class Case(NamedTuple):
    """One planted model, captured, in training mode: level O3 keeps its float32 parameters then."""

    amp: AmpModule
    inputs: tuple[torch.Tensor, ...]
    expected: list[torch.Tensor]
    replanner: Replanner

    def under(self, policy: Policy) -> tuple[fx.GraphModule, Plan]:
        return self.replanner.under(policy)

    def error(self, policy: Policy) -> float:
        """The largest relative error of a floating output."""
        with torch.no_grad():
            actual = tree_leaves(self.under(policy)[0](*self.inputs))
        pairs = [(a, e) for a, e in zip(actual, self.expected, strict=True) if e.is_floating_point()]
        errors = [float((a - e).norm() / e.norm()) for a, e in pairs]
        return max(e if math.isfinite(e) else math.inf for e in errors)

    def wrong_integers(self, policy: Policy) -> list[str]:
        wrong, compared = differing_in(*self.under(policy), policy, self.inputs)
        assert compared
        return wrong


@cache
def case(function: Callable) -> Case:
    torch.manual_seed(0)
    model = Model(function)
    inputs = [torch.randn(LENGTH, WIDTH)]
    if "times" in inspect.signature(function).parameters:
        inputs.append(torch.rand(LENGTH) * 10)
    with torch.no_grad():
        expected = tree_leaves(model(*inputs))
    amp = ampgraph.convert(model, tuple(inputs), policy=policy_of("O1", torch.bfloat16), backend="eager")
    return Case(amp, tuple(inputs), expected, Replanner(amp.graph_module, amp.plan))


def policy_of(level: str, dtype: torch.dtype, **options) -> Policy:
    return Policy(level=level, dtype=dtype, loss_scale=NoLossScale(), **options)


def graph_for(backend: str, model: nn.Module, inputs: tuple, dtype: torch.dtype) -> fx.GraphModule:
    """Returns the graph at O2 that a backend would compile."""
    amp = ampgraph.convert(model, inputs, policy=policy_of("O2", dtype), backend=backend)
    return amp.training_graph


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("function", VALUES, ids=lambda f: f.__name__)
def test_values_are_right(function, level):
    for dtype in DTYPES:
        assert case(function).error(policy_of(level, dtype)) <= CLOSE[dtype]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("function", INTEGERS, ids=lambda f: f.__name__)
def test_integers_are_equal(function, level):
    for dtype in DTYPES:
        assert case(function).wrong_integers(policy_of(level, dtype)) == []


@pytest.mark.parametrize(
    ("function", "level"),
    [*((f, "O1") for f in PRODUCTS), *((f, "O2") for f in (*VALUES, *INTEGERS) if f is not rotary_einsum)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_without_the_analysis_it_is_spoilt(function, level):
    """So the two tests above have something to see. An outer product is arithmetic, which follows."""
    for dtype in DTYPES:
        policy = policy_of(level, dtype, hazards=False)
        if function in VALUES:
            assert case(function).error(policy) > SPOILT * CLOSE[dtype]
        else:
            assert case(function).wrong_integers(policy)


@pytest.mark.parametrize("function", PRODUCTS, ids=lambda f: f.__name__)
def test_just_in_time_too(function):
    torch._dynamo.reset()
    found = case(function)
    amp = ampgraph.convert(found.amp.source, policy=policy_of("O2", torch.bfloat16), backend="eager")
    with torch.no_grad():
        actual = amp(*found.inputs)
    error = (actual - found.expected[0]).norm() / found.expected[0].norm()
    assert error <= CLOSE[torch.bfloat16]


def test_a_converted_program_is_right_too():
    found = case(rotary_matmul)
    program = torch.export.export(found.amp.source, found.inputs, strict=False)
    converted = ampgraph.convert(program, policy=policy_of("O1", torch.bfloat16)).module()
    with torch.no_grad():
        error = (converted(*found.inputs) - found.expected[0]).norm() / found.expected[0].norm()
    assert error <= CLOSE[torch.bfloat16]


# -- positions times frequencies, in every form that models write -------------------------------------------

ANGLES = {
    "einsum with an ellipsis": lambda t, f: torch.einsum("..., f -> ... f", t, f),
    "einsum of a batch": lambda t, f: torch.einsum("... i , j -> ... i j", t[None], f)[0],
    "einsum without an arrow": lambda t, f: torch.einsum("i , j", t, f),
    "einsum with an ellipsis and no arrow": lambda t, f: torch.einsum("...n,nj", t[:, None], f[None]),
    "einsum that sums": lambda t, f: torch.einsum("ik,kj->ij", t[:, None], f[None]),
    "einsum of lists": lambda t, f: torch.einsum(t, [0], f, [1], [0, 1]),
    "outer": torch.outer,
    "ger": torch.ger,
    "matmul": lambda t, f: t[:, None] @ f[None],
    "mm": lambda t, f: torch.mm(t[:, None], f[None]),
    "inner": lambda t, f: torch.inner(t[:, None], f[:, None]),
    "linear": lambda t, f: F.linear(t[:, None], f[:, None]),
    "linear with a bias": lambda t, f: F.linear(t[:, None], f[:, None], torch.zeros_like(f)),
    "bilinear": lambda t, f: F.bilinear(t[:, None], torch.ones_like(t)[:, None], f[:, None, None]),
    "tensordot of vectors": lambda t, f: torch.tensordot(t, f, dims=0),
    "tensordot": lambda t, f: torch.tensordot(t[:, None], f[None], dims=1),
    "tensordot by dimensions": lambda t, f: torch.tensordot(t[None], f[None], dims=([0], [0])),
    "multi_dot": lambda t, f: torch.linalg.multi_dot([t[:, None], torch.ones(1, 1), f[None]]),
    "addmm": lambda t, f: torch.addmm(torch.zeros_like(f), t[:, None], f[None]),
    "bmm": lambda t, f: torch.bmm(t[None, :, None], f[None, None])[0],
    "baddbmm": lambda t, f: torch.baddbmm(torch.zeros_like(f), t[None, :, None], f[None, None])[0],
    "addbmm": lambda t, f: torch.addbmm(torch.zeros_like(f), t[None, :, None], f[None, None]),
    "addr": lambda t, f: torch.addr(torch.zeros_like(f), t, f),
    "kron": lambda t, f: torch.kron(t[:, None], f[None]),
    "vecdot": lambda t, f: torch.linalg.vecdot(t[:, None, None], f[None, :, None]),
    "cdist": lambda t, f: torch.cdist((t[:, None] * f).flatten()[:, None], torch.zeros(1, 1)).view(
        -1, len(f)
    ),
    "dist": lambda t, f: t[:, None] * f + torch.dist(t, t + 1.0),
}
# Gray and black ops: at O1 the autocast rule itself leaves them in float32. These einsums sum over nothing,
# or over a dimension of size 1.
NOT_WHITE = ("outer", "ger", "addr", "kron", "cdist", "dist", "tensordot of vectors")
LISTED_WHITE = [n for n in ANGLES if n not in NOT_WHITE and not n.startswith("einsum")]


@cache
def angles_of(name: str) -> Callable:
    def rotary(self, y):
        return rotate(y, ANGLES[name](positions(y).float(), self.frequencies))

    return rotary


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ANGLES)
def test_angles_are_right_in_every_form(name, level):
    for dtype in DTYPES:
        assert case(angles_of(name)).error(policy_of(level, dtype)) <= CLOSE[dtype]


@pytest.mark.parametrize("name", LISTED_WHITE)
def test_without_the_analysis_every_product_is_spoilt(name):
    for dtype in DTYPES:
        assert case(angles_of(name)).error(policy_of("O1", dtype, hazards=False)) > SPOILT * CLOSE[dtype]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("form", ["i,j->ij", "..., f -> ... f", "i,j", "tensordot"])
@pytest.mark.parametrize("of", ["arguments", "a parameter"])
def test_outer_products_of_what_is_measured_are_exact_too(of, form, level):
    """The analysis of positions has no say in them; the lists have."""
    frequencies = nn.Parameter(1e4 ** -torch.linspace(0, 1, 8))

    def angles(x, at, rates):
        rates = rates if of == "arguments" else model.rates
        outer = torch.tensordot(at, rates, 0) if form == "tensordot" else torch.einsum(form, at, rates)
        return model.linear(x) * outer.cos()

    x, at = torch.randn(600, 8), torch.arange(600.0)
    for dtype in DTYPES:
        model = Fn(angles, linear=nn.Linear(8, 8)).eval()
        model.rates = nn.Parameter(frequencies.detach().clone())
        with torch.no_grad():
            expected = model(x, at, frequencies)
            amp = ampgraph.convert(model, (x, at, frequencies.detach()), policy=policy_of(level, dtype))
            error = (amp(x, at, frequencies.detach()) - expected).norm() / expected.norm()
        assert error <= CLOSE[dtype]


EQUATIONS = {
    "i,j->ij": (1, (4,), (5,)),
    "i , j": (1, (4,), (5,)),
    "ik,kj": (3, (4, 3), (3, 5)),
    "...k,kj": (3, (2, 4, 3), (3, 5)),
    "b...k,...kj->b...j": (3, (2, 4, 3), (4, 3, 5)),
    "...k,k->k": (8, (2, 4, 3), (3,)),
    "...,...->": (12, (3, 4), (4,)),
    "ii": (4, (4, 4)),
    "bi,bj->": (24, (2, 3), (2, 4)),
    "i...,i...->...": (4, (4, 1), (4, 5)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_how_many_products_an_einsum_adds_up(equation):
    expected, *shapes = EQUATIONS[equation]
    graph = fx.Graph()
    operands = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    for node, shape in zip(operands, shapes, strict=True):
        node.meta["val"] = torch.ones(shape)
    assert terms(graph.call_function(torch.ops.aten.einsum.default, (equation, operands))) == expected
    # Of ones, every element of the result is the number of its products.
    result = torch.einsum(equation, *(torch.ones(shape) for shape in shapes))
    assert set(result.flatten().tolist()) == {expected}


# -- precedence and reach ----------------------------------------------------------------------------------


def decisions(model: nn.Module, *inputs: torch.Tensor, **policy) -> dict[str, str]:
    """Who decided, by node."""
    policy = {"dtype": torch.bfloat16, "loss_scale": NoLossScale(), **policy}
    amp = ampgraph.convert(model, inputs, policy=Policy(**policy), backend="eager")
    return {name: d.by for name, d in amp.plan.decisions.items()}


def outer_product(x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(x.shape[-1]).float()
    return x @ F.linear(at[:, None], at[:, None]).cos()


def test_a_rule_stands_above_a_hazard_and_a_hazard_above_the_lists():
    x = torch.randn(4, 8)
    assert decisions(Fn(outer_product), x)["linear"] == "hazard"
    assert decisions(Fn(outer_product), x, rules={"linear": "low"})["linear"] == "rule"
    assert decisions(Fn(outer_product), x, hazards=False)["linear"] == "list"
    white = OpLists.default().with_white("aten.linear")
    assert decisions(Fn(outer_product), x, ops=white)["linear"] == "hazard"


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_guard_stands_above_a_hazard(level):
    def guarded(x):
        with ampgraph.fp16_guard():
            return outer_product(x)

    assert decisions(Fn(guarded), torch.randn(4, 8), level=level)["linear"] == "guard"


def test_a_low_op_that_a_guard_makes_of_positions_ends_their_exactness():
    def guarded(x):
        at = torch.arange(x.shape[-1]).float()
        with ampgraph.fp16_guard():
            at = at * 1.5
        return x @ (at[:, None] * at).cos()

    found = decisions(Fn(guarded), torch.randn(4, 8), level="O2", use_fp16_guard=False)
    assert found["mul_1"] == "hazard"
    found = decisions(Fn(guarded), torch.randn(4, 8), level="O2", use_fp16_guard=None)
    assert (found["mul"], found["mul_1"]) == ("guard", "guard")


def test_the_reason_names_the_node_that_needs_it():
    def model(x):
        return x @ x.T, (x * 3.7 + 0.5).round().long()

    amp = ampgraph.convert(Fn(model), (torch.randn(4, 8),), policy=policy_of("O2", torch.bfloat16))
    assert amp.plan["mul"].because == amp.plan["round_1"].because == ("to",)
    assert amp.plan["mul"].reason == "'to' makes int64 of it, and no low op feeds it"


# -- what float32 results and exact values make: y is float32, but a low op feeds it ------------------------

JOINS = {
    "beside": lambda z, y: torch.cat([z, y]),
    "in order": lambda z, y: torch.cat([z, y.detach()]).sort(0)[0],
    "one of both": lambda z, y: torch.where(y > 0.06, z, y),
    "the larger": torch.maximum,
    "bounds": lambda z, y: z.clamp(min=y),
    "a row of it": lambda z, y: z.clone().index_copy(0, torch.tensor([1]), y[:1]),
    "written into it": lambda z, y: _written(z.clone(), y),
    "picked by it": lambda z, y: z.gather(0, y.argsort(0)),
    "a factor": lambda z, y: z * y,
    "an offset": lambda z, y: z + y,
    "an offset of low dtype": lambda z, y: z + F.linear(y, torch.eye(WIDTH)),
}
READERS = {
    "cells": lambda t: (t * 128).floor().long().remainder(1024).sum(-1),
    "angles": lambda t: (t * 128).sin(),
}


def _written(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z[1:] = y[1:]
    return z


def joined(self, y, z, join, reader):
    t = JOINS[join](z, y.softmax(-1))
    read = READERS[reader](drawn_out(t))
    return y + (F.embedding(read, self.table) if read.dtype is torch.long else read)[: len(y)]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("join", JOINS)
def test_what_joins_exact_values_does_not_round_them(join, reader):
    model = Model(functools.partial(joined, join=join, reader=reader))
    inputs = torch.randn(8, WIDTH), 40 * torch.rand(8, WIDTH)
    for dtype in DTYPES:
        amp = ampgraph.convert(model, inputs, policy=policy_of("O2", dtype), backend="eager")
        names = [node.name for node in amp.graph_module.graph.nodes]
        first = names.index("softmax") + 1
        read = [name for name in names[first:] if amp.plan.decisions.get(name)]
        between = read[: next(i for i, name in enumerate(read) if name.startswith(("floor", "sin")))]
        rounded = [n for n in between if amp.plan[n].dtype is dtype and not n.startswith("linear")]
        assert not rounded, amp.plan[rounded[0]]


def test_the_reason_says_what_autocast_does():
    def model(x, z):
        return (torch.cat([z, (x @ x.T).softmax(-1)]) * 99.7).round().long()

    amp = ampgraph.convert(Fn(model), (X := torch.randn(4, 4), X), policy=policy_of("O2", torch.bfloat16))
    assert amp.plan["cat"].reason == "'to' makes int64 of it, and torch.autocast computes it in float32"


# -- differences: values near 1000 that differ by about 1 ---------------------------------------------------

DIFFERENCES = {
    "the mean": lambda t: t - t.mean(-1, keepdim=True),
    "the first": lambda t: t - t[:, :1],
    "of neighbours": lambda t: F.pad(t[:, 1:] - t[:, :-1], (0, 1)),
    "of all pairs": lambda t: (t[:, None] - t[None]).mean(0),
    "a number": lambda t: t - 1000.0,
    "from a number": lambda t: 1000.0 - t,
    "the whole part": lambda t: t - t.floor(),
    "in a sum": lambda t: (t * 1.5 - t.amax(-1, keepdim=True) * 1.5) * 0.5 + 0.1,
}


class Difference(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.net, self.out = name, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, t):
        return self.out(drawn_out(self.net(x) * DIFFERENCES[self.name](t)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_of_inputs_are_those_of_float32(name, backend):
    torch.manual_seed(0)
    model, inputs = Difference(name), (torch.randn(8, WIDTH), 1000 + torch.rand(8, WIDTH).cumsum(-1))
    expected = model(*inputs)
    for dtype in DTYPES:
        graph = graph_for(backend, model, inputs, dtype)
        assert (graph(*inputs) - expected).norm() <= 8 * torch.finfo(dtype).eps * expected.norm()


def test_a_difference_to_the_whole_part_of_a_predicted_position():
    def model(x, z):
        at = (z + (x @ x.T).softmax(-1)) * 99.7
        weights = at - at.floor()
        return (x @ x.T) * drawn_out(weights), at.floor().long()

    found = decisions(Fn(model), torch.randn(8, 8), torch.rand(8, 8), level="O2")
    assert {name: found[name] for name in ("add", "floor", "sub")} == dict.fromkeys(
        ("add", "floor", "sub"), "hazard"
    )


ON_INPUTS = {
    "one minus": lambda t: torch.log(1 - t / 1e4),
    "an odd": lambda t: torch.log(t / 1e4 / (1 - t / 1e4)),
    "a return": lambda t: (t[:, 1:] / t[:, :-1] - 1) * 1e3,
    "a negative factor": lambda t: torch.add(t, t.mean(-1, keepdim=True), alpha=-1),
    "a negative mean": lambda t: t + -t.mean(-1, keepdim=True),
    "gradient": lambda t: torch.gradient(t, dim=-1)[0],
    "cross": lambda t: torch.cross(t[:, :3], t[:, 3:6], dim=-1),
    "variance": lambda t: (t * t).mean(-1, keepdim=True) - t.mean(-1, keepdim=True) ** 2,
    "layer norm": lambda t: F.layer_norm(t, t.shape[-1:]),
    "group norm": lambda t: F.group_norm(t, 2),
    "batch norm": lambda t: F.batch_norm(t, None, None, training=True),
    "instance norm": lambda t: F.instance_norm(t[:, None])[:, 0],
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ON_INPUTS)
def test_arithmetic_on_inputs_is_that_of_float32(name, backend):
    torch.manual_seed(0)
    t = 1000 + torch.rand(8, WIDTH).cumsum(-1) + torch.rand(8, 1)
    model = Then(ON_INPUTS[name], ON_INPUTS[name](t).shape[-1])
    expected = model(t)
    for dtype in DTYPES:
        graph = graph_for(backend, model, (t,), dtype)
        assert (graph(t) - expected).norm() <= 8 * torch.finfo(dtype).eps * expected.norm()


class Then(nn.Module):
    """A function of the input, and a layer that reads it."""

    def __init__(self, function: Callable, width: int) -> None:
        super().__init__()
        self.function, self.out = function, nn.Linear(width, WIDTH)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return self.out(self.function(t))


class Points(nn.Module):
    """A function of embeddings in the unit ball, and of low features of them."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.points, self.net = nn.Embedding(32, 4), nn.Linear(4, 4)
        nn.init.uniform_(self.points.weight, 0.05, 0.1)
        self.function = function

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.points(ids))


def hyperbolic_distance(model: Points, p: torch.Tensor) -> torch.Tensor:
    q = p.flip(0)
    gap = (p - q).square().sum(-1) / ((1 - p.square().sum(-1)) * (1 - q.square().sum(-1)))
    return torch.acosh(1 + 2 * gap + 1e-6)


def evidence(model: Points, p: torch.Tensor) -> torch.Tensor:
    """Of a Gaussian process over low features, whose matrix is nearly singular."""
    distances = torch.cdist(model.net(p), model.net(p)).square()
    covariance = drawn_out(2.0 * torch.exp(-distances / 2)) + 0.002 * torch.eye(len(p))
    return torch.linalg.cholesky(covariance).diagonal().log()


def transmittance(model: Points, p: torch.Tensor) -> torch.Tensor:
    """Of a ray through thin fog: a product of 1,024 factors near 1, which weighs colours."""
    stopped = 1 - torch.exp(-F.softplus(model.net(p)).repeat(32, 1) * 0.01)
    passed = torch.cumprod(torch.cat([torch.ones(1, 4), 1 - stopped + 1e-10]), 0)[:-1]
    return (stopped * passed * torch.sigmoid(model.net(p)).repeat(32, 1)).sum(0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [hyperbolic_distance, evidence, transmittance])
def test_what_leads_into_a_logarithm_a_solver_or_a_long_product(function, backend):
    torch.manual_seed(0)
    model, ids = Points(function), torch.arange(32)
    expected = model(ids)
    for dtype in DTYPES:
        graph = graph_for(backend, model, (ids,), dtype)
        assert (graph(ids) - expected).norm() <= 8 * torch.finfo(dtype).eps * expected.norm()


# -- sums of exact and low values that are results ---------------------------------------------------------


def euler(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for _ in range(50):
        x = x + 0.002 * net(x - 300)
    return x


RESULTS = {
    "a forecast": lambda net, x: net(x - x.mean(-1, keepdim=True)) * x.std() + x.mean(-1, keepdim=True),
    "a residual": lambda net, x: net(x - 300) + x,
    "a moved residual": lambda net, x: torch.cat([net(x - 300) + x.flip(0), x]).transpose(0, 1),
    "its part": lambda net, x: (net(x - 300) + x)[:, -4:] * 0.5,
    "trends": lambda net, x: net(x - 300) + (F.avg_pool1d(x, 3, 1, 1) + net(x - 300)),
    "small steps": euler,
    "joined": lambda net, x: torch.cat([x, net(x - 300)], 1),
    "stacked": lambda net, x: torch.stack([x, net(x - 300)]).sum(0),
    "summed up": lambda net, x: torch.cat([x[:, :1], 0.1 * net(x - 300)], 1).cumsum(1),
    "a position": lambda net, x: net(x - 300) + torch.arange(WIDTH) * 100.3,
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", RESULTS)
def test_a_sum_of_an_exact_and_a_low_value_is_an_exact_result(name, backend):
    """Rounding may change what the low ops computed, and not the exact value, which is much larger."""
    torch.manual_seed(0)
    net, x = nn.Linear(WIDTH, WIDTH), 300 + torch.randn(8, WIDTH)
    model = Fn(functools.partial(RESULTS[name], net))
    expected = model(x)
    for dtype in DTYPES:
        graph = graph_for(backend, model, (x,), dtype)
        assert (graph(x) - expected).abs().max() <= 8 * torch.finfo(dtype).eps


READ_BY_DIFFERENCES = {
    "neighbours": lambda net, x, y: (x + net(x - 300)).diff(dim=1).relu(),
    "an error": lambda net, x, y: torch.tanh(y - (x + 0.1 * net(x - 300))),
    "a likelihood": lambda net, x, y: ((y - (x + 0.1 * net(x - 300))) ** 2 * (-net(x - 300)).exp()).mean(),
    "a size of a box": lambda net, x, y: drawn_out((x + net(x - 300))[:, 8:] - (y + net(x - 300))[:, :8]) * 2,
    "an update": lambda net, x, y: net((x + net(x - 300)) - x),
    "blocks": lambda net, x, y: net((rest := x - 0.1 * net(x - 300)) - rest[:, -1:]),
    "a norm of a result": lambda net, x, y: (z := x + net(x - 300), net(F.layer_norm(z, (WIDTH,)))),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", READ_BY_DIFFERENCES)
def test_a_difference_from_a_sum_of_an_exact_and_a_low_value(name, backend):
    torch.manual_seed(0)
    net, x = nn.Linear(WIDTH, WIDTH), 300 + torch.randn(8, WIDTH)
    inputs = x, x + 0.1 * torch.randn_like(x)
    model = Fn(functools.partial(READ_BY_DIFFERENCES[name], net))
    expected = tree_leaves(model(*inputs))[-1]
    for dtype in DTYPES:
        found = tree_leaves(graph_for(backend, model, inputs, dtype)(*inputs))[-1]
        assert (found - expected).norm() <= 16 * torch.finfo(dtype).eps * expected.norm()


def test_the_noise_that_a_denoiser_predicts():
    def model(net, x, scale):
        denoised = x / (1 + scale**2) + net(x) * scale
        return (x - denoised) / scale

    torch.manual_seed(0)
    net, x, scale = nn.Linear(WIDTH, WIDTH), 3 * torch.randn(8, WIDTH), torch.tensor(0.01)
    source = Fn(functools.partial(model, net))
    expected = source(x, scale)
    for dtype in DTYPES:
        graph = graph_for("aot_eager", source, (x, scale), dtype)
        assert (graph(x, scale) - expected).norm() <= 8 * torch.finfo(dtype).eps * expected.norm()


def test_a_loss_of_a_forecast():
    def model(net, x, y):
        forecast = net(x - x.mean()) + x.mean(-1, keepdim=True)
        return F.mse_loss(forecast, y), (forecast - y).abs().mean()

    found = decisions(
        Fn(functools.partial(model, nn.Linear(8, 8))), torch.randn(4, 8), torch.randn(4, 8), level="O2"
    )
    assert (found["add"], found["sub_1"]) == ("hazard", "hazard")


NOTHING_TO_PIN = {
    "a factor of what is low": lambda x: ((x @ x.T) * 1.7 + 0.5).sin() @ x,
    "mask": lambda x: (x @ x.T) + (1 - torch.ones(4, 4).tril()) * -1e4,
    "padding": lambda x: (x @ x.T).masked_fill(torch.arange(4)[:, None] > torch.arange(4), -1e4).softmax(-1),
    "scaled": lambda x: (x.relu() * 2 / 255) @ x.T,
    "scale": lambda x: x @ x.T * torch.tensor(64.0).rsqrt() * torch.tensor(2.0),
    "mask of low values": lambda x: (x @ x.T) * ((x @ x.T) * 2 > 0),
    "low statistics": lambda x: ((x @ x.T) - (x @ x.T).mean(-1, keepdim=True)) @ x,
    "a sum that a norm reads": lambda x: F.layer_norm((x @ x.T @ x) + x, (8,)),
    "a sum that a low value scales": lambda x: ((x @ x.T @ x) + x) * (x @ x.T @ x),
    "a sum of low values": lambda x: (x @ x.T) + (x @ x.T).relu(),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", NOTHING_TO_PIN)
def test_nothing_is_pinned_that_needs_nothing(name, level):
    found = decisions(Fn(NOTHING_TO_PIN[name]), torch.randn(4, 8), level=level)
    assert "hazard" not in found.values()


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_a_residual_stream_runs_low(norm):
    def model(x):
        for _ in range(2):
            x = x + norm(x, (8,)) @ torch.ones(8, 8)
        return x

    found = decisions(Fn(model), torch.randn(4, 8), level="O2")
    assert {found[name] for name in ("add", "add_1")} == {"placement"}


def test_long_products_of_tables_are_matrix_products():
    """The weights of a frozen model may be buffers, and its inputs integers."""

    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.randn(32, 64))
            self.register_buffer("weight", torch.randn(64, 64))

        def forward(self, ids):
            return F.linear(F.linear(F.embedding(ids, self.table), self.weight), self.weight)

    found = decisions(Frozen(), torch.arange(5))
    assert (found["linear"], found["linear_1"]) == ("list", "list")


def test_what_is_measured_and_written_into_a_buffer_is_no_table():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.zeros(8))

        def forward(self, x):
            scaled = self.state * 1.5 + 0.5
            self.state.copy_(x.detach().mean(0))
            return x @ x.T, scaled * 2.5

    found = decisions(Running(), torch.randn(4, 8), level="O2")
    assert {found[name] for name in ("mul", "add", "mul_1")} == {"placement"}


def test_an_undone_plan_is_made_again_with_its_tables():
    torch._dynamo.reset()
    model = case(rotary_matmul).amp.source
    amp = ampgraph.convert(model, policy=policy_of("O1", torch.bfloat16), backend="eager")
    amp(*case(rotary_matmul).inputs)
    plan = replanned(amp.graph_module, amp.plan, amp.policy)[1]
    assert {n: d.by for n, d in plan.decisions.items()} == {n: d.by for n, d in amp.plan.decisions.items()}
    assert "hazard" in {d.by for d in plan.decisions.values()}


RETURNED = {
    "mean": lambda x: torch.cat([x, x.mean(1, keepdim=True)], 1),
    "product": lambda x: torch.cat([x, x * 1.1], 1),
    "moves": lambda x: torch.stack([x, x.flip(1)]),
    "maximum": lambda x: torch.maximum(x - 1.3, x.flip(1)),
    "where": lambda x: torch.where(x > 50, x * 1.1, x),
}


@pytest.mark.parametrize("just_in_time", [False, True])
@pytest.mark.parametrize("name", RETURNED)
def test_a_result_that_no_low_op_feeds_is_exact(name, just_in_time):
    """It may not read the low copy that a layer needs of the same input."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x), RETURNED[name](x)

    x = torch.randn(8, 24, 4) * 3 + 50
    policy = Policy("O2", dtype=torch.bfloat16)
    amp = ampgraph.convert(Both(), None if just_in_time else (x,), policy=policy, backend="eager")
    torch.testing.assert_close(amp(x)[1], RETURNED[name](x), rtol=0, atol=0)
