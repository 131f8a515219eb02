"""A picture as one self-contained HTML page: pan, zoom, search, fold and click."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable
from importlib.resources import files
from string import Template
from typing import Any

from ..report import graph_view as view
from ..report.tables import printable
from . import styles
from .largest_casts import largest_casts, ranks
from .picture import Box, Picture, is_single
from .scopes import PLUMBING

_FACTS = ("op", "module", "type", "op_class", "guard")


def page(picture: Picture) -> str:
    """Returns the picture as an HTML page.

    The Content-Security-Policy allows only the page's script and style, by their hashes. Names and reasons
    reach the page as JSON, so they cannot execute.
    """
    style, script = _asset("page.css"), f"{_asset('layout.js')}\n{_asset('view.js')}"
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    data = _data(picture)
    return Template(_asset("index.html")).substitute(
        policy=html.escape(policy),
        title=html.escape(printable(data["title"])),
        style=style,
        script=script,
        data=_json(data),
    )


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(data: dict[str, Any]) -> str:
    """Returns JSON that cannot end a script element."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(picture: Picture) -> dict[str, Any]:
    graph = picture.graph
    names = [*picture.root.all_nodes(), *picture.neighbours]
    index = {name: number for number, name in enumerate(names)}
    inside = set(names) - set(picture.neighbours)
    root = _box(picture.root, index, picture)
    root["nodes"] += [index[name] for name in picture.neighbours]
    edges = [
        [index[a], index[b], data["type"], data["widened"], data["saved"]]
        for a, b, data in graph.edges(data=True)
        if a in index and b in index and inside & {a, b}
    ]
    around = {name: box for box in (picture.root, *picture.root.all_boxes()) for name in box.nodes}
    nodes = [
        _coloured(_node(name, graph.nodes[name], around.get(name)), "lines", picture, [name])
        for name in names
    ]
    listed = [] if picture.scale else largest_casts(picture)
    for name, rank in ranks(listed).items():
        own = nodes[index[name]]["lines"]
        own[0] = f"#{rank} {own[0]}"
    highlighted = picture.highlighted
    return {
        "title": styles.title(
            graph.graph["name"], graph.graph["low_dtype"], picture.root.counts, picture.focus
        ),
        "colours": styles.PRECISION_COLOURS | {"cast": styles.CAST, "boundary": styles.BOUNDARY},
        "nodes": nodes,
        "root": root,
        "edges": edges,
        "highlighted": None if highlighted is None else [index[n] for n in names if n in highlighted],
        "legend": [*_numbers(picture), *([] if picture.scale else _legend(picture, nodes, edges))],
        "largest": [
            {
                "size": view.human_bytes(line.bytes),
                "words": line.words,
                "nodes": [index[n] for n in line.casts],
            }
            for line in listed
        ],
    }


def _node(name: str, data: dict[str, Any], box: Box | None) -> dict[str, Any]:
    """Returns a node with its box; a node outside the focus has no box."""
    alone = box is not None and is_single(box)
    scope = box.scope[: -1 if alone else None] if box else ()
    lines = styles.node_label(data, scope).split("\n")
    if box and alone:
        lines += styles.alone_in(box).split("\n")[1:]
    if data["type"] and "], " not in data["type"]:
        lines.append(data["type"])
    facts = [(key.replace("_", " "), data[key]) for key in _FACTS if data[key]]
    if data["kind"] == "cast":
        facts.append(("moves", f"{view.human_bytes(data['bytes'])} ({data['bytes']} bytes)"))
    if data["line"]:
        facts.append(("line", view.short_line(data["line"])))
    if data["boundary"]:
        facts.append(("boundary", styles.BOUNDARY_WORDS[data["boundary"]]))
    searched = (name, data["label"], data["op"], data["module"], data["dtype"], data["kind"], data["reason"])
    return {
        "name": name,
        "lines": lines,
        "kind": data["kind"],
        "precision": data["precision"],
        "boundary": data["boundary"],
        "by": data["by"],
        "reason": data["reason"],
        "facts": facts,
        "tooltip": styles.node_tooltip(name, data),
        "text": " ".join(searched).lower(),
        "neighbour": box is None,
    }


