"""Renders Graphviz text with the package graphviz and its program ``dot``, or with pygraphviz alone."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Callable

from ..errors import AmpGraphError

INSTALL = (
    "`pip install pygraphviz`, whose wheels bring Graphviz, or `pip install graphviz` and the `dot` program; "
    ".html and .dot need neither"
)
# Those of Graphviz' formats that are files; which of them it was built with, it says itself.
_FORMATS = """
    svg svgz svg_inline png pdf ps ps2 eps jpg jpeg jpe gif bmp wbmp webp tif tiff ico avif heif heic jp2
    json json0 dot_json xdot xdot1.2 xdot1.4 xdot_json plain plain-ext canon cmap cmapx cmapx_np imap imap_np
    ismap fig gd gd2 pct pct2 pic pict pov psd sgi tga tk vml vmlz vrml vt kitty kittyz
"""
FORMATS = tuple(_FORMATS.split())


def can_render() -> bool:
    """Whether pictures (SVG, PNG, PDF), not only HTML and Graphviz text, can be made here."""
    return bool(_routes())


def render(text: str, suffix: str) -> bytes:
    """Returns Graphviz text as a picture.

    Args:
        text: What `dot_text` returns.
        suffix: ``"svg"``, ``"png"``, ``"pdf"`` or another of Graphviz's formats.

    Raises:
        AmpGraphError: Graphviz is not installed, or it cannot write this format.
    """
    routes = _routes()
    if not routes:
        raise AmpGraphError(f"draw: a picture (.{suffix}) needs Graphviz, which is not installed: {INSTALL}.")
    return routes[0](text, suffix)


def by_program(text: str, suffix: str) -> bytes:
    """Renders with the package graphviz, which calls the ``dot`` program."""
    import graphviz

    try:
        return graphviz.pipe("dot", suffix, text.encode(), quiet=True)
    except (subprocess.CalledProcessError, ValueError) as error:
        raise _failed(suffix, str(error)) from error


def by_pygraphviz(text: str, suffix: str) -> bytes:
    """Renders with pygraphviz."""
    import pygraphviz

    try:
        return pygraphviz.AGraph(string=text).draw(format=suffix, prog="dot")
    except TypeError as error:  # its own, when Graphviz says that it does not know the format
        raise _failed(suffix, "it was built without this format") from error
    except Exception as error:  # it passes on what Graphviz says, as several types
        raise _failed(suffix, str(error)) from error


def _routes() -> list[Callable[[str, str], bytes]]:
    routes: list[Callable[[str, str], bytes]] = []
    if shutil.which("dot") and importlib.util.find_spec("graphviz"):
        routes.append(by_program)
    if importlib.util.find_spec("pygraphviz"):
        routes.append(by_pygraphviz)
    return routes


def _failed(suffix: str, message: str) -> AmpGraphError:
    # Graphviz lists every format that it was built with, dozens of them.
    cause = message.partition("(must be one of")[0].strip()
    return AmpGraphError(f"draw: Graphviz could not make {suffix!r}: {cause}; common are svg, png and pdf.")
