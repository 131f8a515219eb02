"""Finds what computes the state that a graph keeps for its next call: running means, momentum queues.

Analysis only. A state moves by small steps. In a low dtype ``0.999 * mean + 0.001 * x`` is ``mean``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from ampgraph._compat import is_same_shape
from ampgraph.marks import input_mark
from ampgraph.ops.lists import OpClass

from .alias import DETACH, SOURCES, AliasSets, written_args
from .facts import Facts
from .graph_walk import values_read
from .problem import Hazard


def find_carried(graph: Graph, facts: Facts) -> dict[Node, Hazard]:
    """Returns the ops, matrix products left out, between a read of kept memory and what is kept of it."""
    found: dict[Node, Hazard] = {}
    states = [*_written(graph, facts), *_returned(graph, facts)]
    # A codebook is the quotient of two other states.
    carried = _computed_from({node for _, memory, _ in states for node in memory}, facts)
    for holder, memory, kept in states:
        hazard = Hazard(f"computes what {holder.name!r} holds for the next call", holder, fed_low=True)
        waiting = kept
        while waiting:
            node = waiting.pop()
            if node in carried and node not in memory and node not in found:
                found[node] = hazard
                waiting += values_read(node)
    return found


def _written(graph: Graph, facts: Facts) -> Iterator[tuple[Node, set[Node], list[Node]]]:
    """Yields the caller's memory that the graph writes: a name for it, its nodes, what is written."""
    writes = [(node, n) for node in facts if node.target is not DETACH for n in written_args(node)]
    if not writes:
        return
    aliases = AliasSets(graph)
    for root in dict.fromkeys(aliases.root(n) for _, n in writes):
        memory = set(aliases.members[root])
        holder = next((n for n in memory if n.op in SOURCES and facts[n].dtype is torch.float32), None)
        if holder is not None:
            yield holder, memory, [n for node, to in writes if to in memory for n in values_read(node)]


def _returned(graph: Graph, facts: Facts) -> Iterator[tuple[Node, set[Node], list[Node]]]:
    """Yields the same for buffers of which a graph returns another value; Dynamo assigns it later."""
    outputs = graph.output_node().all_input_nodes
    for node in graph.find_nodes(op="placeholder"):
        if not input_mark(node).is_table or facts[node].dtype is not torch.float32:
            continue
        if kept := [n for n in outputs if _is_like(n, node)]:
            yield node, {node}, kept


def _is_like(node: Node, buffer: Node) -> bool:
    value, held = node.meta.get("val"), buffer.meta["val"]
    return isinstance(value, torch.Tensor) and value.dtype == held.dtype and is_same_shape(value, held)


def _computed_from(memory: set[Node], facts: Facts) -> set[Node]:
    """Returns the nodes of some memory, and what is computed from it without a matrix product or a norm."""
    found = set(memory)
    for node, fact in facts.items():
        is_led_through = fact.op_class is not OpClass.WHITE and isinstance(node.meta.get("val"), torch.Tensor)
        if is_led_through and not found.isdisjoint(values_read(node)):
            found.add(node)
    return found
