"""Takes custom ``autograd.Function``s and hooks on tensors out of Dynamo's graphs, as graph breaks would.

Tracing would record the forward of such a function and lose its backward, and it would lose hooks. So the
function stays a call, and the code before and after it becomes separate graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter, getitem
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from .._compat import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_ENABLED

# The part between two cuts: its graph, and the inputs that it is compiled for.
CompilePart = Callable[[fx.GraphModule, list], Callable]


def is_custom_function(target: object) -> bool:
    """Whether Dynamo calls a custom ``autograd.Function`` by this, or registers a hook on a tensor."""
    return getattr(target, "__name__", "") in ("autograd_function_apply", "register_hook")


def let_backwards_be_differentiated(graph_module: fx.GraphModule) -> None:
    """Removes the ``no_grad`` that Dynamo writes around the backwards of custom functions.

    With it, a second derivative through such a function is lost (seen in torch 2.13). Autograd turns the grad
    mode off itself, except in a backward that is differentiated again.
    """
    for node in graph_module.graph.nodes:
        if not is_custom_function(node.target) or node.target.__name__ == "register_hook":
            continue
        body = getattr(graph_module, str(node.args[1].target))
        calls = [n for n in body.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
        ends = calls[:1] + calls[-1:]
        if [(n.target, n.args) for n in ends] == [(SET_GRAD_ENABLED, (False,)), (SET_GRAD_ENABLED, (True,))]:
            for end in ends:
                body.graph.erase_node(end)
            body.recompile()


def compile_around_custom_functions(
    graph_module: fx.GraphModule, inputs: list, compile_part: CompilePart
) -> Callable | None:
    """Compiles the parts around custom functions, each separately.

    Args:
        graph_module: Dynamo's graph; not changed.
        inputs: Its inputs, in placeholder order.
        compile_part: Compiles one part. Inputs that another part computes are fake.

    Returns:
        A callable for the whole graph. None if there is no custom function, or if a cut would split a region
        without gradients or under autocast.
    """
    graph = graph_module.graph
    if not any(is_custom_function(node.target) for node in graph.nodes):
        return None
    parts = list(_parts(graph))
    if not all(map(_is_closed, parts)):
        return None
    values = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    held = {node.target: attrgetter(node.target)(graph_module) for node in graph.find_nodes(op="get_attr")}
    whole, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    first = {part[0]: part for part in parts}
    inside = {node for part in parts for node in part}
    for node in graph.nodes:
        if node in first:
            part = _part(graph_module, first[node])
            example = [values.get(n, n.meta["example_value"]) for n in part.reads]
            held[name := f"part_{len(held)}"] = _Call(compile_part(part.graph_module, example))
            call = whole.call_module(name, tuple(copies[n] for n in part.reads))
            copies |= {n: whole.call_function(getitem, (call, i)) for i, n in enumerate(part.results)}
        elif node not in inside:
            copies[node] = whole.node_copy(node, copies.__getitem__)
    return fx.GraphModule(held, whole).forward


def _parts(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yields the nodes between custom functions; `getitem` nodes stay with their producer."""
    home: dict[fx.Node, list[fx.Node]] = {}
    part: list[fx.Node] = []
    found = [part]
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if is_custom_function(node.target):
            part = []
            found.append(part)
            continue
        of = _of_which_item(node)
        if of is not None and is_custom_function(of.target):
            continue
        home[node] = part if of is None else home.get(of, part)
        home[node].append(node)
    yield from filter(None, found)


def _of_which_item(node: fx.Node) -> fx.Node | None:
    """Returns the producer of several results from which this node selects one; not for a tensor index."""
    if node.target is not getitem or not isinstance(of := node.args[0], fx.Node):
        return None
    return None if isinstance(of.meta.get("example_value"), torch.Tensor) else of


def _is_closed(part: list[fx.Node]) -> bool:
    """Whether a part restores grad mode and autocast."""
    modes = [node.args[0] for node in part if node.target is SET_GRAD_ENABLED]
    entered = sum(node.target is ENTER_AUTOCAST for node in part)
    left = sum(node.target is EXIT_AUTOCAST for node in part)
    return entered == left and (not modes or modes[-1] is torch.is_grad_enabled())


class _Part(NamedTuple):
    """One part as a separate graph.

    Attributes:
        graph_module: The graph; returns a tuple.
        reads: Its placeholders, as nodes of the whole graph.
        results: Its outputs, as nodes of the whole graph.
    """

    graph_module: fx.GraphModule
    reads: list[fx.Node]
    results: list[fx.Node]


def _part(source: fx.GraphModule, nodes: list[fx.Node]) -> _Part:
    members = set(nodes)
    outside = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in members)
    reads = [node for node in outside if node.op != "get_attr"]
    results = [node for node in nodes if any(user not in members for user in node.users)]
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in reads:
        copies[node] = graph.placeholder(node.name, node.type)
        copies[node].meta = dict(node.meta)
    for node in (*(n for n in outside if n.op == "get_attr"), *nodes):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    graph_module = fx.GraphModule(source, graph)
    graph_module.meta.update(source.meta)
    return _Part(graph_module, reads, results)


class _Call(nn.Module):
    """A compiled part, as a module that a graph can call."""

    def __init__(self, run: Callable) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: Any) -> Any:
        return self.run(*args)
