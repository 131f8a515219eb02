"""docs/gallery is small, complete, and what tools/gallery.py draws today."""

from __future__ import annotations

import html
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ampgraph.drawing import styles
from ampgraph.drawing.annotated import annotated
from ampgraph.drawing.picture import picture

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "gallery"


@pytest.fixture(scope="module")
def gallery() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "tools" / "gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gallery"] = module  # where its dataclass looks for the names of its annotations
    spec.loader.exec_module(module)
    return module


def test_every_picture_is_there_and_small(gallery: ModuleType) -> None:
    wanted = {
        f"{name}-{level}{suffix}.svg"
        for name, entry in gallery.GALLERY.items()
        for level in gallery.LEVELS
        for suffix in entry.pictures
    }
    assert {path.name for path in FOLDER.iterdir()} == wanted | {"page.png", gallery.TRAINING}
    assert all(path.stat().st_size < 300 * 1024 for path in FOLDER.iterdir())


def test_pictures_tell_nothing_about_a_machine() -> None:
    for path in FOLDER.glob("*.svg"):
        assert str(ROOT) not in path.read_text()
        assert "site-packages" not in path.read_text()


@pytest.mark.parametrize("name", ["block", "unet"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_pictures_and_table_are_up_to_date(gallery: ModuleType, name: str, level: str) -> None:
    amp = gallery.converted(name, level)
    page = (ROOT / "docs" / "gallery.md").read_text()
    assert gallery.row(name, level, amp) in page, "run python tools/gallery.py"
    for suffix, options in gallery.GALLERY[name].pictures.items():
        shown = picture(annotated(amp), **options)
        graph = shown.graph.graph
        heading = styles.title(graph["name"], graph["low_dtype"], shown.root.counts, shown.focus)
        svg = (FOLDER / f"{name}-{level}{suffix}.svg").read_text()
        assert heading in re.findall(r">([^<]+)</text>", svg), "run python tools/gallery.py"
        assert styles.LOW.lower() in svg.lower()


def labels(svg: str) -> list[tuple[str, float, float, float, float]]:
    """Returns every text with its left, top, right and bottom, at half an em for a letter."""
    found = []
    for style, raw in re.findall(r"<text ([^>]*)>([^<]*)</text>", svg):
        value = dict(re.findall(r'([\w-]+)="([^"]*)"', style))
        words, size, x, y = html.unescape(raw), *(float(value[key]) for key in ("font-size", "x", "y"))
        width = len(words) * size / 2
        left = x - {"start": 0, "middle": width / 2, "end": width}[value.get("text-anchor", "start")]
        indent = (len(words) - len(words.lstrip())) * size / 4
        found.append((words.strip(), left + indent, y - 0.7 * size, left + width, y))
    return [label for label in found if label[0]]


def points(path: str) -> Iterator[tuple[float, float]]:
    """Yields points on a path of cubic curves, 40 a curve."""
    ends = [complex(*map(float, pair.split(","))) for pair in re.findall(r"[-\d.]+,[-\d.]+", path)]
    for at in range(0, len(ends) - 3, 3):
        a, b, c, d = ends[at : at + 4]
        for step in range(41):
            t, u = step / 40, 1 - step / 40
            point = u**3 * a + 3 * u * u * t * b + 3 * u * t * t * c + t**3 * d
            yield point.real, point.imag


@pytest.mark.parametrize("picture", sorted(path.name for path in FOLDER.glob("*-O*.svg")))
def test_no_edge_runs_through_a_label(picture: str) -> None:
    svg = (FOLDER / picture).read_text()
    edges = re.findall(r'class="edge">\s*<title>([^<]*)</title>(.*?)(?=<!--|</svg>)', svg, re.DOTALL)
    assert len(edges) > 10
    written = labels(svg)
    crossed = {
        (html.unescape(edge), words)
        for edge, inside in edges
        for path in re.findall(r'<path[^>]* d="([^"]*)"', inside)
        for x, y in points(path)
        for words, left, top, right, bottom in written
        if left < x < right and top < y < bottom
    }
    assert not crossed
