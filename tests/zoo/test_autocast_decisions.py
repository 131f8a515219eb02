"""``OpLists.torch()`` with ``placement="autocast"`` decides every op as torch's real CUDA autocast does.

The plan and the oracle see the same capture. The pipeline inlines sub-graphs, the oracle runs them in place,
so nodes are matched in execution order, and their ops are compared as a check on that.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

from ampgraph.passes import is_inserted_cast
from tests.zoo import models as zoo
from tests.zoo.measure import AUTOCAST, Subject

# Where torch's autocast departs from its own rule: (model, node) -> why.
EXCEPTIONS: dict[tuple[str, str], str] = {}

NAMES = zoo.names()


def calls(gm: fx.GraphModule, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name as the oracle writes it, op) of every op, sub-graphs in place."""
    for node in gm.graph.nodes:
        bodies = [gm._modules.get(arg.target) for arg in node.all_input_nodes if arg.op == "get_attr"]
        bodies = [body for body in bodies if isinstance(body, fx.GraphModule)]
        if bodies:
            yield from calls(bodies[0], f"{prefix}{node.name}.")
        elif isinstance(node.target, torch._ops.OpOverload):
            yield prefix + node.name, node.target


def packet(target: Any) -> str:
    return target._schema.name.rstrip("_")


def compare(name: str, dtype: torch.dtype) -> tuple[list[str], int]:
    """Returns the disagreements, and how many nodes were compared."""
    subject = Subject.of(name, "eval")
    amp = subject.convert(AUTOCAST, dtype)
    expected = subject.oracle(dtype)
    dropped = torch.ops.aten._assert_tensor_metadata.default
    captured = [(node, op) for node, op in calls(subject.program.module(check_guards=False)) if op is not dropped]
    planned = [
        node for node in amp.graph_module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and not is_inserted_cast(node)
        and node.name in amp.plan.decisions
    ]
    assert [packet(op) for _, op in captured] == [packet(node.target) for node in planned]
    wrong = []
    compared = 0
    for (original, op), node in zip(captured, planned, strict=True):
        decided, real = amp.plan[node.name].dtype, expected.node_dtypes.get(original)
        if decided is None or not isinstance(real, torch.dtype):
            continue
        compared += 1
        if decided != real:
            d = amp.plan[node.name]
            wrong.append(f"{original} {op}: planned {decided}, autocast {real} ({d.by}, {d.reason}, {d.op_class})")
    return wrong, compared


@pytest.mark.zoo
@pytest.mark.parametrize("name", NAMES)
def test_same_decisions(name: str) -> None:
    wrong, compared = compare(name, torch.float16)
    assert compared > 10
    assert not wrong
