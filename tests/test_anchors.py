"""Anchors: float32 ops that promote need one float32 operand, and which one is chosen exactly."""

from __future__ import annotations

import copy
import itertools
import random

import numpy
import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ampgraph import Policy
from ampgraph.passes import ClassifyOps, PropagatePrecision, workspace
from ampgraph.passes.analysis.facts import OperandRule
from ampgraph.passes.analysis.precision import Precision
from ampgraph.passes.place import place_optimally
from ampgraph.passes.placement import labelling
from ampgraph.passes.placement.choices import Search
from ampgraph.passes.placement.cost_model import cost_of
from ampgraph.passes.placement.min_cut import INFINITE, SINK, SOURCE, CutNetwork

from .cases import one_in

aten = torch.ops.aten
LOW = torch.bfloat16
OBJECTIVES = {
    "traffic": lambda cost: cost.traffic,
    "cast_bytes": lambda cost: cost.cast_bytes * 10**9 + cost.traffic,
    "casts": lambda cost: cost.casts * 10**9 + cost.traffic,
}


class Builder:
    """Writes an ATen graph node by node, with fake values."""

    def __init__(self):
        self.graph, self.mode = fx.Graph(), FakeTensorMode()

    def input(self, *shape, dtype=torch.float32):
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def call(self, op, *args):
        node = self.graph.call_function(op, args)
        with self.mode:
            node.meta["val"] = op(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    def problem(self, outputs, level="O2", keep_io_dtypes=False):
        self.graph.output(tuple(outputs))
        return problem_of(self.graph, level, keep_io_dtypes)


def problem_of(graph, level, keep_io_dtypes=False):
    graph_module = fx.GraphModule(torch.nn.Module(), graph)
    policy = Policy(level, dtype=LOW, keep_io_dtypes=keep_io_dtypes)
    ClassifyOps(policy)(graph_module)
    PropagatePrecision(policy)(graph_module)
    return workspace(graph_module).problem


def random_graph(seed, steps):
    """Products in low, promoting ops over them, and black ops that want float32."""
    rng, build = random.Random(seed), Builder()
    x, weight = build.input(4, 8), build.input(8, 8)
    mask = build.input(4, 8, dtype=torch.bool)
    row = build.call(aten.linear.default, build.input(1, 8), weight)
    pool = [build.call(aten.linear.default, x, weight), build.call(aten.linear.default, x, weight), row]
    for _ in range(steps):
        a, b = rng.choice(pool[-4:]), rng.choice(pool)
        kind = rng.randrange(9)
        if kind < 4:
            op = (aten.sub, aten.add, aten.mul)[kind % 3].Tensor if kind else aten.maximum.default
            pool.append(build.call(op, a, b))
        elif kind == 4:
            pool.append(build.call(aten.where.self, mask, a, b))
        elif kind == 5:
            pool.append(build.call(aten.cat.default, [a, b, rng.choice(pool)]))
            pool[-1] = build.call(aten.slice.Tensor, pool[-1], 0, 0, 4)
        elif kind == 6:
            pool.append(build.call(aten.gelu.default, a))
        else:
            pool.append(build.call(aten.exp.default, a))
        if pool[-1].meta["val"].shape[0] not in (1, 4):
            pool[-1] = build.call(aten.slice.Tensor, pool[-1], 0, 0, 1)
    used = {n for node in build.graph.nodes for n in node.all_input_nodes}
    return build, [n for n in pool if n not in used]


class Prices:
    """What labellings cost: each value is an array with one number for each labelling."""

    def __init__(self, problem, low):
        self.facts, self.low = problem.facts, low
        self.traffic, self.fixed = 0, {}
        for node, fact in self.facts.items():
            if fact.moves_data and fact.dtype is not None:
                self.traffic += fact.elements * numpy.where(self._is_low(node), 2, 4)
            for operand in fact.operands:
                self._add(node, operand, fact.moves_data)

    def _is_low(self, tensor):
        return self.low[self.facts[tensor].dtype_source]

    def _add(self, node, operand, moves_data):
        tensor, rule = operand.tensor, operand.rule
        want = have = self._is_low(tensor)
        if rule is OperandRule.SOURCE_DTYPE:
            want = numpy.full_like(have, self.facts[tensor].dtype == LOW)
        elif rule is OperandRule.NODE_DTYPE:
            want = self.low[node]
        elif rule is not OperandRule.EITHER:
            want = have | self.low[node]
        if moves_data:
            read = {
                OperandRule.SOURCE_DTYPE: numpy.zeros_like(have),
                OperandRule.NODE_DTYPE: self.low.get(node, numpy.zeros_like(have)),
            }.get(rule, have)
            self.traffic += self.facts[tensor].elements * numpy.where(read, 2, 4)
        self.fixed[tensor] = self.fixed.get(tensor, False) | (want != have)

    def _lacking(self):
        """Returns (operands, where): where it is True, one of these operands has to be cast."""
        found = [((), numpy.zeros_like(self.traffic, dtype=bool))]
        for node, is_low in self.low.items():
            operands = {s.tensor for s in self.facts[node].operands if s.rule is OperandRule.PROMOTED}
            if operands:
                where = numpy.logical_and.reduce([~is_low, *map(self._is_low, operands)])
                found.append((sorted(operands, key=str), where))
        return found

    def of_every_choice(self):
        """Yields arrays (traffic, cast bytes, casts): every labelling with every choice of anchors."""
        operands, table = zip(*self._lacking(), strict=True)
        table = numpy.array(table)
        weights = {tensor: 6 * fact.elements for tensor, fact in self.facts.items()}
        moved = sum(weights[tensor] * is_cast for tensor, is_cast in self.fixed.items())
        casts = sum(is_cast.astype(int) for is_cast in self.fixed.values())
        for pattern in numpy.unique(table, axis=1).T:
            rows = (table == pattern[:, None]).all(axis=0)
            for chosen in itertools.product(*itertools.compress(operands, pattern)):
                added = {tensor: ~self.fixed[tensor][rows] for tensor in chosen}
                more = sum(weights[tensor] * is_cast for tensor, is_cast in added.items())
                yield (
                    self.traffic[rows] + moved[rows] + more,
                    moved[rows] + more,
                    casts[rows] + sum(added.values()),
                )


def brute_force(problem):
    free = [n for n, v in problem.variables.items() if v.pinned is None]
    sides = numpy.array([*itertools.product((True, False), repeat=len(free))]).reshape(
        2 ** len(free), len(free)
    )
    low = {n: numpy.full(len(sides), v.pinned is Precision.LOW) for n, v in problem.variables.items()}
    low |= dict(zip(free, sides.T, strict=True))
    allowed = numpy.ones(len(sides), dtype=bool)
    for node in free:
        allowed &= _allowed(problem, node, low) | ~low[node]
    found = [*Prices(problem, {n: of[allowed] for n, of in low.items()}).of_every_choice()]
    return {
        "traffic": min(t.min() for t, _, _ in found),
        "cast_bytes": min((b * 10**9 + t).min() for t, b, _ in found),
        "casts": min((c * 10**9 + t).min() for t, _, c in found),
    }


def _allowed(problem, node, low):
    variable, facts = problem.variables[node], problem.facts
    follows = [low[facts[s.tensor].dtype_source] for s in facts[node].operands if s.follow]
    return numpy.logical_and.reduce([numpy.ones_like(low[node]), *(follows if variable.follows else ())])


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("block", one_in(4, range(10)))
def test_equals_brute_force(level, block):
    anchored = 0
    for seed in range(block * 20, block * 20 + 20):
        build, outputs = random_graph(seed, 5 + seed % 5)
        problem = build.problem(outputs, level, keep_io_dtypes=seed % 3 == 0)
        expected = brute_force(problem)
        for objective, weigh in OBJECTIVES.items():
            found = place_optimally(problem, weigh)
            assert found.optimal
            assert weigh(cost_of(problem, found.labels, found.anchors)) == expected[objective], (
                seed,
                objective,
            )
            anchored += bool(found.anchors)
    assert level == "O1" or anchored


def random_network(seed, rename=lambda v: v, shuffle=None):
    rng, network = random.Random(seed), CutNetwork()
    heads, options = [f"h{i}" for i in range(rng.randint(1, 4))], [f"o{i}" for i in range(rng.randint(3, 6))]
    ends = [SOURCE, *heads, *options, SINK]
    top = rng.choice([2, 4, 30])
    arcs = [(u, v, rng.randint(1, top)) for u in ends for v in ends if u != v and rng.random() < 0.3]
    arcs = [(u, v, c) for u, v, c in arcs if u != SINK and v != SOURCE]
    choices = [(h, rng.sample(options, rng.randint(2, 3))) for h in (*heads, SINK) if rng.random() < 0.9]
    if shuffle:
        for items in (arcs, choices, *(o for _, o in choices)):
            shuffle.shuffle(items)
    for arc in arcs:
        network.add_arc(*arc)
    for head, chosen in choices:
        network.add_choice(f"choice of {head}", head, chosen)
    return network, arcs, choices


@pytest.mark.parametrize("budget", [10**6, 0], ids=["eliminate", "no budget"])
def test_networks_with_choices_equal_brute_force_in_any_order(budget):
    proven = 0
    for seed in range(400):
        network, arcs, choices = random_network(seed)
        vertices = list(network.vertices())
        least = INFINITE
        for sides in itertools.product((True, False), repeat=len(vertices)):
            low = {**dict(zip(vertices, sides, strict=True)), SOURCE: True, SINK: False}
            if all(low[h] or not all(low[o] for o in options) for h, options in choices):
                least = min(least, sum(c for u, v, c in arcs if low[u] and not low[v]))
        original = copy.deepcopy(network)
        cost, lower, found = Search(budget).solve(network)
        proven += cost == lower
        assert found.keys() == set(vertices)
        assert lower <= least <= cost == original.cost(found), seed
        assert all((h != SINK and found[h]) or not all(found[o] for o in opts) for h, opts in choices), seed
        shuffled, _, _ = random_network(seed, shuffle=random.Random(seed))
        assert Search(budget).solve(shuffled).sides == found, seed
    assert (proven == 400) is bool(budget)


def softmax_like(build, x, weight):
    scores = build.call(aten.linear.default, x, weight)
    top = build.call(aten.slice.Tensor, build.call(aten.linear.default, x, weight), 0, 0, 1)
    return build.call(aten.exp.default, build.call(aten.sub.Tensor, scores, top))


def test_two_hundred_independent_choices_are_proven_minimal():
    build = Builder()
    x, weight = build.input(4, 8), build.input(8, 8)
    problem = build.problem([softmax_like(build, x, weight) for _ in range(200)])
    placement = place_optimally(problem, OBJECTIVES["traffic"])
    assert placement.optimal
    assert len(placement.anchors) == 200
    assert all(anchor.target is aten.slice.Tensor for anchor in placement.anchors.values())


def test_a_chain_of_dependent_choices_is_proven_minimal():
    build = Builder()
    x, weight = build.input(4, 8), build.input(8, 8)
    state = build.call(aten.linear.default, x, weight)
    outputs = []
    for _ in range(200):
        key = build.call(aten.linear.default, x, weight)
        top = build.call(aten.maximum.default, state, key)
        outputs.append(build.call(aten.exp.default, build.call(aten.sub.Tensor, state, top)))
        state = top
    assert place_optimally(build.problem([*outputs, state]), OBJECTIVES["traffic"]).optimal


def test_past_the_limit_the_best_so_far_is_returned_and_not_called_optimal(monkeypatch):
    monkeypatch.setattr(labelling, "MAX_WORK", 0)
    limited = 0
    for seed in range(100):
        build, outputs = random_graph(seed, 9)
        problem = build.problem(outputs)
        placed = place_optimally(problem, OBJECTIVES["traffic"])
        value = cost_of(problem, placed.labels, placed.anchors).traffic
        least = brute_force(problem)["traffic"]
        assert value - placed.gap <= least <= value
        limited += not placed.optimal
    assert limited


def test_operand_and_output_order_do_not_matter():
    for seed in range(100):
        build, outputs = random_graph(seed, 12)
        plain = place_optimally(build.problem(outputs), OBJECTIVES["traffic"])
        other = fx.Graph()
        copies = {}
        for node in build.graph.nodes:
            copies[node] = other.node_copy(node, copies.__getitem__)
            if node.target in (aten.add.Tensor, aten.maximum.default, aten.sub.Tensor):
                copies[node].args = copies[node].args[::-1]
            elif node.op == "output":
                copies[node].args = (copies[node].args[0][::-1],)
        swapped = place_optimally(problem_of(other, "O2"), OBJECTIVES["traffic"])
        assert {n.name: s for n, s in plain.labels.items()} == {
            n.name: s for n, s in swapped.labels.items()
        }, seed
        assert {n.name: a.name for n, a in plain.anchors.items()} == {
            n.name: a.name for n, a in swapped.anchors.items()
        }, seed
