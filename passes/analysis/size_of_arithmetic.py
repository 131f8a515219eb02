"""The sizes of the results of elementwise arithmetic."""

from __future__ import annotations

import math

from torch.fx import Node

from ampgraph._compat import size_hint

from .arguments import argument
from .facts import tensors
from .graph_walk import ancestors, is_same, kind, operand, operands, root
from .magnitudes import LONG_SUM, UNKNOWN, Size, Sizes, interval_product, raised
from .size_of_growth import is_square, power_of


def relu(sizes: Sizes, node: Node) -> Size:
    """Negative values become zero."""
    size = sizes.of(operand(node))
    return size._replace(low=max(size.low, 0.0), high=max(size.high, 0.0))


def absolute(sizes: Sizes, node: Node) -> Size:
    """The magnitude."""
    size = sizes.of(operand(node))
    least = 0.0 if size.low <= 0 <= size.high else min(abs(size.low), abs(size.high))
    return size._replace(low=least, high=size.peak)


def negated(sizes: Sizes, node: Node) -> Size:
    """The opposite bounds; the marks stay."""
    size = sizes.of(operand(node))
    return size._replace(low=-size.high, high=-size.low)


def softplus(sizes: Sizes, node: Node) -> Size:
    """At most its positive argument and log 2."""
    size = sizes.of(operand(node))
    return size._replace(low=0.0, high=max(size.high, 0.0) + 1, root="", eps=0.0)


def clamp(sizes: Sizes, node: Node) -> Size:
    """A number as the least keeps values from zero; one as the most brings them back into range."""
    size = sizes.of(operand(node))
    least, most = (sizes.constant(argument(node, name)) for name in ("min", "max"))
    low_end = size.low if least is None else max(size.low, least)
    high_end = size.high if most is None else min(size.high, most)
    clamped = size._replace(low=min(low_end, high_end), high=max(low_end, high_end))
    if most is not None and most <= sizes.limit:
        clamped = clamped._replace(large="", grows=False)
    return clamped._replace(eps=least) if least is not None and 0 < least < 1 else clamped


def hardtanh(sizes: Sizes, node: Node) -> Size:
    """Its limits."""
    if kind(node) == "relu6":
        return Size(0.0, 6.0)
    low, high = argument(node, "min_val"), argument(node, "max_val")
    return Size(-1.0 if low is None else float(low), 1.0 if high is None else float(high))


def extreme(sizes: Sizes, node: Node) -> Size:
    """The larger or the smaller one of each pair."""
    a, b = map(sizes.of, operands(node))
    choose = max if kind(node) in ("maximum", "fmax") else min
    return Size(choose(a.low, b.low), choose(a.high, b.high)).marked(sizes.hull(a, b))


def dropout(sizes: Sizes, node: Node) -> Size:
    """The kept values are scaled up."""
    size = sizes.of(operand(node))
    drops = argument(node, "train") is True and argument(node, "p") not in (None, 1)
    kept = 1 / (1 - argument(node, "p")) if drops else 1.0
    return size._replace(low=min(size.low * kept, 0.0), high=max(size.high * kept, 0.0))


def add(sizes: Sizes, node: Node) -> Size:
    """Sums and differences, with ``alpha``."""
    first, second = operands(node)
    if kind(node) == "rsub":
        first, second = second, first
    a, b = sizes.of(first), sizes.of(second)
    alpha = argument(node, "alpha")
    if alpha not in (None, 1):
        b = interval_product(b, sizes.of(alpha)).marked(b)
    if kind(node) != "add":
        if _takes_peak_off(first, second):
            return Size(-math.inf, 0.0)
        b = b._replace(low=-b.high, high=-b.low)
    marks = sizes.hull(a, b)._replace(eps=_eps_of_sum(sizes, node, a, b))
    return Size(a.low + b.low, a.high + b.high).marked(marks)


def _eps_of_sum(sizes: Sizes, node: Node, a: Size, b: Size) -> float:
    """The number that is added to something which may be zero."""
    added = [c for c in map(sizes.constant, operands(node)) if c is not None]
    if kind(node) == "add" and added and 0 < abs(added[0]) < 1:
        return abs(added[0])
    return min(a.eps, b.eps) if a.eps and b.eps else 0.0


def _takes_peak_off(value: object, peak: object) -> bool:
    """Whether the largest of the values, or their log-sum-exp, is subtracted from them."""
    if not (isinstance(value, Node) and isinstance(peak, Node)):
        return False
    peak = root(peak)
    if kind(peak) not in ("amax", "max", "maximum", "fmax", "logsumexp", "special_logsumexp", "cummax"):
        return False
    return any(isinstance(of, Node) and is_same(of, value) for of in operands(peak))


def mul(sizes: Sizes, node: Node) -> Size:
    """Products: squares, scaling by a number, normalisation, products of norms."""
    first, second = operands(node)
    if is_square(node):
        return power_of(sizes, node, first, 2.0)
    a, b = sizes.of(first), sizes.of(second)
    for value, size, other in ((first, a, second), (second, b, first)):
        if (factor := sizes.constant(value)) is not None:
            return _scaled(sizes.of(other), factor, interval_product(a, b))
        if isinstance(value, Node) and _is_inverse(value) and isinstance(other, Node):
            if root(other) in ancestors(value):
                return _normalised(sizes, other, value)
            return interval_product(a, b).marked(Size(large=size.large, grows=size.grows))
    if a.root and b.root:
        return interval_product(a, b).marked(sizes.too_large(f"a product of two norms ({a.root})"))
    marks = sizes.hull(a, b)._replace(root="", eps=0.0)
    return interval_product(a, b).marked(marks)


