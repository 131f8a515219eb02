"""Finds the calls that run without gradients. Analysis only."""

from __future__ import annotations

from torch.fx import Graph, Node

from ampgraph._compat import SET_GRAD_ENABLED


def without_gradients(graph: Graph) -> dict[Node, Node]:
    """Returns the calls between turning the grad mode off and on again, with the call that turned it off."""
    found: dict[Node, Node] = {}
    switch: Node | None = None
    for node in graph.nodes:
        if node.target is SET_GRAD_ENABLED:
            mode = node.args[0]
            enabled = mode.meta["val"] if isinstance(mode, Node) else mode
            switch = None if enabled else switch or node
        elif switch is not None and node.op == "call_function":
            found[node] = switch
    return found
