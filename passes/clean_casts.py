"""Removes redundant casts and clones after insertion; never a cast that the user wrote.

- A cast that undoes a widening (low -> float32 -> low) becomes the low tensor, which has the same values,
  unless the widening leaves the tensor's gradients behind.
- The clones with which `Normalize` isolated written memory fold into the node that made the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from ampgraph.marks import StorageMark, mark_of

from .analysis.facts import Facts, is_cast
from .analysis.grad_modes import without_gradients
from .base import Pass, workspace
from .insert_casts import is_inserted_cast


@dataclass(frozen=True)
class CleanCasts(Pass):
    """See the module docstring."""

    name: ClassVar[str] = "clean_casts"

    def run(self, graph_module: GraphModule) -> bool:
        graph = graph_module.graph
        facts = workspace(graph_module).facts or {}
        return _drop_undone_widenings(graph, facts) | _drop_storage_nodes(graph)


def _drop_undone_widenings(graph: Graph, facts: Facts) -> bool:
    modified = False
    inside = without_gradients(graph)
    for node in list(graph.nodes):
        if not is_inserted_cast(node) or not is_cast(widening := node.args[0]):
            continue
        origin = widening.args[0]
        if widening in inside and origin not in inside:
            continue
        if any(n in facts and facts[n].mutated for n in (origin, widening)):
            continue  # the two memories no longer hold the same values
        if origin.meta["val"].dtype != node.meta["val"].dtype or widening.meta["val"].dtype != torch.float32:
            continue
        node.replace_all_uses_with(origin)
        graph.erase_node(node)
        if is_inserted_cast(widening) and not widening.users:
            graph.erase_node(widening)
        modified = True
    return modified


def _drop_storage_nodes(graph: Graph) -> bool:
    storages = [n for n in graph.nodes if mark_of(n, StorageMark) is not None]
    for node in storages:
        made_by: Node = node.args[0]
        node.replace_all_uses_with(made_by)
        made_by.meta["val"] = node.meta["val"]  # fake tensors show which nodes share memory
        graph.erase_node(node)
    return bool(storages)
