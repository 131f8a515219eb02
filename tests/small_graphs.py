"""Random small models, and the best set of pins for a budget by trying every one."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampgraph
from ampgraph.numerics.neighbours import is_changeable
from ampgraph.numerics.run_model import ModelRunner, Part
from ampgraph.passes.placement.amounts import moved
from ampgraph.tuning.result_error import ResultError
from ampgraph.tuning.sensitivity import EqualDraws

# More subsets are too many to try.
MOST = 9


class SmallModel(nn.Module):
    """A random graph of a few matrix products and the ops between them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        widths = [draw.choice((8, 16, 64)) for _ in range(draw.randint(2, 3))]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise([16, *widths]))
        self.norm = nn.LayerNorm(widths[0]) if draw.random() < 0.5 else None
        self.ops = [draw.choice(("gelu", "tanh", "gate", "skip", "scale", "softmax")) for _ in widths]
        self.gain = 10.0 ** draw.uniform(-1, 1)

    def forward(self, x: Tensor) -> Tensor:
        for index, (layer, op) in enumerate(zip(self.layers, self.ops, strict=True)):
            x = _step(layer(x), op, self.gain)
            if index == 0 and self.norm is not None:
                x = self.norm(x)
        return x


def _step(y: Tensor, op: str, gain: float) -> Tensor:
    if op == "gelu":
        return F.gelu(y)
    if op == "tanh":
        return torch.tanh(y)
    if op == "gate":
        return y * torch.sigmoid(y)
    if op == "skip":
        return y + torch.relu(y) * gain
    if op == "scale":
        return y * gain + 0.5
    return torch.softmax(y, -1) * y


class Best(NamedTuple):
    """The least traffic of any set of pins that meets a budget; of float32 where none does."""

    traffic: int
    error: float
    pins: tuple[str, ...]


class EverySet:
    """Every set of pins of a model, measured."""

    def __init__(self, model: nn.Module, x: Tensor, dtype: torch.dtype) -> None:
        amp = ampgraph.convert(model, (x,), policy="O2", dtype=dtype, backend="eager")
        self._runner, self._error = ModelRunner(amp, (x,)), ResultError(None)
        self._policy = amp.policy
        self._run(())
        part = self._runner.parts[0]
        self.nodes = [n.name for n in part.float32.graph.nodes if is_changeable(n, part.plan)]
        reference = self._result(lambda graph: graph.float32)
        self.found = []
        for count in range(len(self.nodes) + 1):
            for pins in itertools.combinations(self.nodes, count):
                result, traffic = self._run(pins)
                self.found.append(Best(traffic, self._error.of([result], [reference]), pins))

    def _run(self, pins: tuple[str, ...]) -> tuple[object, int]:
        traffic = 0

        def planned(part: Part):
            nonlocal traffic
            rules = {f"node:{name}": "fp32" for name in pins}
            graph, plan = part.under(self._policy.replace(rules=rules))
            traffic = moved(plan.cost, stores_low=True)  # as level O2 reads parameters
            return graph

        return self._result(planned), traffic

    def _result(self, graph_of) -> object:
        def run_part(part: Part, inputs):
            run = EqualDraws(graph_of(part), inputs)
            for _ in run:
                pass
            return run.outputs

        return self._runner(run_part)

    @property
    def start(self) -> Best:
        """No pins."""
        return self.found[0]

    def best(self, budget: float) -> Best:
        """Returns the cheapest set within a budget."""
        return min(found for found in self.found if found.error <= budget)
