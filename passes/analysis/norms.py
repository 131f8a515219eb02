"""Norms in a graph: layer norm, RMS norm, and RMS norm written as single ops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from ampgraph._compat import is_same_shape

from .arguments import argument
from .facts import tensors

aten = torch.ops.aten


@dataclass(frozen=True)
class Norm:
    """One norm: ``(x - mean) / deviation * weight + bias``; RMS norm has neither mean nor bias.

    Attributes:
        output: The node that returns the result.
        x: What it normalizes.
        dims: Number of trailing dimensions over which it does.
        weight: The factor, if there is one.
        bias: The summand, if there is one.
        inside: Without a norm op, the ops before ``output``.
        inverse: The one of them that gives 1/deviation.
        normalized: The one that gives the normalized values; None if ``output`` does.
    """

    output: Node
    x: Node
    dims: int
    weight: Node | None = None
    bias: Node | None = None
    inside: tuple[Node, ...] = ()
    inverse: Node | None = None
    normalized: Node | None = None

    @property
    def is_centered(self) -> bool:
        """Whether it subtracts the mean."""
        return self.output.target is aten.layer_norm.default

    @property
    def sources(self) -> list[Node]:
        """What it reads: ``x``, the weight and the bias."""
        return [n for n in (self.x, self.weight, self.bias) if n is not None]

    @property
    def nodes(self) -> list[Node]:
        """What it reads, and the ops that make it."""
        return [*self.sources, *self.inside, self.output]


def norm_at(node: Node) -> Norm | None:
    """Returns the norm whose result a node is, or None; all its values are float32."""
    found: Norm | None
    if node.target in (aten.layer_norm.default, aten.rms_norm.default):
        weight, bias = (argument(node, name) for name in ("weight", "bias"))
        shape = argument(node, "normalized_shape")
        found = Norm(node, argument(node, "input"), len(shape), weight, bias)
    elif node.target is aten.mul.Tensor:
        found = next(_written_out(node), None)
    else:
        found = None
    if found is None or not all(map(_is_float32, found.nodes)):
        return None
    if len(set(found.sources)) < len(found.sources):  # compilers take each input of an autograd function once
        return None
    # A larger weight would repeat the normalized values.
    return found if is_same_shape(node.meta["val"], found.x.meta["val"]) else None


def _is_float32(node: Node) -> bool:
    return [t.dtype for t in tensors(node)] == [torch.float32]


def _written_out(product: Node) -> Iterator[Norm]:
    """Yields the RMS norms that end in a product: with the weight, or of a norm without one."""
    for normalized, weight in _factors(product):
        chain = [normalized]
        while _changes_nothing(chain[0]):
            chain.insert(0, chain[0].args[0])  # type: ignore[arg-type]
        if all(len(n.users) == 1 for n in chain):
            for x, dims, before in _normalized(chain[0]):
                yield Norm(product, x, dims, weight, None, (*before, *chain), before[-1], normalized)
    for x, dims, before in _normalized(product):
        yield Norm(product, x, dims, None, None, before, before[-1])


def _factors(product: Node) -> Iterator[tuple[Node, Node]]:
    left, right = product.args[:2]
    if isinstance(left, Node) and isinstance(right, Node):
        yield from ((left, right), (right, left))


def _changes_nothing(node: Node) -> bool:
    """Whether the node is a cast to the dtype that its tensor has."""
    if node.target is not aten.to.dtype or not isinstance(node.args[0], Node):
        return False
    return [t.dtype for t in tensors(node)] == [t.dtype for t in tensors(node.args[0])]


def _normalized(product: Node) -> Iterator[tuple[Node, int, tuple[Node, ...]]]:
    """Yields x, the number of dimensions and the ops between, of ``x * rsqrt(mean(x * x) + eps)``."""
    for x, inverse in _factors(product) if product.target is aten.mul.Tensor else ():
        if not (inverse.target is aten.rsqrt.default or _is_power(inverse, -0.5)):
            continue
        above = _sole(inverse.args[0], (aten.add.Tensor, aten.add.Scalar))
        mean = above and _sole(above.args[0], (aten.mean.dim,))
        square = mean and _sole(mean.args[0], (aten.pow.Tensor_Scalar, aten.square.default, aten.mul.Tensor))
        if not (above and mean and square) or isinstance(above.args[1], Node) or len(inverse.users) != 1:
            continue
        dims = _trailing(mean, x)
        if dims and _is_square(square, x):
            yield x, dims, (square, mean, above, inverse)


def _sole(value: object, targets: tuple) -> Node | None:
    """Returns a node with one of the targets that nothing else reads."""
    found = isinstance(value, Node) and value.target in targets and len(value.users) == 1
    return value if found else None  # type: ignore[return-value]


def _is_square(node: Node, x: Node) -> bool:
    if node.target is aten.mul.Tensor:
        return node.args[0] is x and node.args[1] is x
    return node.args[0] is x and (node.target is aten.square.default or _is_power(node, 2))


def _is_power(node: Node, exponent: float) -> bool:
    return node.target is aten.pow.Tensor_Scalar and bool(node.args[1] == exponent)


def _trailing(mean: Node, x: Node) -> int:
    """Returns the number of trailing dimensions of a mean that keeps them; 0 for a mean over others."""
    count = x.meta["val"].dim()
    dims = sorted(d % count for d in argument(mean, "dim") or ())
    keeps = argument(mean, "keepdim") is True and argument(mean, "dtype") is None
    return len(dims) if keeps and dims == list(range(count - len(dims), count)) else 0
