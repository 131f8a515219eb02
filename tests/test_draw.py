"""`ampgraph.draw` and `ampgraph.to_networkx`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import graph_view
from ampgraph.draw import COLOURS, can_render, to_dot
from ampgraph.errors import AmpGraphError

MODULE = sys.modules["ampgraph.draw"]  # the attribute of that name is the function
DOCUMENTED = (
    *("label", "kind", "op", "module", "dtype", "shape", "precision", "op_class"),
    *("by", "reason", "bytes", "is_parameter", "line"),
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.body(x).split(4, -1)
        return left.exp() + right


@pytest.fixture(scope="module")
def amp() -> ampgraph.AmpModule:
    return ampgraph.convert(Block(), (torch.randn(2, 8),), dtype=torch.float16)


def test_networkx_has_every_node_and_read(amp: ampgraph.AmpModule) -> None:
    graph = ampgraph.to_networkx(amp)
    nodes = {n.name: n for n in amp.graph_module.graph.nodes}
    assert list(graph) == list(nodes)
    assert set(graph.edges) == {
        (source.name, name) for name, n in nodes.items() for source in n.all_input_nodes
    }
    assert nx.is_directed_acyclic_graph(graph)


def test_networkx_attributes(amp: ampgraph.AmpModule) -> None:
    graph = ampgraph.to_networkx(amp)
    for _, data in graph.nodes(data=True):
        assert tuple(data) == DOCUMENTED
        assert all(isinstance(value, (str, int, bool)) for value in data.values())
    for name in DOCUMENTED:
        assert f"``{name}``" in (ampgraph.to_networkx.__doc__ or "")
    casts = [data for _, data in graph.nodes(data=True) if data["kind"] == "cast"]
    assert sum(c["bytes"] for c in casts) == ampgraph.explain(amp).totals.cast_bytes
    linear = graph.nodes["linear"]
    assert (linear["label"], linear["kind"], linear["op"]) == ("linear", "op", "aten.linear")
    assert (linear["module"], linear["dtype"], linear["shape"]) == ("body.0", "float16", "2x8")
    assert (linear["precision"], linear["op_class"], linear["by"]) == ("low", "white", "list")
    assert (linear["bytes"], linear["is_parameter"]) == (0, False)
    widened = [(a, b) for a, b, data in graph.edges(data=True) if data["widened"]]
    assert [b for _, b in widened] == ["add"]


def test_networkx_graph_can_be_written(amp: ampgraph.AmpModule, tmp_path: Path) -> None:
    nx.write_graphml(ampgraph.to_networkx(amp), tmp_path / "model.graphml")
    again = nx.read_graphml(tmp_path / "model.graphml")
    assert again.nodes["linear"]["dtype"] == "float16"


def test_dot_text_needs_nothing_else(
    amp: ampgraph.AmpModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "_module", lambda name: None)
    path = ampgraph.draw(amp, tmp_path / "inner" / "model.dot")
    assert path.read_text() == to_dot(amp)


def test_dot_shows_casts_modules_types_and_reasons(amp: ampgraph.AmpModule) -> None:
    text = to_dot(amp)
    casts = ampgraph.explain(amp).casts
    drawn = [line for line in text.splitlines() if COLOURS["cast"] in line and "_legend" not in line]
    assert len(drawn) == len(casts)
    by_name = {line.split('"')[1]: line for line in drawn}
    for cast in casts:
        line = by_name[cast.name]
        assert ('shape="invtrapezium"' if cast.dst == "float16" else 'shape="trapezium"') in line
        assert graph_view.human_bytes(cast.bytes) in line
    assert 'subgraph "cluster_body.1.0"' in text
    assert 'label="f16[2, 8]"' in text
    assert "style=dashed" in text
    assert "legend" in text
    assert "white: matrix product" in text


def test_names_are_quoted() -> None:
    assert MODULE._quoted('a "b" \\ \n') == '"a \\"b\\" \\\\ \\n"'


def test_missing_graphviz_says_what_to_install(
    amp: ampgraph.AmpModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "_module", lambda name: None)
    with pytest.raises(AmpGraphError, match="pip install pygraphviz"):
        ampgraph.draw(amp, tmp_path / "model.svg")
    assert not list(tmp_path.iterdir())


def test_a_path_needs_a_suffix(amp: ampgraph.AmpModule, tmp_path: Path) -> None:
    with pytest.raises(AmpGraphError, match=r"model\.svg"):
        ampgraph.draw(amp, tmp_path / "model")


@pytest.mark.skipif(not can_render(), reason="no Graphviz here")
def test_svg_is_rendered(amp: ampgraph.AmpModule, tmp_path: Path) -> None:
    svg = ampgraph.draw(amp, tmp_path / "model.svg").read_text()
    assert "<svg" in svg
    assert svg.count(COLOURS["cast"].lower()) + svg.count(COLOURS["cast"]) >= len(ampgraph.explain(amp).casts)


@pytest.mark.skipif(not can_render(), reason="no Graphviz here")
def test_unknown_format(amp: ampgraph.AmpModule, tmp_path: Path) -> None:
    with pytest.raises(AmpGraphError, match="could not make 'nonsense'"):
        ampgraph.draw(amp, tmp_path / "model.nonsense")


def test_can_render_matches_what_is_installed() -> None:
    if shutil.which("dot") is None and not can_render():
        pytest.skip("nothing to render with")
    assert can_render()