def _coloured(data: dict[str, Any], lines: str, picture: Picture, names: Iterable[str]) -> dict[str, Any]:
    """Returns a node, or a box by the worst inside, with number and colour where a picture is about those."""
    if picture.scale is None:
        return data
    value = picture.scale.worst(names)
    if value is None:
        return data | {"fill": "#FFFFFF", "ink": ""}
    style = picture.scale.style(value)
    written = {lines: [*data[lines], f"{value:.1e}"]}
    return data | written | {"fill": style["fillcolor"], "ink": style.get("fontcolor", "")}


def _numbers(picture: Picture) -> list[dict[str, Any]]:
    legend = picture.scale.legend() if picture.scale else []
    look = {"kind": "op", "precision": "other"}
    return [look | {"words": words, "fill": style["fillcolor"]} for words, style in legend]


def _box(box: Box, index: dict[str, int], picture: Picture) -> dict[str, Any]:
    part = box.scope[-1] if box.scope else None
    counts = styles.counts_lines(box)
    facts = [("module", part.module)] if part and part.module else []
    inner_boxes = [inner for inner in box.boxes.values() if not is_single(inner)]
    nodes = [*box.nodes, *(inner.nodes[0] for inner in box.boxes.values() if is_single(inner))]
    data = {
        "key": box.key,
        "label": styles.box_name(box),
        "kind": part.kind if part else "model",
        "open": not box.folded,
        "counts": counts,
        "ops": box.counts.ops,
        "low": box.counts.low,
        "facts": [*facts, *(("inside", line) for line in counts)],
        "nodes": [index[name] for name in nodes],
        "boxes": [_box(inner, index, picture) for inner in inner_boxes],
    }
    return _coloured(data, "counts", picture, box.all_nodes())


def _legend(picture: Picture, nodes: list[dict], edges: list[list]) -> list[dict[str, Any]]:
    """Returns the entries of the legend; each entry looks like the nodes that it explains."""
    low = picture.graph.graph["low_dtype"]
    words = {"low": low, "fp32": "float32", "other": "other dtype"}
    inside = [n for n in nodes if not n["neighbour"]]
    seen = {(n["kind"], n["precision"]) for n in inside if not n["boundary"]}
    shown = [
        {"words": words[p], "kind": "op", "precision": p}
        for p in words
        if any(kind not in ("cast", "output", "graph") and seen_p == p for kind, seen_p in seen)
    ]
    shown += [
        {"words": f"cast to {words[p]}, with its bytes", "kind": "cast", "precision": p}
        for p in words
        if ("cast", p) in seen
    ]
    kinds = {"clamp": "clamp before a cast", "parameter": "parameter, buffer", "input": "input, output"}
    shown += [
        {"words": text, "kind": kind, "precision": "other", "plain": kind != "clamp"}
        for kind, text in kinds.items()
        if any(k == kind for k, _ in seen)
    ]
    shown += [
        {"words": text, "kind": "op", "precision": "other", "boundary": True}
        for text in dict.fromkeys(styles.boundary_legend(n["boundary"]) for n in inside if n["boundary"])
    ]
    if len(inside) < len(nodes):
        shown.append({"words": "outside of the focus", "kind": "op", "precision": "other", "neighbour": True})
    boxes = list(picture.root.all_boxes())
    if any(map(styles.is_plumbing, boxes)):
        shown.append({"words": "integers and masks, folded", "outline": "plumbing"})
    if any(box.scope[-1].kind != PLUMBING for box in boxes):
        shown.append({"words": "module, folded: the blue share of its ops is low", "outline": "folded"})
    if any(box.scope[-1].kind == "guard" for box in boxes):
        shown.append({"words": "guarded region", "outline": "guard"})
    if picture.highlighted is not None:
        shown.append({"words": "highlighted", "outline": "highlighted"})
    if any(widened for *_, widened, _ in edges):
        shown.append({"words": "widened inside the kernel", "line": "widened"})
    return shown
