"""`ampgraph.to_networkx`: the documented attributes, and where nodes are drawn."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import fx, nn

import ampgraph
from ampgraph.errors import AmpGraphError
from ampgraph.passes import workspace

from .drawn_models import Layer, stack, trained


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


def documented(heading: str) -> set[str]:
    """Returns the names in one table of the docstring."""
    docs = inspect.getdoc(ampgraph.to_networkx) or ""  # Python 3.13 takes the indentation off
    section = docs.partition(f"{heading}:\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^ {4}((?:``\w+``(?:, )?)+):", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"``(\w+)``", row)}


def test_every_node_and_read(amp: ampgraph.AmpModule) -> None:
    graph = ampgraph.to_networkx(amp)
    nodes = {n.name: n for n in amp.graph_module.graph.nodes}
    assert list(graph) == list(nodes)
    assert set(graph.edges) == {(s.name, name) for name, n in nodes.items() for s in n.all_input_nodes}
    assert nx.is_directed_acyclic_graph(graph)


@pytest.mark.parametrize(
    "converted", [lambda: stack(), lambda: stack().graph_module, lambda: trained().backward_graph]
)
def test_table_and_attributes_agree(converted: Callable) -> None:
    graph = ampgraph.to_networkx(converted())
    assert set(graph.graph) == documented("Graph attributes")
    for _, data in graph.nodes(data=True):
        assert set(data) == documented("Node attributes")
        assert all(isinstance(value, (str, int, bool)) for value in data.values())
    for *_, data in graph.edges(data=True):
        assert set(data) == documented("Edge attributes")
        assert all(isinstance(value, (str, bool)) for value in data.values())


def test_attributes(amp: ampgraph.AmpModule) -> None:
    graph = ampgraph.to_networkx(amp)
    casts = [data for _, data in graph.nodes(data=True) if data["kind"] == "cast"]
    assert sum(c["bytes"] for c in casts) == ampgraph.explain(amp).totals.cast_bytes
    linear = graph.nodes["linear"]
    assert (linear["label"], linear["kind"], linear["op"]) == ("linear", "op", "aten.linear")
    assert (linear["module"], linear["dtype"], linear["shape"]) == ("body.0", "float16", "2x8")
    assert (linear["scope"], linear["type"]) == ("body/0", "f16[2, 8]")
    assert (linear["precision"], linear["op_class"], linear["by"]) == ("low", "white", "list")
    assert (linear["bytes"], linear["is_parameter"], linear["boundary"]) == (0, False, "")
    widened = [(a, b) for a, b, data in graph.edges(data=True) if data["widened"]]
    assert [b for _, b in widened] == ["add"]


def test_can_be_written(amp: ampgraph.AmpModule, tmp_path: Path) -> None:
    nx.write_graphml(ampgraph.to_networkx(amp), tmp_path / "model.graphml")
    again = nx.read_graphml(tmp_path / "model.graphml")
    assert again.nodes["linear"]["dtype"] == "float16"


def test_scopes_tell_calls_guards_and_bodies() -> None:
    graph = ampgraph.to_networkx(stack())
    ops = {n: data["scope"] for n, data in graph.nodes(data=True) if data["kind"] == "op"}
    assert ops == {
        "linear": "layers.0/first",
        "relu": "layers.0/relu",
        "linear_1": "layers.0/second",
        "relu_1": "layers.0/relu@2",
        "add": "layers.0",
        "linear_2": "[fp32_guard]/tail/first",
        "relu_2": "[fp32_guard]/tail/relu",
        "linear_3": "[fp32_guard]/tail/second",
        "relu_3": "[fp32_guard]/tail/relu@2",
        "add_1": "[fp32_guard]/tail",
        "sum_1": "",
        "gt": "",
        "true_graph_0/sin": "{true_graph_0}",
        "false_graph_0/cos": "{false_graph_0}",
        "cond": "",
        "getitem": "",
    }
    assert {graph.nodes[n]["guard"] for n in ("linear_2", "add_1")} == {"fp32_guard"}
    assert {graph.nodes[n]["guard"] for n in ("linear", "sum_1")} == {""}


class Tied(nn.Module):
    """One weight that is read before its module runs, and one tensor cast once for two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (-(x + self.last.weight).abs()).exp()
        return self.last(self.left(x) + self.right(x))


def test_what_modules_share_is_drawn_between_them() -> None:
    graph = ampgraph.to_networkx(ampgraph.convert(Tied(), (torch.randn(8, 8),), dtype=torch.float16))
    assert not [data["scope"] for _, data in graph.nodes(data=True) if "@" in data["scope"]]
    shared = [n for n, data in graph.nodes(data=True) if data["kind"] == "cast" and graph.out_degree(n) > 1]
    assert {graph.nodes[n]["scope"] for n in shared} == {""}
    (weight,) = (n for n, data in graph.nodes(data=True) if data["label"].endswith("last.weight"))
    assert graph.nodes[weight]["scope"] == ""


