"""Random graphs at O1 and O2: values that no low op feeds reach every decision and position unrounded.

Values are terms, as in `test_precision_property`; what no low op feeds is found as in `exact_integers`.
"""

from __future__ import annotations

import pytest
import torch
from torch.fx import Node

from ampgraph import Policy
from ampgraph.ops.lists import OpClass
from ampgraph.passes.analysis.problem import Problem
from ampgraph.passes.place import autocast_rule

from .brute_force import Labels
from .exact_integers import integers_fed_by_no_low_op, positions
from .helpers import LOW, RandomGraph, aten, optimal, problem_of
from .test_precision_property import Dataflow, Term

BLOCKS, PER_BLOCK = 4, 10


class PositionalGraph(RandomGraph):
    """A random graph with positions, decisions about all kinds of values, and periodic functions."""

    def _positions(self, x: Node) -> Node | list[Node]:
        rows, columns = x.meta["val"].shape
        if 1 in (rows, columns):
            return []  # a single number is no position
        at = [self.build.call(aten.arange.default, n) for n in (rows, columns)]
        if self.rng.random() < 0.5:
            at = [self.build.call(aten.mul.Tensor, a, 0.37) for a in at]
            columns_of = [self.build.call(aten.unsqueeze.default, a, 1) for a in at]
            return self.build.call(aten.linear.default, *columns_of)
        distance = self.build.call(aten.sub.Tensor, self.build.call(aten.unsqueeze.default, at[0], 1), at[1])
        return self.build.call(aten.mul.Tensor, distance, 1.7)

    def _decide(self, x: Node) -> list[Node]:
        op = self.rng.choice(
            [aten.argmax.default, aten.isfinite.default, aten.sign.default, aten.floor.default]
        )
        made = self.build.call(op, x)
        if not made.meta["val"].dtype.is_floating_point:
            self.masks.append(made)
            return [x]
        return [made]

    def _as_integers(self, x: Node) -> list[Node]:
        self.masks.append(self.build.call(aten.to.dtype, x, torch.int64))
        return [x]

    def _periodic(self, x: Node) -> Node:
        return self.build.call(self.rng.choice([aten.sin.default, aten.cos.default]), x)

    STEPS = (
        *RandomGraph.STEPS,
        _positions,
        _positions,
        _positions,
        _decide,
        _decide,
        _as_integers,
        _periodic,
    )


def problems(block: int, level: str, **policy) -> list[tuple[int, Problem, set[str], set[str]]]:
    """Random problems with the integers and the positions that must be exact."""
    found = []
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        graph_module = PositionalGraph(seed, steps=8 + seed % 8).graph_module
        asked = Policy(level=level, keep_io_dtypes=seed % 3 != 0, **policy)
        problem = problem_of(graph_module, asked)
        integers = integers_fed_by_no_low_op(graph_module, asked, LOW)
        found.append((seed, problem, integers, positions(graph_module, asked, LOW)))
    return found


def is_rounded(term: Term) -> bool:
    return term.rounded or any(map(is_rounded, term.parts))


def rounded_reads(problem: Problem, labels: Labels, integers: set[str], tables: set[str]) -> list[str]:
    """Lists what reads a rounded value: exact integers, and arithmetic on positions."""
    flow, found = Dataflow(problem, labels), []
    for (node, _), term in flow.delivered.items():
        computes = problem.facts[node].op_class is not OpClass.CLEAR
        if node.name in integers or (node.name in tables and computes):
            found += [f"{node.name} <- {term.node}"] * is_rounded(term)
    return found


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("block", range(BLOCKS))
def test_what_no_low_op_feeds_is_exact(block, level):
    for seed, problem, integers, tables in problems(block, level):
        placed = {objective: optimal(problem, objective).labels for objective in ("traffic", "priced")}
        placed["autocast"] = autocast_rule(problem).labels
        for name, labels in placed.items():
            assert rounded_reads(problem, labels, integers, tables) == [], f"seed {seed}, {name}"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_without_the_analysis_it_is_not(level):
    """And the graphs have what there is to see."""
    rounded = compared = 0
    for _, problem, integers, tables in problems(0, level, hazards=False):
        labels = optimal(problem, "traffic").labels
        rounded += bool(rounded_reads(problem, labels, integers, tables))
        compared += bool(integers) + bool(tables)
    assert rounded
    assert compared > PER_BLOCK // 2
