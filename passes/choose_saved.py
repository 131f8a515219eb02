"""Chooses the norms and the softmax ops whose backward reads low values instead of their float32 inputs."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from ampgraph._compat import size_hint
from ampgraph.plan import Plan
from ampgraph.policy.policy import Policy

from .analysis.facts import is_cast, tensors
from .analysis.grad_modes import without_gradients
from .analysis.graph_walk import kind
from .analysis.norms import Norm, norm_at
from .analysis.problem import Problem
from .analysis.softmax import Softmax, same_values, softmax_at
from .base import Pass, workspace
from .placement.fused_kernels import FusedKernels
from .placement.fused_step import Step


@dataclass(frozen=True)
class ChooseSaved(Pass):
    """Adds them to the `Plan`, with their reasons and the cost of the step with them.

    A compiler writes the low values in the op's own kernel, and only there: an eager backend would need more
    kernels. So the objective decides.

    Attributes:
        policy: Its objective, and whether it allows this.
    """

    policy: Policy
    name: ClassVar[str] = "choose_saved"
    edits: ClassVar[bool] = False

    def run(self, graph_module: GraphModule) -> bool:
        policy = self.policy
        if not (policy.saves_norms_low or policy.saves_softmax_low):
            return False
        space = workspace(graph_module)
        problem, plan, costs, placement = space.problem, space.plan, space.costs, space.placement
        assert problem is not None
        assert plan is not None
        assert costs is not None
        assert placement is not None
        known = problem, plan, costs.kernels, without_gradients(graph_module.graph).keys()
        norms = _norms(*known) if policy.saves_norms_low else []
        softmaxes = _softmaxes(*known) if policy.saves_softmax_low else []
        if norms or softmaxes:
            fused = costs.saving_low(norms, softmaxes).fused(placement.labels)
            space.plan = _with(plan, norms, softmaxes, fused)
        return False


def _with(plan: Plan, norms: list[Norm], softmaxes: list[Softmax], fused: Step) -> Plan:
    fields = ("fused_forward", "fused_backward", "fused_saved")
    cost = replace(plan.cost, **dict(zip(fields, fused, strict=True)))
    of_norms, of_softmax = (tuple(one.output.name for one in found) for found in (norms, softmaxes))
    dtype = str(plan.low_dtype).removeprefix("torch.")
    plan = replace(
        plan, decisions=plan.explained(of_norms, f"its backward reads the normalized values in {dtype}")
    )
    decisions = plan.explained(of_softmax, f"its backward reads the probabilities in {dtype}")
    return replace(plan, cost=cost, decisions=decisions, saved_low=of_norms, saved_softmax=of_softmax)


def _cast_low(plan: Plan) -> set[str]:
    """Returns the names of the activations that have a low cast."""
    return {cast.tensor for cast in plan.casts if cast.dst == plan.low_dtype and not cast.is_parameter}


def _softmaxes(problem: Problem, plan: Plan, kernels: FusedKernels, without: Set[Node]) -> list[Softmax]:
    """Returns the softmax ops; ``without`` as in `_norms`."""
    cast_low, found = _cast_low(plan), []
    for node in problem.facts:
        softmax = softmax_at(node)
        if softmax is None or not kernels.has_gradient[node] or node in without:
            continue
        if plan.decisions[node.name].dtype == plan.low_dtype or problem.facts[node].keeps_memory:
            continue
        is_cast_low = not {n.name for n in same_values(node)}.isdisjoint(cast_low)
        if is_cast_low and _is_computed(softmax.x, kernels) and _fits(softmax, plan.low_dtype):
            found.append(softmax)
    return found


def _is_computed(x: Node, kernels: FusedKernels) -> bool:
    """Whether the graph computes a tensor; an input is in memory anyway."""
    return kernels.roots[x].op == "call_function"


def _fits(softmax: Softmax, low_dtype: torch.dtype) -> bool:
    """Whether the low dtype holds equal probabilities as precisely as others."""
    count = size_hint(softmax.x.meta["val"].shape[softmax.dim])
    return count * torch.finfo(low_dtype).tiny <= 1


def _norms(problem: Problem, plan: Plan, kernels: FusedKernels, without: Set[Node]) -> list[Norm]:
    """Returns the norms; ``without`` are the calls without gradients, whose gradient is no norm's."""
    cast_low, found = _cast_low(plan), []
    for node in problem.facts:
        norm = norm_at(node)
        if norm is None or not kernels.has_gradient[node] or not without.isdisjoint((node, *norm.inside)):
            continue
        if not _names_of(node, problem).isdisjoint(cast_low) and _stays_float32(norm, problem, plan):
            found.append(norm)
    return found


def _names_of(node: Node, problem: Problem) -> set[str]:
    """Returns the names of a node, of its views, and of casts to its own dtype."""
    found = [node]
    for one in found:
        calls = (u for u in one.users if u.op == "call_function" and u.all_input_nodes[0] is one)
        found += [user for user in calls if not _computes(user, problem)]
    return {n.name for n in found}


def _computes(node: Node, problem: Problem) -> bool:
    """Whether a node makes other values, of another dtype for example, than its first operand has."""
    if is_cast(node) or kind(node) == "type_as":
        return [t.dtype for t in tensors(node)] != [t.dtype for t in tensors(node.all_input_nodes[0])]
    return problem.facts[node].moves_data


def _stays_float32(norm: Norm, problem: Problem, plan: Plan) -> bool:
    """Whether the norm reads and computes float32, and what it reads is no low tensor that was widened."""
    facts, low = problem.facts, plan.low_dtype
    if any(plan.decisions[n.name].dtype == low or facts[n].keeps_memory for n in norm.nodes):
        return False
    x = norm.x
    while x.op == "call_function" and (is_cast(x) or not _computes(x, problem)):
        x = x.all_input_nodes[0]
        if plan.decisions[x.name].dtype != norm.x.meta["val"].dtype:
            return False
    return x.op == "call_function"  # an input is in memory anyway
