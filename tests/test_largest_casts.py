"""The largest casts, listed beside a picture."""

from __future__ import annotations

import re

import pytest
import torch

import ampgraph
from ampgraph.drawing import to_dot
from ampgraph.drawing.annotated import annotated
from ampgraph.drawing.largest_casts import LISTED, largest_casts, ranks
from ampgraph.drawing.picture import picture
from ampgraph.report import graph_view

from .drawn_models import masked
from .test_layers import Deep


@pytest.fixture(scope="module")
def amp() -> ampgraph.AmpModule:
    return ampgraph.convert(Deep(), (torch.randn(2, 8),), dtype=torch.float16)


def test_the_list_is_sorted_and_complete(amp: ampgraph.AmpModule) -> None:
    bytes_of = {cast.name: cast.bytes for cast in ampgraph.explain(amp).casts}
    listed = largest_casts(picture(annotated(amp)))
    assert len(listed) == LISTED
    assert [dear.bytes for dear in listed] == sorted((dear.bytes for dear in listed), reverse=True)
    for dear in listed:
        assert dear.bytes == sum(bytes_of[name] for name in dear.casts)
    left_out = set(bytes_of) - {name for dear in listed for name in dear.casts}
    assert max(bytes_of[name] for name in left_out) <= listed[-1].bytes
    assert listed[0].words == "head.weight to f16"


def test_equal_layers_are_one_line(amp: ampgraph.AmpModule) -> None:
    listed = largest_casts(picture(annotated(amp)))
    casts = {cast.name: cast for cast in ampgraph.explain(amp).casts}
    (up,) = (dear for dear in listed if dear.words == "h.1.up.weight to f16, 2x")
    assert [casts[name].tensor for name in up.casts] == ["h.1.up.weight", "h.2.up.weight"]
    assert any(dear.words.startswith("h.0.up.weight") and len(dear.casts) == 1 for dear in listed)


def test_activations_tell_whom_they_are_for(amp: ampgraph.AmpModule) -> None:
    listed = largest_casts(picture(annotated(amp), focus="h.0*"))
    assert "layer_norm for h.0.up to f16" in [dear.words for dear in listed]
    inside = set(picture(annotated(amp), focus="h.0*").root.all_nodes())
    assert {name for dear in listed for name in dear.casts} <= inside


def test_a_clamped_mask_goes_by_its_name() -> None:
    listed = largest_casts(picture(annotated(masked())))
    assert not [dear for dear in listed if dear.words.startswith("clamp")]


def test_the_text_numbers_list_and_picture_alike(amp: ampgraph.AmpModule) -> None:
    text, listed = to_dot(amp), largest_casts(picture(annotated(amp)))
    head = re.search(r'graph \[rankdir=TB label="([^"]*)"', text)
    assert head
    lines = head[1].split(r"\l")
    assert lines[1] == "largest casts:"
    assert lines[2] == f"#1  {graph_view.human_bytes(listed[0].bytes)}: head.weight to f16"
    assert len(lines) == 2 + LISTED + 1
    for name, rank in ranks(listed).items():
        assert re.search(rf'^ *"{name}" \[label="#{rank} cast to', text, re.MULTILINE)


def test_nothing_is_listed_where_nothing_is_cast() -> None:
    amp = ampgraph.convert(torch.nn.ReLU(), (torch.randn(2),), dtype=torch.float16)
    assert "largest" not in to_dot(amp)


class Fan(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.exp()
        return x.sin() + x.cos() + x.tan() + x.sinh()


def test_of_many_edges_out_of_a_node_one_is_labelled() -> None:
    text = to_dot(ampgraph.convert(Fan(), (torch.randn(4),), dtype=torch.float16))
    labels = re.findall(r'"exp" -> "\w+" \[label="([^"]*)" tooltip="([^"]*)"', text)
    assert [label.strip() for label, _ in labels] == ["f32[4]", "", "", ""]
    assert {tip for _, tip in labels} == {"f32[4]"}


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(8, 2, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = layer(x, mask)
        return x


def test_what_every_layer_reads_runs_beside_them() -> None:
    amp = ampgraph.convert(Layers(), (torch.randn(4, 1, 8), torch.zeros(4, 4)), dtype=torch.float16)
    edges = re.findall(r'^ *"(\S+)" -> "(\S+)" \[([^\n]*)\];$', to_dot(amp, depth=1), re.MULTILINE)
    beside = {(source, target) for source, target, style in edges if "port=" in style}
    assert len(beside) == 4
    assert {target for _, target in beside} == {f"[h.{i}]" for i in range(4)}
    assert {source for source, _ in beside}.isdisjoint(target for _, target in beside)
