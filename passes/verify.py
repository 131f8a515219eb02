"""Checks the rewritten graph against the plan and the source; always runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from ampgraph._compat import FakeTensorMode, OpOverload, dtypes_of, fake_mode_of, result_dtypes
from ampgraph.errors import VerifyError
from ampgraph.ops import kernels
from ampgraph.origin import module_path, user_line
from ampgraph.plan import Plan

from .analysis.arguments import argument
from .analysis.facts import Facts, is_cast, tensors
from .base import Pass, workspace
from .insert_casts import is_inserted, is_inserted_cast


@dataclass(frozen=True)
class Verify(Pass):
    """Raises `VerifyError` unless every invariant of the rewritten graph holds.

    - each node's fake dtype is the planned one;
    - no integer, bool, complex or float64 tensor was cast;
    - graph inputs and (with ``keep_io_dtypes``) outputs have the source's dtypes;
    - every cast of the user still exists, to the dtype in the source.
    """

    keep_io_dtypes: bool = True
    name: ClassVar[str] = "verify"
    edits: ClassVar[bool] = False

    def run(self, graph_module: GraphModule) -> bool:
        space = workspace(graph_module)
        assert space.plan is not None
        assert space.facts is not None
        present = set(graph_module.graph.nodes)
        mode = fake_mode_of(graph_module.graph)
        for node in graph_module.graph.nodes:
            if is_inserted_cast(node):
                _check_cast(node, space.plan)
            elif node.op != "output" and not is_inserted(node):
                _check_dtype(node, space.plan, space.facts)
        _check_user_casts(space.facts, present)
        if self.keep_io_dtypes:
            _check_outputs(graph_module, space.facts)
        for node in graph_module.graph.nodes:
            _check_metadata(node, mode)
        return False


def _check_metadata(node: Node, mode: FakeTensorMode | None) -> None:
    """Checks with FakeTensor that ``meta["val"]`` has the dtypes that the op returns for its arguments."""
    if not isinstance(node.target, OpOverload) or "val" not in node.meta or kernels.is_opaque(node.target):
        return
    recorded = dtypes_of(node.meta["val"])
    if recorded != (found := result_dtypes(node, mode)):
        raise VerifyError(f"verify: {_who(node)} is recorded as {recorded} but yields {found}")


def _check_dtype(node: Node, plan: Plan, facts: Facts) -> None:
    decision = plan.decisions.get(node.name)
    if decision is None:
        raise VerifyError(f"verify: {_who(node)} is not in the plan")
    if decision.dtype is None:
        return
    wide = facts[node].wide_results
    decided = {d for i, d in enumerate(dtypes_of(node.meta.get("val"))) if i not in wide}
    found = {dtype for dtype in decided if dtype and dtype.is_floating_point}
    if found - {decision.dtype}:
        raise VerifyError(
            f"verify: {_who(node)} was planned as {decision.dtype} ({decision.reason}) but yields {found}"
        )


def _check_cast(node: Node, plan: Plan) -> None:
    source, result = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
    legal = {torch.float32, plan.low_dtype}
    if {source, result} != legal:
        raise VerifyError(
            f"verify: {_who(node)} casts {source} to {result}; legal: between {sorted(map(str, legal))}"
        )


def _check_user_casts(facts: Facts, present: set[Node]) -> None:
    for node, fact in facts.items():
        if fact.fixed_dtype is None or node.op != "call_function":
            continue
        if node not in present or (is_cast(node) and argument(node, "dtype") != fact.fixed_dtype):
            raise VerifyError(f"verify: the user's {_who(node)} was removed or changed")


def _check_outputs(graph_module: GraphModule, facts: Facts) -> None:
    output = next(n for n in reversed(graph_module.graph.nodes) if n.op == "output")
    for operand in facts[output].operands:
        value: object = output.args
        for key in operand.path:
            value = value[key]  # type: ignore[index]
        found = {t.dtype for t in tensors(value)}  # type: ignore[arg-type]
        if found != {facts[operand.tensor].dtype}:
            raise VerifyError(
                f"verify: graph output {operand.tensor.name!r} was "
                f"{facts[operand.tensor].dtype} in the source, "
                f"is {found}"
            )


def _who(node: Node) -> str:
    where = [p for p in (module_path(node), user_line(node)) if p]
    return f"node {node.name!r} ({node.target}{', ' + ', '.join(where) if where else ''})"
