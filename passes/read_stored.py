"""Makes a graph read parameters that are stored low: low uses need no cast, other uses need one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from ampgraph._compat import with_dtypes
from ampgraph.plan import Cast, Use

from .analysis.arguments import tensor_arguments
from .base import Pass
from .insert_casts import insert_cast, refresh_metadata
from .read_shadows import casts_of


@dataclass(frozen=True)
class ReadStored(Pass):
    """Rewrites the reads of parameters that were captured in float32 and are now, or soon, stored low.

    Attributes:
        names: The parameters' nodes.
        low_dtype: Their dtype in storage.
    """

    names: tuple[str, ...]
    low_dtype: torch.dtype
    name: ClassVar[str] = "read_stored"

    def run(self, graph_module: GraphModule) -> bool:
        graph = graph_module.graph
        for node in [n for n in graph.nodes if n.name in self.names]:
            self._narrow(graph, node)
        return bool(self.names)

    def _narrow(self, graph: Graph, node: Node) -> None:
        casts = casts_of(node)
        others = [user for user in node.users if user not in casts and user.op != "output"]
        size = node.meta["val"].numel()
        node.meta["val"] = with_dtypes(node.meta["val"], (self.low_dtype,))
        for cast in casts:
            cast.replace_all_uses_with(node)
            graph.erase_node(cast)
        if others:
            wide = insert_cast(
                graph, node, self._widening(node, others, size), others[0], others[0], self.name
            )
            for user in others:
                user.replace_input_with(node, wide)
            refresh_metadata(graph, [wide])

    def _widening(self, node: Node, users: list[Node], size: int) -> Cast:
        uses = tuple(Use(u.name, path) for u in users for path, n in tensor_arguments(u) if n is node)
        moved = size * (self.low_dtype.itemsize + 4)
        reason = f"stored in {self.low_dtype}, read in float32"
        return Cast(node.name, self.low_dtype, torch.float32, uses, moved, True, reason)
