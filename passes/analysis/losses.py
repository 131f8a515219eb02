"""Finds what is computed from losses: their sums, means and quotients, and what is added to them.

Analysis only. A loop compares, logs and tests what it gets of a loss. In a low dtype two checkpoints tie, and
a sum of 20,000 losses is infinite in float16 before it is divided. A matrix product ends the search.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node

from ampgraph._compat import OpOverload
from ampgraph.ops import kernels
from ampgraph.ops.lists import OpClass

from .facts import Facts
from .graph_walk import values_read
from .precision import LOW, Precision
from .problem import Hazard

_FREE = (OpClass.GRAY, OpClass.CLEAR)


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
            is_led_through = facts[user].op_class is not OpClass.WHITE and node in values_read(user)
            if is_led_through and user not in loss_of:
                loss_of[user] = loss_of[node]
                waiting.append(user)
    return {
        node: Hazard(f"computed from the loss {loss.name!r}", loss, fed_low=True)
        for node, loss in loss_of.items()
        if _is_free(node, facts)
    }


def _is_free(node: Node, facts: Facts) -> bool:
    fact = facts[node]
    return fact.op_class in _FREE and fact.dtype is torch.float32 and fact.dtype_source is node


def _is_kept_loss(node: Node, facts: Facts, fixed: Mapping[Node, Precision]) -> bool:
    if not isinstance(node.target, OpOverload) or not kernels.is_loss(node.target):
        return False
    return facts[node].op_class is OpClass.BLACK and fixed.get(node) is not LOW
