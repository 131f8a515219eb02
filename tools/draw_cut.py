"""Draws docs/cut.svg: the cut network of a small graph, and its minimum cut.

    python tools/draw_cut.py

A number is the cost of cutting the arc, in bytes. Blue vertices run low, orange vertices in float32.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.fx import Node

from ampgraph import Policy
from ampgraph.capture import capture_program, unlift
from ampgraph.drawing.styles import FP32, LOW
from ampgraph.passes import default_pipeline, run_passes, workspace
from ampgraph.passes.analysis.problem import Problem
from ampgraph.passes.place import PlaceCasts
from ampgraph.passes.placement.build_network import cut_network
from ampgraph.passes.placement.min_cut import INFINITE, SINK, SOURCE, CutNetwork, Vertex

PICTURE = Path(__file__).resolve().parent.parent / "docs/cut.svg"
CUT, REST = "#C0392B", "#8A8F94"


class Gated(nn.Module):
    """Products that run low, sums that run in float32, and free ops between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.up(x)
        total = hidden.cumsum(-1) / 3
        low, exact = (hidden.sigmoid() * 2)[:, :8], total[:, 24:].tanh().sum(-1, True)
        return self.down(low) + exact, total.cumsum(-1)


def problem_of(model: nn.Module, x: Tensor) -> Problem:
    """Returns the placement problem of the model at O2 in float16, before anything is decided."""
    policy = Policy(level="O2", dtype=torch.float16)
    graph_module, _ = unlift(capture_program(model, (x,)), model)
    passes = default_pipeline(policy)
    before = passes[: next(i for i, p in enumerate(passes) if isinstance(p, PlaceCasts))]
    run_passes(graph_module, before)
    problem = workspace(graph_module).problem
    assert problem is not None
    return problem


def as_dot(network: CutNetwork, sides: dict[Vertex, bool]) -> str:
    """Returns the network as DOT, the cut arcs marked."""
    on_source = {**sides, SOURCE: True, SINK: False}
    arcs = [*network.arcs()]
    for vertex, if_low, if_float32 in network.terminal_arcs():
        arcs += [(SOURCE, vertex, if_float32)] * bool(if_float32) + [(vertex, SINK, if_low)] * bool(if_low)
    lines = [
        "digraph cut {",
        '  rankdir=LR; nodesep=0.3; ranksep=0.8; node [fontname="Helvetica", fontsize=11, style=filled]',
        '  edge [fontname="Helvetica", fontsize=9]',
    ]
    for vertex, low in on_source.items():
        shape = "box" if isinstance(vertex, Node) or vertex in (SOURCE, SINK) else "ellipse"
        style = f'shape={shape}, fillcolor="{LOW if low else FP32}"'
        lines.append(f'  "{_id(vertex)}" [label="{_label(vertex)}", {style}]')
    for u, v, capacity in arcs:
        cut = on_source[u] and not on_source[v]
        text = "needed" if capacity >= INFINITE else f"{capacity:,}"
        style = f'color="{CUT}", fontcolor="{CUT}", penwidth=2.2' if cut else f'color="{REST}"'
        lines.append(f'  "{_id(u)}" -> "{_id(v)}" [label="  {text}", {style}]')
    return "\n".join([*lines, "}"]) + "\n"


def _id(vertex: Vertex) -> str:
    return str(vertex)


def _label(vertex: Vertex) -> str:
    if vertex in (SOURCE, SINK):
        return "source: low" if vertex == SOURCE else "sink: float32"
    if isinstance(vertex, Node):
        return vertex.name
    tensor, direction, _ = vertex
    return f"cast of {tensor.name}\\n({direction})"


def picture() -> str:
    """Returns the network and its minimum cut as DOT."""
    problem = problem_of(Gated(), torch.randn(4, 16))
    network, solved = (cut_network(problem, lambda cost: cost.traffic)[0] for _ in range(2))
    return as_dot(network, solved.minimum_cut())  # solving empties a network


def main() -> None:
    import pygraphviz

    pygraphviz.AGraph(string=picture()).draw(PICTURE, prog="dot")


if __name__ == "__main__":
    main()
