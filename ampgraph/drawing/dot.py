"""A picture as Graphviz text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from ..report.tables import printable
from . import styles
from .largest_casts import largest_casts, lines, ranks
from .picture import Arc, Box, Counts, Picture, box_id, is_single
from .scopes import GUARD, MODULE, PLUMBING, Part, Scope

_Style = dict[str, str]
# If a node has more outgoing edges, each label is written once.
FAN = 3


def dot_text(picture: Picture) -> str:
    """Returns the picture as Graphviz text.

    It uses only plain labels and shapes, because builds of Graphviz support different features.
    """
    return "\n".join(_Writer(picture).lines()) + "\n"


class _Writer:
    def __init__(self, picture: Picture):
        self.picture = picture
        self.graph = picture.graph
        self.entries: dict[str, _Style] = {}  # the legend's entries
        self.largest = [] if picture.scale else largest_casts(picture)
        self.ranks = ranks(self.largest)
        self.readers = Counter(arc.source for arc in picture.arcs)
        self.told: set[tuple[str, str]] = set()

    def lines(self) -> Iterator[str]:
        graph, counts = self.graph, self.picture.root.counts
        heading = styles.title(graph.graph["name"], graph.graph["low_dtype"], counts, self.picture.focus)
        listed = ["largest casts:", *lines(self.largest)] if self.largest else []
        yield f"digraph {_quoted(graph.graph['name'])} {{"
        yield (
            f"  graph [rankdir=TB label={_left_aligned([heading, *listed])} labelloc=t labeljust=l "
            'fontname="Helvetica" fontsize=11 nodesep=0.2 ranksep=0.35];'
        )
        yield '  node [shape=box style="rounded,filled" fontname="Helvetica" fontsize=10 margin="0.08,0.04"];'
        yield '  edge [fontname="Helvetica" fontsize=8 color="#555555" fontcolor="#444444" arrowsize=0.6];'
        yield from self._inside(self.picture.root, "  ")
        for name in self.picture.neighbours:
            yield "  " + _statement(name, self._neighbour_style(name))
        for arc in self.picture.arcs:
            yield self._arc_line(arc)
        yield from self._legend()
        yield "}"

    def _inside(self, box: Box, indent: str) -> Iterator[str]:
        if box.folded:
            yield indent + _statement(box_id(box), self._folded_style(box))
            return
        for name in box.nodes:
            yield indent + _statement(name, self._node_style(name, box.scope))
        for part, inner in box.boxes.items():
            if inner.folded:
                yield from self._inside(inner, indent)
                continue
            if is_single(inner):
                yield indent + _statement(inner.nodes[0], self._node_style(inner.nodes[0], box.scope, inner))
                continue
            yield f"{indent}subgraph {_quoted('cluster_' + inner.key)} {{"
            yield f"{indent}  {_attributes(self._cluster_style(part, inner), ' ')};"
            yield from self._inside(inner, indent + "  ")
            yield f"{indent}}}"

    def _cluster_style(self, part: Part, box: Box) -> _Style:
        style = {"label": styles.box_label(box), "tooltip": box.key, "style": "rounded", "color": "#AAAAAA"}
        style |= {"penwidth": "1", "fontcolor": "#000000"}  # or it inherits from the cluster around it
        if part.kind == GUARD:
            style |= {"style": "rounded,dashed", "color": styles.GUARDED, "penwidth": "2.5"}
            style["fontcolor"] = "#00664B"
            dashed = {"shape": "box", "style": "rounded,dashed"}
            self._seen("guarded region", dashed | _outline(styles.GUARDED))
        elif part.kind == PLUMBING:
            style |= {"style": "rounded,dotted", "color": "#666666"}
        elif part.kind != MODULE:
            style |= {"style": "rounded,bold", "color": "#555555"}
        return style

    def _node_style(self, name: str, scope: Scope, alone_in: Box | None = None) -> _Style:
        data = self.graph.nodes[name]
        style = {"label": styles.node_label(data, scope), "tooltip": styles.node_tooltip(name, data)}
        if name in self.ranks:
            style["label"] = f"#{self.ranks[name]} {style['label']}"
        if alone_in:
            style["label"] += styles.alone_in(alone_in)
        style |= self._look(data)
        if data["boundary"]:
            style |= {"fillcolor": styles.BOUNDARY, "label": f"{style['label']}\n({data['boundary']})"}
            self._seen(styles.boundary_legend(data["boundary"]), {"fillcolor": styles.BOUNDARY})
        style = self._with_value(style, [name])
        return self._with_highlight(style, name in (self.picture.highlighted or ()))

    def _plain(self) -> _Style:
        """Returns the colour of the legend's shapes where colours stand for numbers."""
        return {"fillcolor": "#FFFFFF"} if self.picture.scale else {}

    def _with_value(self, style: _Style, names: Iterable[str]) -> _Style:
        """Colours a node, or a box by the worst inside, where the picture is about numbers."""
        scale = self.picture.scale
        if scale is None:
            return style
        value = scale.worst(names)
        if value is None:
            return style | {"fillcolor": "#FFFFFF"}
        return style | scale.style(value) | {"label": f"{style['label']}\n{value:.1e}"}

    def _look(self, data: dict[str, Any]) -> _Style:
        """Returns shape and colour, and records them for the legend."""
        if data["kind"] == "cast":
            down = data["precision"] == "low"
            style = {
                "shape": "invtrapezium" if down else "trapezium",
                "style": "filled,bold",
                "fillcolor": styles.CAST,
                "margin": "0.02,0.04",
            }
            self._seen(f"cast to {data['dtype']}", style | self._plain())
            return style
        if data["kind"] == "clamp":
            style = {"shape": "box", "style": "filled,bold", "fillcolor": styles.CAST}
            self._seen("clamp before a cast", style | self._plain())
            return style
        colour = {"fillcolor": styles.PRECISION_COLOURS[data["precision"]]}
        if data["kind"] in ("input", "output", "graph"):
            style = {"shape": "ellipse", "style": "filled"}
            self._seen("input, output", style | {"fillcolor": "#FFFFFF"})
        elif data["kind"] == "parameter":
            style = {"shape": "note", "style": "filled"}
            self._seen("parameter, buffer", style | {"fillcolor": "#FFFFFF"})
        else:
            style = {}
        low = self.graph.graph["low_dtype"]
        words = {"low": low, "fp32": "float32", "other": "other dtype"}[data["precision"]]
        if self.picture.scale is None and data["dtype"] and not data["boundary"]:
            self._seen(words, {"shape": "box"} | colour)
        return style | colour

    def _folded_style(self, box: Box) -> _Style:
        counts = box.counts
        style = {
            "label": styles.box_label(box),
            "tooltip": f"{box.key}: {', '.join(styles.counts_lines(box))}",
            "shape": "box",
            "peripheries": "2",
        }
        if self.picture.scale is not None:
            style |= {"style": "filled"}
            return self._with_highlight(self._with_value(style, box.all_nodes()), bool(counts.highlighted))
        share = counts.low / counts.ops if counts.ops else 0
        if styles.is_plumbing(box):
            return self._plumbing_style(style, counts)
        if 0 < share < 1:
            style |= {"style": "filled", "fillcolor": f"{styles.LOW};{share:.3f}:{styles.FP32}"}
        else:
            plain = styles.LOW if share else styles.FP32 if counts.ops else styles.OTHER
            style |= {"style": "filled", "fillcolor": plain}
        low = self.graph.graph["low_dtype"]
        if counts.low:
            self._seen(low, {"shape": "box", "fillcolor": styles.LOW})
        if counts.low < counts.ops:
            self._seen("float32", {"shape": "box", "fillcolor": styles.FP32})
        self._seen(
            "module, folded: blue is\nthe share of its ops that is low",
            {
                "shape": "box",
                "style": "filled",
                "peripheries": "2",
                "fillcolor": f"{styles.LOW};0.6:{styles.FP32}",
            },
        )
        return self._with_highlight(style, bool(counts.highlighted))

    def _plumbing_style(self, style: _Style, counts: Counts) -> _Style:
        style |= {"style": "filled", "fillcolor": styles.OTHER}
        shown = {key: style[key] for key in ("shape", "peripheries", "style", "fillcolor")}
        self._seen("integers and masks, folded", shown)
        return self._with_highlight(style, bool(counts.highlighted))

    def _neighbour_style(self, name: str) -> _Style:
        data = self.graph.nodes[name]
        style = {
            "label": styles.node_label(data, ()),
            "tooltip": styles.node_tooltip(name, data),
            "shape": "box",
            "style": "dashed",
            "color": "#888888",
            "fontcolor": "#666666",
        }
        self._seen("outside of the focus", {k: v for k, v in style.items() if k not in ("label", "tooltip")})
        return style

    def _with_highlight(self, style: _Style, highlighted: bool) -> _Style:
        if self.picture.highlighted is None:
            return style
        if not highlighted:
            return style | {
                "fillcolor": _faded(style["fillcolor"]),
                "color": "#BBBBBB",
                "fontcolor": "#777777",
            }
        self._seen("highlighted", _outline(styles.HIGHLIGHT))
        return style | {"color": styles.HIGHLIGHT, "penwidth": "4"}

    def _arc_line(self, arc: Arc) -> str:
        several = len(arc.types) > 1 or arc.tensors > 1
        label = f"{arc.tensors} tensors" if several else "".join(arc.types)
        if "], " in label:  # an op with several results: the edges of the results have labels
            label = ""
        if label and self._is_told(arc.source, label):
            label = ""
        tip = ("widened inside the kernel: " if arc.widened else "") + "\n".join(arc.types)
        style = {"label": f"  {label}" if label else "", "tooltip": tip, "labeltooltip": tip}
        if self.readers[arc.source] > FAN and arc.target.startswith("["):
            # Edges to nodes that every layer reads run beside the chain of layers.
            style |= {"tailport": "e", "headport": "e"} | ({"label": ""} if several else {})
        if arc.widened:
            style["style"] = "dashed"
            self._seen("dashed edge: widened\ninside the kernel", {"shape": "plaintext", "style": ""})
        if arc.saved:
            style |= {"style": "dotted", "constraint": "false"}
            self._seen("dotted edge: saved\nfor the backward", {"shape": "plaintext", "style": ""})
        return f"  {_quoted(arc.source)} -> {_quoted(arc.target)} [{_attributes(style)}];"

    def _is_told(self, source: str, label: str) -> bool:
        """Whether one edge out of many (a mask to each layer) has the label already."""
        first = (source, label) not in self.told
        self.told.add((source, label))
        return self.readers[source] > FAN and not first

    def _seen(self, words: str, style: _Style) -> None:
        self.entries.setdefault(words, style)

    def _legend(self) -> Iterator[str]:
        yield '  subgraph "cluster__legend" {'
        yield '    label="legend"; style="rounded,dashed"; color="#AAAAAA"; fontsize=10;'
        scale = self.picture.scale
        numbers = [(words, {"shape": "box"} | style) for words, style in scale.legend()] if scale else []
        entries = [*numbers, *sorted(self.entries.items(), key=lambda entry: _rank(*entry))]
        names = [f"_legend_{number}" for number in range(len(entries))]
        for name, (words, style) in zip(names, entries, strict=True):
            yield "    " + _statement(name, {"label": words, "fontsize": "9", "tooltip": words} | style)
        for upper, lower in pairwise(names):
            yield f"    {_quoted(upper)} -> {_quoted(lower)} [style=invis minlen=1];"
        yield "  }"


