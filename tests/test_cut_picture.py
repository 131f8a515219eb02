"""docs/cut.svg shows the network and the cut that tools/draw_cut.py computes."""

from __future__ import annotations

import html
import importlib.util
import re
from pathlib import Path

from ampgraph.drawing import styles

ROOT = Path(__file__).resolve().parent.parent


def test_the_picture_of_the_cut_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("draw_cut", ROOT / "tools" / "draw_cut.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    dot = tool.picture()
    filled = dict(re.findall(r'^ *"(.*)" \[label=.*fillcolor="(#\w+)"', dot, re.MULTILINE))
    arcs = re.findall(r'^ *"(.*)" -> "(.*)" \[label=" *(\S+)", color="(#\w+)"', dot, re.MULTILINE)
    assert set(filled.values()) == {styles.LOW, styles.FP32}
    assert {filled[u] for u, _, _, color in arcs if color == tool.CUT} == {styles.LOW}
    svg = html.unescape((ROOT / "docs/cut.svg").read_text())
    drawn = dict(re.findall(r'class="node">\s*<title>([^<]*)</title>\s*<\w+ fill="(#\w+)"', svg))
    assert drawn == {name: color.lower() for name, color in filled.items()}, "run python tools/draw_cut.py"
    labels = re.findall(
        r'class="edge">\s*<title>([^<]*)</title>.*?>[\s\xa0]*([^<\s\xa0]+)</text>', svg, re.DOTALL
    )
    assert sorted(labels) == sorted((f"{u}->{v}", label) for u, v, label, _ in arcs)
