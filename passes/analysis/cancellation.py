"""Finds small differences of large values, which rounding would erase.

Analysis only. Three kinds occur in models. The first subtracts or divides a sum of squares of the same values
(variances, distances, cosines). The second is the distance of a probability from 0 or 1 that a logarithm
reads. The third is a sum with a mask of large numbers: a softmax or a maximum sees its differences alone, and
where the mask hides all of a row, those of the other operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.fx import Node

from ampgraph._compat import size_expression
from ampgraph.ops.lists import OpClass

from .arguments import argument
from .facts import Facts, tensors
from .graph_walk import MEANS, ancestors, kind, operand, operands
from .magnitudes import COARSE, Size, Sizes, interval_product
from .problem import Hazard

# Paths longer than this belong to other parts of the model.
_LONGEST = 8
_PAIRED = ("add", "sub", "rsub", "div")
_LOGARITHMS = ("log", "log2", "log10", "log1p", "special_log1p", "logit", "special_logit", "xlogy")
_SATURATES = ("sigmoid", "special_expit", "hardsigmoid", "tanh", "erf")
SOFTMAX = ("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax")
_SELECTS = (
    *("max", "amax", "cummax", "argmax", "maximum", "fmax", "max_pool1d", "max_pool2d", "max_pool3d"),
    *("min", "amin", "cummin", "argmin", "minimum", "fmin"),
    *("aminmax", "topk", "sort", "argsort", "msort", "kthvalue", "median"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("logsumexp", "logcumsumexp", "logaddexp"),
)
_SEES_DIFFERENCES = (*SOFTMAX, *_SELECTS, "exp", "exp2", "cross_entropy_loss")
# They leave the rows of a table as they are, if its last size stays.
_KEEPS_ROWS = (
    *("alias", "detach", "clone", "contiguous", "lift_fresh_copy", "to", "_to_copy"),
    *("unsqueeze", "expand", "view", "reshape"),
)
_SUMS = ("add", "sub", "rsub")
# Ops behind which a large sum is still large.
_LEADS_ON = (*_SELECTS, "dropout", "native_dropout", "leaky_relu", "relu")
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
        elif name in _SEES_DIFFERENCES:
            hazards = _behind_mask(node, sizes)
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
    """Returns the nodes from ``start`` up to ``stops`` and parameters; None if a way leads elsewhere.

    Only arithmetic, means and one product can cancel a sum of squares: a branch of a network does not.
    """
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
    products = [n for n in found if facts[n].op_class is OpClass.WHITE]
    others = [n for n in found if facts[n].op_class is OpClass.GRAY and kind(n) not in (*_ARITHMETIC, *MEANS)]
    return None if others or len(products) > 1 else found


def _before_logarithm(node: Node, facts: Facts, low_dtype: torch.dtype) -> Iterator[tuple[Node, Hazard]]:
    """Yields what leads from a probability into a logarithm."""
    unit = torch.finfo(low_dtype).eps / 2
    reason = f"leads into {node.name!r}: {low_dtype} rounds what is near 1 by {unit:.2g}"
    for part in _ways(node, facts, lambda n: kind(n) in _SATURATES):
        if part is not node:
            yield part, Hazard(reason, node, fed_low=True)


def _behind_mask(node: Node, sizes: Sizes) -> Iterator[tuple[Node, Hazard]]:
    """Yields what leads from a sum with a mask into an op that sees differences alone."""
    parts = _ways(node, sizes.facts, lambda n: _mask_in(n, sizes) is not None)
    if kind(node) not in _SELECTS:
        parts = [part for part in parts if part is not node]
    if _shows_every_row(parts, node, sizes):
        return
    for part in parts:
        reason = f"leads from a sum with a mask into {node.name!r}"
        if (mask := _mask_in(part, sizes)) is not None:
            step, of = mask.size.peak * sizes.limits.eps, mask.of[0].name
            reason = f"adds the mask {of!r}: {sizes.limits.dtype} rounds such sums by up to {step / 2:.3g}"
        yield part, Hazard(reason, node, fed_low=True)


class _Addend(NamedTuple):
    """One of the two tensors that an op adds: its size, and the nodes that it is made of."""

    size: Size
    of: tuple[Node, ...]


def _addends(node: Node, sizes: Sizes) -> list[_Addend]:
    """Returns the two tensors that a node adds, of usual size; empty if it adds no two tensors."""
    name, usual = kind(node), sizes.typical
    if name in _SUMS:
        added = [_Addend(usual[n], (n,)) for n in operands(node) if isinstance(n, Node)]
        factor, scaled = argument(node, "alpha"), 0 if name == "rsub" else 1
    elif name == "addcmul":
        start, *factors = (argument(node, of) for of in ("self", "tensor1", "tensor2"))
        product = interval_product(*map(usual.of, factors))
        added = [_Addend(usual[start], (start,)), _Addend(product, (*factors,))]
        factor, scaled = argument(node, "value"), 1
    else:
        return []
    if len(added) < 2:
        return []
    if factor is not None:
        size = interval_product(added[scaled].size, usual.of(factor))
        added[scaled] = added[scaled]._replace(size=size)
    return added


def _mask_in(node: Node, sizes: Sizes) -> _Addend | None:
    """Returns the addend whose numbers make the low dtype round the other one coarsely; None if none does."""
    return next((addend for addend in _addends(node, sizes) if _hides(addend, sizes)), None)


def _hides(addend: _Addend, sizes: Sizes) -> bool:
    """Whether numbers are a mask. Large numbers of both signs that depend on parameters are scores."""
    size = addend.size
    if not COARSE < size.peak < math.inf:
        return False
    if size.low >= -COARSE or size.high <= COARSE:
        return True
    return not any(_is_learned(n, sizes) for n in addend.of)


def _is_learned(node: Node, sizes: Sizes) -> bool:
    sources = (n for n in (node, *ancestors(node)) if n in sizes.facts and sizes.facts[n].is_parameter)
    return not all(map(sizes.extents.is_constant, sources))


def _shows_every_row(parts: list[Node], node: Node, sizes: Sizes) -> bool:
    """Whether the one mask is a table that hides no whole row of those along which a softmax runs."""
    masks = {part: mask.of for part in parts if (mask := _mask_in(part, sizes)) is not None}
    last = len(tensors(node)[0].shape) - 1
    if len(masks) != 1 or kind(node) not in SOFTMAX or argument(node, "dim") not in (-1, last):
        return False
    ((added, (table, *_)),) = masks.items()
    if kind(added) != "add" or added.kwargs:
        return False
    if not all(part is added or (kind(part) in _KEEPS_ROWS and _keeps_size(part)) for part in parts):
        return False
    while kind(table) in _KEEPS_ROWS and _keeps_size(table):
        table = operand(table)
    if table.op != "get_attr" or sizes.facts[table].mutated or not sizes.extents.is_constant(table):
        return False
    tops = sizes.extents.tops(table)
    return tops is not None and max(map(abs, tops)) <= COARSE


def _keeps_size(node: Node) -> bool:
    """Whether the last dimension of a view or a copy has the size that it had."""
    before, after = ([*map(size_expression, tensors(n)[0].shape[-1:])] for n in (operand(node), node))
    return before == after


def _ways(node: Node, facts: Facts, is_start: Callable[[Node], bool]) -> list[Node]:
    """Returns the nodes on the ways to ``node`` from where they start, all included; arithmetic leads on."""
    known: dict[Node, list[Node]] = {}

    def ways_to(part: Node, hops: int) -> list[Node]:
        if part in known:
            return known[part]
        known[part] = []
        name = kind(part)
        leads_on = name in (*_ARITHMETIC, *_LOGARITHMS, *_LEADS_ON) or facts[part].op_class is OpClass.CLEAR
        reads = part.all_input_nodes if hops and (leads_on or part is node) else ()
        above = [n for read in reads for n in ways_to(read, hops - 1)]
        known[part] = [*dict.fromkeys(above), part] if above or is_start(part) else []
        return known[part]

    return ways_to(node, _LONGEST)
