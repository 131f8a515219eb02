"""A graph module as an annotated networkx graph, the source of every picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node

from ..errors import AmpGraphError, did_you_mean
from ..marks import META_KEY
from ..origin import beside_users
from ..passes import Workspace
from ..plan import Plan
from ..report import graph_view as view
from ..report.converted import Converted
from .attributes import (
    LOW_DTYPES,
    body_of,
    called_modules,
    modules_around,
    node_attributes,
)
from .plumbing import with_plumbing
from .scopes import (
    BODY,
    GRAPH,
    MODULE,
    Part,
    Scope,
    module_scope,
    numbered_calls,
    scope_text,
    with_guards,
)

if TYPE_CHECKING:
    import networkx as nx

GRAPHS = ("forward", "backward", "both")


@dataclass
class Annotated:
    """A graph with its annotations.

    Attributes:
        graph: The result of `to_networkx`.
        scopes: The nested regions of each node in the picture.
    """

    graph: nx.DiGraph
    scopes: dict[str, Scope] = field(default_factory=dict)


def to_networkx(amp: Converted | GraphModule, graph: str = "forward") -> nx.DiGraph:
    """Returns a graph as an annotated networkx graph, in graph order.

    Every value is a str, int or bool, so that the graph can be written as GraphML. Nodes are keyed by name;
    those in the body of a higher-order op (``torch.cond`` ...) by ``true_graph_0/name``.

    Node attributes:
        ``label``: a parameter's path, ``split[0]``, else the name
        ``kind``: ``"input"``, ``"parameter"``, ``"op"``, ``"output"``; ``"cast"`` or ``"clamp"`` for inserted
            nodes; ``"graph"`` for the body that a higher-order op runs. In a graph without a plan
            (AOTAutograd's) every change of floating dtype is a ``"cast"``
        ``op``: ``"aten.conv2d"``, or ``""``
        ``module``: path of the innermost module; its owner's for a parameter
        ``scope``: where it is drawn, outermost first: ``"layer1/0/conv1"``; ``relu@2`` is the second call of
            relu, ``[fp32_guard]`` a guarded region, ``{true_graph_0}`` a body, ``(integers and masks)`` ops
            that compute positions, indices and masks, ``(integers from topk)`` those that read model data
        ``guard``: ``"fp16_guard"``, ``"fp32_guard"``, ``"autocast"`` (a region of ``torch.autocast``) or
            ``""``
        ``boundary``: ``"scale"``, ``"unscale"`` or ``"finite check"`` on nodes of the loss scaling,
            ``"shadow"`` on the low copies of parameters, else ``""``
        ``dtype``, ``shape``: ``"float16"``, ``"2x8x16"``
        ``type``: both in short, ``"f16[2, 8, 16]"``
        ``precision``: ``"low"``, ``"fp32"`` or ``"other"``
        ``op_class``: ``"white"``, ``"black"``, ``"gray"``, ``"clear"`` or ``""``
        ``by``, ``reason``: the deciding rule and its reason; ``""`` in a graph without a plan
        ``bytes``: bytes that a cast reads and writes; 0 for other nodes
        ``is_parameter``: whether it is a parameter, buffer or constant, or a cast of one
        ``line``: ``file:line`` of the model's code

    Edge attributes:
        ``dtype``, ``shape``, ``type``: of the tensor that is read
        ``widened``: whether the kernel widens this operand
        ``saved``: whether the forward saves this tensor for the backward

    Graph attributes:
        ``name``: class of the model
        ``low_dtype``: ``"float16"``, ``"bfloat16"``, or ``""`` if nothing runs low

    Args:
        amp: The converted model, or a graph module whose nodes have ``meta["val"]``.
        graph: ``"forward"`` is the rewritten graph; ``"backward"`` is ``amp.backward_graph``, which backend
            ``"aot_eager"`` has after the first backward; ``"both"`` is ``amp.forward_graph`` beside it, with
            names that start with ``forward/`` and ``backward/``.

    Raises:
        AmpGraphError: The graph does not exist, or its nodes have no ``meta["val"]``.
    """
    return annotated(amp, graph).graph


def annotated(amp: Converted | GraphModule, graph: str = "forward") -> Annotated:
    """Returns `to_networkx`'s graph with the scopes of its nodes."""
    if graph not in GRAPHS:
        hint = did_you_mean(str(graph), GRAPHS)
        raise AmpGraphError(f"graph={graph!r}: expected {', '.join(map(repr, GRAPHS))}.{hint}")
    name = view.graph_name(amp)
    if graph == "forward":
        return _annotated(*_forward(amp), name)
    if graph == "backward":
        return _annotated(_aot_graph(amp, "backward"), None, name)
    forward, backward = (_annotated(_aot_graph(amp, which), None, name) for which in GRAPHS[:2])
    return _side_by_side(forward, backward)


def _forward(amp: Converted | GraphModule) -> tuple[GraphModule, Plan | None]:
    if not isinstance(amp, GraphModule) or _plan_of(amp):
        return view.rewritten(amp)
    if not any("val" in node.meta for node in amp.graph.nodes):
        raise AmpGraphError("the nodes of the graph module have no meta['val'], so their dtypes are unknown.")
    return amp, None


def _plan_of(graph_module: GraphModule) -> Plan | None:
    space = graph_module.meta.get(META_KEY)
    return space.plan if isinstance(space, Workspace) else None


def _aot_graph(amp: Converted | GraphModule, which: str) -> GraphModule:
    if not isinstance(amp, Converted):
        raise AmpGraphError(
            f"graph={which!r}: this needs a converted model; to draw one graph, pass amp.{which}_graph."
        )
    return amp.forward_graph if which == "forward" else amp.backward_graph


def _annotated(graph_module: GraphModule, plan: Plan | None, name: str) -> Annotated:
    import networkx as nx

    result = Annotated(nx.DiGraph(name=name, low_dtype=""))
    guards: dict[str, str] = {}
    _add_graph(result, guards, graph_module, plan)
    graph = result.graph
    graph.graph["low_dtype"] = _low_dtype(graph, plan)
    ops = {n for n, data in graph.nodes(data=True) if data["kind"] == "op"}
    scopes = with_guards(result.scopes, guards, ops)
    moved = [n for n, data in graph.nodes(data=True) if data["kind"] in ("parameter", "cast", "clamp")]
    scopes = beside_users(scopes, {n: list(graph.successors(n)) for n in moved}, moved)
    for node in moved:
        if graph.nodes[node]["kind"] != "parameter":
            modules = [part.module for part in scopes[node] if part.kind == MODULE]
            graph.nodes[node]["module"] = modules[-1] if modules else ""
    scopes = with_plumbing(graph, scopes)
    result.scopes = numbered_calls(graph, scopes)
    for node, scope in result.scopes.items():
        graph.nodes[node]["scope"] = scope_text(scope)
    return result


def _add_graph(
    result: Annotated, guards: dict[str, str], graph_module: GraphModule, plan: Plan | None, prefix: str = ""
) -> str:
    """Adds a graph and the bodies that it runs; returns the name of its output node."""
    around = result.scopes.get(prefix.removesuffix("/"), ())
    called = called_modules(graph_module)
    widened = set(plan.widened) if plan else set()
    for node in graph_module.graph.nodes:
        name = prefix + node.name
        data = node_attributes(node, plan)
        result.graph.add_node(name, **data)
        result.scopes[name] = (*around, *module_scope(modules_around(node, called)))
        guards[name] = data["guard"]
        for path, source in view.operands(node):
            widens = (node.name, path) in widened and view.dtype_of(source) in LOW_DTYPES
            _add_edge(result.graph, prefix + source.name, name, source, widens)
        if data["kind"] == "graph":
            _add_body(result, guards, node, name)
    return prefix + graph_module.graph.output_node().name


def _add_body(result: Annotated, guards: dict[str, str], node: Node, name: str) -> None:
    body = body_of(node)
    assert isinstance(body, GraphModule)
    result.scopes[name] = (*result.scopes[name], Part(BODY, node.name))
    output = _add_graph(result, guards, body, _plan_of(body), f"{name}/")
    result.graph.add_edge(output, name, dtype="", shape="", type="", widened=False, saved=False)


def _add_edge(graph: nx.DiGraph, source: str, target: str, tensor: Node, widens: bool) -> None:
    if graph.has_edge(source, target):
        graph.edges[source, target]["widened"] |= widens
        return
    types = {"dtype": view.dtype_of(tensor), "shape": view.shape_of(tensor), "type": view.type_of(tensor)}
    graph.add_edge(source, target, **types, widened=widens, saved=False)


def _low_dtype(graph: nx.DiGraph, plan: Plan | None) -> str:
    if plan is not None:
        return view.dtype_name(plan.low_dtype)
    return next((d for _, d in graph.nodes(data="dtype") if d in LOW_DTYPES), "")


def _side_by_side(forward: Annotated, backward: Annotated) -> Annotated:
    """Joins AOTAutograd's two graphs; a tensor that the forward saves has the same name in the backward."""
    import networkx as nx

    result = Annotated(nx.DiGraph(**backward.graph.graph | forward.graph.graph))
    for which, half in (("forward", forward), ("backward", backward)):
        part = Part(GRAPH, which)
        for name, data in half.graph.nodes(data=True):
            result.scopes[f"{which}/{name}"] = (part, *half.scopes[name])
            scope = scope_text((part, *half.scopes[name]))
            result.graph.add_node(f"{which}/{name}", **data | {"scope": scope})
        for source, target, data in half.graph.edges(data=True):
            result.graph.add_edge(f"{which}/{source}", f"{which}/{target}", **data)
    for name, data in backward.graph.nodes(data=True):
        if data["kind"] in ("input", "parameter") and name in forward.graph:
            types = {key: data[key] for key in ("dtype", "shape", "type")}
            result.graph.add_edge(f"forward/{name}", f"backward/{name}", **types, widened=False, saved=True)
    return result
