"""Finds the targets that losses compare, and what is computed from losses: their sums, means and quotients.

Analysis only. A loop compares, logs and tests what it gets from a loss. In a low dtype two checkpoints tie,
and a sum of 20,000 losses is infinite in float16 before it is divided. The search ends where a loss enters
something larger, such as the hidden state of a network, and at products with weights.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from ampgraph._compat import OpOverload
from ampgraph.ops import kernels
from ampgraph.ops.lists import OpClass

from .alias import SOURCES
from .facts import FREE, Facts, NodeFacts, OperandRule
from .graph_walk import is_zero_dim, kind, operand, values_read
from .precision import FP32, LOW
from .problem import Hazard

if TYPE_CHECKING:
    from .traces import Tracer


def find_targets(tracer: Tracer) -> dict[Node, Hazard]:
    """Returns the exact values that losses in float32 compare, and what brings both sides to one shape."""
    facts, found = tracer.facts, {}
    for loss in facts:
        if not _is_kept_loss(loss, tracer):
            continue
        for read, value in _sides(loss):
            trace, owner = tracer.traces[value], facts[read].dtype_source
            is_exact = facts[value].dtype is not None and not (trace.moved or trace.few)
            if is_exact and owner.op not in SOURCES:
                found[owner] = Hazard(f"the loss {loss.name!r} compares it", value)
    return found


def _sides(loss: Node) -> Iterator[tuple[Node, Node]]:
    """Yields what a loss reads, and what that is before ``broadcast_tensors``, which comes first in torch."""
    for read in values_read(loss):
        of = read.args[0] if read.target is operator.getitem else None
        if isinstance(of, Node) and kind(of) == "broadcast_tensors":
            yield read, operand(of)[read.args[1]]
        else:
            yield read, read


def find_loss_terms(tracer: Tracer) -> dict[Node, Hazard]:
    """Returns the gray and clear ops that compute losses or compute on them, where the rule has float32."""
    facts = tracer.facts
    loss_of = {node: node for node in facts if _is_kept_loss(node, tracer)}
    waiting = [*loss_of]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user not in loss_of and tracer.fixed.get(user) is not LOW and _is_of_loss(user, node, facts):
                loss_of[user] = loss_of[node]
                waiting.append(user)
    terms = {
        node: Hazard(f"computed from the loss {loss.name!r}", loss, fed_low=True)
        for node, loss in loss_of.items()
        if facts[node].op_class in FREE and facts[node].dtype_source is node
    }
    kept = Hazard("a number that the autocast rule has in float32", fed_low=True)
    return dict.fromkeys(_kept_means(tracer), kept) | terms


def _is_of_loss(user: Node, read: Node, facts: Facts) -> bool:
    """Whether a node computes floats of a loss. They are no more than if all that it reads were as large."""
    fact = facts[user]
    if fact.dtype is not torch.float32 or fact.op_class is OpClass.WHITE or read not in values_read(user):
        return False
    return fact.elements <= facts[read].elements * len(user.all_input_nodes)


def _is_kept_loss(node: Node, tracer: Tracer) -> bool:
    if not isinstance(node.target, OpOverload) or not kernels.is_loss(node.target):
        return False
    return tracer.facts[node].op_class is OpClass.BLACK and tracer.labels.get(node) is not LOW


def _kept_means(tracer: Tracer) -> list[Node]:
    """Returns the means to a number, in float32 by the rule: a loss that is written by hand ends with one.

    The autocast rule has float32 there for another reason than a parameter; parameters of O2 are low. Only
    kernels that widen what they read count, so that no copy of a large tensor is made for a number. What is
    computed from numbers follows them.
    """
    facts = tracer.facts
    numbers = [n for n in facts if is_zero_dim(n) and any(not is_zero_dim(v) for v in values_read(n))]
    if not numbers:
        return []
    kept: set[Node] = set()
    for node, fact in facts.items():
        if fact.dtype is not torch.float32 or tracer.labels.get(fact.dtype_source) is not FP32:
            continue
        starts = fact.op_class is OpClass.BLACK or (node.op in SOURCES and not fact.is_parameter)
        if starts or not kept.isdisjoint(values_read(node)):
            kept.add(node)
    return [n for n in numbers if n in kept and facts[n].op_class in FREE and _widens(facts[n])]


def _widens(fact: NodeFacts) -> bool:
    return all(operand.rule is OperandRule.DTYPE_ARG for operand in fact.operands)
