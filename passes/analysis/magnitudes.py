"""Bounds on the values of each node.

Analysis only. Nothing is known of activations, so they count as moderate. Values count as large if an op
makes large values from moderate ones (a sum of squares, an exponential, a long sum, 1 / eps). A value that is
proven to fit is not large. `size_rules` holds the rule of each op.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch
from torch.fx import Graph, Node
from torch.nn import Module

from ampgraph.ops.lists import OpClass

from .alias import SOURCES
from .facts import Facts, element_count, tensors
from .graph_walk import kind, operand, values_read
from .ranges import Extents, numbers

# A sum of so many moderate values may leave float16's range; a factor as small brings it back.
LONG_SUM = 64
# Above this number bfloat16 rounds by 1/16 and more, as much as a softmax should lose.
COARSE = 16.0


class Size(NamedTuple):
    """The bounds of a node's values.

    Attributes:
        low: None is smaller.
        high: None is larger.
        large: Why some may leave the low range; empty if nothing says so.
        grows: Whether they leave it so fast that a matrix product must not read them low either.
        root: Why the square, or the product with another such value, may leave the range (a norm).
        eps: The number that keeps them from zero; 0 if there is none.
    """

    low: float = -math.inf
    high: float = math.inf
    large: str = ""
    grows: bool = False
    root: str = ""
    eps: float = 0.0

    @property
    def peak(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))

    def marked(self, other: Size) -> Size:
        """Returns the bounds of this with the marks of another."""
        return Size(self.low, self.high, other.large, other.grows, other.root, other.eps)


UNKNOWN = Size()
UNIT = Size(0.0, 1.0)
SIGNED_UNIT = Size(-1.0, 1.0)


class Sizes:
    """The sizes of all nodes of a graph.

    Args:
        facts: The facts about its nodes.
        low_dtype: The low dtype.
        extents: The least and largest elements of parameters and buffers.
        rule: Returns the size of what an op makes.
    """

    def __init__(
        self, facts: Facts, low_dtype: torch.dtype, extents: Extents, rule: Callable[[Sizes, Node], Size]
    ) -> None:
        self.facts, self.extents, self.limits = facts, extents, torch.finfo(low_dtype)
        self._low_dtype, self._rule = low_dtype, rule
        self.limit = self.limits.max
        self.is_narrow = self.limit < torch.finfo(torch.float32).max / 2
        self._known: dict[Node, Size] = {}
        self._find_all()

    def __getitem__(self, node: Node) -> Size:
        if node not in self._known:
            self._known[node] = self._of_source(node) if node.op in SOURCES else UNKNOWN
        return self._known[node]

    def _find_all(self) -> None:
        for node in self.facts:
            if node.op not in (*SOURCES, "output"):
                self._known[node] = self._of_result(node)

    @cached_property
    def typical(self) -> TypicalSizes:
        """The sizes for inputs and parameters of usual size."""
        return TypicalSizes(self.facts, self._low_dtype, self.extents, self._rule)

    def of(self, value: object) -> Size:
        """Returns the size of an argument: a node, a number, or nothing."""
        if isinstance(value, Node):
            return self[value]
        if isinstance(value, (int, float)) and not math.isnan(value):
            return Size(float(value), float(value))
        return UNKNOWN

    def too_large(self, reason: str, *, turn: float | None = None, grows: bool = True) -> Size:
        """Returns the mark of what may be too large; a dtype with the range of float32 holds it.

        Args:
            reason: What makes it large.
            turn: From which value on.
            grows: See `Size`.
        """
        if not self.is_narrow:
            return UNKNOWN
        where = "" if turn is None else f" from {turn:.3g} on"
        return Size(large=f"{reason}: above {self.limit:.6g}{where}", grows=grows)

    def summed_square(self, reason: str, turn: float) -> Size:
        """Returns the mark of squares that are summed: of a wide dtype it is the precision that counts."""
        if self.is_narrow:
            return self.too_large(reason, turn=turn)
        return Size(large=f"{reason}: {self.limits.dtype} rounds each by up to {self.limits.eps / 2:.2g}")

    def constant(self, value: object) -> float | None:
        """Returns the number that an argument is, as a number or as a tensor of it."""
        size = self.of(value)
        return size.low if size.low == size.high and math.isfinite(size.low) else None

    def hull(self, *sizes: Size) -> Size:
        """Returns what may be any of them."""
        large = next((s for s in sizes if s.large), UNKNOWN)
        return Size(
            min([s.low for s in sizes], default=-math.inf),
            max([s.high for s in sizes], default=math.inf),
            large.large,
            any(s.grows for s in sizes),
            next((s.root for s in sizes if s.root), ""),
            min([s.eps for s in sizes if s.eps], default=0.0),
        )

    def read(self, node: Node) -> list[Size]:
        """Returns the sizes of the tensors that a node reads, and of its numbers."""
        return [*(self[n] for n in values_read(node)), *map(self.of, numbers(node))]

    def moved(self, node: Node) -> list[Size]:
        """Returns the sizes of what an op moves; integers beside floats are indices."""
        read = values_read(node)
        floats = [n for n in read if any(t.is_floating_point() for t in tensors(n))]
        return [*(self[n] for n in floats or read), *map(self.of, numbers(node))]

    def _of_result(self, node: Node) -> Size:
        size = self._rule(self, node)
        if size.large and size.peak <= self.limit:  # it is proven to fit
            return size._replace(large="", grows=False)
        return size

    def _of_source(self, node: Node) -> Size:
        if all(v.dtype is torch.bool for v in tensors(node)) and tensors(node):
            return UNIT
        extent = None if self.facts[node].mutated else self.extents[node]
        if extent is None:
            return UNKNOWN
        return Size(*extent) if self.extents.is_constant(node) else of_trained(*extent)


class TypicalSizes(Sizes):
    """The sizes if inputs and parameters are from 0 to 1, matrix products and what is unknown from -1 to 1.

    They tell what the numbers in the code and in the buffers of a model make of such values. Few are asked
    for, so each is found when it is, with those that it is computed from.
    """

    def __getitem__(self, node: Node) -> Size:
        waiting = [node]
        while waiting:
            last = waiting[-1]
            before = () if self._is_unit(last) else last.all_input_nodes
            if last not in self._known and (unknown := [n for n in before if n not in self._known]):
                waiting += unknown
                continue
            waiting.pop()
            if last not in self._known and last.op not in (*SOURCES, "output"):
                self._known[last] = self._of_result(last)
            elif last not in self._known:
                super().__getitem__(last)
        return self._known[node]

    def _find_all(self) -> None:
        """Finds none yet."""

    def _is_unit(self, node: Node) -> bool:
        """Whether the result has the size of a matrix product, which does not depend on its operands."""
        return self.facts[node].op_class is OpClass.WHITE and kind(node) != "div"

    def _of_source(self, node: Node) -> Size:
        known = super()._of_source(node)
        return known if known.peak < math.inf and self.extents.is_constant(node) else UNIT

    def _of_result(self, node: Node) -> Size:
        if self._is_unit(node):
            return SIGNED_UNIT
        size = self._rule(self, node)
        is_unknown = size.low == -math.inf and size.high == math.inf
        if is_unknown and kind(node) == "div":  # by something about 1
            return self.of(operand(node))
        if is_unknown or self.facts[node].op_class is OpClass.WHITE:
            return SIGNED_UNIT
        low = size.low if size.low > -math.inf else min(-1.0, size.high)
        return Size(low, size.high if size.high < math.inf else max(1.0, low))


def values_that_count(graph: Graph, root: Module, low_dtype: torch.dtype) -> list[tuple]:
    """Returns all that a plan of a graph depends on of the parameters, buffers and constants of a module."""
    extents, most = Extents(root), torch.finfo(low_dtype).max
    found: list[tuple] = []
    for node in graph.find_nodes(op="get_attr"):
        extent = extents[node]
        if extent is None or extents.is_constant(node):
            tops = extents.tops(node) if extents.peak(node) > COARSE else None
            found.append((node.name, extent, tops))
        else:
            peak = extents.peak(node)
            found.append((node.name, of_trained(*extent), peak if peak > most else 0.0))
    return found


def of_trained(low: float, high: float) -> Size:
    """Training moves a parameter: a few times its size today is taken for its bound."""
    room = max(4 * max(abs(low), abs(high)), 1.0)
    return Size(-room, room)


Rule: TypeAlias = Callable[[Sizes, Node], Size]


def times(a: float, b: float) -> float:
    """Returns a product; zero times infinity is zero."""
    return 0.0 if 0 in (a, b) else a * b


def interval_product(a: Size, b: Size) -> Size:
    """Returns the bounds of a product, without marks."""
    ends = [times(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return Size(min(ends), max(ends))


def raised(base: float, exponent: float) -> float:
    """Returns a power of a number that is not negative; infinity if it does not fit into a float."""
    try:
        return base**exponent
    except (OverflowError, ZeroDivisionError):
        return math.inf


def elements(value: object) -> int:
    """Returns the number of elements of a node's tensor; 1 for a number."""
    found = tensors(value) if isinstance(value, Node) else []
    return element_count(found[0]) if found else 1
