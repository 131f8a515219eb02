"""`ampgraph.draw`: what is drawn, how it is folded, and by which route."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ampgraph
from ampgraph.drawing import can_render, notebook_svg, render, styles, to_dot
from ampgraph.drawing.annotated import annotated
from ampgraph.drawing.picture import fitting, picture
from ampgraph.errors import AmpGraphError
from ampgraph.report import graph_view

from .drawn_models import Layer, stack, trained

RENDER = sys.modules["ampgraph.drawing.render"]
needs_renderer = pytest.mark.skipif(not can_render(), reason="neither dot nor pygraphviz is installed")


@pytest.fixture(scope="module")
def amp() -> ampgraph.AmpModule:
    return stack()


@pytest.fixture
def no_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RENDER, "_routes", list)


def statements(text: str) -> dict[str, dict[str, str]]:
    """Returns node, edge and cluster name -> attributes, of Graphviz text that ampgraph wrote."""
    found = {}
    for line in text.splitlines():
        match = re.match(r'\s*("[^"]*"(?: -> "[^"]*")?) \[(.*)\];$', line)
        if match:
            attributes = re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2])
            found[match[1].replace('"', "")] = dict(attributes)
    return found


def test_text_needs_nothing_else(amp: ampgraph.AmpModule, tmp_path: Path, no_renderer: None) -> None:
    path = ampgraph.draw(amp, tmp_path / "inner" / "model.dot")
    assert path.read_text() == to_dot(amp)


def test_casts_have_their_shape_and_bytes(amp: ampgraph.AmpModule) -> None:
    drawn = statements(to_dot(amp))
    casts = ampgraph.explain(amp).casts
    purple = {n for n, style in drawn.items() if style.get("fillcolor") == styles.CAST and "_legend" not in n}
    assert purple == {cast.name for cast in casts}
    for cast in casts:
        style = drawn[cast.name]
        assert style["shape"] == ("invtrapezium" if cast.dst == "float16" else "trapezium")
        assert style["label"].endswith(graph_view.human_bytes(cast.bytes))


def test_nodes_have_colour_and_reason(amp: ampgraph.AmpModule) -> None:
    drawn = statements(to_dot(amp))
    assert drawn["linear"]["fillcolor"] == styles.LOW
    assert drawn["linear_2"]["fillcolor"] == styles.FP32
    assert drawn["gt"]["fillcolor"] == styles.OTHER
    assert "white: matrix product" in drawn["linear"]["tooltip"]
    assert "guard" in drawn["linear_2"]["tooltip"]


def test_edges_tell_dtype_and_shape(amp: ampgraph.AmpModule) -> None:
    drawn = statements(to_dot(amp))
    assert drawn["linear -> relu"]["label"].strip() == "f16[2, 8]"
    assert drawn["relu_1 -> add"]["style"] == "dashed"
    assert "widened inside the kernel" in drawn["relu_1 -> add"]["tooltip"]


def test_modules_guards_and_bodies_are_nested(amp: ampgraph.AmpModule) -> None:
    clusters = re.findall(r'subgraph "cluster_([^"]+)"', to_dot(amp))
    assert clusters == [
        *("layers.0", "layers.0/first", "layers.0/second"),
        *("[fp32_guard]", "[fp32_guard]/tail", "[fp32_guard]/tail/first", "[fp32_guard]/tail/second"),
        *("{true_graph_0}", "{false_graph_0}", "_legend"),
    ]
    assert statements(to_dot(amp))["relu_1"]["label"] == r"relu_1\naten.relu\nin relu (call 2)"


def test_boundary_is_marked() -> None:
    amp = ampgraph.convert(Layer(), (torch.randn(2, 8),), dtype=torch.float16)
    drawn = statements(to_dot(amp.training_graph))
    assert drawn["scale_gradients"]["fillcolor"] == styles.BOUNDARY
    assert drawn["unscale_gradients"]["label"].endswith("(unscale)")


def legend(text: str) -> set[str]:
    return {
        style["label"] for name, style in statements(text).items() if name.startswith("_legend_") and style
    }


def test_legend_shows_what_occurs(amp: ampgraph.AmpModule) -> None:
    plain = {"float16", "float32", "other dtype", "input, output", "parameter, buffer", "cast to float16"}
    common = plain | {r"dashed edge: widened\ninside the kernel"}
    assert {e for e in legend(to_dot(amp)) if e} == common | {"guarded region"}
    layer = ampgraph.convert(Layer(), (torch.randn(2, 8),), dtype=torch.float16)
    assert {e for e in legend(to_dot(layer)) if e} == common - {"other dtype"}
    backward = legend(to_dot(trained(), graph="backward"))
    assert {e for e in backward if e} == {
        *("float16", "float32", "loss scaling", "input, output", "cast to float16", "cast to float32")
    }
    folded = r"module, folded: blue is\nthe share of its ops that is low"
    assert legend(to_dot(amp, depth=1)) >= {folded, "guarded region", "float16", "float32"}
    assert "outside of the focus" in legend(to_dot(amp, focus="tail"))
    assert "highlighted" in legend(to_dot(amp, highlight="casts"))


def test_folded_modules_tell_what_is_inside(amp: ampgraph.AmpModule) -> None:
    drawn = statements(to_dot(amp, depth=1))
    casts = [c for c in ampgraph.explain(amp).casts if c.name in inside(amp, "layers.0")]
    size = graph_view.human_bytes(sum(c.bytes for c in casts))
    assert drawn["[layers.0]"]["label"] == rf"layers.0\n4 of 5 ops low\n{len(casts)} casts, {size}"
    assert drawn["[layers.0]"]["fillcolor"] == f"{styles.LOW};0.800:{styles.FP32}"
    assert drawn["[[fp32_guard]/tail]"]["label"] == r"tail\n0 of 5 ops low"
    assert drawn["[layers.0] -> [[fp32_guard]/tail]"]["label"].strip() == "f32[2, 8]"
    assert "linear" not in drawn
    assert statements(to_dot(amp, depth=0))["[]"]["label"].startswith(r"model\n4 of ")


def inside(amp: ampgraph.AmpModule, scope: str) -> set[str]:
    nodes = ampgraph.to_networkx(amp).nodes(data="scope")
    return {name for name, at in nodes if at == scope or at.startswith(scope + "/")}


def test_folding_everything_keeps_the_totals(amp: ampgraph.AmpModule) -> None:
    source, totals = annotated(amp), ampgraph.explain(amp).totals
    for depth in (0, 1, 2, None):
        counts = picture(source, depth).root.counts
        assert (counts.casts, counts.cast_bytes) == (totals.casts, totals.cast_bytes)


def test_buffers_that_nothing_reads_are_left_out() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).eval()
    amp = ampgraph.convert(model, (torch.randn(4, 8),), dtype=torch.float16)
    assert "num_batches_tracked" in "".join(ampgraph.to_networkx(amp))
    assert "num_batches_tracked" not in to_dot(amp)


def test_focus_shows_the_edges_to_the_rest(amp: ampgraph.AmpModule) -> None:
    drawn = statements(to_dot(amp, focus="tail.fir*"))
    nodes = {name for name in drawn if "->" not in name and "_legend" not in name}
    labels = {n for n in nodes if drawn[n].get("style") != "dashed"}
    assert labels == inside(amp, "[fp32_guard]/tail/first")
    assert nodes - labels == {"add", "relu_2"}
    assert drawn["add -> linear_2"]["label"].strip() == "f32[2, 8]"
    assert "add -> add_1" not in drawn


class Skip(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.exp()
        return x + x.sin()


def test_edges_between_neighbours_are_left_out() -> None:
    drawn = statements(to_dot(ampgraph.convert(Skip(), (torch.randn(4),)), focus="sin"))
    assert {name for name in drawn if "->" in name and "_legend" not in name} == {"exp -> sin", "sin -> add"}


def test_highlight(amp: ampgraph.AmpModule) -> None:
    drawn = statements(to_dot(amp, highlight=["linear_1", "relu*"]))
    highlighted = {n for n, style in drawn.items() if style.get("color") == styles.HIGHLIGHT}
    bright = {n for n in highlighted if "_legend" not in n}
    assert bright == {"linear_1", "relu", "relu_1", "relu_2", "relu_3"}
    assert drawn["linear"]["fillcolor"] != styles.LOW
    drawn = statements(to_dot(amp, highlight="casts"))
    assert {n for n, s in drawn.items() if s.get("color") == styles.HIGHLIGHT and "_legend" not in n} == {
        cast.name for cast in ampgraph.explain(amp).casts
    }
    assert (
        "2 highlighted"
        in statements(to_dot(amp, highlight="relu_[23]", depth=1))["[[fp32_guard]/tail]"]["label"]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"focus": "tial.*"},
            r"focus='tial\.\*' matches no module path and no node name\. Did you mean 'tail",
        ),
        ({"highlight": "lineer"}, "no node 'lineer'. Did you mean 'linear"),
        ({"highlight": "cast"}, "Did you mean 'casts'"),
        ({"depth": -1}, "depth=-1: expected"),
        ({"depth": "deep"}, "depth='deep': expected"),
        ({"graph": "sideways"}, "graph='sideways': expected 'forward'"),
        ({"graph": "backward"}, "keeps no backward graph"),
    ],
)
def test_wrong_options_write_nothing(
    amp: ampgraph.AmpModule, tmp_path: Path, options: dict, message: str
) -> None:
    with pytest.raises(AmpGraphError, match=message):
        ampgraph.draw(amp, tmp_path / "model.dot", **options)
    assert not list(tmp_path.iterdir())


def test_forward_and_backward_side_by_side() -> None:
    amp = trained()
    forward, backward = amp.forward_graph, amp.backward_graph
    text = to_dot(amp, graph="both")
    drawn = statements(text)
    for which, graph_module in (("forward", forward), ("backward", backward)):
        read = {f"{which}/{n.name}" for n in graph_module.graph.nodes}
        assert read <= set(drawn)
        assert f'subgraph "cluster_{which}"' in text
    saved = {a for a in drawn if drawn[a].get("style") == "dotted"}
    kept = {n.name for n in backward.graph.find_nodes(op="placeholder")} & {
        n.name for n in forward.graph.nodes
    }
    assert saved == {f"forward/{name} -> backward/{name}" for name in kept}
    assert kept
    alone = statements(to_dot(amp, graph="backward"))
    assert {n.name for n in backward.graph.nodes} <= set(alone)
    purple = {n for n, s in alone.items() if s.get("fillcolor") == styles.CAST and "_legend" not in n}
    assert {alone[n]["shape"] for n in purple} == {"trapezium", "invtrapezium"}
    boundary = {n.name for n in backward.graph.nodes if alone[n.name].get("fillcolor") == styles.BOUNDARY}
    products = {n.name for n in backward.graph.nodes if n.target is torch.ops.aten.mul.Tensor}
    peaks = {n.name for n in backward.graph.nodes if n.target is torch.ops.aten.amax.default}
    assert len(peaks & boundary) == len([*amp.parameters()]) == 4
    assert peaks < boundary
    assert len(products & boundary) > 4


def test_names_are_quoted() -> None:
    assert sys.modules["ampgraph.drawing.dot"]._quoted('a "b" \\ \n') == '"a \\"b\\" \\\\ \\n"'


def test_missing_renderer_says_what_to_install(
    amp: ampgraph.AmpModule, tmp_path: Path, no_renderer: None
) -> None:
    with pytest.raises(AmpGraphError, match="pip install pygraphviz"):
        ampgraph.draw(amp, tmp_path / "model.svg")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [None, 3])
def test_a_path_is_the_name_of_a_file(amp: ampgraph.AmpModule, path: Any) -> None:
    with pytest.raises(AmpGraphError, match=f"draw: path is {path}; expected the name of a file"):
        ampgraph.draw(amp, path)


def test_a_path_needs_a_suffix(amp: ampgraph.AmpModule, tmp_path: Path) -> None:
    with pytest.raises(AmpGraphError, match=r"model\.svg"):
        ampgraph.draw(amp, tmp_path / "model")


def test_unknown_format(amp: ampgraph.AmpModule, tmp_path: Path) -> None:
    with pytest.raises(
        AmpGraphError, match=r"'\.svgg' is not a known format; common are \.svg, .* mean '\.svg'"
    ):
        ampgraph.draw(amp, tmp_path / "model.svgg")
    assert not list(tmp_path.iterdir())


@needs_renderer
def test_format_that_is_not_built_in() -> None:
    with pytest.raises(AmpGraphError, match=r"could not make 'nonsense'.* common are svg, png and pdf"):
        render.render("digraph {}", "nonsense")


ROUTES = {
    "dot": (render.by_program, shutil.which("dot")),
    "pygraphviz": (render.by_pygraphviz, importlib.util.find_spec("pygraphviz")),
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_draws_everything(amp: ampgraph.AmpModule, route: str) -> None:
    function, installed = ROUTES[route]
    if not installed:
        pytest.skip(f"{route} is not installed")
    svg = function(to_dot(amp), "svg").decode()
    titles = set(re.findall(r"<title>([^<]+)</title>", svg))
    assert set(ampgraph.to_networkx(amp)) <= titles
    # The legend shows one cast as well.
    assert svg.lower().count(styles.CAST.lower()) == len(ampgraph.explain(amp).casts) + 1
    assert function(to_dot(amp), "png").startswith(b"\x89PNG")
    assert function(to_dot(amp), "pdf").startswith(b"%PDF")


def test_pygraphviz_stands_in_for_the_program(
    amp: ampgraph.AmpModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ROUTES["pygraphviz"][1]:
        pytest.skip("pygraphviz is not installed")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert ampgraph.draw(amp, tmp_path / "model.png").read_bytes().startswith(b"\x89PNG")


def test_routes_agree(amp: ampgraph.AmpModule) -> None:
    if not all(installed for _, installed in ROUTES.values()):
        pytest.skip("needs both dot and pygraphviz")
    texts = [
        re.findall(r"<(?:title|text)[^>]*>([^<]*)<", function(to_dot(amp, depth=2), "svg").decode())
        for function, _ in ROUTES.values()
    ]
    assert sorted(texts[0]) == sorted(texts[1])


@needs_renderer
def test_notebooks_show_a_small_picture(amp: ampgraph.AmpModule) -> None:
    svg = amp._repr_svg_()
    assert svg is not None
    assert "<svg" in svg
    assert fitting(annotated(amp), 30).size <= 30
    assert fitting(annotated(amp), 1).root.folded


def test_notebooks_show_text_where_nothing_renders(amp: ampgraph.AmpModule, no_renderer: None) -> None:
    assert amp._repr_svg_() is None
    assert "Stack" in repr(amp) or "AmpModule" in repr(amp)


@needs_renderer
def test_notebooks_show_text_before_the_first_call() -> None:
    assert notebook_svg(ampgraph.convert(Layer())) is None
