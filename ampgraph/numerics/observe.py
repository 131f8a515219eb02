"""Observes the values and gradients of a run: their ranges, and values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from ..passes.analysis.alias import SOURCES
from ..runtime.run_graph import Draws, GraphRun
from ..training.gradient_boundary import scale_gradients, unscale_gradients
from .run_model import ModelRunner, Part

# A node of a model: which of its graphs, and the node's name.
Place = tuple[int, str]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Exponents of float32, with room for zero at the bottom.
LEAST, MOST = -150, 130


class Look(NamedTuple):
    """What a tensor holds: how many NaN, how many NaN or infinite, and the range of the rest."""

    nan: int
    bad: int
    least: float
    most: float

    @property
    def peak(self) -> float:
        """The largest finite magnitude."""
        return max(-self.least, self.most)

    def is_worse_than(self, other: Look | None) -> bool:
        """Whether more elements are not finite than in the other; masks have their share in both."""
        return self.bad > (other.bad if other else 0) or self.nan > (other.nan if other else 0)


@dataclass
class Seen:
    """What one run has shown.

    Attributes:
        values: Of each node that makes floats, in the order of the run.
        gradients: Of each node's result, in the order of the backward.
        leaves: Of the gradients of parameters and inputs, by place of the node that reads them.
        exponents: How often each binary exponent occurs in a gradient; index 0 counts zeros.
        outputs: Of the model's floating results; with a loss, the loss is the last.
        nodes: The nodes by place.
        unwritten: The places in memory that is not written yet; `values` leaves them out.
    """

    values: dict[Place, Look] = field(default_factory=dict)
    gradients: dict[Place, Look] = field(default_factory=dict)
    leaves: dict[Place, Look] = field(default_factory=dict)
    exponents: dict[Place, Tensor] = field(default_factory=dict)
    outputs: list[Look] = field(default_factory=list)
    nodes: dict[Place, Node] = field(default_factory=dict)
    unwritten: set[Place] = field(default_factory=set)


class Observer:
    """Runs a model and looks at every value; one wait for the device, at the end.

    Args:
        model: Runs the model.
        graph_of: Chooses what runs for each of its graphs.
        loss: Makes the loss of the model's result; None: no backward.
        scale: What gradients are multiplied by at the boundary; None: there is no boundary.
        draws: Random numbers that several runs share.
        with_exponents: Whether to count the exponents of gradients.
    """

    def __init__(
        self,
        model: ModelRunner,
        graph_of: Callable[[Part], GraphModule],
        loss: Callable[[Any], Tensor] | None,
        scale: float | None,
        draws: Draws,
        with_exponents: bool = False,
    ):
        self._model, self._graph_of, self._loss = model, graph_of, loss
        self._draws, self._with_exponents = draws, with_exponents
        self._scale = None if scale is None else torch.tensor(scale, device=model.device)
        self._seen = Seen()
        self._looks: list[tuple[dict[Place, Look], Place, Tensor]] = []
        self._leaves: dict[int, tuple[Place, Tensor, Tensor]] = {}

    def run(self) -> Seen:
        """Runs forward and, with a loss, backward."""
        result = self._model(self._run_part, gradients=self._loss is not None)
        finals = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]
        if self._loss is not None:
            finals.append(self._backward(result))
        finals = [t for t in finals if _can_be_seen(t)]
        looks = torch.stack([t for _, _, t in self._looks] + [look_at(t) for t in finals]).tolist()
        found = [Look(int(nan), int(bad), least, most) for nan, bad, least, most in looks]
        for (where, place, _), look in zip(self._looks, found[: len(self._looks)], strict=True):
            where[place] = look
        self._seen.outputs = found[len(self._looks) :]
        return self._seen

    def _backward(self, result: Any) -> Tensor:
        assert self._loss is not None
        with torch.enable_grad():
            loss = self._loss(result)
            leaves = [(place, leaf) for place, _, leaf in self._leaves.values()]
            if loss.requires_grad and leaves:
                torch.autograd.backward(loss, inputs=[leaf for _, leaf in leaves])
        for place, leaf in leaves:
            if leaf.grad is not None:
                self._note(self._seen.leaves, place, leaf.grad)
        return loss.detach()

    def _run_part(self, part: Part, inputs: list[Any]) -> Sequence[Any]:
        run = GraphRun(self._graph_of(part), inputs, self._draws)
        for node, value in run:
            place = part.index, node.name
            self._seen.nodes[place] = node
            if node.op in SOURCES:
                run.values[node] = self._entering(place, value)
            elif self._loss is not None and isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda gradient, place=place: self._note_gradient(place, gradient))
            if node in run.unwritten:
                self._seen.unwritten.add(place)
            elif isinstance(value, Tensor):  # of several results, each has a node that picks it
                self._note(self._seen.values, place, value)
        return self._leaving(run.outputs)

    def _entering(self, place: Place, value: Any) -> Any:
        """Lets gradients end here: what the model's own tensors would receive stays out of them."""
        if self._loss is None or not isinstance(value, Tensor) or not value.requires_grad:
            return value
        if not value.is_leaf:
            return self._unscaled(value)
        if id(value) not in self._leaves:
            alias = value.detach().requires_grad_()
            # The value itself is kept, so that its id stays its own.
            self._leaves[id(value)] = place, value, alias
        return self._unscaled(self._leaves[id(value)][2])

    def _unscaled(self, tensor: Tensor) -> Tensor:
        if self._scale is None:
            return tensor
        probe = torch.zeros(1, device=self._scale.device)
        return unscale_gradients(probe, self._scale.reciprocal(), "0", tensor)[0]

    def _leaving(self, outputs: Sequence[Any]) -> Sequence[Any]:
        if self._scale is None or self._loss is None:
            return outputs
        leaving = list(outputs)
        for index, value in enumerate(leaving):
            if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                leaving[index] = scale_gradients(self._scale, value)[0]
        return tuple(leaving)

    def _note_gradient(self, place: Place, gradient: Tensor) -> None:
        self._note(self._seen.gradients, place, gradient)
        if self._with_exponents and _can_be_seen(gradient):
            self._seen.exponents[place] = exponents_of(gradient)

    def _note(self, where: dict[Place, Look], place: Place, tensor: Tensor) -> None:
        if _can_be_seen(tensor):
            where[place] = Look(0, 0, 0.0, 0.0)  # keeps the order
            self._looks.append((where, place, look_at(tensor)))


