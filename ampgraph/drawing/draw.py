"""`draw`: a converted model as SVG, PNG, PDF, Graphviz text or an HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path

from torch.fx import GraphModule

from ..errors import AmpGraphError, did_you_mean
from ..report.converted import Converted
from .annotated import annotated
from .colour_scale import ColourScale
from .dot import dot_text
from .page import page
from .picture import Picture, fitting, picture
from .render import FORMATS, can_render, render

TEXT_SUFFIXES = (".dot", ".gv")
PAGE_SUFFIXES = (".html", ".htm")
# A notebook shows at most this many boxes and nodes; deeper modules are folded.
NOTEBOOK_SIZE = 80
# An HTML page starts folded to this size; it contains everything.
PAGE_SIZE = 80


def draw(
    amp: Converted | GraphModule,
    path: str | Path,
    *,
    depth: int | None = None,
    focus: str | None = None,
    highlight: str | Iterable[str] | None = None,
    graph: str = "forward",
    plumbing: bool = False,
    all_layers: bool | None = None,
    values: Mapping[str, float] | None = None,
) -> Path:
    """Draws a converted model.

    Colours show the precision. Purple trapezoids are casts with the bytes that they read and write. Edges
    show dtype and shape. Nested boxes are module calls. Guarded regions and loss-scaling nodes are marked. A
    node's tooltip shows its reason, and a legend explains the symbols. A list shows the casts that move the
    most bytes, with their numbers in the picture; the same cast of repeated layers is one line.

    Args:
        amp: The result of `ampgraph.convert`, or a graph module whose nodes have ``meta["val"]``.
        path: The output file; the suffix selects the format. ``.html`` (one page to fold, search and click),
            ``.dot`` and ``.gv`` always work. ``.svg``, ``.png``, ``.pdf`` and other formats of Graphviz need
            the ``dot`` program or pygraphviz.
        depth: Folds modules this many calls deep into boxes. A box shows how many of its ops run low, and the
            number and bytes of its casts. In a page this is the initial state.
        focus: A glob over module paths and node names, ``"layer3*"``: draws only the matching nodes and the
            edges to their neighbours.
        highlight: ``"casts"``, or names of nodes (globs allowed). All other nodes fade.
        graph: ``"forward"``, ``"backward"`` or ``"both"``, see `to_networkx`.
        plumbing: Opens the regions of ops that only compute integers and masks (positions, attention masks,
            indices); they are folded by default. In a page this is the initial state.
        all_layers: Shows repeated layers in full. If False, the first one stands for the equal layers after
            it, which are folded. None: in full up to 200 nodes, in a page, and with ``depth`` or ``values``.
        values: Numbers by node name, 0 or more, such as `NumericComparison.values` gives: they are written on
            the nodes and colour them, by orders of magnitude, in place of precision. A folded box has the
            largest inside. Nodes without one are white.

    Returns:
        The path written.

    Raises:
        AmpGraphError: The suffix is missing or not available here, a pattern matches nothing, or the graph
            does not exist. No file is written.
    """
    if not isinstance(path, (str, PathLike)):
        raise AmpGraphError(f"draw: path is {path!r}; expected the name of a file, 'model.svg'.")
    path = Path(path)
    suffix = format_suffix(path)
    source = annotated(amp, graph)
    if depth is None and all_layers is None and suffix in PAGE_SUFFIXES:
        shown = fitting(source, PAGE_SIZE, focus, highlight, plumbing)
    else:
        layers = True if values is not None and all_layers is None else all_layers
        shown = picture(source, depth, focus, highlight, plumbing, layers)
    if values is not None:
        shown.scale = ColourScale.of(values, source.graph)
    data = _written(shown, suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def format_suffix(path: Path) -> str:
    """Returns the suffix of a picture's format, in lower case.

    Raises:
        AmpGraphError: The suffix is missing or is not a format.
    """
    if "\0" in str(path):
        raise AmpGraphError(f"draw: {str(path)!r}: a path cannot contain a null byte.")
    if not path.suffix:
        hint = f"try {path.name + '.svg'!r}"
        raise AmpGraphError(f"draw: {str(path)!r} has no suffix, which selects the format; {hint}.")
    suffix = path.suffix.lower()
    legal = (*PAGE_SUFFIXES, *TEXT_SUFFIXES, *(f".{name}" for name in FORMATS))
    if suffix in legal:
        return suffix
    raise AmpGraphError(
        f"draw: {str(path)!r}: {suffix!r} is not a known format; common are .svg, .png, .pdf, .html and "
        ".dot." + did_you_mean(suffix, legal)
    )


def to_dot(
    amp: Converted | GraphModule,
    *,
    depth: int | None = None,
    focus: str | None = None,
    highlight: str | Iterable[str] | None = None,
    graph: str = "forward",
    plumbing: bool = False,
    all_layers: bool | None = None,
) -> str:
    """Returns the diagram as Graphviz text; takes `draw`'s options."""
    return dot_text(picture(annotated(amp, graph), depth, focus, highlight, plumbing, all_layers))


def notebook_svg(amp: Converted) -> str | None:
    """Returns a small diagram for notebooks: folded until it has at most `NOTEBOOK_SIZE` boxes and nodes.

    None if nothing is captured yet or no renderer is installed; notebooks then show the text.
    """
    if not can_render() or not amp.graph_modules:
        return None
    shown = fitting(annotated(amp), NOTEBOOK_SIZE)
    try:
        return render(dot_text(shown), "svg").decode()
    except AmpGraphError:
        return None


def _written(shown: Picture, suffix: str) -> bytes:
    if suffix in TEXT_SUFFIXES:
        return dot_text(shown).encode()
    if suffix in PAGE_SUFFIXES:
        return page(shown).encode()
    return render(dot_text(shown), suffix[1:])