def _rank(words: str, style: _Style) -> tuple[int, str]:
    """Sorts the legend: plain colours, then shapes, then outlines, then edges."""
    plain = set(style) <= {"shape", "fillcolor"}
    last = style.get("shape") == "plaintext"
    return (0 if plain else 3 if last else 2 if "penwidth" in style else 1), words


def _outline(colour: str) -> _Style:
    return {"fillcolor": "#FFFFFF", "color": colour, "penwidth": "2.5"}


def _faded(colour: str) -> str:
    """Returns a colour, or the colours of stripes, halfway to white."""
    return ":".join(_faded_one(part) for part in colour.split(":"))


def _faded_one(colour: str) -> str:
    code, semicolon, share = colour.partition(";")
    parts = [int(code[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{(255 * 2 + part) // 3:02X}" for part in parts) + semicolon + share


def _statement(name: str, style: _Style) -> str:
    return f"{_quoted(name)} [{_attributes(style)}];"


def _attributes(style: _Style, between: str = " ") -> str:
    return between.join(f"{key}={_quoted(value)}" for key, value in style.items())


def _left_aligned(texts: list[str]) -> str:
    """Returns lines as one label, each at the left border."""
    return '"' + "".join(_quoted(text)[1:-1] + "\\l" for text in texts) + '"'


def _quoted(text: str) -> str:
    escaped = printable(str(text)).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
