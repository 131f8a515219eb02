"""The report's summaries: operators, modules, chains of reasons; counted again by other means."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import AmpGraphError, Explanation

from .test_explain import CASES, attention, counted

LOW = torch.float16


class Encoder(nn.Module):
    """Two levels of modules, a chain of three followers, one clear op that placement narrows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x).cumsum(-1)
        y = (y + 1).sigmoid() * 2
        return self.head(y.relu())


@pytest.fixture(scope="module")
def amp() -> ampgraph.AmpModule:
    return ampgraph.convert(Encoder(), (torch.randn(4, 16),), dtype=LOW)


@pytest.fixture(scope="module")
def explanation(amp: ampgraph.AmpModule) -> Explanation:
    return ampgraph.explain(amp)


def is_inserted(node: torch.fx.Node) -> bool:
    return "inserted" in node.meta.get("ampgraph", {})


def dtype_name(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    names = dict.fromkeys(str(v.dtype).removeprefix("torch.") for v in values if isinstance(v, torch.Tensor))
    return ",".join(names) or "other"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_operators_are_what_the_graph_has(case: str, level: str) -> None:
    build, shape = CASES[case]
    amp = ampgraph.convert(build(), (torch.randn(shape),), policy=level, dtype=LOW)
    expected: Counter[tuple[str, str]] = Counter()
    for node in amp.graph_module.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            name = "cast (inserted)" if is_inserted(node) else str(node.target).removesuffix(".default")
            expected[name, dtype_name(node)] += 1
    operators = ampgraph.explain(amp).operators
    assert {(op, d): n for op, row in operators.items() for d, n in row.items()} == expected


def test_modules_are_what_the_graph_has(amp: ampgraph.AmpModule, explanation: Explanation) -> None:
    """A cast is inside a module if all that reads it is: a shared one belongs to no single reader.

    What a cast node says of its module is that of its first reader, or of the tensor of an output.
    """

    def is_inside(node: torch.fx.Node, path: str) -> bool:
        return any(p == path for p, _ in (node.meta.get("nn_module_stack") or {}).values())

    found = {m.path: (m.ops, m.low, m.casts) for m in explanation.modules}
    functions = [node for node in amp.graph_module.graph.nodes if node.op == "call_function"]
    for path in ("body", "body.0", "body.2", "body.2.0", "head"):
        ops = [node for node in functions if not is_inserted(node) and is_inside(node, path)]
        low = [node for node in ops if node.meta["val"].dtype == LOW]
        casts = [n for n in functions if is_inserted(n) and all(is_inside(user, path) for user in n.users)]
        assert found[path] == (len(ops), len(low), len(casts)), path
    # Casts of the root's own code, and of outputs, are in no module.
    inside = sum(m.casts for m in explanation.modules if "." not in m.path)
    outside = sum(not c.module for c in explanation.casts)
    assert inside + outside == explanation.totals.casts == counted(amp.graph_module)[0]


def test_modules_in_the_text_are_the_outer_ones(explanation: Explanation) -> None:
    text = str(explanation)
    assert "body      4    4   100%      5     3.6 KiB" in text
    assert "body.2.0" in {m.path for m in explanation.modules}
    assert "\nbody.2.0 " not in text
    assert "(2 inner modules not shown)" in text


def test_chain_of_reasons(explanation: Explanation) -> None:
    assert [row.name for row in explanation.chain("mul")] == ["mul", "sigmoid", "add", "cumsum"]
    assert explanation.why("mul").splitlines()[:5] == [
        "mul: aten.mul.Tensor, float32 4x16",
        "  decided by propagation: gray: follows 'sigmoid', which is float32",
        "    sigmoid is float32, decided by propagation: gray: follows 'add', which is float32",
        "    add is float32, decided by propagation: gray: follows 'cumsum', which is float32",
        "    cumsum is float32, decided by list: black: long sum or product: the result overflows or swamps "
        "its terms",
    ]


def test_chain_of_what_placement_chose_leads_to_who_is_pinned(explanation: Explanation) -> None:
    assert [row.name for row in explanation.chain("relu_1")] == ["relu_1", "linear_2"]
    assert "linear_2 is float16, decided by list: white" in explanation.why("relu_1")


def test_long_chains_are_cut() -> None:
    class Long(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.cumsum(-1)
            for _ in range(30):
                x = x.sigmoid()
            return x @ x

    why = ampgraph.explain(ampgraph.convert(Long(), (torch.randn(4, 4),))).why("sigmoid_29")
    assert "    .. 18 more, the last:\n    cumsum is float32, decided by list" in why


@pytest.mark.parametrize("name", ["lineer", "body.0.wieght", "to_dtyp"])
def test_an_unknown_node_gets_the_nearest(explanation: Explanation, name: str) -> None:
    with pytest.raises(AmpGraphError, match=r"Did you mean '(linear|body.0.weight|to_dtype)"):
        explanation.why(name)


def test_markdown(explanation: Explanation) -> None:
    text = explanation.to_markdown()
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings[0].startswith("# Encoder: 10 ops (6 float16, 4 float32), ")
    assert headings[1:] == [
        "## Nodes",
        "## Casts",
        "## Operators by dtype",
        "## Modules",
        "## Advice",
        "## Totals",
        "## Training step, modelled",
    ]
    assert "| operator | float16 | float32 |" in text
    assert "| --- | --: | --: |" in text
    assert "| aten.cumsum |  | 1 |" in text
    assert ".." not in text.replace("..\n", "")  # nothing is shortened
    assert explanation.to_markdown(casts_only=True).count("## ") == 2


def test_cells_of_markdown_cannot_break_the_table() -> None:
    from ampgraph.report.tables import Column, markdown_table

    assert markdown_table([Column("a")], [["x | y\nz"]]).splitlines()[-1] == "| x \\| y z |"


def test_a_report_is_read_again(explanation: Explanation) -> None:
    read = Explanation.from_dict(json.loads(explanation.to_json()))
    assert read == explanation
    assert str(read) == str(explanation)
    assert not explanation.diff(read)
    with pytest.raises(AmpGraphError, match="can be compared, but not planned again"):
        read.under("O2")


@pytest.mark.parametrize("data", [{}, {"nodes": []}, {"nodes": [{"name": "x"}], "casts": []}])
def test_something_else_is_no_report(data: dict) -> None:
    with pytest.raises(AmpGraphError, match="not a report that this version"):
        Explanation.from_dict(data)


def test_a_report_with_another_low_dtype_is_spoilt(explanation: Explanation) -> None:
    with pytest.raises(AmpGraphError, match="low_dtype=\\[\\]"):
        Explanation.from_dict({**json.loads(explanation.to_json()), "low_dtype": []})


def test_the_dict_has_the_summaries() -> None:
    data = ampgraph.explain(attention()).to_dict()
    assert data["operators"]["aten.linear"] == {"float16": 3}
    assert data["modules"][0] == {"path": "norm", "ops": 1, "low": 0, "casts": 0, "cast_bytes": 0}
    assert data["nodes"][-1]["because"] == []


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("copies", [True, False])
def test_casts_of_parameters_are_said_to_run_once_per_update(level, copies):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    policy = ampgraph.Policy(level, dtype=torch.bfloat16, weight_copies=copies)
    report = str(ampgraph.explain(ampgraph.convert(model, (torch.ones(2, 8),), policy=policy)))
    assert ("once per update, into low copies" in report) == copies
