"""Finds small differences of large values, which rounding would erase.

Analysis only. Two kinds occur in models. The first subtracts or divides a sum of squares of the same values
(variances, distances, cosines). The second is the distance of a probability from 0 or 1 that a logarithm
reads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from ampgraph.ops.lists import OpClass

from .facts import Facts
from .graph_walk import ancestors, kind, operands
from .magnitudes import Sizes
from .problem import Hazard

# Paths longer than this belong to other parts of the model.
_LONGEST = 8
_PAIRED = ("add", "sub", "rsub", "div")
_LOGARITHMS = ("log", "log2", "log10", "log1p", "special_log1p", "logit", "special_logit", "xlogy")
_SATURATES = ("sigmoid", "special_expit", "hardsigmoid", "tanh", "erf")
_ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "pow", "square", "clamp", "clip", "clamp_min", "clamp_max")


def find_cancellations(facts: Facts, sizes: Sizes, low_dtype: torch.dtype) -> dict[Node, Hazard]:
    """Returns the nodes that must stay float32 to keep a difference exact."""
    found: dict[Node, Hazard] = {}
    for node in facts:
        name = kind(node)
        if name in _PAIRED:
            hazards = _beside_squares(node, sizes)
        elif name in _LOGARITHMS:
            hazards = _before_logarithm(node, facts, low_dtype)
        else:
            continue
        for part, hazard in hazards:
            found.setdefault(part, hazard)
    return found


def _beside_squares(node: Node, sizes: Sizes) -> Iterator[tuple[Node, Hazard]]:
    """Yields what is set against a large value and made of the same operands."""
    pair = [n for n in operands(node) if isinstance(n, Node)]
    if len(pair) < 2:
        return
    for one, large in (pair, pair[::-1]):
        if not sizes[large].large or (kind(node) == "div" and large is not operands(node)[1]):
            continue
        path = _path(one, ancestors(large), sizes.facts)
        for part in path or ():
            if not sizes[part].large:
                rounds = sizes.facts[part].op_class is not OpClass.CLEAR  # it moves low values as they are
                yield part, Hazard(f"against {large.name!r}: {sizes[large].large}", large, fed_low=rounds)


def _path(start: Node, stops: set[Node], facts: Facts) -> list[Node] | None:
    """Returns the nodes from ``start`` up to ``stops`` and parameters; None if a way leads elsewhere."""
    found: list[Node] = []
    waiting = [start]
    while waiting:
        node = waiting.pop()
        if node in found or node in stops or facts[node].is_parameter:
            continue
        if not node.all_input_nodes or len(found) == _LONGEST:
            return None
        found.append(node)
        waiting += node.all_input_nodes
    return found


def _before_logarithm(node: Node, facts: Facts, low_dtype: torch.dtype) -> Iterator[tuple[Node, Hazard]]:
    """Yields what leads from a probability into a logarithm."""
    unit = torch.finfo(low_dtype).eps / 2
    reason = f"leads into {node.name!r}: {low_dtype} rounds what is near 1 by {unit:.2g}"
    for part in _from_probability(node, facts, {}, _LONGEST):
        if part is not node:
            yield part, Hazard(reason, node, fed_low=True)


def _from_probability(node: Node, facts: Facts, known: dict[Node, list[Node]], hops: int) -> list[Node]:
    """Returns the nodes on the ways from a saturating op to ``node``, both included."""
    if node in known:
        return known[node]
    known[node] = []
    if kind(node) in _SATURATES:
        known[node] = [node]
    elif hops and (
        kind(node) in _ARITHMETIC or kind(node) in _LOGARITHMS or facts[node].op_class is OpClass.CLEAR
    ):
        above = [n for read in node.all_input_nodes for n in _from_probability(read, facts, known, hops - 1)]
        known[node] = [*dict.fromkeys(above), node] if above else []
    return known[node]
