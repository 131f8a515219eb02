"""Finds norms over rows that a mask sets to zero: their gradients may leave the low range.

Analysis only. The gradient of a norm over zeros is up to 1/sqrt(eps), that of a quotient 1/eps. Behind the
product with the mask it is 0 again, but only if it was finite: infinity times 0 is NaN at each loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch.fx import Node

from .arguments import argument
from .facts import Facts, tensors
from .graph_walk import kind, operand, operands, root
from .magnitudes import Sizes
from .problem import Hazard

_NORMS = ("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "instance_norm")
# Above this part of the range, loss scales of usual size are too large for the gradients.
_PART = 1 / 64
# Ops between the inputs that make a mask and the product.
_LONGEST = 8


def find_zero_rows(facts: Facts, sizes: Sizes) -> dict[Node, Hazard]:
    """Returns such products, the norms and divisions that read them, and what lies between."""
    found: dict[Node, Hazard] = {}
    for node in facts:
        steepest = _steepest(node, sizes)
        if not sizes.limit * _PART < steepest < math.inf:
            continue
        way = [node, *_way_to_root(operand(node))]
        if (mask := _mask_at(way[-1], facts)) is not None:
            reason = (
                f"{mask.name!r} may set rows to 0, and gradients of {node.name!r} reach {steepest:.2g} there"
            )
            found |= {part: Hazard(reason, node, fed_low=True) for part in way}
    return found


def _steepest(node: Node, sizes: Sizes) -> float:
    """Returns the largest derivative of a norm or a quotient at zero."""
    if kind(node) in _NORMS:
        eps = argument(node, "eps")
        return eps**-0.5 if isinstance(eps, float) and eps > 0 else 0.0
    if kind(node) == "div" and all(isinstance(n, Node) for n in operands(node)):
        least = sizes.typical[operands(node)[1]].low
        return 1 / least if least > 0 else 0.0
    return 0.0


def _way_to_root(node: Node) -> Iterator[Node]:
    last = root(node)
    while node is not last:
        yield node
        node = node.all_input_nodes[0]
    yield last


def _mask_at(product: Node, facts: Facts) -> Node | None:
    """Returns the operand of a product that is made of integers, or of inputs of the model alone."""
    factors = operands(product) if kind(product) == "mul" else ()
    return next((n for n in factors if isinstance(n, Node) and _is_mask(n, facts, _LONGEST)), None)


def _is_mask(node: Node, facts: Facts, hops: int) -> bool:
    if any(not t.is_floating_point() for t in tensors(node)):
        return True
    if node.op == "placeholder":
        return not facts[node].is_parameter
    reads = node.all_input_nodes if hops else []
    return bool(reads) and all(_is_mask(n, facts, hops - 1) for n in reads)
