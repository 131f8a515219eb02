"""Finds the calls that run without gradients. Analysis only."""

from __future__ import annotations

from torch.fx import Graph, Node

from ampgraph._compat import SET_GRAD_ENABLED


def without_gradients(graph: Graph) -> set[Node]:
    """Returns the calls between turning the grad mode off and on again."""
    found = set()
    enabled = True
    for node in graph.nodes:
        if node.target is SET_GRAD_ENABLED:
            mode = node.args[0]
            enabled = mode.meta["val"] if isinstance(mode, Node) else mode
        elif not enabled and node.op == "call_function":
            found.add(node)
    return found
