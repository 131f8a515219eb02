"""The code in README.md and docs/ runs, and the generated parts are up to date."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NEEDS = {"lightning.md": "lightning", "deployment.md": "onnxruntime"}
LINK = re.compile(r"\]\(([^)#:]+)\)")


def code(page: Path) -> str:
    """Returns all Python blocks of a page as one program whose line numbers are the page's."""
    text = page.read_text()
    lines = [""] * text.count("\n")
    for match in BLOCK.finditer(text):
        start = text[: match.start(1)].count("\n")
        block = match[1].splitlines()
        lines[start : start + len(block)] = block
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_generator", ROOT / "tools" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    exec(compile(code(page), str(page), "exec"), vars(module))


@pytest.mark.parametrize(("page", "name"), [("README.md", "block"), ("docs/loss-scaling.md", "backward")])
def test_generated_section_is_up_to_date(generator: ModuleType, page: str, name: str) -> None:
    text = (ROOT / page).read_text()
    fresh = generator.with_section(text, name, getattr(generator, f"{name}_section")())
    assert fresh == text, "run python tools/readme.py"


def test_picture_shows_every_cast(generator: ModuleType) -> None:
    import ampgraph

    svg = (ROOT / "docs" / "block.svg").read_text()
    for cast in ampgraph.explain(generator.converted()).casts:
        assert f">{cast.name}<" in svg, "run python tools/readme.py"
    assert str(ROOT) not in svg


def test_demo_section_has_both_accuracies() -> None:
    text = (ROOT / "README.md").read_text()
    section = text.partition("<!-- demo:begin -->")[2].partition("<!-- demo:end -->")[0]
    assert re.search(r"accuracy +float32 +\d\d\.\d\d%", section)
    assert re.search(r"accuracy +bfloat16 +\d\d\.\d\d%", section)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_anchors_name_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        text = (page.parent / target if target else page).read_text()
        headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_row_of_a_table_is_one_line(page: Path) -> None:
    lines = page.read_text().splitlines()
    for line, after in itertools.pairwise(lines):
        if line.startswith("|"):
            assert line.endswith("|"), line
            assert after.startswith("|") or not after, after


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "results").glob("*.md")), ids=lambda p: p.name)
def test_results_name_their_commit(page: Path) -> None:
    assert re.search(r"at commit [0-9a-f]{7,}\b|\| commit \|", page.read_text())


def test_make_writes_every_page_of_results() -> None:
    pages = {p.name for p in (ROOT / "docs" / "results").glob("*.md")}
    written = set(re.findall(r"docs/results/(\S+\.md)", (ROOT / "Makefile").read_text()))
    assert pages - written == {"versions.md"}  # tools/matrix.py
