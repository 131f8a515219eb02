"""Keeps the values that ops read of memory which the graph also writes, for the backward of a compiler.

AOTAutograd saves an input of the forward for the backward, or computes from it again, although the forward
writes to it: gradients are wrong in silence (seen in torch 2.13). So ops read such memory through a copy that
no partitioner computes again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from ampgraph.training.kept_copy import kept_copy

from .analysis.alias import SOURCES, AliasSets, written_args
from .analysis.gradient_flow import matter_to_gradients
from .base import Pass
from .insert_casts import inherit_metadata


@dataclass(frozen=True)
class KeepRead(Pass):
    """Puts a copy before each read of written memory on which a gradient depends."""

    name: ClassVar[str] = "keep_read"

    def run(self, graph_module: GraphModule) -> bool:
        graph = graph_module.graph
        reads = reads_of_written_memory(graph)
        copies: dict[tuple[Node, int], Node] = {}
        for reader, source, writes in reads:
            if (source, writes) not in copies:
                copies[source, writes] = _copied(graph, source, reader)
            reader.replace_input_with(source, copies[source, writes])
        return bool(reads)


def reads_of_written_memory(graph: Graph) -> list[tuple[Node, Node, int]]:
    """Returns the readers of the caller's memory that the graph writes: reader, node, writes so far.

    Only readers count whose result matters to a gradient.
    """
    written = [n for node in graph.nodes for n in written_args(node)]
    if not written:
        return []
    aliases = AliasSets(graph)
    roots = {aliases.root(n) for n in written}
    roots = {root for root in roots if any(n.op in SOURCES for n in aliases.members[root])}
    if not roots:
        return []
    matters = matter_to_gradients(graph)
    writes = dict.fromkeys(roots, 0)
    found: list[tuple[Node, Node, int]] = []
    for node in graph.nodes:
        own = written_args(node)
        for source in node.all_input_nodes if node.op == "call_function" and node in matters else ():
            root = aliases.root(source)
            # A view, or a cast that does nothing.
            is_same_memory = source in own or aliases.root(node) == root
            if root in roots and not is_same_memory and _is_tensor(source):
                found.append((node, source, writes[root]))
        for n in own:
            if aliases.root(n) in roots:
                writes[aliases.root(n)] += 1
    return found


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _copied(graph: Graph, source: Node, reader: Node) -> Node:
    with graph.inserting_before(reader):
        copy = graph.call_function(kept_copy, (source,))
    inherit_metadata(copy, reader)
    copy.meta["val"] = source.meta["val"].clone()
    return copy
