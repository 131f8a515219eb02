"""A few hundred random modules, all invariants; `tools/fuzz.py` runs thousands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from ampgraph.passes import CleanCasts

from .fuzz_checks import NotConvertible, check_just_in_time, check_program
from .random_modules import HEADER, Program, programs

QUICK = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


# tools/fuzz.py takes thousands.
@pytest.mark.parametrize(("level", "count"), [("O1", 30), ("O2", 30), ("O3", 10)])
def test_random_modules(level, count):
    @settings(QUICK, max_examples=count)
    @given(programs(10))
    def convert(program):
        try:
            check_program(program, level)
        except NotConvertible:
            assume(False)

    convert()


def test_random_modules_just_in_time():
    @settings(QUICK, max_examples=10)
    @given(programs(8))
    def convert(program):
        torch._dynamo.reset()
        try:
            check_just_in_time(program, "O1")
        except NotConvertible:
            assume(False)

    convert()


def test_the_checks_see_a_lost_bias(monkeypatch):
    """The checker itself: a pass that drops a bias is found."""
    lines = "        v0 = self.first(x)\n        return {'v0': v0.relu()}\n"
    program = Program(HEADER.format(low="torch.bfloat16") + lines, torch.bfloat16, False, 0)
    assert check_program(program, "O1") == "low"

    def drop_biases(self, graph_module):
        for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
            node.args = node.args[:2]
        return True

    monkeypatch.setattr(CleanCasts, "run", drop_biases)
    with pytest.raises(AssertionError, match="instead of"):
        check_program(program, "O1")
