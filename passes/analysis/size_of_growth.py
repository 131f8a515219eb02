"""The sizes of results that may exceed their operands: exponentials, powers, sums, norms, matrix products."""

from __future__ import annotations

import math

from torch.fx import Node

from ampgraph._compat import OpOverload, size_hint
from ampgraph.ops import kernels

from .arguments import argument, tensor_arguments
from .facts import tensors
from .graph_walk import kind, operand, operands, root, scaled_by
from .magnitudes import LONG_SUM, UNKNOWN, Size, Sizes, elements, interval_product, raised, times
from .products import terms

AVERAGES = "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"


_SUMS = frozenset(f"sum nansum cumsum mean nanmean scatter_add index_add trace {AVERAGES}".split(" "))


_PASSED = frozenset(("add", "sub", "mul", "masked_fill", "where", "pad", "constant_pad_nd"))

# Activations may be as large. A power or a product that leaves float16's range before that is large.
MODERATE = 16.0
# A matrix product of so many terms may overflow if it is divided, as in a mean, only afterwards.
MEAN_TERMS = 16
# A product of a tensor with itself sums squares. With so many terms, values of 45 overflow float16.
OWN_TERMS = 32


def exponential(sizes: Sizes, node: Node) -> Size:
    """Exponentials, unless their argument is bounded, or negated."""
    value = operand(node)
    size, base = sizes.of(value), 2.0 if kind(node) in ("exp2", "special_exp2") else math.e
    if kind(node) in ("cosh", "sinh"):
        size = Size(-size.peak, size.peak)
    turn = math.log(sizes.limit) / math.log(base)
    low, high = (raised(base, end) for end in (size.low, size.high))
    if kind(node) == "sinh":
        low = -high
    falls = isinstance(value, Node) and _is_negated(sizes, value) and kind(node) not in ("cosh", "sinh")
    if falls and high == math.inf:
        return Size(low, high)
    return Size(low, high).marked(sizes.too_large(f"{kind(node)} without the maximum subtracted", turn=turn))


def _is_negated(sizes: Sizes, value: Node) -> bool:
    """Whether a minus stands before it: a decay, a distance."""
    value = root(value)
    if kind(value) == "neg":
        return True
    if kind(value) not in ("mul", "div"):
        return False
    factors = [sizes.constant(v) for v in operands(value)]
    negated = [_is_negated(sizes, v) for v in operands(value) if isinstance(v, Node)]
    return any(f is not None and f < 0 for f in factors) or any(negated)


def is_square(node: Node) -> bool:
    """Whether a node is the square of its operand."""
    if kind(node) == "square":
        return True
    if kind(node) == "pow":
        return operands(node)[1] == 2 and isinstance(operand(node), Node)
    a, b = operands(node) if kind(node) == "mul" else (None, None)
    if not (isinstance(a, Node) and isinstance(b, Node)) or root(a) is not root(b):
        return False
    return elements(a) == elements(b) == elements(node)


def squared(sizes: Sizes, node: Node) -> Size:
    """A square."""
    return power_of(sizes, node, operand(node), 2.0)


def power_of(sizes: Sizes, node: Node, base: object, power: float) -> Size:
    """A power of a value; a high one is large, and any that a sum reads."""
    base, power = _whole_power(base, power)
    if power == 0:
        return Size(1.0, 1.0)
    size = sizes.of(base)
    high = raised(size.peak, power)
    low = raised(max(size.low, 0.0), power) if size.low >= 0 or power % 2 == 0 else -high
    what = "a square" if power == 2 else f"a power of {power:g}"
    turn = raised(sizes.limit, 1 / power)
    if power > 1 and turn <= MODERATE and not size.large:
        marks = sizes.too_large(what, turn=turn)
    elif power >= 2 and _is_summed(node):
        marks = sizes.summed_square(f"{what} that is summed", turn)
    elif size.root and not size.large:
        marks = sizes.too_large(f"{what} of a norm ({size.root})")
    else:
        marks = Size(large=size.large, grows=size.grows)
    return Size(low, high).marked(marks._replace(eps=raised(size.eps, power)))


def _whole_power(base: object, power: float) -> tuple[object, float]:
    """Returns what a power of a power, of a power .. is a power of, and which."""
    while isinstance(base, Node):
        base_of = root(base)
        exponent = operands(base_of)[1] if kind(base_of) == "pow" else 2.0 if is_square(base_of) else None
        if not isinstance(exponent, (int, float)) or exponent < 1:
            break
        base, power = operand(base_of), power * exponent
    return base, power


def running_product(sizes: Sizes, node: Node) -> Size:
    """Products of all values, or of the first ones, along a dimension."""
    value = operand(node)
    assert isinstance(value, Node)
    size, shape = sizes[value], tensors(value)[0].shape
    dim = argument(node, "dim")
    factors = elements(value) if not isinstance(dim, int) else size_hint(shape[dim]) if shape else 1
    high = max(size.peak, raised(size.peak, factors))
    low = 0.0 if size.low >= 0 else -high
    if raised(sizes.limit, 1 / max(1, factors)) > MODERATE:
        return Size(low, high, size.large, size.grows)
    return Size(low, high).marked(sizes.too_large(f"a product of {factors} values"))


