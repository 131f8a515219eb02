"""Finds norms over rows that a mask sets to zero: their gradients may leave the low range.

Analysis only. The gradient of a norm over zeros is up to 1/sqrt(eps). Behind the product with the mask it is
0 again, but only if it was finite: infinity times 0 is NaN at each loss scale.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from .arguments import argument
from .facts import Facts, tensors
from .graph_walk import kind, operand, operands, root
from .problem import Hazard

_NORMS = ("layer_norm", "native_layer_norm", "rms_norm", "group_norm")
# Ops between a mask of integers and the product.
_LONGEST = 8


def find_zero_rows(facts: Facts, low_dtype: torch.dtype) -> dict[Node, Hazard]:
    """Returns such products, the norms that read them, and what lies between."""
    found: dict[Node, Hazard] = {}
    for node in facts:
        if kind(node) not in _NORMS:
            continue
        eps = argument(node, "eps")
        if not isinstance(eps, float) or not 0 < eps < torch.finfo(low_dtype).max ** -2:
            continue
        way = [node, *_way_to_root(operand(node))]
        if (mask := _mask_at(way[-1])) is not None:
            reason = (
                f"{mask.name!r} may set rows to 0, and gradients of {node.name!r} reach {eps**-0.5:.2g} there"
            )
            found |= {part: Hazard(reason, node, fed_low=True) for part in way}
    return found


def _way_to_root(node: Node) -> Iterator[Node]:
    last = root(node)
    while node is not last:
        yield node
        node = node.all_input_nodes[0]
    yield last


def _mask_at(product: Node) -> Node | None:
    """Returns the operand of a product that is made of integers."""
    factors = operands(product) if kind(product) == "mul" else ()
    return next((n for n in factors if isinstance(n, Node) and _is_of_integers(n, _LONGEST)), None)


def _is_of_integers(node: Node, hops: int) -> bool:
    if any(not t.is_floating_point() for t in tensors(node)):
        return True
    reads = node.all_input_nodes if hops else []
    return bool(reads) and all(_is_of_integers(n, hops - 1) for n in reads)
