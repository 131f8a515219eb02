"""Integers and masks in pictures: which ops are folded away, into which boxes, and that nothing else is."""

from __future__ import annotations

import re

import networkx as nx
import pytest
import torch
from torch import nn

import ampgraph
from ampgraph.drawing import styles, to_dot
from ampgraph.drawing.annotated import annotated
from ampgraph.drawing.picture import box_id, picture

from .drawn_models import masked, stack

MASK, CONDITION = "(integers and masks)", "(integers from argmax)"
IN_MASK = {"arange", "full", "triu", "gt", "gt_1", "or_1"}
IN_CONDITION = {"argmax", "ne", "logical_not"}


@pytest.fixture(scope="module")
def amp() -> ampgraph.AmpModule:
    return masked()


def regions(graph: nx.DiGraph) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, scope in graph.nodes(data="scope"):
        if "(" in scope:
            found.setdefault(scope, set()).add(name)
    return found


def drawn(text: str) -> set[str]:
    return set(re.findall(r'^ *"([^"]+)" \[', text, re.MULTILINE))


def test_data_keeps_every_node(amp: ampgraph.AmpModule) -> None:
    graph = ampgraph.to_networkx(amp)
    assert set(graph) == {node.name for node in amp.graph_module.graph.nodes}
    assert regions(graph) == {MASK: IN_MASK, CONDITION: IN_CONDITION}


def test_folded_by_default(amp: ampgraph.AmpModule) -> None:
    text = to_dot(amp)
    assert not (IN_MASK | IN_CONDITION) & drawn(text)
    assert {f"[{MASK}]", f"[{CONDITION}]"} <= drawn(text)
    assert r'label="integers and masks\n6 ops"' in text
    assert r'label="integers from argmax\n3 ops"' in text
    [line] = [line for line in text.splitlines() if f'"[{MASK}]" [' in line][:1]
    assert f'fillcolor="{styles.OTHER}"' in line
    assert "integers and masks, folded" in text


def test_an_option_opens_them(amp: ampgraph.AmpModule) -> None:
    text = to_dot(amp, plumbing=True)
    assert drawn(text) >= IN_MASK | IN_CONDITION
    assert f'subgraph "cluster_{MASK}"' in text
    assert "integers and masks, folded" not in text


def test_a_focus_on_nothing_else_shows_them(amp: ampgraph.AmpModule) -> None:
    assert {"gt", "gt_1"} <= drawn(to_dot(amp, focus="gt*"))
    assert "gt" not in drawn(to_dot(amp, focus="*"))


def test_a_highlighted_op_marks_its_box(amp: ampgraph.AmpModule) -> None:
    (line,) = (line for line in to_dot(amp, highlight="triu").splitlines() if f'"[{MASK}]" [' in line)
    assert "1 highlighted" in line
    assert styles.HIGHLIGHT in line


def test_totals_are_those_of_the_open_picture(amp: ampgraph.AmpModule) -> None:
    source = annotated(amp)
    assert picture(source).root.counts == picture(source, plumbing=True).root.counts


@pytest.mark.parametrize("model", [masked, stack])
def test_no_cast_and_no_model_arithmetic_is_folded_away(model) -> None:
    source = annotated(model())
    for region in regions(source.graph).values():
        kinds = {source.graph.nodes[name]["kind"] for name in region}
        assert kinds <= {"op", "parameter"}
        floats = {name for name in region if "float" in source.graph.nodes[name]["dtype"]}
        made_of = {name for at in floats for name in nx.ancestors(source.graph, at)}
        assert made_of <= region


def test_folding_makes_no_circle(amp: ampgraph.AmpModule) -> None:
    arcs = picture(annotated(amp)).arcs
    assert nx.is_directed_acyclic_graph(nx.DiGraph([(arc.source, arc.target) for arc in arcs]))


class Routed(nn.Module):
    """Integers that go back into arithmetic, whose result makes integers again; indices of a max-pool."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            rank = x.argsort(-1).flip(-1)
            x = x.gather(-1, rank).sin()
        pooled, at = nn.functional.max_pool1d(x, 2, return_indices=True)
        return nn.functional.max_unpool1d(pooled, at, 2)


def test_integers_made_of_integers_through_arithmetic_are_two_boxes() -> None:
    source = annotated(ampgraph.convert(Routed(), (torch.randn(2, 3, 4),), dtype=torch.float16))
    found = regions(source.graph)
    assert list(found) == ["(integers from argsort)", "(integers from argsort_1)"]
    assert all(len(region) == 2 for region in found.values())
    arcs = {(arc.source, arc.target) for arc in picture(source).arcs}
    assert nx.is_directed_acyclic_graph(nx.DiGraph(list(arcs)))
    folded = [box for box in picture(source).root.all_boxes() if box.folded]
    assert ("sin", box_id(folded[1])) in arcs


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(8).view(1, 8))
        self.table = nn.Embedding(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(self.ids[:, : x.shape[1]].flip(-1))


def test_integer_buffers_go_with_their_readers() -> None:
    graph = ampgraph.to_networkx(ampgraph.convert(Positions(), (torch.randn(2, 3, 4),)))
    assert "ids" in regions(graph)[MASK]


def test_equal_layers_are_folded_in_large_pictures(
    amp: ampgraph.AmpModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"[blocks.0]", "[blocks.1]"}.isdisjoint(drawn(to_dot(amp)))  # a small one
    short = to_dot(amp, all_layers=False)
    assert 'subgraph "cluster_blocks.0"' in short
    assert "[blocks.1]" in drawn(short)
    assert r"\nas blocks.0" in short
    monkeypatch.setattr("ampgraph.drawing.picture.LARGE", 10)
    assert to_dot(amp) == short
    assert "[blocks.1]" not in drawn(to_dot(amp, all_layers=True))
    assert r"as blocks.0" not in to_dot(amp, depth=1)


def test_layers_that_differ_are_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
    policy = ampgraph.Policy(dtype=torch.float16, rules={"1.*": "fp32"})
    amp = ampgraph.convert(model, (torch.randn(2, 8),), policy=policy)
    assert "as 0" not in to_dot(amp, all_layers=False)
