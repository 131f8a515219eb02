"""Makes one flat graph: regions that capture wraps in sub-graphs are inlined.

``torch.export`` turns ``with torch.no_grad()`` and ``with torch.autocast(...)`` in model code into
higher-order ops with a sub-graph; ``torch.compile`` leaves pairs of enter and exit calls. After this
pass a grad-mode region is a pair of ``_set_grad_enabled`` calls around its nodes, and an autocast
region is a guard on its nodes: ``enabled=False`` forces float32, ``enabled=True`` lets the op lists
decide. Where such a region names another low dtype than the policy's, its values are captured in that dtype:
inside, they become float32 again for the lists to decide on; at its borders, casts keep what the source has.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ampgraph._compat import evaluate, fake_mode_of
from ampgraph.guards import FP32, LISTS, guard_of, set_guard

from .base import Pass

_SET_GRAD, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"


@dataclass(frozen=True)
class InlineRegions(Pass):
    """Inlines ``wrap_with_set_grad_enabled`` and ``wrap_with_autocast``; see the module docstring.

    Attributes:
        low_dtype: The policy's low dtype.
    """

    low_dtype: torch.dtype
    name: ClassVar[str] = "inline_regions"

    def run(self, graph_module: GraphModule) -> bool:
        modified = False
        while region := _next_region(graph_module.graph):
            _inline(graph_module, region, self.low_dtype)
            modified = True
        return _autocast_calls_to_guards(graph_module.graph) or modified


def _next_region(graph: Graph) -> Node | None:
    for node in graph.nodes:
        if node.op == "call_function" and _name(node) in (_SET_GRAD, _AUTOCAST):
            return node
    return None


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", "")


def _inline(graph_module: GraphModule, region: Node, low_dtype: torch.dtype) -> None:
    graph = graph_module.graph
    at = next(i for i, a in enumerate(region.args) if isinstance(a, Node) and a.op == "get_attr")
    body_ref = region.args[at]
    assert isinstance(body_ref, Node)
    body = getattr(graph_module, str(body_ref.target))
    inputs = body.graph.find_nodes(op="placeholder")
    values: dict[Node, Any] = dict(zip(inputs, region.args[at + 1 :], strict=True))
    is_grad_region = _name(region) == _SET_GRAD
    enabled = bool(region.args[0] if is_grad_region else region.args[2])
    other_dtype = None if is_grad_region or not enabled else _other_dtype(region, low_dtype)
    outputs: Any = ()
    with graph.inserting_before(region):
        if other_dtype:
            values = {n: _cast(graph, v, other_dtype, torch.float32) for n, v in values.items()}
        before = _enter_grad_mode(graph, enabled) if is_grad_region else None
        for node in body.graph.nodes:
            if node.op == "output":
                outputs = map_arg(node.args[0], values.__getitem__)
            elif node.op != "placeholder":
                values[node] = _copy(graph_module, body, node, values)
                if other_dtype and node.op == "call_function":
                    values[node].meta["val"] = evaluate(values[node], fake_mode_of(graph))
        if other_dtype:
            outputs = tuple(_cast_back(graph, v, u) for v, u in zip(outputs, _recorded(body), strict=True))
        if before is not None:
            graph.call_function(torch._C._set_grad_enabled, (before,)).meta["val"] = None
    if not is_grad_region:
        _guard(values, LISTS if enabled else FP32)
    _replace_outputs(region, outputs)
    graph.erase_node(region)
    if not body_ref.users:
        graph.erase_node(body_ref)


def _other_dtype(region: Node, low_dtype: torch.dtype) -> torch.dtype | None:
    """Returns the dtype of an autocast region if it is not the policy's."""
    device, dtype = region.args[:2]
    dtype = dtype or torch.get_autocast_dtype(str(device))
    return None if dtype == low_dtype else dtype  # type: ignore[return-value]


def _cast(graph: Graph, value: Any, from_dtype: torch.dtype, to_dtype: torch.dtype) -> Any:
    """Casts a node of one dtype; returns anything else as it is."""
    fake = value.meta.get("val") if isinstance(value, Node) else None
    if not isinstance(fake, torch.Tensor) or fake.dtype != from_dtype:
        return value
    node = graph.call_function(torch.ops.aten.to.dtype, (value, to_dtype))
    node.meta = {k: v for k, v in value.meta.items() if k in ("nn_module_stack", "stack_trace", "custom")}
    node.meta["val"] = evaluate(node, fake_mode_of(graph))
    return node


def _recorded(body: GraphModule) -> list[Any]:
    """Returns the values that a region's outputs had when it was captured."""
    results = body.graph.output_node().args[0]
    return [r.meta.get("val") if isinstance(r, Node) else r for r in results]  # type: ignore[union-attr]


def _cast_back(graph: Graph, value: Any, recorded: Any) -> Any:
    found = value.meta.get("val") if isinstance(value, Node) else None
    if not isinstance(found, torch.Tensor) or found.dtype == recorded.dtype:
        return value
    return _cast(graph, value, found.dtype, recorded.dtype)


def _enter_grad_mode(graph: Graph, enabled: bool) -> Node:
    """Sets the grad mode and returns the one before: the caller of the model may have turned it off."""
    before = graph.call_function(torch.is_grad_enabled)
    before.meta["val"] = not enabled
    graph.call_function(torch._C._set_grad_enabled, (enabled,)).meta["val"] = None
    return before


def _guard(values: dict[Node, Node], guard: str) -> None:
    calls = [(n, new) for n, new in values.items() if n.op == "call_function"]
    # A guard on only some of the nodes was entered inside the region; one on all of them, around it.
    has_inner_guard = len({guard_of(n) for n, _ in calls}) > 1
    for node, new in calls:
        if not (has_inner_guard and guard_of(node)):
            set_guard(new, guard)


def _copy(graph_module: GraphModule, body: GraphModule, node: Node, values: dict[Node, Any]) -> Node:
    copied = graph_module.graph.node_copy(node, values.__getitem__)
    name = str(node.target)
    if node.op == "get_attr" and isinstance(child := getattr(body, name), GraphModule):
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
