"""The content of a picture: the nodes in focus in nested boxes, folded modules, and the edges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ..errors import AmpGraphError, did_you_mean
from ..report.layers import Repeat, is_repeated, repeats, representative
from ..report.rows import is_float_op
from .annotated import Annotated
from .colour_scale import ColourScale
from .scopes import MODULE, PLUMBING, Part, Scope, scope_text

if TYPE_CHECKING:
    import networkx as nx

CASTS = "casts"
# In larger pictures, repeated layers are shown once.
LARGE = 200


@dataclass
class Counts:
    """Counts of the nodes inside a box.

    Attributes:
        ops: Ops whose dtype ampgraph decides; casts and `getitem` do not count.
        low: Those whose result is low.
        exact: Ops without a floating-point result.
        casts: Casts.
        cast_bytes: Bytes that the casts read and write.
        highlighted: Highlighted nodes.
    """

    ops: int = 0
    low: int = 0
    exact: int = 0
    casts: int = 0
    cast_bytes: int = 0
    highlighted: int = 0


@dataclass
class Box:
    """A module, a guarded region or a body, and its content.

    Attributes:
        scope: Its nesting, its own part last; ``()`` for the whole picture.
        nodes: Names of the nodes directly inside.
        boxes: Boxes inside.
        counts: Of everything inside.
        folded: Whether it is drawn as one closed box.
        like: Path of the layer that it equals and that is shown instead; empty for all other boxes.
    """

    scope: Scope
    nodes: list[str] = field(default_factory=list)
    boxes: dict[Part, Box] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    folded: bool = False
    like: str = ""

    @property
    def key(self) -> str:
        """A unique text for each box of a picture."""
        return scope_text(self.scope)

    def all_nodes(self) -> Iterator[str]:
        """Yields the names of the nodes inside, at any depth."""
        yield from self.nodes
        for box in self.boxes.values():
            yield from box.all_nodes()

    def all_boxes(self) -> Iterator[Box]:
        """Yields the boxes inside, at any depth, outer ones first."""
        for box in self.boxes.values():
            yield box
            yield from box.all_boxes()


@dataclass(frozen=True)
class Arc:
    """An edge as drawn: all tensors that go from one node or folded box to another.

    Attributes:
        source: A node's name, or a folded box's key in brackets, see `box_id`.
        target: The same for the target.
        types: The tensors' types, ``"f16[2, 8]"``, each once.
        tensors: How many tensors.
        widened: Whether the target's kernel widens one of them.
        saved: Whether it leads from the forward to the backward graph.
    """

    source: str
    target: str
    types: tuple[str, ...]
    tensors: int
    widened: bool
    saved: bool


@dataclass
class Picture:
    """Everything that is drawn.

    Attributes:
        graph: The annotated graph.
        root: The outermost box.
        arcs: Edges between visible nodes and boxes.
        neighbours: Nodes outside the focus that share an edge with it.
        highlighted: Names of the highlighted nodes, or None without ``highlight``.
        focus: The glob that selects the nodes, or None.
        size: Number of visible nodes and boxes.
        scale: Numbers on nodes, whose colours replace those of precision; None without.
    """

    graph: nx.DiGraph
    root: Box
    arcs: list[Arc]
    neighbours: list[str]
    highlighted: frozenset[str] | None
    focus: str | None
    scale: ColourScale | None = None

    @property
    def size(self) -> int:
        return _size(self.root) + len(self.neighbours)


def picture(
    source: Annotated,
    depth: int | None = None,
    focus: str | None = None,
    highlight: str | Iterable[str] | None = None,
    plumbing: bool = False,
    all_layers: bool | None = True,
) -> Picture:
    """Returns the content of a picture.

    Args:
        source: The annotated graph.
        depth: Modules at this depth are folded; None folds nothing, 0 everything.
        focus: A glob over module paths and node names.
        highlight: ``"casts"``, a node name or a glob over names, or several.
        plumbing: Whether regions of integers and masks are open. They also open if the focus matches
            only them.
        all_layers: Whether repeated layers are shown in full. If not, the first one stands for the others,
            which are folded. None: in full up to `LARGE` nodes, and if ``depth`` is given.

    Raises:
        AmpGraphError: A pattern matches nothing, or ``depth`` is negative.
    """
    if depth is not None and (not isinstance(depth, int) or depth < 0):
        raise AmpGraphError(f"draw: depth={depth!r}: expected a number of module levels, 0 or more, or None.")
    if all_layers not in (True, False, None):
        raise AmpGraphError(f"draw: all_layers={all_layers!r}; legal: True, False, None.")
    graph = source.graph
    highlighted = None if highlight is None else _highlighted(source, highlight)
    shown = list(graph) if focus is None else _in_focus(source, focus)
    # Buffers without readers (num_batches_tracked in evaluation mode) are not drawn.
    shown = [n for n in shown if graph.nodes[n]["kind"] != "parameter" or graph.out_degree(n)]
    root = _boxes(source, shown)
    _count(root, graph, highlighted or frozenset())
    if depth is not None:
        _fold(root, depth)
    if not plumbing:
        _fold_plumbing(root)
    if not (depth is not None or _size(root) <= LARGE if all_layers is None else all_layers):
        _fold_repeats(root, _repeats(source, shown))
    inside = set(shown)
    near = {n for name in shown for n in (*graph.predecessors(name), *graph.successors(name))} - inside
    neighbours = [name for name in graph if name in near]
    return Picture(graph, root, _arcs(graph, root, inside, near), neighbours, highlighted, focus)


def fitting(
    source: Annotated,
    size: int,
    focus: str | None = None,
    highlight: str | Iterable[str] | None = None,
    plumbing: bool = False,
) -> Picture:
    """Returns the picture with the fewest folds that has at most ``size`` nodes and boxes."""
    levels = max((sum(p.kind == MODULE for p in scope) for scope in source.scopes.values()), default=0)
    for depth in (None, *range(levels, 0, -1)):
        shown = picture(source, depth, focus, highlight, plumbing)
        if shown.size <= size:
            return shown
    return picture(source, 0, focus, highlight, plumbing)


def box_id(box: Box) -> str:
    """Returns the name of a folded box in arcs; no node has such a name."""
    return f"[{box.key}]"


def is_single(box: Box) -> bool:
    """Whether a module or region has only one node; the node is then drawn without a box."""
    kind = box.scope[-1].kind if box.scope else ""
    return not box.boxes and len(box.nodes) == 1 and kind in (MODULE, PLUMBING)


def _size(box: Box) -> int:
    return 1 if box.folded else len(box.nodes) + sum(_size(inner) for inner in box.boxes.values())


def _boxes(source: Annotated, shown: list[str]) -> Box:
    root = Box(())
    for name in shown:
        box = root
        for part in source.scopes[name]:
            box = box.boxes.setdefault(part, Box((*box.scope, part)))
        box.nodes.append(name)
    return root


def _count(box: Box, graph: nx.DiGraph, highlighted: frozenset[str]) -> None:
    for inner in box.boxes.values():
        _count(inner, graph, highlighted)
    parts = [inner.counts for inner in box.boxes.values()]
    parts += [_count_node(graph.nodes[name], name in highlighted) for name in box.nodes]
    for name in vars(box.counts):
        setattr(box.counts, name, sum(getattr(part, name) for part in parts))


def _count_node(data: dict, highlighted: bool) -> Counts:
    is_ours = is_float_op(data["kind"], data["op"], data["dtype"])
    is_op = data["kind"] == "op" and data["op"] != "getitem"
    return Counts(
        ops=is_ours,
        low=is_ours and data["precision"] == "low",
        exact=is_op and "float" not in data["dtype"],
        casts=data["kind"] == "cast",
        cast_bytes=data["bytes"],
        highlighted=highlighted,
    )


def _fold(box: Box, depth: int) -> None:
    """Folds modules ``depth`` levels down; guarded regions and bodies do not count as levels."""
    if depth == 0:
        box.folded = not is_single(box)
        return
    for part, inner in box.boxes.items():
        if part.kind == MODULE:
            _fold(inner, depth - 1)
        else:
            _fold(inner, depth)


def _fold_plumbing(root: Box) -> None:
    regions = [box for box in root.all_boxes() if box.scope[-1].kind == PLUMBING]
    inside = {name for box in regions for name in box.nodes}
    if inside.issuperset(root.all_nodes()):
        return
    for box in regions:
        box.folded = not is_single(box)


def _repeats(source: Annotated, shown: list[str]) -> tuple[Repeat, ...]:
    """Returns the layers whose nodes look equal except for names."""
    nodes = source.graph.nodes
    keys = ("kind", "op", "dtype", "shape", "op_class", "by", "guard", "boundary")
    return repeats((nodes[name]["module"], tuple(nodes[name][key] for key in keys)) for name in shown)


def _fold_repeats(root: Box, found: tuple[Repeat, ...]) -> None:
    for box in root.all_boxes():
        path = box.scope[-1].module
        if path and is_repeated(path, found) and not is_single(box):
            box.folded, box.like = True, representative(path, found)


def _arcs(graph: nx.DiGraph, root: Box, inside: set[str], near: set[str]) -> list[Arc]:
    drawn_as = {name: name for name in inside | near}
    drawn_as |= {name: box_id(box) for box in _folded(root) for name in box.all_nodes()}
    merged: dict[tuple[str, str], list[tuple[str, dict]]] = defaultdict(list)
    for source, target, data in graph.edges(data=True):
        if source not in drawn_as or target not in drawn_as or not inside & {source, target}:
            continue
        if drawn_as[source] != drawn_as[target]:
            merged[drawn_as[source], drawn_as[target]].append((source, data))
    return [_arc(*ends, edges) for ends, edges in merged.items()]


def _folded(box: Box) -> Iterator[Box]:
    if box.folded:
        yield box
        return
    for inner in box.boxes.values():
        yield from _folded(inner)


def _arc(source: str, target: str, edges: list[tuple[str, dict]]) -> Arc:
    return Arc(
        source,
        target,
        types=tuple(dict.fromkeys(data["type"] for _, data in edges if data["type"])),
        tensors=len({name for name, _ in edges}),
        widened=any(data["widened"] for _, data in edges),
        saved=all(data["saved"] for _, data in edges),
    )


def _in_focus(source: Annotated, focus: str) -> list[str]:
    if not isinstance(focus, str):
        raise AmpGraphError(f"draw: focus={focus!r}: expected a glob over module paths and node names.")
    names = {name: _names(source, name) for name in source.graph}
    shown = [name for name, known in names.items() if _fits(focus, known)]
    if not shown:
        legal = dict.fromkeys(n for known in names.values() for n in known)
        near = did_you_mean(focus, legal) or did_you_mean(focus.rstrip(".*"), legal)
        raise AmpGraphError(f"draw: focus={focus!r} matches no module path and no node name.{near}")
    return shown


def _fits(pattern: str, names: Iterable[str]) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for name in names)


def _names(source: Annotated, name: str) -> list[str]:
    data = source.graph.nodes[name]
    return [name, data["label"], *(part.module for part in source.scopes[name] if part.module)]


def _highlighted(source: Annotated, highlight: str | Iterable[str]) -> frozenset[str]:
    graph = source.graph
    if highlight == CASTS:
        return frozenset(name for name, kind in graph.nodes(data="kind") if kind == "cast")
    if not isinstance(highlight, Iterable):
        raise AmpGraphError(f"draw: highlight={highlight!r}: expected 'casts', names of nodes, or None.")
    patterns = [highlight] if isinstance(highlight, str) else list(highlight)
    labels = {name: (name, label) for name, label in graph.nodes(data="label")}
    found: set[str] = set()
    for pattern in patterns:
        matching = {n for n, known in labels.items() if _fits(str(pattern), known)}
        if not matching:
            legal = dict.fromkeys((CASTS, *(k for known in labels.values() for k in known)))
            near = did_you_mean(str(pattern), legal)
            raise AmpGraphError(f"draw: highlight: the graph has no node {pattern!r}.{near}")
        found |= matching
    return frozenset(found)
