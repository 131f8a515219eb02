"""Pictures of comparisons: diagrams coloured by numbers, histograms of exponents."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from ampgraph.drawing.colour_scale import ColourScale
from ampgraph.errors import AmpGraphError
from ampgraph.numerics.exponent_chart import range_of, svg_chart, text_chart

SVG = "{http://www.w3.org/2000/svg}"


class Energy(nn.Module):
    """Rows divided by their norm, which float16 does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x) * 300
        return self.head(y / (y * y).sum(-1, keepdim=True).sqrt())


@pytest.fixture(scope="module")
def compared() -> tuple[ampgraph.AmpModule, ampgraph.NumericComparison]:
    torch.manual_seed(0)
    policy = ampgraph.Policy(level="O2", hazards=False, rules={"node:mul*": "low"}, dtype=torch.float16)
    x = torch.randn(8, 64)
    amp = ampgraph.convert(Energy(), (x,), policy=policy)
    return amp, ampgraph.compare(amp, (x,), loss=lambda y: y.square().mean())


@pytest.mark.parametrize("by", ["own", "accumulated", "headroom", "nonfinite"])
def test_diagram_has_the_column_and_its_colours(compared, tmp_path: Path, by: str) -> None:
    amp, found = compared
    text = found.draw(amp, tmp_path / "x.dot", by=by).read_text()
    values = found.values(by)
    scale = ColourScale.of(values, values)
    assert "largest casts" not in text
    for name, value in values.items():
        (line,) = re.findall(rf'^ *"{name}" \[(.*)\];$', text, re.MULTILINE)
        assert f"\\n{value:.1e}" in line, name
        assert f'fillcolor="{scale.style(value)["fillcolor"]}"' in line, name
    for words, style in scale.legend():
        assert re.search(rf'"_legend_\d+" \[label="{re.escape(words)}".*{style["fillcolor"]}', text)
    assert text.startswith('digraph "Energy"')


def test_folded_box_has_the_worst_inside(compared, tmp_path: Path) -> None:
    amp, found = compared
    text = found.draw(amp, tmp_path / "x.dot", by="own", depth=0).read_text()
    assert re.search(r'label="model\\n[^"]*\\ninf"[^\n]*fillcolor="#000000"', text)


def test_page_has_the_column(compared, tmp_path: Path) -> None:
    amp, found = compared
    page = found.draw(amp, tmp_path / "x.html", direction="backward").read_text()
    data = json.loads(re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    nodes = {node["name"]: node for node in data["nodes"]}
    values = found.values("own", "backward")
    assert values
    for name, value in values.items():
        assert nodes[name]["lines"][-1] == f"{value:.1e}"
    assert nodes["output"]["fill"] == "#FFFFFF"
    assert [entry["fill"] for entry in data["legend"]]


def test_unlike_orders_of_magnitude_have_unlike_colours() -> None:
    scale = ColourScale.of(
        {"a": 3e-4, "b": 4e-4, "c": 3e-1, "d": 0.0, "e": math.inf, "f": math.nan}, "abcdef"
    )
    colours = {name: scale.style(value)["fillcolor"] for name, value in scale.values.items()}
    assert colours["a"] == colours["b"] != colours["c"]
    assert colours["e"] == colours["f"] == "#000000"
    assert len({colours[n] for n in "acde"}) == 4
    assert math.isnan(scale.worst("abf"))
    assert scale.worst(["x"]) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [({"mull": 1.0}, "no node 'mull'"), ({"mul": -1.0}, "'mul' has -1.0"), ({"mul": "1"}, "'mul' has '1'")],
)
def test_wrong_values_are_refused(compared, tmp_path: Path, values: dict, message: str) -> None:
    with pytest.raises(AmpGraphError, match=message):
        ampgraph.draw(compared[0], tmp_path / "x.dot", values=values)
    assert not (tmp_path / "x.dot").exists()


def test_other_model_is_refused(compared, tmp_path: Path) -> None:
    other = ampgraph.convert(nn.Linear(4, 4), (torch.ones(1, 4),))
    with pytest.raises(AmpGraphError, match="Energy has no graph"):
        compared[1].draw(other, tmp_path / "x.dot")


@pytest.mark.parametrize(
    ("dtype", "least", "normal", "most"), [("float16", -25, -14, 15), ("bfloat16", -134, -126, 127)]
)
def test_ranges(dtype: str, least: int, normal: int, most: int) -> None:
    assert range_of(dtype) == (least, normal, most)
    low = getattr(torch, dtype)
    assert torch.tensor(1.5 * 2.0**least, dtype=torch.float64).to(low) != 0
    assert torch.tensor(0.99 * 2.0**least, dtype=torch.float64).to(low) == 0


def test_histogram_counts_every_value(compared, tmp_path: Path) -> None:
    _, found = compared
    text = found.histogram(tmp_path / "h.svg", node="mul_1")
    counts = found.exponents("mul_1")
    assert sum(counts.values()) == 8 * 64
    beyond = sum(n for e, n in counts.items() if e > 15)
    assert beyond == found["mul_1"].nonfinite > 0
    assert text.count("!") > 2
    root = ElementTree.parse(tmp_path / "h.svg").getroot()
    titles = [t.text for t in root.iter(f"{SVG}title")]
    assert [int(re.match(r"2\^-?\d+: (\d+) values", t)[1]) for t in titles] == list(counts.values())
    words = [t.text for t in root.iter(f"{SVG}text")]
    assert f"becomes infinite in float16: {beyond / 512:.3%}" in words
    assert words[0] == "Energy: exponents of float32 values of mul_1"


def test_histogram_of_gradients_says_the_scale(compared, tmp_path: Path) -> None:
    _, found = compared
    text = found.histogram(tmp_path / "deep" / "h.txt", direction="backward")
    assert text.splitlines()[0] == "Energy: exponents of float32 gradients, times 65536"
    assert (tmp_path / "deep" / "h.txt").read_text() == f"{text}\n"


def test_empty_histogram() -> None:
    assert text_chart({}, "float16", "nothing").endswith("(no values)")
    ElementTree.fromstring(svg_chart({}, "float16", "<nothing>"))
