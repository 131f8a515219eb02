"""The rooms of the package: who may import whom, no circles, one name for one file."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the ground up. A file imports from its own floor or from below, never from above.
FLOORS = (
    ("_compat", "own_files"),
    ("errors",),
    ("plan", "origin", "guards", "marks"),
    ("ops",),
    ("policy",),
    ("proxy",),
    ("training",),
    ("passes",),
    ("capture",),
    ("runtime",),
    ("report",),
    ("drawing",),
    ("module",),
    ("numerics", "step"),
    ("tuning",),
    ("blocks", "convert", "export", "testing"),
    ("tune_model",),
    ("ampgraph",),
    ("integrations", "cli", "__main__", "pytest_plugin"),
)
FLOOR_OF = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("import_graph", ROOT / "tools" / "import_graph.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_has_a_floor(tool: ModuleType) -> None:
    rooms = {tool.room_of(module) for module in tool.import_graph()}
    assert rooms == set(FLOOR_OF), "name the new room in FLOORS and in docs/architecture.md"


def test_no_file_imports_from_above(tool: ModuleType) -> None:
    upward = [
        f"{importer} -> {imported}"
        for importer, imported in tool.import_graph().edges
        if FLOOR_OF[tool.room_of(imported)] > FLOOR_OF[tool.room_of(importer)]
    ]
    assert not upward


def test_no_circles(tool: ModuleType) -> None:
    assert tool.circles(tool.import_graph()) == []


def test_analysis_and_placement_do_not_import_passes(tool: ModuleType) -> None:
    """What the passes know and reckon with stands below them."""
    lower = ("ampgraph.passes.analysis", "ampgraph.passes.placement")
    for importer, imported in tool.import_graph().edges:
        if importer.startswith(lower) and imported.startswith("ampgraph.passes"):
            assert imported.startswith(lower), f"{importer} imports {imported}"


def test_no_two_files_share_a_name() -> None:
    files = [path.name for folder in ("ampgraph", "passes") for path in (ROOT / folder).rglob("*.py")]
    shared = {name for name, count in Counter(files).items() if count > 1}
    assert shared <= {"__init__.py", "__main__.py"}


def test_few_files_at_the_top() -> None:
    assert len(list((ROOT / "ampgraph").glob("*.py"))) <= 13


def test_the_documentation_lists_every_room() -> None:
    """The tree in docs/architecture.md has a line for each folder and each file at the top, no other."""
    page = (ROOT / "docs/architecture.md").read_text()
    block = page[page.index("\npasses/ ") : page.index("\n```", page.index("\npasses/ "))]
    listed, parents = [], [""]
    for line in block.strip().splitlines():
        name = line.split()[0]
        depth = 0 if not line.startswith(" ") else 1
        parents[depth:] = [name] if depth == 0 else []
        listed.append(name if depth == 0 else parents[0] + name)
    folders = {
        f"{path.parent.relative_to(ROOT)}/"
        for top in ("ampgraph", "passes")
        for path in (ROOT / top).rglob("*.py")
    }
    files = {f"ampgraph/{path.name}" for path in (ROOT / "ampgraph").glob("[!_]*.py")}
    assert sorted(listed) == sorted(folders | files)


def test_the_picture_shows_every_room() -> None:
    shown = set(re.findall(r"<title>(\w+)</title>", (ROOT / "docs/rooms.svg").read_text()))
    assert set(FLOOR_OF) - {"ampgraph"} <= shown, "run python tools/import_graph.py --draw docs/rooms.svg"


def test_the_tool_finds_a_circle(tool: ModuleType, tmp_path: Path) -> None:
    """A check that cannot fail would be none."""
    for folder in ("ampgraph", "passes"):
        (tmp_path / folder).mkdir()
    (tmp_path / "ampgraph/__init__.py").write_text("")
    (tmp_path / "ampgraph/a.py").write_text("from .b import y\n")
    (tmp_path / "ampgraph/b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import x\n"
    )
    (tmp_path / "passes/__init__.py").write_text("def late():\n    from ampgraph import a\n")
    graph = tool.import_graph(tmp_path)
    assert tool.circles(graph) == [["ampgraph.a", "ampgraph.b"]]
    assert ("ampgraph.passes", "ampgraph.a") in graph.edges


def test_the_wheel_holds_every_room() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^packages = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    rooms = [path.parent.relative_to(ROOT) for path in (ROOT / "ampgraph").rglob("__init__.py")]
    rooms += [path.parent.relative_to(ROOT) for path in (ROOT / "passes").rglob("__init__.py")]
    names = {".".join(room.parts) for room in rooms}
    expected = {f"ampgraph.{name}" if name.startswith("passes") else name for name in names}
    expected = expected - {"ampgraph.pytest_plugin"} | {"pytest_ampgraph"}
    assert set(re.findall(r'"([\w.]+)"', listed[1])) == expected
