"""Finds sums that a graph adds term by term: the score of a sequence, a loss of many parts, a Viterbi path.

Analysis only. Each addition rounds what there is so far, so a low total loses terms below its eps. Kernels
that sum (``aten.sum``) add in float32, whatever the dtype of their operand. A total has one reader: the next
addition, or a move or a maximum before it. The hidden state of a network, which layers read between two
additions, is not a total.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, NamedTuple

from torch.fx import Node

from ampgraph.ops.lists import OpClass

from .exact_parts import DIFFERENCES
from .graph_walk import is_item_of_maximum, kind, values_read
from .problem import Hazard

if TYPE_CHECKING:
    from .traces import Tracer

# The rounding errors of so many additions add up to about 3 of one: more than those of other low ops nearby.
MANY = 8
_SUMS = DIFFERENCES | {"add"}
_MAXIMA = frozenset(("max", "min", "amax", "amin", "maximum", "minimum", "logsumexp"))


class _Total(NamedTuple):
    """The nodes that make a total, and how many of them add."""

    nodes: list[Node]
    additions: int = 0


def find_running_sums(tracer: Tracer) -> dict[Node, Hazard]:
    """Returns the additions of long sums, and what lies between them, where the autocast rule has float32."""
    totals: dict[Node, _Total] = {}  # by the last node
    for node in tracer.facts:
        adds = kind(node) in _SUMS
        if not (adds or _passes_on(node, tracer)) or not tracer.keeps(node):
            continue
        read = [n for n in values_read(node) if n in totals and _has_one_reader(n)]
        longest = max(read, key=lambda n: totals[n].additions, default=None)
        if longest is None and not adds:
            continue
        nodes, additions = totals.pop(longest) if longest else _Total([])
        nodes.append(node)
        totals[node] = _Total(nodes, additions + adds)
    found: dict[Node, Hazard] = {}
    for total in totals.values():
        if total.additions >= MANY:
            hazard = Hazard(f"one of {total.additions} additions to one total, or what it adds")
            found |= dict.fromkeys(_with_addends(total.nodes, tracer), hazard)
    return found


def _with_addends(nodes: list[Node], tracer: Tracer) -> set[Node]:
    """Returns the nodes with the moves of what they add, whose gradients are such sums, too."""
    found = set(nodes)
    waiting = [read for node in nodes for read in values_read(node)]
    while waiting:
        node = waiting.pop()
        is_move = tracer.facts[node].op_class is OpClass.CLEAR
        if is_move and tracer.keeps(node) and node not in found:
            found.add(node)
            waiting += values_read(node)
    return found


def _passes_on(node: Node, tracer: Tracer) -> bool:
    if node.target is operator.getitem:
        return not _is_index(node)
    return kind(node) in _MAXIMA or tracer.facts[node].op_class is OpClass.CLEAR


def _has_one_reader(node: Node) -> bool:
    return sum(not _is_index(user) for user in node.users) == 1


def _is_index(node: Node) -> bool:
    """Whether the node is the second result of a maximum: where it is."""
    return is_item_of_maximum(node) and bool(node.args[1] == 1)
