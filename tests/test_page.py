"""The HTML page: nothing in it comes from elsewhere or can act, and it does in a browser what it says."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph.drawing import styles
from ampgraph.drawing.annotated import annotated
from ampgraph.drawing.largest_casts import largest_casts
from ampgraph.drawing.page import page
from ampgraph.drawing.picture import picture

from .drawn_models import Layer, masked, stack

ROOT = Path(__file__).resolve().parent.parent
NASTY = "</script><script>document.title='owned'</script>\"'&<!--"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BROWSER = load(ROOT / "tools" / "browser.py")
needs_browser = pytest.mark.skipif(BROWSER.find_browser() is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def amp() -> ampgraph.AmpModule:
    return stack()


@pytest.fixture
def browser() -> Iterator[Any]:
    with BROWSER.Browser() as browser:
        yield browser


def data_of(html: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert match
    return json.loads(match[1])


def nasty_page() -> str:
    """Returns a page whose names, labels and reasons try to become markup."""
    amp = ampgraph.convert(nn.Linear(4, 4), (torch.randn(2, 4),), dtype=torch.float16)
    source = annotated(amp)
    source.graph.graph["name"] = NASTY
    for data in source.graph.nodes.values():
        data |= {"label": NASTY, "reason": NASTY, "module": NASTY}
    return page(picture(source))


def test_page_has_every_node_edge_and_reason(amp: ampgraph.AmpModule, tmp_path: Path) -> None:
    data = data_of(ampgraph.draw(amp, tmp_path / "model.html").read_text())
    graph = ampgraph.to_networkx(amp)
    assert {node["name"]: node["reason"] for node in data["nodes"]} == dict(graph.nodes(data="reason"))
    names = [node["name"] for node in data["nodes"]]
    assert {(names[a], names[b]) for a, b, *_ in data["edges"]} == set(graph.edges)
    assert len(data["edges"]) == graph.number_of_edges()


def test_page_loads_nothing(amp: ampgraph.AmpModule, tmp_path: Path) -> None:
    html = ampgraph.draw(amp, tmp_path / "model.html").read_text()
    assert not re.findall(r"<(?:link|img|iframe|object|base)\b|\bsrc=|@import|url\((?!#)", html)
    assert set(re.findall(r"https?://[\w./]+", html)) == {"http://www.w3.org/2000/svg"}  # a namespace
    assert "default-src &#x27;none&#x27;" in html


def test_text_cannot_become_markup() -> None:
    html = nasty_page()
    assert len(re.findall(r"</script", html)) == 2
    assert data_of(html)["nodes"][0]["reason"] == NASTY


def test_depth_is_where_a_page_starts(amp: ampgraph.AmpModule, tmp_path: Path) -> None:
    html = ampgraph.draw(amp, tmp_path / "model.html", depth=1).read_text()
    boxes = {box["key"]: box["open"] for box in data_of(html)["root"]["boxes"]}
    assert boxes == {"layers.0": False, "[fp32_guard]": True, "{true_graph_0}": True, "{false_graph_0}": True}


@needs_browser
def test_text_stays_text_in_a_browser(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "nasty.html"
    path.write_text(nasty_page())
    browser.open(path)
    assert browser.evaluate("document.body.dataset.ready") == "true"
    browser.click(".node")
    assert browser.evaluate("document.querySelector('#details .reason').textContent").endswith(NASTY)
    assert browser.evaluate("document.title").startswith("</script>")
    assert browser.evaluate("document.scripts.length") == 2
    assert browser.errors == []


def nodes(browser: Any) -> set[str]:
    return set(
        browser.evaluate("[...document.querySelectorAll('.node[data-name]')].map(n => n.dataset.name)")
    )


@needs_browser
def test_fold_and_unfold(browser: Any, amp: ampgraph.AmpModule, tmp_path: Path) -> None:
    browser.open(ampgraph.draw(amp, tmp_path / "model.html", depth=1))
    assert "linear" not in nodes(browser)
    text = "document.querySelector('.folded[data-key=\"layers.0\"]').textContent"
    assert "4 of 5 ops low" in browser.evaluate(text)
    browser.click('[data-toggle="layers.0"]')
    assert "add" in nodes(browser)
    browser.click("#unfold")
    graph = ampgraph.to_networkx(amp)
    assert nodes(browser) == set(graph)
    browser.click('[data-toggle="[fp32_guard]/tail"]')
    assert nodes(browser) == {n for n in graph if not graph.nodes[n]["scope"].startswith("[fp32_guard]/tail")}
    browser.click("#fold")
    assert nodes(browser) == {"x", "sum_1", "gt", "cond", "getitem", "output"}
    browser.click("#level")
    assert "linear_2" not in nodes(browser)
    assert "add" in nodes(browser)
    assert browser.errors == []


OVERLAPS = """(() => {
  const groups = [...document.querySelectorAll('#scene .node, #scene .folded')];
  const shapes = groups.map((group) => group.querySelector('.shape').getBoundingClientRect());
  let count = 0;
  shapes.forEach((a, i) => shapes.slice(i + 1).forEach((b) => {
    const beside = a.left > b.right - .5 || b.left > a.right - .5;
    if (!beside && a.top < b.bottom - .5 && b.top < a.bottom - .5) count++;
  }));
  return count;
})()"""
CONTAINED = """[...document.querySelectorAll('.node[data-name]')].every((group) => {
  const shape = group.querySelector('.shape').getBoundingClientRect();
  return [...group.querySelectorAll('text')].every((text) => {
    const box = text.getBoundingClientRect();
    return box.left >= shape.left - 1 && box.right <= shape.right + 1 && box.bottom <= shape.bottom + 1;
  });
})"""


@needs_browser
def test_nothing_overlaps(browser: Any, amp: ampgraph.AmpModule, tmp_path: Path) -> None:
    browser.open(ampgraph.draw(amp, tmp_path / "model.html"))
    for button in ("#unfold", "#fold", "#level"):
        browser.click(button)
        assert browser.evaluate(OVERLAPS) == 0
        assert browser.evaluate(CONTAINED)


@needs_browser
def test_click_shows_the_reason(browser: Any, amp: ampgraph.AmpModule, tmp_path: Path) -> None:
    browser.open(ampgraph.draw(amp, tmp_path / "model.html", focus="layers.0*"))
    browser.click('.node[data-name="linear"]')
    details = browser.evaluate("document.getElementById('details').textContent")
    decision = amp.plan["linear"]
    assert f"{decision.by}: {decision.reason}" in details
    for fact in ("aten.linear", "layers.0.first", "f16[2, 8]", "white"):
        assert fact in details
    assert browser.evaluate("document.querySelector('.node.picked').dataset.name") == "linear"
    browser.click("#details h3 + button")
    cast = browser.evaluate("document.querySelector('.node.picked').dataset.name")
    assert amp.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.to.dtype)
    moved = next(c.bytes for c in ampgraph.explain(amp).casts if c.name == cast)
    assert f"({moved} bytes)" in browser.evaluate("document.getElementById('details').textContent")


@needs_browser
def test_search_unfolds_what_it_finds(browser: Any, amp: ampgraph.AmpModule, tmp_path: Path) -> None:
    browser.open(ampgraph.draw(amp, tmp_path / "model.html", depth=1))
    browser.click("#search")
    browser.type("relu")
    assert browser.evaluate("document.getElementById('found').textContent") == "4 found"
    assert "relu" not in nodes(browser)
    browser.type("\n")
    assert browser.evaluate("document.getElementById('found').textContent") == "1 of 4"
    assert browser.evaluate("document.querySelector('.node.picked').dataset.name") == "relu"
    browser.type("x")
    assert browser.evaluate("document.getElementById('found').textContent") == "0 found"


@needs_browser
def test_pan_and_zoom(browser: Any, amp: ampgraph.AmpModule, tmp_path: Path) -> None:
    browser.open(ampgraph.draw(amp, tmp_path / "model.html"))

    def view() -> list[float]:
        text = browser.evaluate("document.getElementById('scene').getAttribute('transform')")
        return [float(number) for number in re.findall(r"-?[\d.]+", text)]

    x, y, scale = view()
    browser.mouse("mousePressed", 1300, 500)
    browser.mouse("mouseMoved", 1330, 540)
    browser.mouse("mouseReleased", 1330, 540)
    assert view() == pytest.approx([x + 30, y + 40, scale])
    place = browser.evaluate(
        "(r => [r.x + 5, r.y + 5])(document.querySelector('.node').getBoundingClientRect())"
    )
    browser.mouse("mousePressed", *place)
    browser.mouse("mouseMoved", place[0] + 50, place[1] + 50)
    browser.mouse("mouseReleased", place[0] + 50, place[1] + 50)
    assert browser.evaluate("document.getElementById('details').hidden")
    x, y, scale = view()
    browser.mouse("mouseWheel", 700, 500, deltaX=0, deltaY=-300)
    browser.wait(f"!document.getElementById('scene').getAttribute('transform').includes('scale({scale})')")
    assert view()[2] > scale
    browser.click("#out")
    browser.click("#fit")
    assert view()[2] <= scale


@needs_browser
def test_highlight_and_legend(browser: Any, amp: ampgraph.AmpModule, tmp_path: Path) -> None:
    browser.open(ampgraph.draw(amp, tmp_path / "model.html", highlight="casts"))
    browser.click("#unfold")
    marked = browser.evaluate(
        "[...document.querySelectorAll('.highlighted[data-name]')].map(n => n.dataset.name)"
    )
    assert set(marked) == {cast.name for cast in ampgraph.explain(amp).casts}
    rows = browser.evaluate("[...document.querySelectorAll('#entries div')].map(row => row.textContent)")
    assert rows == [
        *("float16", "float32", "other dtype", "cast to float16, with its bytes", "parameter, buffer"),
        *(
            "input, output",
            "module, folded: the blue share of its ops is low",
            "guarded region",
            "highlighted",
        ),
        "widened inside the kernel",
    ]
    swatch = "document.querySelector('#entries .cast .shape').getAttribute('fill')"
    assert browser.evaluate(swatch) == styles.CAST


@needs_browser
def test_pages_ask_for_nothing(browser: Any, amp: ampgraph.AmpModule, tmp_path: Path) -> None:
    path = ampgraph.draw(amp, tmp_path / "model.html")
    browser.open(path)
    browser.click("#unfold")
    assert browser.requests == [path.resolve().as_uri()]
    assert browser.errors == []


CROSSED_LABELS = """(() => {
  const texts = [...document.querySelectorAll('#scene text')];
  const labels = texts.map((e) => ({text: e.firstChild.data, box: e.getBBox()}));
  const crossed = [];
  for (const path of document.querySelectorAll('#scene .line')) {
    let at = null;
    for (const [, kind, rest] of path.getAttribute('d').matchAll(/([MLC])([^MLC]*)/g)) {
      const ends = rest.trim().split(/\\s+/).map((pair) => pair.split(',').map(Number));
      const end = ends[ends.length - 1];
      const curve = kind === 'C' ? [at, ...ends] : [at || end, at || end, end, end];
      const steps = 1 + Math.ceil((Math.abs(end[0] - curve[0][0]) + Math.abs(end[1] - curve[0][1])) / 3);
      for (let i = 0; i <= steps; i++) {
        const t = i / steps, u = 1 - t, weights = [u * u * u, 3 * u * u * t, 3 * u * t * t, t * t * t];
        const [x, y] = [0, 1].map((k) => curve.reduce((sum, point, j) => sum + weights[j] * point[k], 0));
        for (const {text, box} of labels) {
          if (x > box.x && x < box.x + box.width && y > box.y && y < box.y + box.height) {
            crossed.push(`${text} by ${path.textContent}`);
          }
        }
      }
      at = end;
    }
  }
  return crossed;
})()"""


class Narrow(nn.Module):
    """A module with a long name and two inputs, so that lines enter where its name is."""

    def __init__(self) -> None:
        super().__init__()
        self.a_module_with_a_name_that_is_wider_than_what_is_inside = Layer()
        self.b = nn.ModuleList([masked_block() for _ in range(2)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.a_module_with_a_name_that_is_wider_than_what_is_inside(x)
        for block in self.b:
            x = block(x, src_mask=mask > 0)
        return x


def masked_block() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)


@needs_browser
@pytest.mark.parametrize("model", ["stack", "masked", "narrow"])
def test_no_line_runs_through_a_label(browser: Any, model: str, tmp_path: Path) -> None:
    inputs = (torch.randn(4, 8), torch.zeros(4, 4))
    build = {
        "stack": stack,
        "masked": masked,
        "narrow": lambda: ampgraph.convert(Narrow(), inputs, dtype=torch.float16),
    }
    browser.open(ampgraph.draw(build[model](), tmp_path / "model.html", plumbing=True))
    for button in ("#unfold", "#fold", "#level"):
        browser.click(button)
        assert browser.evaluate("document.querySelectorAll('#scene .line').length") > 3
        assert browser.evaluate(CROSSED_LABELS) == []
        assert browser.evaluate(OVERLAPS) == 0


@needs_browser
def test_a_page_opens_on_the_model_and_not_on_its_mask(browser: Any, tmp_path: Path) -> None:
    browser.open(ampgraph.draw(masked(), tmp_path / "model.html", depth=1))
    box = "document.querySelector('.folded[data-key=\"(integers and masks)\"]')"
    assert "6 ops" in browser.evaluate(f"{box}.textContent")
    assert not nodes(browser) & {"arange", "full", "triu", "gt", "or_1"}
    block = "document.querySelector('.folded[data-key=\"blocks.0\"]').getBoundingClientRect()"
    top, bottom, height = browser.evaluate(f"[{block}.top, {block}.bottom, innerHeight]")
    assert 0 < top < bottom < height
    browser.click('[data-toggle="(integers and masks)"]')
    assert {"arange", "full", "triu", "gt", "or_1"} <= nodes(browser)
    assert browser.errors == []


@needs_browser
def test_readers_of_one_tensor_share_a_line(browser: Any, tmp_path: Path) -> None:
    """What several layers read leaves its node once: the mask of a deep stack is no fan of lines."""
    browser.open(ampgraph.draw(masked(), tmp_path / "model.html", depth=1))
    starts = browser.evaluate(
        "lines.filter((line) => line.points.length > 3)"
        ".filter((line) => line.edges[0].source.key === '(integers and masks)')"
        ".map((line) => line.points.slice(0, 4).join(' '))"
    )
    assert len(starts) > 1
    assert len(set(starts)) == 1


@needs_browser
def test_the_largest_casts_are_listed_and_lead_there(browser: Any, tmp_path: Path) -> None:
    amp = masked()
    browser.open(ampgraph.draw(amp, tmp_path / "model.html", depth=1))
    listed = largest_casts(picture(annotated(amp)))
    rows = "[...document.querySelectorAll('#casts button')].map((row) => row.lastChild.textContent)"
    assert browser.evaluate(rows) == [dear.words for dear in listed]
    row = next(i for i, dear in enumerate(listed) if len(dear.casts) > 1)
    for cast in (*listed[row].casts, listed[row].casts[0]):
        browser.click(f"#casts button:nth-child({row + 1})")
        assert browser.evaluate("document.querySelector('.node.picked').dataset.name") == cast
        first = "document.querySelector('.node.picked text').textContent"
        assert browser.evaluate(first) == f"#{row + 1} cast to f16"
    assert browser.errors == []
