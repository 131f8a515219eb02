"""`explain`'s table of modules and the folded boxes of a picture count the same."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph.drawing.annotated import annotated
from ampgraph.drawing.picture import picture
from ampgraph.drawing.scopes import MODULE

from .drawn_models import Layer


class Pair(nn.Module):
    """Two readers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) * self.k(x)


class Shared(nn.Module):
    """A cast for two layers of the root, one for two layers of a module, and one of an output."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8))
        self.pair = Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(self.q(x) * self.k(x))
        return self.pair(y.cumsum(-1))


class Reused(nn.Module):
    """Modules that are called again, one of them in a guard, and ops with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pool = Layer(), nn.MaxPool1d(2, return_indices=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layer(self.norm(self.layer(x))))
        with ampgraph.fp32_guard():
            x = self.layer(x)
        values, places = self.pool(x)
        return values.double().cumsum(-1).float() + places


def block() -> nn.Module:
    from transformers.models.bert.modeling_bert import BertConfig, BertLayer

    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    return BertLayer(BertConfig(**sizes, attn_implementation="eager"))


MODELS = {
    "shared casts": (Shared, (2, 8)),
    "reused modules": (Reused, (2, 8)),
    "a transformers block": (block, (2, 4, 8)),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", MODELS)
def test_explain_and_the_folded_picture_count_the_same(name: str, level: str) -> None:
    build, shape = MODELS[name]
    amp = ampgraph.convert(build().train(), (torch.randn(shape),), policy=level, dtype=torch.float16)
    drawn: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    shown = picture(annotated(amp))
    for box in shown.root.all_boxes():
        if box.scope[-1].kind == MODULE:
            counts = box.counts
            found = (counts.ops, counts.low, counts.casts, counts.cast_bytes)
            path = box.scope[-1].module
            drawn[path] = [a + b for a, b in zip(drawn[path], found, strict=True)]
    explanation = ampgraph.explain(amp)
    told = {row.path: [row.ops, row.low, row.casts, row.cast_bytes] for row in explanation.modules}
    assert {path: row for path, row in told.items() if path in drawn or any(row)} == drawn
    assert sum(row[2] for row in told.values()) > 0
    everything = shown.root.counts
    assert everything.ops == sum(node.is_float_op for node in explanation.nodes)
    assert everything.casts == explanation.totals.casts
    assert explanation.totals.cast_bytes == everything.cast_bytes


def test_a_cast_belongs_to_the_innermost_module_around_all_that_reads_it() -> None:
    amp = ampgraph.convert(Shared(), (torch.randn(2, 8),), dtype=torch.float16)
    modules = {cast.users: cast.module for cast in ampgraph.explain(amp).casts}
    graph = ampgraph.to_networkx(amp)
    for cast in ampgraph.explain(amp).casts:
        assert graph.nodes[cast.name]["module"] == cast.module
    assert modules["linear", "linear_1"] == ""
    assert modules["linear_4", "linear_5"] == "pair"
    assert modules["output",] == ""
