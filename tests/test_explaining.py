"""docs/explaining.md shows what the command line prints today."""

from __future__ import annotations

import importlib.util
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "explaining.md"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    sys.path.insert(0, str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location("explaining_generator", ROOT / "tools" / "explaining.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
@pytest.mark.parametrize("name", ["report", "why", "diff", "policies"])
def test_the_page_is_up_to_date(name: str, generator: ModuleType) -> None:
    fresh = f"<!-- {name}:begin -->\n```text\n{generator.SECTIONS[name]()}\n```\n<!-- {name}:end -->"
    assert fresh in PAGE.read_text(), "run python tools/explaining.py"
