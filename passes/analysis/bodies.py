"""Finds the sub-graphs that higher-order ops run on tensors: branches of ``torch.cond``, loops, scans."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from ampgraph._compat import HigherOrderOperator

_WITH_BODIES = ("cond", "while_loop", "map_impl", "scan", "associative_scan", "invoke_subgraph")


def runs_bodies(node: Node) -> bool:
    """Whether a node is such an op."""
    return isinstance(node.target, HigherOrderOperator) and node.target.name() in _WITH_BODIES


def bodies_of(graph_module: GraphModule) -> dict[GraphModule, list[Node]]:
    """Returns each of these sub-graphs, with the ops that run it."""
    bodies: dict[GraphModule, list[Node]] = {}
    for node in graph_module.graph.nodes:
        if not runs_bodies(node):
            continue
        for reference in node.all_input_nodes:
            body = getattr(graph_module, str(reference.target), None) if reference.op == "get_attr" else None
            if isinstance(body, GraphModule):
                bodies.setdefault(body, []).append(node)
    return bodies
