"""O1 is never less precise than the autocast rule on the same lists, and never moves more bytes.

Precision is compared symbolically. A value is a term: an op over the terms of what it reads, marked when it
is rounded to low. Rounding passes through clear ops (they only move values) and is idempotent. A term is no
less precise than another if it is the same computation with fewer or equal roundings.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch.fx import Node

from ampgraph import Policy
from ampgraph.ops.lists import OpClass
from ampgraph.passes.analysis.facts import OperandRule
from ampgraph.passes.analysis.precision import Precision
from ampgraph.passes.analysis.problem import Problem
from ampgraph.passes.place import autocast_rule, place_within
from ampgraph.policy.policy import OBJECTIVES

from .brute_force import Labels, allowed, is_low, moved
from .cases import one_in
from .helpers import LOW, GraphBuilder, aten, optimal, problem_of, random_graph

BLOCKS, PER_BLOCK = 8, 50


class Term(NamedTuple):
    """What one node computes: rounded at its own output or not (clear ops: never), from which terms."""

    node: str
    clear: bool
    rounded: bool
    parts: tuple[Term, ...]


def rounded(term: Term) -> Term:
    if term.clear:
        return term._replace(parts=tuple(map(rounded, term.parts)))
    return term._replace(rounded=True)


def no_less_precise(a: Term, b: Term) -> bool:
    assert (a.node, len(a.parts)) == (b.node, len(b.parts))
    if a.rounded and not b.rounded:
        return False
    return all(map(no_less_precise, a.parts, b.parts))


class Dataflow:
    """The term of every node, and the term that every operand delivers, under one labelling."""

    def __init__(self, problem: Problem, labels: Labels) -> None:
        self.problem, self.labels = problem, labels
        self.terms: dict[Node, Term] = {}
        self.delivered: dict[tuple[Node, int], Term] = {}
        for node, fact in problem.facts.items():
            if fact.dtype_source is not node:
                self.terms[node] = self.terms[fact.dtype_source]
                continue
            for i, operand in enumerate(fact.operands):
                self.delivered[node, i] = self._deliver(node, operand)
            parts = tuple(self.delivered[node, i] for i in range(len(fact.operands)))
            clear = fact.op_class is OpClass.CLEAR and bool(parts) and node in problem.variables
            term = Term(node.name, clear, False, parts)
            rounds = labels.get(node) is Precision.LOW and node.op == "call_function"
            self.terms[node] = rounded(term) if rounds else term

    def _deliver(self, node: Node, operand) -> Term:
        term = self.terms[operand.tensor]
        has = is_low(self.problem, self.labels, operand.tensor)
        if operand.rule is OperandRule.EITHER:
            needs_low = has
        elif operand.rule is OperandRule.SOURCE_DTYPE:
            needs_low = self.problem.facts[operand.tensor].dtype == self.problem.low_dtype
        else:
            needs_low = self.labels.get(node) is Precision.LOW
        return rounded(term) if needs_low and not has else term


def violations(problem: Problem, labels: Labels) -> list[str]:
    """Lists the reads at which ``labels`` delivers a value with more roundings than the autocast rule does.

    A clear op that is low for the sake of its low consumers reads a value rounded early; that is compared
    where its consumers read it.
    """
    ours, theirs = Dataflow(problem, labels), Dataflow(problem, autocast_rule(problem).labels)
    found = []
    for (node, i), term in ours.delivered.items():
        if ours.labels.get(node) is Precision.LOW and problem.facts[node].op_class is OpClass.CLEAR:
            continue
        if not no_less_precise(term, theirs.delivered[node, i]):
            found.append(f"{node.name} reads {term.node} with more roundings")
    return found


def fp32_reads_rounded(problem: Problem, labels: Labels) -> list[str]:
    """Lists float32 values that reach a float32 consumer through low clear ops only: rounded on the way."""
    found = []
    for node, fact in problem.facts.items():
        if labels.get(node) is Precision.LOW:
            continue
        for operand in fact.operands:
            if operand.rule is OperandRule.SOURCE_DTYPE and fact.dtype is None and node.op != "output":
                continue
            found += [
                f"{node.name} <- {origin.name}"
                for origin in narrowed_origins(problem, labels, operand.tensor)
            ]
    return found


def narrowed_origins(problem: Problem, labels: Labels, tensor: Node) -> list[Node]:
    """The float32 tensors that low clear ops behind ``tensor`` have rounded."""
    owner = problem.facts[tensor].dtype_source
    fact = problem.facts[owner]
    chosen = problem.variables[owner].by in ("placement", "propagation")
    if not (labels[owner] is Precision.LOW and chosen and fact.op_class is OpClass.CLEAR):
        return []
    found = []
    for operand in fact.operands:
        if is_low(problem, labels, operand.tensor):
            found += narrowed_origins(problem, labels, operand.tensor)
        elif operand.rule is not OperandRule.EITHER:
            found.append(operand.tensor)
    return found


class Case(NamedTuple):
    seed: int
    problem: Problem
    labels: dict[str, Labels]


def autocast_bytes(problem: Problem) -> int:
    """Activation bytes that torch.autocast casts: at each use anew."""
    rule = autocast_rule(problem)
    return moved(problem, rule.labels, rule.anchors, shared=False).activation_cast_bytes


@cache
def cases(block: int) -> list[Case]:
    """Random graphs, each placed for every objective."""
    made = []
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        graph_module = random_graph(seed, steps=8 + seed % 7)
        problem = problem_of(graph_module, Policy(level="O1", keep_io_dtypes=seed % 4 != 0))
        labels = {o: optimal(problem, o).labels for o in OBJECTIVES}
        made.append(
            Case(seed, problem, {**labels, "default": place_within(problem, autocast_bytes(problem)).labels})
        )
    return made


@pytest.mark.parametrize("block", one_in(4, range(BLOCKS)))
def test_never_less_precise_than_the_autocast_rule(block):
    for seed, problem, by_objective in cases(block):
        for objective, labels in by_objective.items():
            assert violations(problem, labels) == [], f"seed {seed}, {objective}"


@pytest.mark.parametrize("block", one_in(4, range(BLOCKS)))
def test_no_fp32_value_is_rounded_on_its_way_to_an_fp32_consumer(block):
    for seed, problem, by_objective in cases(block):
        for objective, labels in by_objective.items():
            assert fp32_reads_rounded(problem, labels) == [], f"seed {seed}, {objective}"


@pytest.mark.parametrize("block", one_in(4, range(BLOCKS)))
def test_never_more_bytes_than_the_autocast_rule(block):
    for seed, problem, _ in cases(block):
        rule = autocast_rule(problem)
        theirs = moved(problem, rule.labels, rule.anchors)
        for placed in (optimal(problem, "traffic"), place_within(problem, autocast_bytes(problem))):
            assert moved(problem, placed.labels, placed.anchors).traffic <= theirs.traffic, f"seed {seed}"
        assert moved(problem, placed.labels, placed.anchors).activation_cast_bytes <= autocast_bytes(problem)


def cut_down_to_a_slice():
    """A float32 join of a low value and a large float32 one, of which little is read in low."""
    build = GraphBuilder()
    x, large = build.input(8, 64), build.input(8, 64)
    low = build.call(aten.relu.default, build.call(aten.linear.default, x, build.weight(64, 64)))
    joined = build.call(aten.cat.default, [low, large], 1)
    part = build.call(aten.slice.Tensor, joined, 1, 0, 2)
    return build.finish(build.call(aten.linear.default, part, build.weight(64, 2)))


def test_never_more_bytes_where_little_of_a_join_is_read():
    problem = problem_of(cut_down_to_a_slice(), Policy(level="O1"))
    rule, placed = autocast_rule(problem), optimal(problem, "traffic")
    theirs = moved(problem, rule.labels, rule.anchors)
    assert moved(problem, placed.labels, placed.anchors).traffic <= theirs.traffic
    assert violations(problem, placed.labels) == []


def test_the_comparison_sees_a_rounded_value():
    """The checker itself: narrowing a relu that float32 code reads is found by both criteria."""
    build = GraphBuilder()
    relu = build.call(aten.relu.default, build.input(4, 4))
    problem = problem_of(build.finish(build.call(aten.exp.default, relu)), Policy(level="O1"))
    labels = {**autocast_rule(problem).labels, relu: Precision.LOW}
    assert not allowed(problem, labels)
    assert violations(problem, labels)
    assert fp32_reads_rounded(problem, labels)
    assert problem.low_dtype == LOW


def test_a_precision_is_no_truth_value():
    """``if labels[node]`` would take float32 for low."""
    assert Precision.of(LOW, LOW) is Precision.LOW is Precision.of(torch.float32, LOW).other
    assert [p.dtype(LOW) for p in Precision] == [LOW, torch.float32]
    with pytest.raises(TypeError, match="compare"):
        bool(Precision.FP32)
