"""Replaces the transforms of ``torch.func`` inside a model by flat ops.

Capture writes ``torch.vmap(f)(x)`` as calls that enter and leave the transform, with the ops of ``f`` on one
sample between them. The transformed ops are visible only below autograd. So each outermost region is traced
there separately, and the resulting ATen ops replace it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from ampgraph._compat import FakeTensor, accept_real_constants, forget_constant, no_ambient_autocast

from .analysis.graph_walk import function_name
from .base import Pass

_ENTER, _LEAVE, _GRADIENT = "_increment_nesting", "_decrement_nesting", "_autograd_grad"
# Calls by which a transform has torch load what it needs; programs cannot save them.
_PREPARATIONS = ("lazy_load_decompositions",)
_HOOK_SWITCHES = ("_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable")


@dataclass(frozen=True)
class InlineTransforms(Pass):
    """See the module docstring.

    Attributes:
        value: The meta key of fake values: "val" in an ATen graph, "example_value" in Dynamo's.
    """

    value: str = "val"
    name: ClassVar[str] = "inline_transforms"

    def run(self, graph_module: GraphModule) -> bool:
        graph = graph_module.graph
        if not any(function_name(node).endswith(_ENTER) for node in graph.nodes):
            return False
        _erase(graph, _HOOK_SWITCHES)  # a transform inside another one switches them back to off
        for region in list(_regions(graph)):
            _inline(graph_module, region, self.value)
        _erase(graph, _PREPARATIONS)
        return True


def _regions(graph: Graph) -> Iterator[list[Node]]:
    """Yields the nodes of each outermost transform, from the call that enters it to the one that leaves."""
    depth, region = 0, list[Node]()
    for node in graph.nodes:
        name = function_name(node)
        depth += name.endswith(_ENTER)
        if depth or region:
            region.append(node)
        depth -= name.endswith(_LEAVE)
        if region and not depth and not _goes_on(region):
            yield region
            region = []


def _goes_on(region: list[Node]) -> bool:
    """Whether a later call takes a gradient of what a transform made: the function that ``vjp`` returns."""
    members = set(region)
    later = {user for node in region for user in node.users} - members
    return any(function_name(user) == _GRADIENT or user.target is operator.getitem for user in later)


def _erase(graph: Graph, names: tuple[str, ...]) -> None:
    for node in graph.nodes:
        if function_name(node) in names:
            graph.erase_node(node)


def _inline(graph_module: GraphModule, region: list[Node], value: str) -> None:
    graph, members = graph_module.graph, set(region)
    inputs = list(dict.fromkeys(n for node in region for n in node.all_input_nodes if n not in members))
    outputs = [node for node in region if any(user not in members for user in node.users)]
    lowered = _lower(_body(graph_module, region, inputs, outputs), [node.meta[value] for node in inputs])
    for node in lowered.graph.find_nodes(op="get_attr"):
        constant = getattr(lowered, str(node.target))
        node.target = f"_{region[0].name}{node.target}"
        setattr(graph_module, node.target, constant)
    placeholders = lowered.graph.find_nodes(op="placeholder")
    with graph.inserting_before(region[0]):
        results: Any = graph.graph_copy(lowered.graph, dict(zip(placeholders, inputs, strict=True)))
    for node, result in zip(outputs, results, strict=True):
        result.meta.setdefault(value, node.meta[value])
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in members)
    for node in reversed(region):
        graph.erase_node(node)


def _body(root: GraphModule, region: list[Node], inputs: list[Node], outputs: list[Node]) -> GraphModule:
    graph = Graph()
    values = {node: graph.placeholder(node.name) for node in inputs}
    for node in region:
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(tuple(values[node] for node in outputs))
    return GraphModule(root, graph)


def _lower(body: GraphModule, fakes: list[Any]) -> GraphModule:
    for fake in fakes:
        forget_constant(fake)
    modes = [fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)]
    mode = modes[0] if modes else None
    with (
        fx_traceback.preserve_node_meta(),
        torch.enable_grad(),  # for a gradient inside, also if the conversion runs without it
        no_ambient_autocast(),
        accept_real_constants(mode),
        mode or nullcontext(),  # for what the region makes by itself
    ):
        lowered = make_fx(Interpreter(body).run, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    lowered.graph.eliminate_dead_code()
    return lowered