def folded_once(graph: nx.DiGraph, depth: int) -> nx.DiGraph:
    """Returns the graph with every scope of ``depth`` levels as one node."""

    def box(name: str) -> str:
        parts = graph.nodes[name]["scope"].split("/")
        return "/".join(parts[:depth]) if len(parts) >= depth and parts != [""] else f"node {name}"

    result = nx.DiGraph()
    result.add_edges_from((box(a), box(b)) for a, b in graph.edges if box(a) != box(b))
    return result


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_folding_scopes_makes_no_cycle(depth: int) -> None:
    assert nx.is_directed_acyclic_graph(folded_once(ampgraph.to_networkx(stack()), depth))


def test_graph_without_a_plan() -> None:
    amp = trained()
    graph = ampgraph.to_networkx(amp, graph="backward")
    assert list(graph) == list(ampgraph.to_networkx(amp.backward_graph))
    assert graph.graph["low_dtype"] == "float16"
    nodes = {n.name: n for n in amp.backward_graph.graph.nodes}
    casts = {n: data for n, data in graph.nodes(data=True) if data["kind"] == "cast"}
    for name, data in casts.items():
        assert {data["dtype"], graph.nodes[nodes[name].args[0].name]["dtype"]} == {"float16", "float32"}
        assert data["bytes"] == 6 * nodes[name].meta["val"].numel()
    weights = sum(p.numel() for p in amp.parameters())
    assert sum(data["bytes"] for data in casts.values()) == 6 * (weights + 2 * 8)  # and the incoming gradient
    roles = {n: data["boundary"] for n, data in graph.nodes(data=True) if data["boundary"]}
    assert roles["mul"] == "scale"
    assert roles["mul_1"] == roles["mul_4"] == "unscale"  # a product for each parameter
    assert roles["amax"] == roles["cat"] == "finite check"
    assert "mm" not in roles


def test_boundary_of_the_training_graph() -> None:
    amp = ampgraph.convert(Layer(), (torch.randn(2, 8),), dtype=torch.float16)
    data = ampgraph.to_networkx(amp.training_graph).nodes
    assert {data[n]["kind"] for n in ("_amp_scale", "_amp_inverse", "_amp_probe")} == {"parameter"}
    assert {n: data[n]["boundary"] for n in data if "gradients" in n} == {
        "unscale_gradients": "unscale",
        "unscale_gradients_1": "unscale",
        "scale_gradients": "scale",
    }


def test_shadow_weights_are_marked() -> None:
    amp = ampgraph.convert(Layer(), (torch.randn(2, 8),), policy="O2", dtype=torch.float16)
    roles = dict(ampgraph.to_networkx(amp.training_graph).nodes(data="boundary"))
    assert {n for n, role in roles.items() if role == "shadow" and n.startswith("shadow_weights")} == {
        n.name for n in amp.training_graph.graph.nodes if n.name.startswith("shadow_weights")
    }
    assert "shadow" in roles.values()


def test_unknown_graphs_are_refused(amp: ampgraph.AmpModule) -> None:
    with pytest.raises(AmpGraphError, match="'forward', 'backward', 'both'"):
        ampgraph.to_networkx(amp, graph="sideways")
    with pytest.raises(AmpGraphError, match=r"to draw one graph, pass amp\.backward_graph"):
        ampgraph.to_networkx(amp.graph_module, graph="backward")
    with pytest.raises(AmpGraphError, match=r"meta\['val'\]"):
        ampgraph.to_networkx(fx.symbolic_trace(Block()))


def test_print_readable_shows_reasons(amp: ampgraph.AmpModule) -> None:
    text = amp.graph_module.print_readable(print_output=False, additional_meta=["ampgraph"])
    for node in amp.graph_module.graph.nodes:
        if node.op == "call_function":
            assert node.meta["ampgraph"]["reason"] in text.replace("\\'", "'")
    decisions = workspace(amp.graph_module).plan
    assert decisions is not None
    assert f"'by': '{decisions['exp'].by}'" in text


def test_model_explorer_keys_are_the_exported_programs_names() -> None:
    model, x = Block(), torch.randn(2, 8)
    amp = ampgraph.convert(model, (x,), dtype=torch.float16)
    program = ampgraph.export(model, (x,), dtype=torch.float16)
    results = ampgraph.to_model_explorer(amp)["results"]
    kinds = ("call_function", "placeholder")
    names = {n.name for n in program.graph.nodes if n.op in kinds and not n.name.startswith("p_")}
    assert set(results) == names
    assert results["linear"] == {"value": "float16", "bgColor": "#9BD0F0", "textColor": "#000000"}
    cast = next(n.name for n in amp.graph_module.graph.nodes if n.name.startswith("to"))
    assert results[cast]["value"] == "cast to float16"
    assert results[cast]["bgColor"] == "#CC79A7"
