"""Small converted models for the tests of pictures."""

from __future__ import annotations

from collections.abc import Callable

import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

import ampgraph


class Layer(nn.Module):
    """Two linear layers around one ReLU module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.second(self.relu(self.first(x)))) + x


class Stack(nn.Module):
    """Two layers, one of them in a guard, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.tail = nn.ModuleList([Layer()]), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        with ampgraph.fp32_guard():
            x = self.tail(x)
        return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))


def stack() -> ampgraph.AmpModule:
    """Returns `Stack`, converted for float16."""
    return ampgraph.convert(Stack(), (torch.randn(2, 8),), dtype=torch.float16)


def aot_graphs() -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns the forward and the backward graph that AOTAutograd makes of `Layer`."""
    graphs: list[fx.GraphModule] = []

    def keep(graph_module: fx.GraphModule, inputs: list) -> Callable:
        graphs.append(graph_module)
        return make_boxed_func(graph_module)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    amp = ampgraph.convert(Layer(), (torch.randn(2, 8),), dtype=torch.float16, backend=backend)
    amp(torch.randn(2, 8)).sum().backward()
    forward, backward = graphs
    return forward, backward
