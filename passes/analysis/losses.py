"""Finds the targets that losses compare, and what is computed from losses: their sums, means and quotients.

Analysis only. A loop compares, logs and tests what it gets from a loss. In a low dtype two checkpoints tie,
and a sum of 20,000 losses is infinite in float16 before it is divided. The search ends where a loss enters
something larger, such as the hidden state of a network, and at products with weights.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from ampgraph._compat import OpOverload
from ampgraph.ops import kernels
from ampgraph.ops.lists import OpClass

from .alias import SOURCES
from .facts import Facts
from .graph_walk import kind, operand, values_read
from .precision import LOW, Precision
from .problem import Hazard

if TYPE_CHECKING:
    from .traces import Tracer

_FREE = (OpClass.GRAY, OpClass.CLEAR)


def find_targets(tracer: Tracer) -> dict[Node, Hazard]:
    """Returns the exact values that losses in float32 compare, and what brings both sides to one shape."""
    facts, found = tracer.facts, {}
    for loss in facts:
        if not _is_kept_loss(loss, facts, tracer.labels):
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


def find_loss_terms(facts: Facts, fixed: Mapping[Node, Precision]) -> dict[Node, Hazard]:
    """Returns the gray and clear ops on losses that the op lists keep in float32.

    Args:
        facts: The facts about the nodes.
        fixed: The labels that something above the op lists decides.
    """
    loss_of = {node: node for node in facts if _is_kept_loss(node, facts, fixed)}
    waiting = [*loss_of]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user not in loss_of and fixed.get(user) is not LOW and _is_of_loss(user, node, facts):
                loss_of[user] = loss_of[node]
                waiting.append(user)
    return {
        node: Hazard(f"computed from the loss {loss.name!r}", loss, fed_low=True)
        for node, loss in loss_of.items()
        if facts[node].op_class in _FREE and facts[node].dtype_source is node
    }


def _is_of_loss(user: Node, read: Node, facts: Facts) -> bool:
    """Whether a node computes floats of a loss. They are no more than if all that it reads were as large."""
    fact = facts[user]
    if fact.dtype is not torch.float32 or fact.op_class is OpClass.WHITE or read not in values_read(user):
        return False
    return fact.elements <= facts[read].elements * len(user.all_input_nodes)


def _is_kept_loss(node: Node, facts: Facts, labels: Mapping[Node, Precision]) -> bool:
    if not isinstance(node.target, OpOverload) or not kernels.is_loss(node.target):
        return False
    return facts[node].op_class is OpClass.BLACK and labels.get(node) is not LOW
