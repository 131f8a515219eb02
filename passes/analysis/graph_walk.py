"""Small questions about a node: its op's name, the base of a view, the values that it reads."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ampgraph._compat import OpOverload
from ampgraph.ops import kernels

from .arguments import argument, argument_name, tensor_arguments
from .facts import is_cast

# Far enough for any normalisation, and the walk stays short.
_MOST_ANCESTORS = 64
MEANS = frozenset(("mean", *(f"{of}avg_pool{n}d" for of in ("", "adaptive_") for n in (1, 2, 3))))
_COPIES = frozenset(("clone", "contiguous", "masked_fill", "lift_fresh_copy", "detach", "dropout", "type_as"))


def kind(node: Node) -> str:
    """Returns the op's functional name below ``aten.``; empty for other ops."""
    return kernels.functional_name(node.target) if isinstance(node.target, OpOverload) else ""


def function_name(node: Node) -> str:
    """Returns the Python name of the function that a node calls; empty for a name in text."""
    return getattr(node.target, "__name__", "")


def operands(node: Node) -> tuple[Any, Any]:
    """Returns the first two arguments of an ATen call, however they were given; None for what is missing."""
    args = node.args
    if len(args) > 1:  # first because common
        return args[0], args[1]
    names = kernels.argument_names(node.target)[:2]  # type: ignore[arg-type]
    first, second, *_ = (*(argument(node, name) for name in names), None, None)
    return first, second


def operand(node: Node) -> Any:
    """Returns the first argument of an ATen call."""
    return operands(node)[0]


def is_zero_dim(node: Node) -> bool:
    """Whether a node makes one tensor without dimensions, a number."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0


def values_read(node: Node) -> list[Node]:
    """Returns the nodes whose values, not only whose sizes or dtypes, a node reads."""
    if not isinstance(node.target, OpOverload):
        return node.all_input_nodes
    op = kernels.op_of(node.target)
    if op.reads_no_values:
        return []
    if not (shape_only := op.shape_slots):
        return node.all_input_nodes
    read = (tensor for path, tensor in tensor_arguments(node) if argument_name(node, path) not in shape_only)
    return list(dict.fromkeys(read))


def root(node: Node) -> Node:
    """Returns what a node is a view, a copy, a cast or a masked copy of, as far as that leads."""
    while node.all_input_nodes and _passes_on(node):
        node = node.all_input_nodes[0]
    return node


def is_same(a: Node, b: Node) -> bool:
    """Whether two nodes have the same values: one tensor, or one op on the same arguments."""
    a, b = root(a), root(b)
    return a is b or (
        a.op == "call_function" and a.target == b.target and (a.args, a.kwargs) == (b.args, b.kwargs)
    )


def is_item_of_maximum(node: Node) -> bool:
    """Whether the node takes a result of a maximum or a minimum: 0 is the value, 1 its index."""
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return False
    return kind(node.args[0]) in ("max", "min")


def _passes_on(node: Node) -> bool:
    if node.target is operator.getitem:
        return is_item_of_maximum(node)
    if not isinstance(node.target, OpOverload):
        return False
    op = kernels.op_of(node.target)
    if op.name in (
        "select",
        "slice",
        "split",
        "chunk",
        "unbind",
        "split_with_sizes",
        "narrow",
        "diagonal",
    ):
        return False  # a part of it
    return op.is_view or is_cast(node) or op.name in _COPIES


def ancestors(node: Node) -> set[Node]:
    """Returns the nodes that a node is computed from, the nearest ones."""
    found: set[Node] = set()
    waiting = [node]
    while waiting and len(found) < _MOST_ANCESTORS:
        new = [n for n in waiting.pop(0).all_input_nodes if n not in found]
        found.update(new)
        waiting += new
    return found


def scaled_by(user: Node, value: Node, constant: Callable[[object], float | None]) -> float | None:
    """Returns the number by which ``user`` multiplies ``value``, if it does nothing else."""
    first, second = operands(user) if kind(user) in ("mul", "div") else (None, None)
    if kind(user) == "div" and first is value:
        divisor = constant(second)
        return 1 / divisor if divisor else None
    if kind(user) != "mul":
        return None
    return next((constant(other) for other in (first, second) if other is not value), None)
