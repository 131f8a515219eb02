"""Colours and words that every kind of picture shares."""

from __future__ import annotations

from typing import Any

from ..report import graph_view as view
from .picture import Box, Counts
from .scopes import BODY, GUARD, PLUMBING, Scope

# Okabe and Ito's palette with lighter large areas: colour-blind users can distinguish the classes
# (https://jfly.uni-koeln.de/color/).
LOW, FP32, OTHER = "#9BD0F0", "#F6D08A", "#E4E4E4"
CAST, BOUNDARY, GUARDED, HIGHLIGHT = "#CC79A7", "#F0E442", "#009E73", "#D55E00"
PRECISION_COLOURS = {"low": LOW, "fp32": FP32, "other": OTHER}

BOUNDARY_WORDS = {
    "scale": "loss scaling: multiplies by the scale",
    "unscale": "loss scaling: multiplies by 1/scale",
    "finite check": "loss scaling: looks for infinities and NaN",
    "shadow": "shadow weight: a parameter's low copy; the gradient goes to the parameter",
}


def boundary_legend(role: str) -> str:
    """Returns the name of a boundary node in the legend."""
    return BOUNDARY_WORDS[role].partition(":")[0]


def short_dtype(dtype: str) -> str:
    """Returns ``"f16"`` for ``"float16"``, ``"bf16"`` for ``"bfloat16"``."""
    return dtype.replace("float", "f")


def cast_label(data: dict[str, Any]) -> str:
    """Returns the label of a cast: the new dtype and the bytes that it moves."""
    return f"cast to {short_dtype(data['dtype'])}\n{view.human_bytes(data['bytes'])}"


def node_label(data: dict[str, Any], scope: Scope) -> str:
    """Returns a node's name, and its op if the name does not contain it.

    Inside a module's box, parameters are shown without the module's path.
    """
    if data["kind"] == "cast":
        return cast_label(data)
    if data["kind"] == "graph":
        return f"result of {data['label']}"
    if data["kind"] == "parameter":
        inner = next((part.module for part in reversed(scope) if part.module), "")
        return str(data["label"]).removeprefix(f"{inner}.")
    return f"{data['label']}\n{data['op']}" if data["op"] and data["op"] != "getitem" else data["label"]


def node_tooltip(name: str, data: dict[str, Any]) -> str:
    """Returns all attributes of a node, including the reason, in lines."""
    lines = [f"{name}: {data['op'] or data['kind']}" + (f" -> {data['type']}" if data["type"] else "")]
    if data["reason"]:
        lines.append(f"{data['by']}: {data['reason']}")
    if data["kind"] == "cast":
        lines.append(f"moves {view.human_bytes(data['bytes'])}")
    if data["guard"]:
        lines.append(f"in a region of {data['guard']}")
    if data["boundary"]:
        lines.append(BOUNDARY_WORDS[data["boundary"]])
    if data["line"]:
        lines.append(view.short_line(data["line"]))
    return "\n".join(lines)


def box_name(box: Box) -> str:
    """Returns the name of a box; ``""`` for the whole picture."""
    if not box.scope:
        return ""
    part = box.scope[-1]
    words = {BODY: f"body {part.name}", GUARD: f"guard: {part.name}"}.get(part.kind, part.name)
    return f"{words} (call {part.call})" if part.call > 1 else words


def alone_in(box: Box) -> str:
    """Returns the line that names the module of a node that is the only node in it."""
    return "" if is_plumbing(box) else f"\nin {box_name(box)}"


def box_label(box: Box) -> str:
    """Returns a box's name; for a folded box also its counts."""
    lines = [box_name(box) or "model", *counts_lines(box)] if box.folded else [box_name(box)]
    lines += [f"as {box.like}"] if box.like and box.folded else []
    return "\n".join(lines)


def is_plumbing(box: Box) -> bool:
    """Whether a box is a region of integers and masks."""
    return bool(box.scope) and box.scope[-1].kind == PLUMBING


def counts_lines(box: Box) -> list[str]:
    """Returns the text of a folded box: how many of its ops run low, and its casts with their bytes."""
    counts = box.counts
    lines = [f"{counts.low} of {counts.ops} ops low"] if counts.ops else []
    if is_plumbing(box):
        lines = [f"{counts.ops + counts.exact} ops"]
    if counts.casts:
        casts = "1 cast" if counts.casts == 1 else f"{counts.casts} casts"
        lines.append(f"{casts}, {view.human_bytes(counts.cast_bytes)}")
    if counts.highlighted:
        lines.append(f"{counts.highlighted} highlighted")
    return lines


def title(name: str, low_dtype: str, counts: Counts, focus: str | None) -> str:
    """Returns the picture's headline."""
    name = f"{name}, {focus}" if focus else name
    low = f"{counts.low} of {counts.ops} ops in {low_dtype or 'low precision'}"
    return f"{name}: {low}, {counts.casts} casts ({view.human_bytes(counts.cast_bytes)})"
