"""Long reports: repeated layers are shown once, and the rows with the most cast bytes come first."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import AmpGraphError, Explanation
from ampgraph.report import text
from ampgraph.report.layers import Repeat, is_repeated, repeats, times


def found(*paths: str) -> list[str]:
    """Returns the repeats of rows given as ``path=row``."""
    return [str(repeat) for repeat in repeats(tuple(path.split("=")) for path in paths)]


def test_runs_of_equal_layers() -> None:
    assert found("h.0=a", "h.0.x=b", "h.1=a", "h.1.x=b", "h.2=a", "h.2.x=b") == ["h.0 .. h.2 (3x)"]
    assert found("a.h.0=a", "a.h.1=b", "a.h.2=b", "a.h.3=a") == ["a.h.1 .. h.2 (2x)"]
    assert found("0.x=a", "1.x=a") == ["0 .. 1 (2x)"]
    assert found("h.0=a", "h.2=a", "h.4=a") == []  # what is between them differs
    assert found("h.0=a", "h.0=b", "h.1=b", "h.1=a") == []  # the order counts
    assert found("h.0.x=a", "h.1.y=a") == []
    assert found("head=a", "=a") == []


def test_layers_in_layers_count_together() -> None:
    rows = [(f"up.{i}.res.{j}", "same") for i in range(3) for j in range(2)]
    outer, inner = repeats(rows)
    assert (outer, inner) == (Repeat("up", 0, 2), Repeat("up.0.res", 0, 1))
    assert times("up.0.res.0", (outer, inner)) == 6
    assert [path for path, _ in rows if not is_repeated(path, (outer, inner))] == ["up.0.res.0"]
    assert times("up", (outer, inner)) == times("upper.0", (outer, inner)) == 1


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Deep(nn.Module):
    """Two equal blocks after a wider one, and a dear head."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(width) for width in (32, 16, 16))
        self.head = nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    amp = ampgraph.convert(Deep(), (torch.randn(2, 8),), dtype=torch.float16)
    return ampgraph.explain(amp)


def lines(text: str, heading: str) -> list[str]:
    """Returns the rows of the table whose heading starts like that."""
    return text.partition(f"\n{heading} ")[2].partition("\n\n")[0].splitlines()[2:]


def test_equal_layers_are_shown_once(explanation: Explanation) -> None:
    assert [str(repeat) for repeat in text.repeated_layers(explanation)] == ["h.1 .. h.2 (2x)"]
    whole, short = explanation.table(all_layers=True), explanation.table(all_layers=False)
    assert "h.2.up" in whole
    assert "h.2.up" not in short
    for heading in ("node", "tensor"):
        rows = lines(short, heading)
        assert "h.1 .. h.2 (2x): equal but for names, shown once" in rows
        doubled = [row for row in rows if re.search(r" 2x ", row)]
        assert len(lines(whole, heading)) - len(rows) == len(doubled) - 1  # and the line above
    assert re.search(r"^h\.1 \.\. h\.2 \(2x\) +5 ", short, re.MULTILINE)
    assert re.search(r"^h\.0 +5 ", short, re.MULTILINE)


def test_large_graphs_are_short_by_default(explanation: Explanation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(explanation) == explanation.table(all_layers=True)
    monkeypatch.setattr(text, "LARGE", len(explanation.nodes) - 1)
    assert str(explanation) == explanation.table(all_layers=False)
    assert explanation.to_markdown() == explanation.to_markdown(all_layers=False)
    assert "| h.1 .. h.2 (2x) | 5 |" in explanation.to_markdown()
    assert explanation.to_dict()["nodes"][-1]["kind"] == "output"
    assert len(explanation.to_dict()["casts"]) == explanation.totals.casts


@pytest.mark.parametrize("all_layers", [True, False])
def test_the_largest_come_first(explanation: Explanation, all_layers: bool) -> None:
    text = explanation.table(top=2, all_layers=all_layers)
    total: dict[str, int] = {}
    for cast in explanation.casts:
        known = cast.tensor if all_layers else cast.tensor.replace("h.2.", "h.1.")
        total[known] = total.get(known, 0) + cast.bytes
    largest = sorted(total, key=lambda tensor: -total[tensor])[:2]
    assert largest[0] == "head.weight"
    rows = lines(text, "tensor")
    assert [row.split()[0] for row in rows[:2]] == largest
    assert re.fullmatch(r"\(the 2 of \d+ that move the most bytes\)", rows[-1])
    nodes = lines(text, "node")
    assert "head" in nodes[0].split()
    assert any(re.fullmatch(r"\(the 2 of \d+ that read the most cast bytes\)", row) for row in nodes)
    assert any("with the most bytes of casts" in row for row in lines(text, "module"))
    assert any("that are called most often" in row for row in lines(text, "operator"))


def test_more_rows_than_there_are(explanation: Explanation) -> None:
    text = explanation.table(top=1000)
    assert "(the " not in text
    assert sorted(lines(text, "tensor")) == sorted(lines(explanation.table(), "tensor"))


@pytest.mark.parametrize("top", [0, -1, 2.5, "3"])
def test_a_wrong_number_of_rows(explanation: Explanation, top: object) -> None:
    with pytest.raises(AmpGraphError, match="expected a number of rows, 1 or more"):
        explanation.table(top=top)  # type: ignore[arg-type]
