"""Integers and masks: the ops that compute positions, indices, masks and sizes, each group in a region."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .scopes import PLUMBING, Part, Scope

if TYPE_CHECKING:
    import networkx as nx

FREE = "integers and masks"
_EXACT = ("int", "uint", "bool")


def with_plumbing(graph: nx.DiGraph, scopes: Mapping[str, Scope]) -> dict[str, Scope]:
    """Puts the plumbing of every scope into regions; one op alone gets none.

    What depends on no floating-point tensor of the model (positions, attention masks) is one region in each
    scope. What depends on one (routing, conditions) stays near it: connected ops are one region.
    """
    import networkx as nx

    found = plumbing_ops(graph)
    bound = found & _from_floats(graph, found)
    words = dict.fromkeys(found, FREE)
    for component in nx.weakly_connected_components(graph.subgraph(bound)):
        first = next(name for name in graph if name in component)
        words |= dict.fromkeys(component, f"integers from {first}")
    groups: dict[Scope, list[str]] = defaultdict(list)
    for name in graph:
        if name in found:
            groups[(*scopes[name], Part(PLUMBING, words[name]))].append(name)
    regions = {name: scope for scope, names in groups.items() if len(names) > 1 for name in names}
    return {**scopes, **regions, **_integer_buffers(graph, regions)}


def _integer_buffers(graph: nx.DiGraph, regions: Mapping[str, Scope]) -> dict[str, Scope]:
    """Returns the buffers of integers (``position_ids``) that one region alone reads, with that region."""
    found = {}
    for name, data in graph.nodes(data=True):
        readers = {regions.get(reader) for reader in graph.successors(name)}
        region = readers.pop() if len(readers) == 1 else None
        if region and data["kind"] == "parameter" and data["dtype"].startswith(_EXACT):
            found[name] = region
    return found


def plumbing_ops(graph: nx.DiGraph) -> set[str]:
    """Returns the ops that only compute integers and masks.

    An op is one if its results are integers, booleans or no tensors at all. A floating-point op is one if it
    is made of plumbing, or of nothing, and only plumbing reads it: ``full`` before a comparison.
    """
    import networkx as nx

    order = list(nx.topological_sort(graph))
    exact = {name for name in order if _is_exact(graph, name)}
    made_of = set(exact)
    for name in order:
        if _is_op(graph.nodes[name]) and made_of.issuperset(graph.predecessors(name)):
            made_of.add(name)
    found: set[str] = set()
    for name in reversed(order):
        readers = set(graph.successors(name))
        if name in exact or (name in made_of and readers and readers <= found):
            found.add(name)
    return found


def _is_exact(graph: nx.DiGraph, name: str) -> bool:
    data = graph.nodes[name]
    if not _is_op(data) or not all(part.startswith(_EXACT) for part in data["dtype"].split(",") if part):
        return False
    # One of several results of a floating-point op (the indices of a max-pool) belongs to that op.
    return data["op"] != "getitem" or all(_is_exact(graph, source) for source in graph.predecessors(name))


def _is_op(data: Mapping[str, Any]) -> bool:
    return data["kind"] == "op" and not data["boundary"]


def _from_floats(graph: nx.DiGraph, plumbing: set[str]) -> set[str]:
    """Returns the nodes that depend on a floating-point input, parameter or op outside the plumbing."""
    found: set[str] = set()
    import networkx as nx

    for name in nx.topological_sort(graph):
        dtype = graph.nodes[name]["dtype"]
        is_source = ("float" in dtype or "complex" in dtype) and name not in plumbing
        if is_source or not found.isdisjoint(graph.predecessors(name)):
            found.add(name)
    return found
