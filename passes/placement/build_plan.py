"""Turns a labelling into the frozen `Plan`: decisions with reasons, casts with bytes. Analysis only."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from ampgraph.ops import kernels
from ampgraph.plan import Cast, Cost, Decision, Plan, Use

from ..analysis.facts import Operand, OperandRule
from ..analysis.precision import Precision
from ..analysis.problem import Problem
from ..analysis.ranges import may_be_infinite
from .cost_model import CAST_BYTES, Anchors, Demand, Demands, Labels, label_of
from .labelling import Placement


def build_plan(
    problem: Problem, placement: Placement, casts_of: Demands, cost: Cost, baselines: Mapping[str, Cost]
) -> Plan:
    """Freezes a placement, whose `demands` are known; see `Plan`."""
    labels, anchors, gap = placement.labels, placement.anchors, placement.gap
    motives = {**dict.fromkeys(labels, placement.motive), **placement.motives}
    decisions = {n.name: _decision(problem, labels, n, motives) for n in problem.facts}
    casts = [c for demand, uses in casts_of.items() for c in _casts(problem, decisions, demand, uses)]
    widened, dtype_args = _in_kernel(problem, labels, anchors)
    return Plan(decisions, tuple(casts), widened, dtype_args, problem.low_dtype, cost, baselines, gap)


def _decision(problem: Problem, labels: Labels, node: Node, motives: Mapping[Node, str]) -> Decision:
    fact = problem.facts[node]
    op_class = fact.op_class.value if fact.op_class else None
    if fact.dtype is None:
        return Decision(None, "source", "no float32 or low-precision result", op_class)
    if fact.dtype_source is not node:
        return Decision(
            labels[fact.dtype_source].dtype(problem.low_dtype),
            "source",
            f"has the dtype of {fact.dtype_source.name!r}",
            op_class,
            (fact.dtype_source.name,),
        )
    variable, dtype = problem.variables[node], labels[node].dtype(problem.low_dtype)
    if variable.pinned is None:
        reason, because = _choice(problem, labels, node, motives[node])
        return Decision(dtype, "placement", f"{variable.reason}: {reason}", op_class, because)
    because = (variable.because.name,) if variable.because else ()
    return Decision(dtype, variable.by, variable.reason, op_class, because)


def _choice(problem: Problem, labels: Labels, node: Node, motive: str) -> tuple[str, tuple[str, ...]]:
    """Returns the reason for a free node's dtype, and the neighbours with the same dtype."""
    label = labels[node]
    dtype = str(label.dtype(problem.low_dtype)).removeprefix("torch.")
    producers = [s.tensor for s in problem.facts[node].operands if s.follow]
    agreeing = tuple(t.name for t in producers if label_of(problem, labels, t) is label)
    if len(agreeing) == len(producers):
        return f"its inputs are {dtype}, and {motive}", agreeing
    users = [user for user, _ in problem.uses.get(node, ()) if labels.get(user) is label]
    users.sort(key=lambda user: problem.variables[user].pinned is None)
    return f"it is {dtype}, because {motive}", (*(user.name for user in users), *agreeing)


def _casts(
    problem: Problem, decisions: Mapping[str, Decision], demand: Demand, uses: list[tuple[Node, Operand]]
) -> list[Cast]:
    tensor, need = demand
    fact = problem.facts[tensor]
    # A tensor that is written in place may change between uses, so its casts are not shared.
    groups = [[use] for use in uses] if fact.mutated else [uses]
    saturates = need is Precision.LOW and tensor in problem.out_of_range
    keeps_infinity = saturates and may_be_infinite(tensor, problem.out_of_range)
    return [
        Cast(
            tensor.name,
            need.other.dtype(problem.low_dtype),
            need.dtype(problem.low_dtype),
            tuple(Use(node.name, operand.path) for node, operand in group),
            CAST_BYTES * fact.elements,
            fact.is_parameter,
            _cast_reason(decisions, tensor, [n for n, _ in group]),
            saturates=saturates,
            keeps_infinity=keeps_infinity,
        )
        for group in groups
    ]


def _cast_reason(decisions: Mapping[str, Decision], tensor: Node, users: list[Node]) -> str:
    first = users[0]
    wants = "graph output keeps its dtype" if first.op == "output" else decisions[first.name].reason
    more = f" and {len(users) - 1} more" if len(users) > 1 else ""
    return f"{tensor.name}: {decisions[tensor.name].reason}; {first.name}{more}: {wants}"


def _in_kernel(problem: Problem, labels: Labels, anchors: Anchors) -> tuple[tuple[Use, ...], dict[str, str]]:
    """Returns the uses that a float32 kernel widens, and the dtype arguments to set for them."""
    widened: list[Use] = []
    dtype_args: dict[str, str] = {}
    for node in problem.variables:
        if labels[node] is Precision.LOW:
            continue
        for operand in problem.facts[node].operands:
            if operand.rule not in (
                OperandRule.PROMOTED,
                OperandRule.DTYPE_ARG,
            ) or operand.tensor is anchors.get(node):
                continue
            if label_of(problem, labels, operand.tensor) is Precision.FP32:
                continue
            widened.append(Use(node.name, operand.path))
            if operand.rule is OperandRule.DTYPE_ARG:
                dtype_args[node.name] = kernels.dtype_arg(node.target)  # type: ignore[arg-type, assignment]
    return tuple(widened), dtype_args
