"""Undoes a rewrite: a graph with casts becomes the graph that its plan was made for.

It is the inverse of `InsertCasts` and `CleanCasts`. So a graph can be planned under another policy without a
new capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from ampgraph._compat import with_dtypes
from ampgraph.marks import META_KEY, drop_mark
from ampgraph.plan import Plan

from .base import Pass, Workspace
from .insert_casts import (
    is_inserted,
    is_inserted_cast,
    refresh_metadata,
    set_argument,
    set_named_argument,
)


@dataclass(frozen=True)
class RemoveCasts(Pass):
    """See the module docstring.

    Attributes:
        plan: The plan that the graph was rewritten by.
    """

    plan: Plan
    name: ClassVar[str] = "remove_casts"

    def run(self, graph_module: GraphModule) -> bool:
        graph = graph_module.graph
        nodes = {n.name: n for n in graph.nodes}
        inserted = [n for n in graph.nodes if is_inserted(n)]
        edited = {user for node in inserted for user in node.users}
        for cast in self.plan.casts:
            for use in cast.uses:
                # The clean-up has folded the nodes that isolated written memory.
                if cast.tensor in nodes and use.node in nodes:
                    set_argument(nodes[use.node], use.path, nodes[cast.tensor])
                    edited.add(nodes[use.node])
        for name, argument in self.plan.dtype_args.items():
            set_named_argument(nodes[name], argument, None)
            edited.add(nodes[name])
        for node in reversed(inserted):
            _erase(graph, node)
        edited |= {user for node in _stored_low(graph, self.plan) for user in node.users}
        for node in graph.nodes:
            drop_mark(node)  # the mark of the old plan
        graph_module.meta[META_KEY] = Workspace()
        refresh_metadata(graph, edited)
        return bool(edited)


def _stored_low(graph: Graph, plan: Plan) -> list[Node]:
    """Restores float32 for parameters that were stored low after the plan; returns these parameters."""
    stored = [
        node
        for node in graph.find_nodes(op="get_attr")
        if plan.decisions[node.name].dtype == torch.float32 and node.meta["val"].dtype == plan.low_dtype
    ]
    for node in stored:
        node.meta["val"] = with_dtypes(node.meta["val"], (torch.float32,))
    return stored


def _erase(graph: Graph, node: Node) -> None:
    if is_inserted_cast(node):
        source: Node = node.args[0]  # type: ignore[assignment]
        while is_inserted(source):
            source = source.args[0]  # type: ignore[assignment]
        node.replace_all_uses_with(source)
    graph.erase_node(node)
