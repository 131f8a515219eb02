"""The scope of a node in a picture: nested module calls, guarded regions, bodies of higher-order ops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import networkx as nx

MODULE, GUARD, BODY, GRAPH, PLUMBING = "module", "guard", "body", "graph", "plumbing"


class Part(NamedTuple):
    """One level of nesting.

    Attributes:
        kind: ``"module"``, ``"guard"``, ``"body"`` (of a higher-order op), ``"graph"`` (forward, backward)
            or ``"plumbing"`` (integers and masks).
        name: ``"layer1"``, ``"fp32_guard"``, ``"true_graph_0"``, ``"integers and masks"``.
        module: For a module, its path.
        call: The number of the call, from 1.
    """

    kind: str
    name: str
    module: str = ""
    call: int = 1

    def __str__(self) -> str:
        name = self.name.replace("/", "%2F")
        name = {GUARD: f"[{name}]", BODY: f"{{{name}}}", PLUMBING: f"({name})"}.get(self.kind, name)
        return f"{name}@{self.call}" if self.call > 1 else name


Scope = tuple[Part, ...]


def scope_text(scope: Scope) -> str:
    """Returns ``"layer1/0/relu@2"``."""
    return "/".join(map(str, scope))


def module_scope(paths: Iterable[str]) -> Scope:
    """Returns the scope of nested module paths, outermost first. Containers that are never called (a
    ``ModuleList``) are not a separate level: ``h.0``."""
    parts: list[Part] = []
    outer = ""
    for path in paths:
        inside = path.removeprefix(outer + ".") if outer else path
        parts.append(Part(MODULE, inside, path))
        outer = path
    return tuple(parts)


def with_guards(scopes: Mapping[str, Scope], guards: Mapping[str, str], ops: set[str]) -> dict[str, Scope]:
    """Puts every guarded node into a region around the largest module that is guarded as a whole. If there
    is none, the region is the innermost scope.

    Args:
        scopes: Node to its modules.
        guards: Node to its guard's name, ``""`` for none.
        ops: The nodes that show whether a module is guarded; parameters have no guard.
    """
    inside: dict[Scope, set[str]] = defaultdict(set)
    for name in ops:
        scope = scopes[name]
        for depth in range(len(scope) + 1):
            inside[scope[:depth]].add(guards[name])

    def guarded(name: str) -> Scope:
        scope = scopes[name]
        for depth in range(len(scope) + 1):
            seen = inside[scope[:depth]]
            if len(seen) == 1 and (guard := next(iter(seen))):
                at = max(depth - 1, 0)
                return (*scope[:at], Part(GUARD, guard), *scope[at:])
        return (*scope, Part(GUARD, guards[name])) if guards[name] else scope

    return {name: guarded(name) for name in scopes}


def numbered_calls(graph: nx.DiGraph, scopes: Mapping[str, Scope]) -> dict[str, Scope]:
    """Splits modules and regions that data leaves and enters again, so that the boxes form an acyclic
    picture: the second call of a module becomes ``relu@2``.

    If a node depends on a call through a node outside, the node belongs to a later call.
    """
    import networkx as nx

    calls: dict[str, tuple[int, ...]] = {}
    reached: dict[str, dict[Scope, int]] = {}
    result: dict[str, Scope] = {}
    for name in nx.topological_sort(graph):
        scope, sources = scopes[name], list(graph.predecessors(name))
        seen: dict[Scope, int] = {}
        for source in sources:
            for key, call in reached[source].items():
                seen[key] = max(call, seen.get(key, 0))
        own = []
        for depth in range(1, len(scope) + 1):
            key = scope[:depth]
            inside = [calls[s][depth - 1] for s in sources if scopes[s][:depth] == key]
            left = [reached[s][key] + 1 for s in sources if scopes[s][:depth] != key and key in reached[s]]
            call = max((1, *inside, *left))
            own.append(call)
            seen[key] = max(call, seen.get(key, 0))
        calls[name], reached[name] = tuple(own), seen
        result[name] = tuple(part._replace(call=call) for part, call in zip(scope, own, strict=True))
    return result
