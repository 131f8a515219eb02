"""Computes tensors that a graph makes from numbers alone. Analysis only."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from ampgraph._compat import OpOverload, no_modes
from ampgraph.ops.kernels import op_of, written_slots

# Elements: a mask of 32 sequences of 4,096 tokens. Larger ones take seconds and gigabytes.
LARGEST = 2**29


def constant_value(node: Node, unstable: Container[Node]) -> Tensor | None:
    """Returns what a node computes if that depends on no input, weight, symbol or random number.

    Args:
        node: A node with a tensor.
        unstable: Nodes whose memory is written.

    Returns:
        The value, on the CPU, or None if it depends on any of these, is larger than `LARGEST`, or has an op
        that a CPU cannot run.
    """
    needed: dict[Node, None] = {}
    waiting = [node]
    while waiting:
        if (current := waiting.pop()) in needed:
            continue
        if current in unstable or not _is_constant_op(current):
            return None
        needed[current] = None
        waiting += current.all_input_nodes
    try:
        with no_modes(), torch.no_grad(), torch.device("cpu"):
            return _computed(node, sorted(needed))
    except RuntimeError:  # no kernel for this dtype on a CPU, or no memory: the graph's device has them
        return None


def _is_constant_op(node: Node) -> bool:
    """Whether equal arguments make the node give equal results, in a size that can be computed here."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or written_slots(node.target):
        return False
    if node.target.namespace != "aten":  # a custom op may have a state, or no kernel for a CPU
        return False
    if op_of(node.target).is_random:
        return False
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)
    return all(isinstance(v, Tensor) and _is_computable(v) for v in values)


def _is_computable(tensor: Tensor) -> bool:
    size = tensor.numel()
    return isinstance(size, int) and size <= LARGEST


def _computed(node: Node, needed: list[Node]) -> Tensor:
    """Runs nodes in graph order, each on the CPU, and frees what no later node reads."""
    reads = Counter(read for other in needed for read in other.all_input_nodes)
    values: dict[Node, Any] = {}

    def here(argument: Any) -> Any:
        if isinstance(argument, Node):
            return values[argument]
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    for current in needed:
        args, kwargs = map_aggregate(current.args, here), map_aggregate(dict(current.kwargs), here)
        values[current] = current.target(*args, **kwargs)  # type: ignore[operator]
        for read in current.all_input_nodes:
            reads[read] -= 1
            if not reads[read] and read is not node:
                del values[read]
    value: Tensor = values[node]
    return value
