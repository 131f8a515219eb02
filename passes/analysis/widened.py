"""Finds the black ops on values that the model's own code casts to float32, for level O3.

Analysis only. ``x.to(torch.float32)`` before a root mean square changes nothing in a float32 source. In a
model of low parameters it widens, and squares of 300 do not overflow. O3 runs black ops low, but not these.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ampgraph.ops.lists import OpClass

from .facts import Facts, followed, is_cast
from .problem import Hazard


def find_widened(facts: Facts) -> dict[Node, Hazard]:
    """Returns these ops, and what leads from the cast to them."""
    casts = _casts_read(facts)
    found: dict[Node, Hazard] = {}
    pending = [node for node in casts if facts[node].op_class is OpClass.BLACK]
    while pending:
        node = pending.pop()
        if node in found or is_cast(node):
            continue
        reason = f"computed from {casts[node].name!r}, which the model's code casts to float32"
        found[node] = Hazard(reason, casts[node], fed_low=True)
        pending += [owner for owner in followed(node, facts) if owner in casts]
    return found


def _casts_read(facts: Facts) -> dict[Node, Node]:
    """Returns the casts of float32 to float32, and for what they lead to one of the casts."""
    casts: dict[Node, Node] = {}
    for node, fact in facts.items():
        if fact.dtype is not torch.float32 or fact.dtype_source is not node:
            continue
        if is_cast(node):
            read = [node] if facts[node.all_input_nodes[0]].dtype is torch.float32 else []
        elif fact.op_class in (None, OpClass.WHITE):
            read = []
        else:
            read = [casts[owner] for owner in followed(node, facts) if owner in casts]
        if read:
            casts[node] = read[0]
    return casts
