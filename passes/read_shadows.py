"""Makes a graph read low copies of its parameters instead of casting them in every forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from ampgraph.marks import BoundaryMark, set_mark
from ampgraph.training.gradient_boundary import shadow_weight

from .base import Pass
from .insert_casts import is_inserted_cast


@dataclass(frozen=True)
class ReadShadows(Pass):
    """Replaces every inserted cast of a parameter by its shadow.

    Attributes:
        shadows: Parameter node name to the holder of its shadow: a placeholder of the graph, or an attribute.
        differentiable: Whether the gradient of a shadow goes to its parameter.
    """

    shadows: Mapping[str, str]
    differentiable: bool
    name: ClassVar[str] = "read_shadows"

    def run(self, graph_module: GraphModule) -> bool:
        graph = graph_module.graph
        placeholders = {n.name: n for n in graph.find_nodes(op="placeholder")}
        found = {n.name: n for n in graph.nodes if n.name in self.shadows}
        for name, holder in self.shadows.items():
            casts = casts_of(found[name])
            shadow = placeholders.get(holder) or _attribute(graph, holder, casts[0])
            for cast in casts:
                self._replace(graph, cast, found[name], shadow)
        return bool(self.shadows)

    def _replace(self, graph: Graph, cast: Node, parameter: Node, shadow: Node) -> None:
        read = shadow
        if self.differentiable:
            with graph.inserting_before(cast):
                read = graph.call_function(shadow_weight, (parameter, shadow))
            read.meta.update(cast.meta)
            set_mark(read, BoundaryMark(self.name))
        cast.replace_all_uses_with(read)
        graph.erase_node(cast)


def _attribute(graph: Graph, target: str, cast: Node) -> Node:
    with graph.inserting_before(next(iter(graph.nodes))):
        node = graph.create_node("get_attr", target)
    node.meta["val"] = cast.meta["val"]
    set_mark(node, BoundaryMark(ReadShadows.name))
    return node


def casts_of(node: Node) -> list[Node]:
    """Returns the inserted casts to a low dtype directly after a node."""
    low = (torch.float16, torch.bfloat16)
    return [user for user in node.users if is_inserted_cast(user) and user.meta["val"].dtype in low]
