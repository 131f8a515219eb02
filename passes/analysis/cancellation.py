"""Finds small differences of large values, which rounding would erase.

Analysis only. Three kinds occur in models. The first subtracts or divides a sum of squares of the same values
(variances, distances, cosines). The second is the distance of a probability from 0 or 1 that a logarithm
reads. The third is a sum with a mask of large numbers: a softmax sees its differences alone, and where the
mask hides all of a row, those of the other operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch.fx import Node

from ampgraph.ops.lists import OpClass

from .facts import Facts, NodeFacts, is_cast
from .graph_walk import ancestors, kind, operand, operands
from .magnitudes import Sizes
from .problem import Hazard

# Paths longer than this belong to other parts of the model.
_LONGEST = 8
_PAIRED = ("add", "sub", "rsub", "div")
_LOGARITHMS = ("log", "log2", "log10", "log1p", "special_log1p", "logit", "special_logit", "xlogy")
_SATURATES = ("sigmoid", "special_expit", "hardsigmoid", "tanh", "erf")
_SOFTMAX = ("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax", "exp", "exp2", "logsumexp")
_SUMS = ("add", "sub", "rsub")
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
        elif name in _SOFTMAX:
            hazards = _before_softmax(node, sizes)
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
    for part in _ways(node, facts, lambda n: kind(n) in _SATURATES):
        if part is not node:
            yield part, Hazard(reason, node, fed_low=True)


def _before_softmax(node: Node, sizes: Sizes) -> Iterator[tuple[Node, Hazard]]:
    """Yields what leads from a sum with a mask into a softmax."""
    for part in _ways(node, sizes.facts, lambda n: _mask_at(n, sizes) is not None):
        if part is node:
            continue
        reason = f"leads from a sum with a mask into {node.name!r}"
        if (mask := _mask_at(part, sizes)) is not None:
            step = _largest(mask, sizes) * sizes.limits.eps
            reason = (
                f"adds the mask {mask.name!r}: {sizes.limits.dtype} rounds such sums by up to {step / 2:.3g}"
            )
        yield part, Hazard(reason, node, fed_low=True)


def _mask_at(node: Node, sizes: Sizes) -> Node | None:
    """Returns the operand of a sum beside which the low dtype loses steps of 1 of the other one."""
    pair = [n for n in operands(node) if isinstance(n, Node)] if kind(node) in _SUMS else []
    if len(pair) < 2:
        return None
    hides = [
        1 / sizes.limits.eps <= _largest(n, sizes) < math.inf and not _is_learned(n, sizes) for n in pair
    ]
    return pair[hides.index(True)] if hides[0] != hides[1] else None


def _largest(node: Node, sizes: Sizes) -> float:
    """Returns the largest number by which a mask hides; 0 if this is none, whose numbers have both signs."""
    size = sizes[node]
    one, other = sorted((abs(size.low), abs(size.high)))
    if other < math.inf:
        return other if one < 1 / sizes.limits.eps else 0.0
    return _factor(node, sizes, _LONGEST) or 0.0


def _factor(node: Node, sizes: Sizes, hops: int) -> float | None:
    """Returns the factor by which numbers multiply the inputs of the model that a node is made of.

    An input that is multiplied by a large number is a mask, whatever its dtype. None if the node is made of
    something else.
    """
    fact = sizes.facts[node]
    if node.op == "placeholder" and not fact.is_parameter:
        return 1.0
    if not hops or fact.is_parameter:
        return None
    first, second = operands(node) if kind(node) in (*_SUMS, "mul", "div") else (operand(node), None)
    factors = [_factor(n, sizes, hops - 1) for n in (first, second) if isinstance(n, Node)]
    numbers = [n for n in map(sizes.constant, (first, second)) if n is not None]
    if kind(node) in _SUMS:
        known = [factor for factor in factors if factor is not None]
        return max(known, default=None) if len(known) + len(numbers) == 2 else None
    if kind(node) == "mul" and len(numbers) == 1:
        return next((abs(factor * numbers[0]) for factor in factors if factor is not None), None)
    if kind(node) == "div" and sizes.constant(second):
        return factors[0] and abs(factors[0] / numbers[-1])
    return factors[0] if factors and (kind(node) == "neg" or _moves(node, fact)) else None


def _moves(node: Node, fact: NodeFacts) -> bool:
    """Whether an op leaves values as they are: it moves, copies or casts them."""
    return fact.op_class is OpClass.CLEAR or is_cast(node)


def _is_learned(node: Node, sizes: Sizes) -> bool:
    """Whether parameters decide the numbers, as in a table of biases by position."""
    sources = (n for n in (node, *ancestors(node)) if sizes.facts[n].is_parameter)
    return not all(map(sizes.extents.is_constant, sources))


def _ways(node: Node, facts: Facts, is_start: Callable[[Node], bool]) -> list[Node]:
    """Returns the nodes on the ways to ``node`` from where they start, all included; arithmetic leads on."""
    known: dict[Node, list[Node]] = {}

    def ways_to(part: Node, hops: int) -> list[Node]:
        if part in known:
            return known[part]
        known[part] = []
        name = kind(part)
        leads_on = name in _ARITHMETIC or name in _LOGARITHMS or facts[part].op_class is OpClass.CLEAR
        reads = part.all_input_nodes if hops and (leads_on or part is node) else ()
        above = [n for read in reads for n in ways_to(read, hops - 1)]
        known[part] = [*dict.fromkeys(above), part] if above or is_start(part) else []
        return known[part]

    return ways_to(node, _LONGEST)
