"""The casts of a picture that move the most bytes; repeated layers count together."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ..report import graph_view as view
from ..report.layers import repeats, representative
from . import styles
from .picture import Picture

# A picture lists at most this many lines.
LISTED = 10


@dataclass(frozen=True)
class CastLine:
    """One line of the list.

    Attributes:
        casts: Names of the casts: one cast, or the same cast in several equal layers.
        bytes: Bytes that they read and write together.
        words: The tensor, the new dtype and the number of casts.
    """

    casts: tuple[str, ...]
    bytes: int
    words: str


def largest_casts(picture: Picture) -> list[CastLine]:
    """Returns the casts with the most bytes, at most `LISTED`; equal casts count together."""
    graph = picture.graph
    order = {name: number for number, name in enumerate(graph)}
    casts = [name for name in picture.root.all_nodes() if graph.nodes[name]["kind"] == "cast"]
    casts.sort(key=order.__getitem__)
    found = repeats((graph.nodes[name]["module"], _look(picture, name)) for name in casts)
    groups: dict[tuple[str, int], list[str]] = defaultdict(list)
    seen: dict[str, int] = defaultdict(int)
    for name in casts:
        module = graph.nodes[name]["module"]
        groups[representative(module, found), seen[module]].append(name)
        seen[module] += 1
    listed = [_cast_line(picture, names) for names in groups.values()]
    return sorted(listed, key=lambda line: -line.bytes)[:LISTED]


def ranks(listed: list[CastLine]) -> dict[str, int]:
    """Returns the position of each listed cast, from 1."""
    return {name: rank for rank, line in enumerate(listed, 1) for name in line.casts}


def _look(picture: Picture, name: str) -> tuple[str, str, int, bool]:
    data = picture.graph.nodes[name]
    return data["dtype"], data["shape"], data["bytes"], data["is_parameter"]


def _cast_line(picture: Picture, names: list[str]) -> CastLine:
    data = picture.graph.nodes[names[0]]
    moved = sum(picture.graph.nodes[name]["bytes"] for name in names)
    what = _source(picture, names[0])
    if data["module"] and not data["is_parameter"]:
        what += f" for {data['module']}"
    times = f", {len(names)}x" if len(names) > 1 else ""
    return CastLine(tuple(names), moved, f"{what} to {styles.short_dtype(data['dtype'])}{times}")


def _source(picture: Picture, name: str) -> str:
    """Returns the label of the tensor that a cast reads, directly or through a clamp."""
    source = next(iter(picture.graph.predecessors(name)), name)
    return _source(picture, source) if _is_clamp(picture, source) else picture.graph.nodes[source]["label"]


def _is_clamp(picture: Picture, name: str) -> bool:
    return picture.graph.nodes[name]["kind"] == "clamp"


def lines(listed: list[CastLine]) -> list[str]:
    """Returns the list as lines of text."""
    return [f"#{rank}  {view.human_bytes(line.bytes)}: {line.words}" for rank, line in enumerate(listed, 1)]
