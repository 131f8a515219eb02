"""Computes tensors that a graph makes from numbers alone. Analysis only."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Container, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from ampgraph._compat import OpOverload, no_modes
from ampgraph.ops.kernels import op_of, written_slots

# Elements: a mask of 32 sequences of 4,096 tokens. Larger ones take seconds and gigabytes.
LARGEST = 2**29


def constant_nodes(node: Node, unstable: Container[Node]) -> list[Node]:
    """Returns the nodes that compute a tensor from numbers alone.

    Args:
        node: The node with the tensor.
        unstable: Nodes whose memory is written.

    Returns:
        The nodes in graph order, ``node`` last. No nodes if it depends on an input, a weight, a symbol or a
        random number, or if a tensor is larger than `LARGEST`.
    """
    needed: dict[Node, None] = {}
    waiting = [node]
    while waiting:
        if (current := waiting.pop()) in needed:
            continue
        if current in unstable or not _is_constant_op(current):
            return []
        needed[current] = None
        waiting += current.all_input_nodes
    return sorted(needed)


def expression_of(nodes: list[Node]) -> Hashable:
    """Returns what is equal for nodes that compute the same, `constant_nodes` of another node too."""
    numbers = {node: i for i, node in enumerate(nodes)}

    def described(argument: Any) -> Any:
        return ("node", numbers[argument]) if isinstance(argument, Node) else argument

    calls = ((n.target, map_aggregate(n.args, described), map_aggregate(n.kwargs, described)) for n in nodes)
    return tuple(map(repr, calls))


def computed(nodes: list[Node]) -> Tensor | None:
    """Returns what the last one of `constant_nodes` computes, on the CPU; None if a CPU cannot run an op."""
    try:
        with no_modes(), torch.no_grad(), torch.device("cpu"):
            return _computed(nodes)
    except RuntimeError:  # no kernel for this dtype, or no memory: the graph's device may have them
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


def _computed(nodes: list[Node]) -> Tensor:
    """Runs nodes in graph order, each on the CPU, and frees what no later node reads."""
    reads = Counter(read for node in nodes for read in node.all_input_nodes)
    values: dict[Node, Any] = {}

    def here(argument: Any) -> Any:
        if isinstance(argument, Node):
            return values[argument]
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    for current in nodes:
        args, kwargs = map_aggregate(current.args, here), map_aggregate(dict(current.kwargs), here)
        values[current] = current.target(*args, **kwargs)  # type: ignore[operator]
        for read in current.all_input_nodes:
            reads[read] -= 1
            if not reads[read]:
                del values[read]
    value: Tensor = values[nodes[-1]]
    return value
