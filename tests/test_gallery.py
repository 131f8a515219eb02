"""docs/gallery is small, complete, and what tools/gallery.py draws today."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ampgraph.drawing import look
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
        heading = look.title(graph["name"], graph["low_dtype"], shown.root.counts, shown.focus)
        svg = (FOLDER / f"{name}-{level}{suffix}.svg").read_text()
        assert heading in re.findall(r">([^<]+)</text>", svg), "run python tools/gallery.py"
        assert look.LOW.lower() in svg.lower()
