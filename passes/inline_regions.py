"""Inlines the regions that a capture wraps in sub-graphs, into one flat graph.

``torch.export`` turns ``with torch.no_grad()`` and ``with torch.autocast(...)`` in model code into
higher-order ops with a sub-graph; ``torch.compile`` leaves pairs of enter and exit calls. After this
pass a grad-mode region is a pair of ``_set_grad_enabled`` calls around its nodes, and an autocast
region is a guard on its nodes: ``enabled=False`` forces float32, ``enabled=True`` lets the op lists
decide. If such a region names another low dtype than the policy's, its values are captured in that dtype.
Then ops inside read float32 again, so that the lists can decide, and results of the region are cast back.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ampgraph._compat import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    SET_GRAD_ENABLED,
    OpOverload,
    dtypes_of,
    evaluate,
    fake_mode_of,
)
from ampgraph.guards import FP32, LISTS, guard_of, set_guard
from ampgraph.ops.kernels import may_convert, promotes
from ampgraph.policy.policy import LOW_DTYPES, Policy

from .analysis.alias import viewed, written_args
from .analysis.graph_walk import function_name
from .base import Pass

_SET_GRAD, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"


@dataclass(frozen=True)
class InlineRegions(Pass):
    """Inlines ``wrap_with_set_grad_enabled`` and ``wrap_with_autocast``; see the module docstring.

    Attributes:
        policy: The policy; its low dtype counts.
        with_autocast: Whether autocast regions are inlined, too, and not grad-mode regions alone.
    """

    policy: Policy
    with_autocast: bool = True
    name: ClassVar[str] = "inline_regions"

    def run(self, graph_module: GraphModule) -> bool:
        modified = False
        kinds = (_SET_GRAD, _AUTOCAST) if self.with_autocast else (_SET_GRAD,)
        while region := _next_region(graph_module.graph, kinds):
            _inline(graph_module, region, self.policy.low_dtype)
            modified = True
        if not self.with_autocast:
            return modified
        return _autocast_calls_to_guards(graph_module.graph, self.policy.low_dtype) or modified


def _next_region(graph: Graph, kinds: tuple[str, ...]) -> Node | None:
    for node in graph.nodes:
        if _is_region(node, kinds):
            return node
    return None


def has_writing_regions(graph_module: GraphModule) -> bool:
    """Whether the graph has a grad-mode region that writes memory in place."""
    regions = [node for node in graph_module.graph.nodes if _is_region(node, (_SET_GRAD,))]
    bodies = [getattr(graph_module, str(_body(region).target)) for region in regions]
    return any(written_args(node) for body in bodies for node in body.graph.nodes)


def _is_region(node: Node, kinds: Sequence[str]) -> bool:
    return node.op == "call_function" and function_name(node) in kinds


def _body(region: Node) -> Node:
    return next(a for a in region.args if isinstance(a, Node) and a.op == "get_attr")


def _inline(graph_module: GraphModule, region: Node, low_dtype: torch.dtype) -> None:
    graph = graph_module.graph
    body_ref = _body(region)
    at = region.args.index(body_ref)
    body = getattr(graph_module, str(body_ref.target))
    inputs = body.graph.find_nodes(op="placeholder")
    values: dict[Node, Any] = dict(zip(inputs, region.args[at + 1 :], strict=True))
    is_grad_region = function_name(region) == _SET_GRAD
    enabled = bool(region.args[0] if is_grad_region else region.args[2])
    outputs: Any = ()
    with graph.inserting_before(region):
        before = _enter_grad_mode(graph, enabled) if is_grad_region else None
        for node in body.graph.nodes:
            if node.op == "output":
                outputs = map_arg(node.args[0], values.__getitem__)
            elif node.op != "placeholder":
                values[node] = _copy(graph_module, body, node, values)
        if before is not None:
            graph.call_function(SET_GRAD_ENABLED, (before,)).meta["val"] = None
    if not is_grad_region:
        _guard(values, LISTS if enabled else FP32)
    _replace_outputs(region, outputs)
    if not is_grad_region and _is_of_other_dtype(region, low_dtype):
        _widen([values[n] for n in body.graph.nodes if n.op == "call_function"])
    graph.erase_node(region)
    if not body_ref.users:
        graph.erase_node(body_ref)


def _is_of_other_dtype(region: Node, low_dtype: torch.dtype) -> bool:
    """Whether an autocast region (a sub-graph or its entering call) names another low dtype."""
    device, dtype, enabled = region.args[:3]
    return bool(enabled) and (dtype or torch.get_autocast_dtype(str(device))) != low_dtype


def _widen(nodes: Sequence[Node]) -> None:
    """Makes the ops of a region read float32 instead of low, and casts results of the region back.

    The model's casts, checks, and ops with a sub-graph keep their captured dtypes.
    """
    inside, recorded = set(nodes), dict[Node, Any]()
    for node in nodes:
        if _computes(node) or (node.target is operator.getitem and node.args[0] in recorded):
            recorded[node] = node.meta["val"]
    for node in recorded:
        _read_wide(node)
        with torch.no_grad():  # a leaf that requires a gradient may be written without one
            value = evaluate(node, fake_mode_of(node.graph))
        if dtypes_of(value) != dtypes_of(recorded[node]):  # the fake tensor shows shared memory
            node.meta["val"] = value
    for node, value in recorded.items():
        if not isinstance(value, torch.Tensor) or node.meta["val"].dtype == value.dtype:
            continue
        readers = [user for user in node.users if user not in recorded]
        within = [reader for reader in readers if reader in inside]
        # Cast at each read, because the region could write in between; outside, the copy is written.
        for group in (*([reader] for reader in within), [r for r in readers if r not in inside]):
            _cast_for(group, node, value.dtype)


def _computes(node: Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and bool(target._schema.returns) and not may_convert(target)


def _cast_for(readers: list[Node], node: Node, dtype: torch.dtype) -> None:
    if not readers:
        return
    with node.graph.inserting_before(min(readers)):
        copy = _cast(node, dtype)
    for reader in readers:
        reader.replace_input_with(node, copy)


def _read_wide(node: Node) -> None:
    """Casts low arguments to float32, except tensors that are written or viewed.

    An in-place op that takes both dtypes may read the memory that it writes.
    """
    written = written_args(node)
    if node.target is operator.getitem or viewed(node) or (written and promotes(node.target)):  # type: ignore[arg-type]
        return

    def wide(value: Node) -> Node:
        fake = value.meta.get("val")
        if value in written or not isinstance(fake, torch.Tensor) or fake.dtype not in LOW_DTYPES:
            return value
        with node.graph.inserting_before(node):
            return _cast(value, torch.float32)

    node.args, node.kwargs = map_arg((node.args, node.kwargs), wide)


def _cast(value: Node, dtype: torch.dtype) -> Node:
    """Casts as the source's region did: the source's own cast, like those in its code."""
    node = value.graph.call_function(torch.ops.aten.to.dtype, (value, dtype))
    node.meta = {k: v for k, v in value.meta.items() if k in ("nn_module_stack", "stack_trace", "custom")}
    node.meta["val"] = evaluate(node, fake_mode_of(value.graph))
    return node


def _enter_grad_mode(graph: Graph, enabled: bool) -> Node:
    """Sets the grad mode and returns the earlier one, because the caller may have turned it off."""
    before = graph.call_function(torch.is_grad_enabled)
    before.meta["val"] = not enabled
    graph.call_function(SET_GRAD_ENABLED, (enabled,)).meta["val"] = None
    return before


def _guard(values: dict[Node, Node], guard: str) -> None:
    calls = [(n, new) for n, new in values.items() if n.op == "call_function"]
    # A guard on some of the nodes was entered inside the region; a guard on all nodes, around it.
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


def _autocast_calls_to_guards(graph: Graph, low_dtype: torch.dtype) -> bool:
    regions: list[tuple[Node, list[Node]]] = []
    open_regions: list[tuple[Node, list[Node]]] = []
    ended: list[Node] = []
    for node in graph.nodes:
        if node.target is ENTER_AUTOCAST:
            open_regions.append((node, []))
            regions.append(open_regions[-1])
        elif node.target is EXIT_AUTOCAST:
            open_regions = [r for r in open_regions if r[0] is not node.args[0]]
            ended += [node, node.args[0]]  # type: ignore[list-item]
        elif open_regions and node.op == "call_function":
            open_regions[-1][1].append(node)
    for enter, inside in regions:
        for node in inside:
            # A mark that the region's entry does not have was made inside the region.
            if guard_of(node) == guard_of(enter):
                set_guard(node, LISTS if enter.args[2] else FP32)
        if _is_of_other_dtype(enter, low_dtype):
            _widen(inside)
    for node in ended:
        graph.erase_node(node)
    return bool(ended)