def _is_summed(node: Node, hops: int = 4) -> bool:
    """Whether a sum or mean reads the node, through views and a little arithmetic."""
    for user in node.users:
        if kind(user) in _SUMS:
            return True
        moves = isinstance(user.target, OpOverload) and kernels.is_view(user.target)
        if (moves or kind(user) in _PASSED) and hops and _is_summed(user, hops - (not moves)):
            return True
    return False


def total(sizes: Sizes, node: Node) -> Size:
    """Sums; a long one may be large, and one of large values is."""
    value = operand(node)
    assert isinstance(value, Node)
    size = sizes[value]
    if kind(node) == "cumsum":
        shape = tensors(value)[0].shape
        added = size_hint(shape[argument(node, "dim")]) if shape else 1
        low, high = min(size.low, times(size.low, added)), max(size.high, times(size.high, added))
    else:
        added = max(1, elements(value) // max(1, elements(node)))
        low, high = times(size.low, added), times(size.high, added)
    if size.large:
        return Size(low, high, large=size.large, grows=size.grows)
    is_long = added >= LONG_SUM
    return Size(low, high).marked(
        sizes.too_large(f"a sum of {added} values", grows=False) if is_long else UNKNOWN
    )


def log_of_sum(sizes: Sizes, node: Node) -> Size:
    """Not less than the least value, and little more than the largest."""
    value = operand(node)
    assert isinstance(value, Node)
    return Size(sizes[value].low, sizes[value].high + math.log(max(1, elements(value))))


def unbounded(sizes: Sizes, node: Node) -> Size:
    """Without bounds, and with the marks of what it reads: sums by index have an unknown number of terms."""
    return UNKNOWN.marked(sizes.hull(*sizes.read(node))._replace(root="", eps=0.0))


def mean(sizes: Sizes, node: Node) -> Size:
    """No larger than the largest term."""
    return sizes.of(operand(node))._replace(root="")


def variance(sizes: Sizes, node: Node) -> Size:
    """A mean of squares, or its root."""
    size = sizes.of(operand(node))
    high = raised(size.peak, 2.0)
    if kind(node) == "std":
        return Size(0.0, size.peak, root="a mean of squares")
    return Size(0.0, high).marked(sizes.summed_square("a mean of squares", math.sqrt(sizes.limit)))


def norm_of(sizes: Sizes, node: Node) -> Size:
    """A norm; its square is a sum of squares."""
    value = operand(node)
    assert isinstance(value, Node)
    size = sizes[value]
    added = max(1, elements(value) // max(1, elements(node)))
    return Size(0.0, size.peak * math.sqrt(added), root=f"a norm of {added} values")


def norm_layer(sizes: Sizes, node: Node) -> Size:
    """A normalised value: at most sqrt(d) of its d elements, times the weight."""
    shape, weight, bias = (argument(node, name) for name in ("normalized_shape", "weight", "bias"))
    scale = sizes[weight].peak if isinstance(weight, Node) else 1.0
    shift = sizes[bias].peak if isinstance(bias, Node) else 0.0
    room = math.sqrt(math.prod(size_hint(s) for s in shape)) * scale + shift
    return Size(-room, room)


def product(sizes: Sizes, node: Node) -> Size:
    """Matrix products, and all else that the lists name white: float32 inside, and rounded once."""
    added = terms(node)
    floats = [n for _, n in tensor_arguments(node) if sizes.facts[n].dtype]
    if grown := next((sizes[n] for n in floats if sizes[n].large and sizes[n].grows), None):
        return Size(large=grown.large) if sizes.is_narrow else UNKNOWN  # the next product reads this low
    if added is None or len(floats) != 2 or any(sizes.facts[root(n)].is_parameter for n in floats):
        return UNKNOWN
    a, b = floats
    one = interval_product(sizes[a], sizes[b])
    bounds = Size(times(one.low, added), times(one.high, added))
    return bounds.marked(_mark_of_product(sizes, node, added, a, b))


def _mark_of_product(sizes: Sizes, node: Node, added: int, a: Node, b: Node) -> Size:
    if sizes[a].root and sizes[b].root:
        return sizes.too_large(f"a product of two norms ({sizes[a].root})")
    if root(a) is root(b) and added >= OWN_TERMS:
        turn = math.sqrt(sizes.limit / added)
        return sizes.too_large(f"a product with itself, which sums {added} squares", turn=turn)
    if added >= MEAN_TERMS and (divisor := _divided_by(sizes, node)) >= added / 2:
        return sizes.too_large(f"a sum of {added} products, divided by {divisor:.6g} only afterwards")
    return UNKNOWN


def _divided_by(sizes: Sizes, node: Node) -> float:
    """The smallest divisor of a product over all its uses; 0 if a use does not divide it."""
    factors = [scaled_by(user, source, sizes.constant) for user, source in _uses(node)]
    if not factors or any(f is None or f == 0 for f in factors):
        return 0.0
    return min(1 / abs(f) for f in factors if f)


def _uses(node: Node) -> list[tuple[Node, Node]]:
    """Returns what reads a node, with what it reads: itself or a view of it."""
    found: list[tuple[Node, Node]] = []
    for user in node.users:
        moves = isinstance(user.target, OpOverload) and kernels.is_view(user.target)
        found += _uses(user) if moves else [(user, node)]
    return found
