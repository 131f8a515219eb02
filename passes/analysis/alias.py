"""Finds nodes that share memory, and nodes that are written in place. Analysis only."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator

import torch
from torch.fx import Graph, Node

from ampgraph._compat import FakeTensorMode, OpOverload, evaluate, size_hint, storage_key
from ampgraph.ops.kernels import (
    is_view,
    may_convert,
    op_of,
    reads_strides,
    written_slots,
)

from .arguments import argument

SOURCES = ("placeholder", "get_attr")
DETACH = torch.ops.aten.detach_.default  # it does not write a value


def written_args(node: Node) -> list[Node]:
    """Returns the nodes that ``node`` writes in place, by its schema."""
    if not isinstance(node.target, OpOverload) or not (slots := written_slots(node.target)):
        return []
    written: list[Node] = []
    for position, name in slots:
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        values = value if isinstance(value, (list, tuple)) else (value,)
        written += [v for v in values if isinstance(v, Node)]
    return written


def returned_views(graph: Graph) -> set[Node]:
    """Returns the views of the caller's own memory that the graph returns, and the views between."""
    owners: dict[Node, list[Node]] = {}
    waiting = list(graph.output_node().all_input_nodes)
    while waiting:
        if (node := waiting.pop()) not in owners:
            owners[node] = owners_of(node)
            waiting += owners[node]
    found: set[Node] = set()
    for node in sorted(owners):  # in graph order: owners first
        if any(owner.op in SOURCES or owner in found for owner in owners[node]):
            found |= {node, _call(node)}
    return found


def viewed(node: Node) -> list[Node]:
    """Returns the arguments whose memory the node returns; none for an op that writes or converts.

    Schemas declare views. Composite ops (einsum, sum_to_size) may return a view without a declaration; fake
    tensors show it. For a dropout that drops nothing, neither shows it.
    """
    return _viewed(node, node)


def _viewed(call: Node, result: Node) -> list[Node]:
    """As `viewed`, for one result of the call, or the call itself."""
    if not isinstance(call.target, OpOverload):
        return []
    op = op_of(call.target)
    if op.is_mutable or op.may_convert:
        return []
    if op.is_view or (op.is_dropout and not drops(call)):
        return call.all_input_nodes[:1]
    if not op.is_composite:
        return []
    keys, of = set(_keys(result)), {n: set(_keys(n)) for n in call.all_input_nodes}
    return [n for n in of if keys & of[n]] if keys <= set().union(*of.values()) else []


def owners_of(node: Node) -> list[Node]:
    """As `viewed`, plus ops that return their input in the source: casts to the same dtype, in-place ops.

    For one of several results, these are the arguments whose memory this result has.
    """
    call = _call(node)
    if written := written_args(call):
        return _sharing(node, written)
    if isinstance(call.target, OpOverload) and may_convert(call.target):
        return _sharing(node, call.all_input_nodes[:1])
    return _viewed(call, node)


def source_of(node: Node, passing: Container[Node] | None = None) -> Node | None:
    """Returns the input or attribute whose memory a node has; None if there is none.

    Args:
        node: A source, a view, or the result of a write. Of several owners the first counts.
        passing: The calls that may be between, besides writes; default all.
    """
    while node.op not in SOURCES:
        owners = owners_of(node)
        if not owners or not (passing is None or node in passing or written_args(node)):
            return None
        node = owners[0]
    return node


def _sharing(node: Node, others: list[Node]) -> list[Node]:
    """Returns those of ``others`` whose storage the node's fake tensor has."""
    keys = set(_keys(node))
    return [n for n in others if not keys.isdisjoint(_keys(n))]


def _call(node: Node) -> Node:
    """Returns the call of which a node takes one of several results; for any other node, the node itself."""
    whole = node.args[0] if node.target is operator.getitem else node
    return whole if isinstance(whole, Node) else node


