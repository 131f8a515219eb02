"""`draw`: a converted model as SVG, PNG, PDF, Graphviz text or an HTML page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch.fx import GraphModule

from ..errors import AmpGraphError, did_you_mean
from ..report.converted import Converted
from .annotated import annotated
from .dot import dot_text
from .page import page
from .picture import Picture, fitting, picture
from .render import FORMATS, can_render, render

TEXT_SUFFIXES = (".dot", ".gv")
PAGE_SUFFIXES = (".html", ".htm")
# A notebook shows at most this many boxes and nodes; deeper modules are folded.
NOTEBOOK_SIZE = 80
# A page starts folded to as much; everything is in it.
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
) -> Path:
    """Draws a converted model.

    Colour tells precision, purple trapezoids are casts with the bytes they read and write, edges carry dtype
    and shape, nested boxes are module calls. Guarded regions and the nodes of the loss scaling are marked. A
    node's reason is its tooltip. The legend explains what occurs. The casts that move the most bytes are
    listed, with their numbers in the picture; the same cast of repeated layers is one line.

    Args:
        amp: What `ampgraph.convert` returned, or a graph module whose nodes have ``meta["val"]``.
        path: Where to write; the suffix tells the format. ``.html`` (a page of its own to fold, search
            and click), ``.dot`` and ``.gv`` always work; ``.svg``, ``.png``, ``.pdf`` and Graphviz's others
            need the ``dot`` program or pygraphviz.
        depth: Folds modules this many calls deep into boxes that tell how many of their ops run low, and how
            many casts of how many bytes are inside. In a page, where it starts.
        focus: Draws only what a glob over module paths and node names matches, ``"layer3*"``, with the edges
            to what is around it.
        highlight: ``"casts"``, or names of nodes (globs allowed): these stand out, the rest is faded.
        graph: ``"forward"``, ``"backward"`` or ``"both"``, see `to_networkx`.
        plumbing: Opens the regions of ops that only compute integers and masks (positions, attention masks,
            indices); they are folded by default. In a page, where it starts.

    Returns:
        The path written.

    Raises:
        AmpGraphError: The suffix is missing or cannot be made here, a pattern matches nothing, or there is no
            such graph; nothing is written.
    """
    path = Path(path)
    suffix = format_suffix(path)
    source = annotated(amp, graph)
    if depth is None and suffix in PAGE_SUFFIXES:
        shown = fitting(source, PAGE_SIZE, focus, highlight, plumbing)
    else:
        shown = picture(source, depth, focus, highlight, plumbing)
    data = _written(shown, suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def format_suffix(path: Path) -> str:
    """Returns the suffix that tells a picture's format, in lower case.

    Raises:
        AmpGraphError: There is none, or it is no format's.
    """
    if "\0" in str(path):
        raise AmpGraphError(f"draw: {str(path)!r}: a path has no null byte.")
    if not path.suffix:
        hint = f"try {path.name + '.svg'!r}"
        raise AmpGraphError(f"draw: {str(path)!r} has no suffix that tells the format; {hint}.")
    suffix = path.suffix.lower()
    legal = (*PAGE_SUFFIXES, *TEXT_SUFFIXES, *(f".{name}" for name in FORMATS))
    if suffix in legal:
        return suffix
    raise AmpGraphError(
        f"draw: {str(path)!r}: {suffix!r} is no format; common are .svg, .png, .pdf, .html and .dot."
        + did_you_mean(suffix, legal)
    )


def to_dot(
    amp: Converted | GraphModule,
    *,
    depth: int | None = None,
    focus: str | None = None,
    highlight: str | Iterable[str] | None = None,
    graph: str = "forward",
    plumbing: bool = False,
) -> str:
    """Returns the diagram as Graphviz text; takes `draw`'s options."""
    return dot_text(picture(annotated(amp, graph), depth, focus, highlight, plumbing))


def notebook_svg(amp: Converted) -> str | None:
    """Returns a small diagram for notebooks: folded until it has at most `NOTEBOOK_SIZE` boxes and nodes.

    None where nothing is captured yet or nothing can render it, so that notebooks show the text instead.
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
