"""Diagrams of a rewritten graph: Graphviz text and pictures, and an annotated networkx graph."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networkx as nx
from torch.fx import GraphModule, Node

from . import graph_view as view
from .errors import AmpGraphError
from .module import AmpModule
from .module_path import clean_path, module_path
from .plan import META_KEY, Plan

# Okabe and Ito's palette, lightened: the classes stay apart for the usual forms of colour blindness.
COLOURS = {"low": "#9BD0F0", "fp32": "#F6D08A", "cast": "#CC79A7", "other": "#E4E4E4"}
TEXT_FORMATS = (".dot", ".gv")
_INSTALL = (
    "install Graphviz (its `dot` program) and `pip install graphviz`, or `pip install pygraphviz`, which "
    "brings its own; or write a .dot file, which needs neither"
)


def to_networkx(amp: AmpModule | GraphModule) -> nx.DiGraph:
    """Returns the rewritten graph as an annotated networkx graph, in graph order.

    Every value is a str, int or bool, so that the graph can be written as GraphML. Nodes are keyed by name.

    Node attributes:
        ``label``: a parameter's path, ``split[0]``, else the name
        ``kind``: ``"input"``, ``"parameter"``, ``"op"``, ``"output"``, and for what ampgraph inserted,
            ``"cast"`` or ``"clamp"``; ``"graph"`` is the body of a higher-order op, which is not drawn
        ``op``: ``"aten.conv2d"``, or ``""``
        ``module``: path of the innermost module
        ``dtype``, ``shape``: ``"float16"``, ``"2x8x16"``
        ``precision``: ``"low"``, ``"fp32"`` or ``"other"``
        ``op_class``: ``"white"``, ``"black"``, ``"gray"``, ``"clear"`` or ``""``
        ``by``, ``reason``: who decided, and why
        ``bytes``: bytes that a cast reads and writes; 0 for other nodes
        ``is_parameter``: whether it is a parameter, buffer or constant, or a cast of one
        ``line``: ``file:line`` of the model's code

    Edge attributes:
        ``dtype``, ``shape``: of the tensor that is read
        ``type``: both in short, ``"f16[2, 8, 16]"``
        ``widened``: whether the kernel widens this operand itself

    Args:
        amp: What `ampgraph.convert` returned, or its graph module.
    """
    graph_module, plan = view.rewritten(amp)
    widened = set(plan.widened)
    graph = nx.DiGraph(name=view.graph_name(amp), low_dtype=view.dtype_name(plan.low_dtype))
    for node in graph_module.graph.nodes:
        graph.add_node(node.name, **_attributes(node, plan))
        for path, source in view.operands(node):
            widens = (node.name, path) in widened and view.dtype_of(source) == view.dtype_name(plan.low_dtype)
            if graph.has_edge(source.name, node.name):
                graph.edges[source.name, node.name]["widened"] |= widens
                continue
            graph.add_edge(
                source.name,
                node.name,
                dtype=view.dtype_of(source),
                shape=view.shape_of(source),
                type=view.type_of(source),
                widened=widens,
            )
    return graph


def to_dot(amp: AmpModule | GraphModule) -> str:
    """Returns the diagram as Graphviz text; needs no other package.

    Modules are nested boxes; colour tells precision; inserted casts are the trapezoids, narrow at the
    bottom where they narrow, with the bytes they move; dashed edges are operands that a kernel widens itself;
    reasons are tooltips.
    """
    graph = to_networkx(amp)
    root = _Box("")
    for name, data in graph.nodes.items():
        _box_for(root, data["module"]).nodes.append(name)
    lines = [
        f"digraph {_quoted(graph.name)} {{",
        '  graph [rankdir=TB fontname="Helvetica" fontsize=10 nodesep=0.25 ranksep=0.3];',
        '  node [shape=box style="rounded,filled" fontname="Helvetica" fontsize=10 margin="0.08,0.04"];',
        '  edge [fontname="Helvetica" fontsize=8 color="#555555" arrowsize=0.6];',
        *_box_lines(root, graph, "  "),
        *(_edge_line(a, b, data) for a, b, data in graph.edges(data=True)),
        *_legend(graph.graph["low_dtype"]),
        "}",
    ]
    return "\n".join(lines) + "\n"


def draw(amp: AmpModule | GraphModule, path: str | Path) -> Path:
    """Draws a converted model.

    Args:
        amp: What `ampgraph.convert` returned, or its graph module.
        path: Where to write; the suffix tells the format: ``.dot`` and ``.gv`` always work; ``.svg``,
            ``.png``, ``.pdf`` and Graphviz's others need the ``dot`` program or pygraphviz.

    Returns:
        The path written.

    Raises:
        AmpGraphError: The format cannot be rendered here; the message says what to install.
    """
    path = Path(path)
    if not path.suffix:
        hint = f"try {path.name + '.svg'!r}"
        raise AmpGraphError(f"draw: {str(path)!r} has no suffix that tells the format; {hint}.")
    text = to_dot(amp)
    data = text.encode() if path.suffix in TEXT_FORMATS else _render(text, path.suffix[1:])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def can_render() -> bool:
    """Whether pictures, not only Graphviz text, can be made here."""
    return bool((_module("graphviz") and shutil.which("dot")) or _module("pygraphviz"))


def _render(text: str, suffix: str) -> bytes:
    graphviz, pygraphviz = _module("graphviz"), _module("pygraphviz")
    try:
        if graphviz and shutil.which("dot"):
            return graphviz.Source(text).pipe(format=suffix)
        if pygraphviz:
            return pygraphviz.AGraph(string=text).draw(format=suffix, prog="dot")
    except Exception as error:  # Graphviz reports an unknown format as it likes.
        raise AmpGraphError(f"draw: Graphviz could not make {suffix!r}: {error}") from error
    raise AmpGraphError(f"draw: a picture ({suffix}) needs Graphviz, which is not here: {_INSTALL}.")


def _module(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        return None


def _attributes(node: Node, plan: Plan) -> dict[str, Any]:
    kind = view.kind_of(node)
    decision = plan.decisions.get(node.name)
    is_cast, meta = kind == "cast", node.meta[META_KEY] if kind in ("cast", "clamp") else {}
    by, reason = (decision.by, decision.reason) if decision else ("", "")
    dtype = "" if kind == "output" else view.dtype_of(node)
    return {
        "label": view.label_of(node),
        "kind": kind,
        "op": view.op_name(node),
        "module": _module_of(node),
        "dtype": dtype,
        "shape": "" if kind == "output" else view.shape_of(node),
        "precision": {view.dtype_name(plan.low_dtype): "low", "float32": "fp32"}.get(dtype, "other"),
        "op_class": (decision.op_class or "") if decision else "",
        "by": meta.get("inserted") or meta.get("clamped") or by,
        "reason": meta.get("reason") or reason,
        "bytes": view.cast_bytes(node) if is_cast else 0,
        "is_parameter": view.is_parameter_cast(node) if is_cast else kind == "parameter",
        "line": view.user_line(node),
    }


def _module_of(node: Node) -> str:
    """Returns the module that a node is drawn in; a parameter's owner for a parameter."""
    if node.op == "get_attr":
        return clean_path(str(node.target)).rpartition(".")[0]
    return module_path(node)