def returned_input(node: Node, mode: FakeTensorMode | None) -> Node | None:
    """Returns the argument that is the result itself (``x.to(x.dtype)``, ``x.contiguous()``), or None.

    A node that takes one of several results out (``broadcast_tensors``) counts as its call.
    """
    call = _call(node)
    if not isinstance(call.target, OpOverload) or "val" not in node.meta:
        return None
    op = op_of(call.target)
    if op.is_opaque or op.is_mutable:
        return None
    if op.is_dropout and not drops(call):
        return call.all_input_nodes[0]
    if not (op.is_composite or op.may_convert):
        return None
    result = evaluate(call, mode)
    if call is not node:
        result = result[node.args[1]]
    return next((n for n in call.all_input_nodes if n.meta.get("val") is result), None)


def drops(dropout: Node) -> bool:
    """Whether a dropout may set values to zero."""
    return argument(dropout, "train") is not False and argument(dropout, "p") != 0


def written_memory(graph: Graph) -> set[Node]:
    """Returns the nodes whose tensors live in memory that some node writes in place."""
    return _same_memory(graph, [n for node in graph.nodes for n in written_args(node)])


def strided_memory(graph: Graph) -> set[Node]:
    """Returns the nodes whose memory ``as_strided`` reads beyond its input tensor.

    The input is a part of the memory, and a cast of it does not have the layout of the whole.
    """
    strided = [n.args[0] for n in graph.nodes if isinstance(n.target, OpOverload) and reads_strides(n.target)]
    return _same_memory(graph, [n for n in strided if not is_whole(n.meta["val"])])


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indices may share one element: expanded tensors, sliding windows (``unfold``)."""
    sizes = [size_hint(size, fallback=2) for size in tensor.shape]
    steps = sorted(zip(map(size_hint, tensor.stride()), sizes, strict=True))
    furthest = 0
    for stride, size in steps:
        if size > 1 and stride <= furthest:
            return True
        furthest += stride * max(size - 1, 0)
    return False


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its memory, and no view of a part."""
    return size_hint(tensor.numel()) * tensor.itemsize == size_hint(tensor.untyped_storage().nbytes())


def _same_memory(graph: Graph, nodes: list[Node]) -> set[Node]:
    if not nodes:
        return set()
    aliases = AliasSets(graph)
    return {member for node in nodes for member in aliases.of(node)}


class AliasSets:
    """Groups the nodes of a graph by the memory their tensors live in.

    Two nodes are in one set when their fake tensors share a storage, or when the op's schema says
    that it returns (part of) an argument.
    """

    def __init__(self, graph: Graph):
        self._parent: dict[Node, Node] = {}
        owner: dict[int, Node] = {}
        for node in graph.nodes:
            for key in _keys(node):
                self._union(owner.setdefault(key, node), node)
            for source in (*_schema_aliases(node), *viewed(node)):
                self._union(source, node)
        self.members: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            self.members.setdefault(self.root(node), []).append(node)

    def root(self, node: Node) -> Node:
        """Returns the representative of the node's set."""
        while (parent := self._parent.get(node, node)) is not node:
            self._parent[node] = self._parent.get(parent, parent)
            node = parent
        return node

    def of(self, node: Node) -> list[Node]:
        """Returns all nodes in the set of ``node``, in graph order."""
        return self.members[self.root(node)]

    def _union(self, a: Node, b: Node) -> None:
        a, b = self.root(a), self.root(b)
        if a is not b:
            self._parent[b] = a


def _keys(node: Node) -> Iterator[int]:
    value = node.meta.get("val")
    for tensor in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(tensor, torch.Tensor) and (key := storage_key(tensor)) is not None:
            yield key


def _schema_aliases(node: Node) -> Iterator[Node]:
    if not isinstance(node.target, OpOverload):
        return
    schema = node.target._schema
    if not any(r.alias_info is not None for r in schema.returns):
        return
    for position, parameter in enumerate(schema.arguments):
        if parameter.alias_info is None or position >= len(node.args):
            continue
        source = node.args[position]
        if isinstance(source, Node) and not _converts(source, node):
            yield source


def _converts(source: Node, node: Node) -> bool:
    """Whether the op made new memory because it changed the dtype or has ``copy=True``."""
    if is_view(node.target):  # type: ignore[arg-type]
        return False
    if argument(node, "copy"):
        return True
    before, after = (getattr(n.meta.get("val"), "dtype", None) for n in (source, node))
    return before != after
