"""`fingerprint`: shows whether a measurement on one graph applies to another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from ampgraph.marks import StorageMark, input_mark, mark_of

from .facts import tensors


def fingerprint(graph_module: GraphModule) -> str:
    """Returns a short text that two graphs share if the same ops compute the same floats of the same inputs.

    It ignores integers, sizes of inputs and nodes that ampgraph inserts. So captures for different input
    sizes agree, and so do graphs with and without casts. Names of nodes, ops, dtypes, float constants and
    sizes of parameters count; the values of parameters do not.

    Args:
        graph_module: A graph without inserted casts.
    """
    lines = (line for node in graph_module.graph.nodes for line in _lines(graph_module, node))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _lines(graph_module: GraphModule, node: Node) -> Iterator[str]:
    body = getattr(graph_module, str(node.target), None) if node.op == "get_attr" else None
    if isinstance(body, GraphModule):
        yield f"{node.name} {fingerprint(body)}"
    if not _is_float(node) or _is_storage(node):
        return
    read = " ".join(_source(n).name for n in node.all_input_nodes if _is_float(n))
    constants = " ".join(repr(x) for x in tree_leaves((node.args, node.kwargs)) if isinstance(x, float))
    dtypes = " ".join(str(tensor.dtype) for tensor in tensors(node))
    target = "" if node.op == "placeholder" else str(node.target)
    yield f"{node.op} {node.name} {target} {dtypes} ({read}) ({constants}) {_parameter_sizes(node)}"


def _is_float(node: Node) -> bool:
    return node.op != "output" and any(tensor.is_floating_point() for tensor in tensors(node))


def _is_storage(node: Node) -> bool:
    return mark_of(node, StorageMark) is not None


def _source(node: Node) -> Node:
    while _is_storage(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _parameter_sizes(node: Node) -> Any:
    if node.op != "get_attr" and not input_mark(node).is_parameter:
        return ""
    return [tuple(tensor.shape) for tensor in tensors(node) if isinstance(tensor, torch.Tensor)]