def interpolated(sizes: Sizes, node: Node) -> Size:
    """Between the two ends, if the weight is between 0 and 1."""
    start, end, weight = (sizes.of(argument(node, name)) for name in ("self", "end", "weight"))
    if weight.low < 0 or weight.high > 1:
        return UNKNOWN.marked(sizes.hull(start, end))
    return sizes.hull(start, end)


def _scaled(size: Size, factor: float, bounds: Size) -> Size:
    """The size of a value times a number: a small one brings it back into range."""
    if abs(factor) <= 1 / LONG_SUM:
        return bounds.marked(Size(eps=size.eps * abs(factor)))
    return bounds.marked(size._replace(eps=size.eps * abs(factor)))


def _is_inverse(value: Node) -> bool:
    value = root(value)
    if kind(value) in ("rsqrt", "reciprocal"):
        return True
    if kind(value) == "pow":
        return isinstance(operands(value)[1], (int, float)) and operands(value)[1] < 0
    return kind(value) in ("div", "true_divide", "divide") and not isinstance(operand(value), Node)


def _normalised(sizes: Sizes, value: Node, by: Node) -> Size:
    """A value that is divided by what was computed of it: at most sqrt(d) of its d elements, or 1."""
    norm = kind(root(by)) in ("linalg_vector_norm", "norm", "linalg_norm")
    shape = tensors(value)[0].shape
    room = 1.0 if norm or sizes[value].low >= 0 else math.sqrt(size_hint(shape[-1]) if shape else 1)
    return Size(0.0 if sizes[value].low >= 0 else -room, room)


def div(sizes: Sizes, node: Node) -> Size:
    """Quotients: scaling, normalisation, division by what an eps alone keeps from zero."""
    top, bottom = operands(node)
    if (divisor := sizes.constant(bottom)) is not None:
        scale = sizes.of(1 / divisor) if divisor else UNKNOWN
        return _scaled(sizes.of(top), scale.high, interval_product(sizes.of(top), scale))
    if not isinstance(bottom, Node):  # infinity or NaN
        return UNKNOWN
    a, b = sizes.of(top), sizes.of(bottom)
    if isinstance(top, Node) and root(top) in ancestors(bottom):
        return _normalised(sizes, top, bottom)
    least = _least(b)
    bounds = interval_product(a, Size(1 / b.high, 1 / least)) if least and b.low >= 0 else UNKNOWN
    if least and (a.peak if a.peak < math.inf else 1.0) / least > sizes.limit:
        return bounds.marked(sizes.too_large(f"a division by what may be as small as {least:.3g}"))
    return bounds


def _least(size: Size) -> float:
    """The smallest magnitude that a number guarantees, or is meant to; 0 if none is known."""
    return max(size.low, 0.0) or size.eps


def inverse(sizes: Sizes, node: Node) -> Size:
    """1/x and 1/sqrt(x)."""
    power = 0.5 if kind(node) == "rsqrt" else 1.0
    return _inverse_power(sizes, operand(node), power)


def _inverse_power(sizes: Sizes, value: object, power: float) -> Size:
    size = sizes.of(value)
    least = _least(size)
    if not least:
        return Size(0.0 if size.low >= 0 else -math.inf)
    highest = raised(least, -power)
    low = raised(size.high, -power) if size.low >= 0 else (0.0 if power == 0.5 else -highest)
    if highest <= sizes.limit:
        return Size(low, highest)
    return Size(low, highest).marked(sizes.too_large(f"the inverse of what may be as small as {least:.3g}"))


def sqrt(sizes: Sizes, node: Node) -> Size:
    """The square root of what is large is in range."""
    size = sizes.of(operand(node))
    low, high = (math.sqrt(max(v, 0.0)) for v in (size.low, size.high))
    return Size(low, high, root=size.large or size.root, eps=math.sqrt(size.eps))


def logarithm(sizes: Sizes, node: Node) -> Size:
    """In range; the factor is for log2."""
    size = sizes.of(operand(node))
    shift = 1.0 if kind(node) in ("log1p", "special_log1p") else 0.0
    low, high = size.low + shift, size.high + shift
    if not 0 < high < math.inf:
        return UNKNOWN
    least = min(0.0, 1.5 * math.log(low)) if low > 0 else -math.inf
    return Size(least, max(0.0, 1.5 * math.log(high)))


def to_power(sizes: Sizes, node: Node) -> Size:
    """Powers by a number; by anything else nothing is known."""
    base, exponent = operands(node)
    if not isinstance(base, Node):
        ends = [raised(base, end) for end in sizes.of(exponent)[:2]] if base > 0 else [0.0, math.inf]
        return Size(min(ends), max(ends)).marked(sizes.too_large(f"{base} to a power"))
    power = sizes.constant(exponent)
    if power is None:
        return Size(0.0 if sizes[base].low >= 0 else -math.inf)
    if power == 0.5:
        return sqrt(sizes, node)
    return _inverse_power(sizes, base, -power) if power < 0 else power_of(sizes, node, base, power)
