"""examples/tour.ipynb runs, and the outputs that it stores are those of today."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOUR = ROOT / "examples" / "tour.ipynb"


def printed(notebook: dict) -> list[str]:
    return [
        "".join(output["text"])
        for cell in notebook["cells"]
        for output in cell.get("outputs", ())
        if output["output_type"] == "stream"
    ]


def test_the_stored_outputs_are_those_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    spec = importlib.util.spec_from_file_location("notebook", ROOT / "tools" / "notebook.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    stored, fresh = json.loads(TOUR.read_text()), tool.run(TOUR)
    assert printed(stored) == printed(fresh), "run python tools/notebook.py examples/tour.ipynb"
    assert "finite: False" in printed(fresh)[-2]
    assert "finding: None" in printed(fresh)[-1]
    pictures = [
        o for c in fresh["cells"] for o in c.get("outputs", ()) if "image/svg+xml" in o.get("data", {})
    ]
    assert len(pictures) == 1
    assert str(ROOT) not in TOUR.read_text()