@dataclass
class _Box:
    path: str
    nodes: list[str] = field(default_factory=list)
    boxes: dict[str, _Box] = field(default_factory=dict)


def _box_for(root: _Box, path: str) -> _Box:
    box = root
    for part in path.split(".") if path else ():
        inner = f"{box.path}.{part}" if box.path else part
        box = box.boxes.setdefault(part, _Box(inner))
    return box


def _box_lines(box: _Box, graph: nx.DiGraph, indent: str) -> Iterator[str]:
    for name in box.nodes:
        yield indent + _node_line(name, graph.nodes[name])
    for part, inner in box.boxes.items():
        yield f"{indent}subgraph {_quoted('cluster_' + inner.path)} {{"
        yield f"{indent}  label={_quoted(part)}; tooltip={_quoted(inner.path)};"
        yield f'{indent}  style=rounded; color="#AAAAAA";'
        yield from _box_lines(inner, graph, indent + "  ")
        yield f"{indent}}}"


def _node_line(name: str, data: dict[str, Any]) -> str:
    tooltip = f"{name}: {data['by']}: {data['reason']}" + (
        f" ({view.short_line(data['line'])})" if data["line"] else ""
    )
    style = {"label": data["label"], "tooltip": tooltip, "fillcolor": COLOURS[data["precision"]]}
    if data["kind"] == "cast":
        short = data["dtype"].replace("bfloat", "bf").replace("float", "f")
        style |= {
            "label": f"cast to {short}\n{view.human_bytes(data['bytes'])}",
            "shape": "invtrapezium" if data["precision"] == "low" else "trapezium",
            "style": "filled,bold",
            "fillcolor": COLOURS["cast"],
        }
    elif data["kind"] in ("input", "output"):
        style |= {"shape": "ellipse", "style": "filled"}
    elif data["kind"] == "parameter":
        style |= {"shape": "note", "style": "filled"}
    elif data["op"]:
        style["label"] = f"{data['label']}\n{data['op']}"
    if data["kind"] == "clamp":
        style |= {"style": "filled,bold", "fillcolor": COLOURS["cast"]}
    return f"{_quoted(name)} [{' '.join(f'{k}={_quoted(v)}' for k, v in style.items())}];"


def _edge_line(source: str, target: str, data: dict[str, Any]) -> str:
    label = "" if ", " in data["shape"] else data["type"]  # several results: their own edges say it
    extra = ' style=dashed tooltip="widened inside the kernel"' if data["widened"] else ""
    return f"  {_quoted(source)} -> {_quoted(target)} [label={_quoted(label)}{extra}];"


def _legend(low_dtype: str) -> Iterator[str]:
    yield '  subgraph "cluster__legend" {'
    yield '    label="legend"; style="rounded,dashed"; color="#AAAAAA";'
    cast_colour = COLOURS["cast"]
    entries = (("low", low_dtype, "box"), ("fp32", "float32", "box"), ("other", "other dtype", "box"))
    for key, label, shape in entries:
        yield f'    "_legend_{key}" [label={_quoted(label)} shape={shape} fillcolor="{COLOURS[key]}"];'
    for shape, label in (("invtrapezium", "cast to low"), ("trapezium", "cast to float32")):
        look = f'shape={shape} style="filled,bold" fillcolor="{cast_colour}"'
        yield f'    "_legend_{shape}" [label="{label}" {look}];'
    yield '    "_legend_parameter" [label="parameter" shape=note style=filled fillcolor="#FFFFFF"];'
    yield '    "_legend_dash" [label="dashed edge: widened inside the kernel" shape=plaintext style=""];'
    yield "  }"


def _quoted(text: str) -> str:
    escaped = str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