def _can_be_seen(tensor: Tensor) -> bool:
    dense = tensor.layout == torch.strided and not tensor.is_nested
    return dense and tensor.dtype in _DTYPES and tensor.numel() > 0


@torch.no_grad()
def look_at(tensor: Tensor) -> Tensor:
    """Returns the numbers of a `Look`, on the tensor's device."""
    finite = tensor.isfinite()
    least, most = tensor.masked_fill(~finite, 0).aminmax()
    counts = tensor.isnan().sum(), (~finite).sum()
    return torch.stack([*(c.double() for c in counts), least.double(), most.double()])


@torch.no_grad()
def exponents_of(tensor: Tensor) -> Tensor:
    """Returns how often each binary exponent occurs, from `LEAST` to `MOST`; zeros are counted below."""
    values = tensor.float().flatten()
    values = values.masked_fill(~values.isfinite(), 0)
    places = torch.frexp(values).exponent.long().clamp(LEAST, MOST) - LEAST + 1
    return torch.bincount(places.masked_fill(values == 0, 0), minlength=MOST - LEAST + 2).cpu()


def share_below(exponents: Tensor, limit: float) -> float:
    """Returns the share of the non-zero elements that are smaller than ``limit``."""
    count = int(exponents[1:].sum())
    index = max(0, min(MOST, math.floor(math.log2(limit))) - LEAST + 1)
    return int(exponents[1 : index + 1].sum()) / count if count else 0.0
