"""Random small models, and the best set of pins for a budget by trying every one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

import ampgraph
from ampgraph import Plan, Policy
from ampgraph.numerics.neighbours import is_changeable
from ampgraph.numerics.run_model import ModelRunner, Part
from ampgraph.passes import ClassifyOps, PlaceCasts, PropagatePrecision, run_passes, workspace
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
    """Every set of pins of a model: the traffic of its plan, and the error of a run where it is asked for."""

    def __init__(self, model: nn.Module, x: Tensor, dtype: torch.dtype) -> None:
        amp = ampgraph.convert(model, (x,), policy="O2", dtype=dtype, backend="eager")
        self._runner, self._measure = ModelRunner(amp, (x,)), ResultError(None)
        self._policy = amp.policy
        self._errors: dict[object, float] = {}
        self._reference = self._result(lambda part: part.float32)
        (part,) = self._runner.parts
        self._graph = part.float32
        run_passes(self._graph, (ClassifyOps(self._policy),))  # the same facts for all pins
        nodes = [n.name for n in self._graph.graph.nodes if is_changeable(n, part.plan)]
        sets = [pins for count in range(len(nodes) + 1) for pins in itertools.combinations(nodes, count)]
        plans = [(pins, self._plan(pins)) for pins in sets]
        found = [(_moved(plan), pins, _edits(plan)) for pins, plan in plans]
        self._sets = sorted(found, key=lambda one: one[:2])

    def _under(self, pins: tuple[str, ...]) -> Policy:
        return self._policy.replace(rules={f"node:{name}": "fp32" for name in pins})

    def _plan(self, pins: tuple[str, ...]) -> Plan:
        policy = self._under(pins)
        run_passes(self._graph, (PropagatePrecision(policy, check_rules=False), PlaceCasts(policy)))
        return workspace(self._graph).plan

    def _error(self, pins: tuple[str, ...], edits: object) -> float:
        """Runs the model with these pins, once for all pins that make the same graph."""

        def planned(part: Part) -> GraphModule:
            graph, plan = part.under(self._under(pins))
            assert _edits(plan) == edits
            return graph

        if edits not in self._errors:
            self._errors[edits] = self._measure.of([self._result(planned)], [self._reference])
        return self._errors[edits]

    def _result(self, graph_of: Callable[[Part], GraphModule]) -> object:
        def run_part(part: Part, inputs: list) -> object:
            run = EqualDraws(graph_of(part), inputs)
            for _ in run:
                pass
            return run.outputs

        return self._runner(run_part)

    @property
    def start(self) -> Best:
        """No pins."""
        plan = self._plan(())
        return Best(_moved(plan), self._error((), _edits(plan)), ())

    def best(self, budget: float) -> Best:
        """Returns the cheapest set within a budget; dearer ones are not run."""
        for traffic, pins, edits in self._sets:
            if (error := self._error(pins, edits)) <= budget:
                return Best(traffic, error, pins)
        raise AssertionError(f"not even all pins meet {budget}")


def _moved(plan: Plan) -> int:
    return moved(plan.cost, stores_low=True)  # as level O2 reads parameters


def _edits(plan: Plan) -> tuple:
    """Returns all of a plan that changes the graph."""
    dtypes = tuple((name, str(decision.dtype)) for name, decision in plan.decisions.items())
    casts = tuple((cast.tensor, str(cast.dst), cast.uses) for cast in plan.casts)
    return dtypes, casts, tuple(plan.dtype_args.items())
