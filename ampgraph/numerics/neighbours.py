"""Which nodes of a graph a tensor's dtype depends on: who makes it, and who reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

from torch.fx import Node

from ..passes.analysis.graph_walk import values_read
from ..plan import Plan
from ..report.graph_view import is_item
from .run_model import Part

# Who decides what no rule can change.
_FIXED = ("source", "user cast", "guard", "alias", "kernel", "range")


class Neighbours:
    """Finds, in the graph of one part without casts, the nodes that keep a tensor low.

    Args:
        part: The part.
    """

    def __init__(self, part: Part):
        self._part = part
        self.nodes: dict[str, Node] = {node.name: node for node in part.float32.graph.nodes}

    def own(self, node: Node | None) -> Node | None:
        """Returns the node of the graph without casts that a node of one with casts stands for."""
        while node is not None and node.name not in self.nodes:
            node = next(iter(node.all_input_nodes), None)
        return None if node is None else self.nodes[node.name]

    @cached_property
    def roots(self) -> dict[Node, tuple[Node, ...]]:
        """The tensors whose values a node passes on: its own, or those that a clear op moves."""
        found: dict[Node, tuple[Node, ...]] = {}
        for node in self.nodes.values():
            decision = self._part.plan.decisions.get(node.name)
            moves = is_item(node) or (decision is not None and decision.op_class == "clear")
            sources = [root for n in values_read(node) for root in found[n]] if moves else []
            found[node] = tuple(dict.fromkeys(sources)) or (node,)
        return found

    def around(self, tensors: Iterable[Node], plan: Plan) -> set[str]:
        """Returns the low nodes that make or read these tensors, through ops that only move values."""
        wanted = {root for tensor in tensors for root in self.roots[tensor]}
        return {
            node.name
            for node in self.nodes.values()
            if is_changeable(node, plan)
            and any(root in wanted for n in (node, *values_read(node)) for root in self.roots[n])
        }

    def nearest(self, node: Node, plan: Plan, upwards: bool) -> set[str]:
        """Returns the low nodes that are met first on the ways up (or down) from a node."""
        following: Callable[[Node], Iterable[Node]]
        following = (lambda n: n.all_input_nodes) if upwards else (lambda n: n.users)
        found: set[str] = set()
        seen: set[Node] = set()
        waiting = list(following(node))
        while waiting:
            other = waiting.pop()
            if other in seen:
                continue
            seen.add(other)
            if is_changeable(other, plan):
                found.add(other.name)
            else:
                waiting += following(other)
        return found


def is_changeable(node: Node, plan: Plan) -> bool:
    """Whether a node runs low, and a rule could keep it in float32."""
    decision = plan.decisions.get(node.name)
    return decision is not None and decision.dtype == plan.low_dtype and decision.by not in _FIXED
