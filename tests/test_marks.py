"""What ampgraph notes on graph nodes: typed, read like dictionaries, and dropped where a graph leaves."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph.marks import (
    META_KEY,
    CastMark,
    DecisionMark,
    InputMark,
    Mark,
    StorageMark,
    input_mark,
    mark_of,
)

ROOT = Path(__file__).resolve().parent.parent
X = torch.randn(2, 4)


def test_a_mark_reads_like_a_dictionary() -> None:
    mark = CastMark("insert_casts", "because", 12, False)
    expected = {"inserted": "insert_casts", "reason": "because", "bytes": 12, "is_parameter": False}
    assert dict(mark) == expected
    assert mark.get("boundary") is None
    assert "clamped" not in mark
    assert len(StorageMark()) == 0
    with pytest.raises(KeyError):
        mark["boundary"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        mark.reason = "no"  # type: ignore[misc]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda mark: pickle.loads(pickle.dumps(mark))])
def test_copies_are_equal(again) -> None:
    for mark in (CastMark("a", "b", 1, True), StorageMark(), InputMark(peak=3.0)):
        assert again(mark) == mark
        assert type(again(mark)) is type(mark)


def test_every_planned_node_has_a_mark() -> None:
    amp = ampgraph.convert(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), (X,), dtype=torch.bfloat16)
    for node in amp.graph_module.graph.nodes:
        decided = amp.plan.decisions.get(node.name)
        kind = DecisionMark if decided else CastMark
        assert mark_of(node, kind) is mark_of(node, Mark) is not None
        assert node.meta[META_KEY]["reason"]


def test_an_input_tells_its_peak_and_keeps_no_tensor() -> None:
    """Just in time, a parameter is a placeholder; a second plan must know its size without its memory."""
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight[0, 0] = 1e6
    amp = ampgraph.convert(model, dtype=torch.float16)
    amp(X)
    marks = [input_mark(node) for node in amp.graph_module.graph.find_nodes(op="placeholder")]
    assert max(mark.peak for mark in marks) == 1e6
    held = [leaf for n in amp.graph_module.graph.nodes for key, leaf in n.meta.items() if "ampgraph" in key]
    assert not any(isinstance(leaf, torch.Tensor) for leaf in held)
    assert ampgraph.explain(amp).under("O2").node("linear").by == "range"


def test_nobody_else_writes_marks() -> None:
    for path in (*(ROOT / "ampgraph").rglob("*.py"), *(ROOT / "passes").rglob("*.py")):
        if path.name != "marks.py":
            assert "node.meta[META_KEY] =" not in path.read_text(), path
            assert 'meta["ampgraph' not in path.read_text().replace(
                'graph_module.meta["ampgraph"]', ""
            ).replace('``node.meta["ampgraph"]', ""), path
