"""Makes one flat graph: regions that capture wraps in sub-graphs are inlined.

``torch.export`` turns ``with torch.no_grad()`` and ``with torch.autocast(...)`` in model code into
higher-order ops with a sub-graph; ``torch.compile`` leaves pairs of enter and exit calls. After this
pass a grad-mode region is a pair of ``_set_grad_enabled`` calls around its nodes, and an autocast
region is a guard on its nodes: ``enabled=False`` forces float32, ``enabled=True`` lets the op lists
decide.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ampgraph.guards import FP32, LISTS, guard_of, set_guard

from .base import Pass

_SET_GRAD, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"


@dataclass(frozen=True)
class InlineRegions(Pass):
    """Inlines ``wrap_with_set_grad_enabled`` and ``wrap_with_autocast``; see the module docstring."""

    name: ClassVar[str] = "inline_regions"

    def run(self, graph_module: GraphModule) -> bool:
        modified = False
        while region := _next_region(graph_module.graph):
            _inline(graph_module, region)
            modified = True
        return _autocast_calls_to_guards(graph_module.graph) or modified


def _next_region(graph: Graph) -> Node | None:
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") in (_SET_GRAD, _AUTOCAST):
            return node
    return None


def _inline(graph_module: GraphModule, region: Node) -> None:
    graph = graph_module.graph
    at = next(i for i, a in enumerate(region.args) if isinstance(a, Node) and a.op == "get_attr")
    body_ref = region.args[at]
    body = getattr(graph_module, body_ref.target)
    values = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"), region.args[at + 1 :], strict=True))
    is_grad_region = region.target.__name__ == _SET_GRAD
    enabled = region.args[0] if is_grad_region else region.args[2]
    outputs: tuple = ()
    with graph.inserting_before(region):
        if is_grad_region:
            before = graph.call_function(torch._C._set_grad_enabled, (enabled,))
        for node in body.graph.nodes:
            if node.op == "output":
                outputs = map_arg(node.args[0], values.__getitem__)
            elif node.op != "placeholder":
                values[node] = _copy(graph_module, body, node, values)
        if is_grad_region:
            after = graph.call_function(torch._C._set_grad_enabled, (not enabled,))
            for call in (before, after):
                call.meta["val"] = None
    if not is_grad_region:
        _guard(values, LISTS if enabled else FP32)
    _replace_outputs(region, outputs)
    graph.erase_node(region)
    if not body_ref.users:
        graph.erase_node(body_ref)


def _guard(values: dict[Node, Node], guard: str) -> None:
    calls = [(n, new) for n, new in values.items() if n.op == "call_function"]
    # A guard on only some of the nodes was entered inside the region; one on all of them, around it.
    has_inner_guard = len({guard_of(n) for n, _ in calls}) > 1
    for node, new in calls:
        if not (has_inner_guard and guard_of(node)):
            set_guard(new, guard)


def _copy(graph_module: GraphModule, body: GraphModule, node: Node, values: dict) -> Node:
    copied = graph_module.graph.node_copy(node, values.__getitem__)
    if node.op == "get_attr" and isinstance(child := getattr(body, node.target), GraphModule):
        name = node.target
        while hasattr(graph_module, name):
            name += "_inner"
        setattr(graph_module, name, child)
        copied.target = name
    return copied


def _replace_outputs(region: Node, outputs: tuple | Node) -> None:
    for user in list(region.users):
        if user.target is not operator.getitem:
            raise AssertionError(f"{region.name}: result used as a whole by {user.name}")
        user.replace_all_uses_with(outputs[user.args[1]])  # type: ignore[index]
        user.graph.erase_node(user)


def _autocast_calls_to_guards(graph: Graph) -> bool:
    open_regions: list[tuple[Node, str]] = []
    ended: list[Node] = []
    for node in graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            enabled = node.args[2] if len(node.args) > 2 else node.kwargs.get("enabled", True)
            open_regions.append((node, LISTS if enabled else FP32))
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            open_regions = [r for r in open_regions if r[0] is not node.args[0]]
            ended += [node, node.args[0]]  # type: ignore[list-item]
        elif open_regions and node.op == "call_function":
            enter, guard = open_regions[-1]
            # A mark that the region's own entry does not bear was made inside the region.
            if guard_of(node) == guard_of(enter):
                set_guard(node, guard)
    for node in ended:
        graph.erase_node(node)
    return bool(ended)
