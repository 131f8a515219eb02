"""The change of a model's results by rounding each tensor, from one forward and a few backwards.

The float32 graph runs with a gate at each tensor t. A gate knows the error e_t that low precision would make
there: of the kernel, or of rounding. With random weights v of the outputs, one backward brings each gate the
gradient g_t of the weighted outputs, so g_t e_t is v times the change of the outputs, to first order. Its
mean square over v is the squared error that rounding t makes in the outputs.

Where several ops read a tensor, there is a gate at each of these reads, too: if only some of the readers run
low, the others read the exact value.

Errors of the elements are independent as a rule; then the sum of (g_t e_t)^2 over the elements has the same
mean and scatters far less. Where the square of their sum differs a lot, errors add up or cancel, and it
counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import mean, variance
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from .._compat import SET_GRAD_ENABLED, HigherOrderOperator, OpOverload
from ..numerics.side_run import in_dtypes_of
from ..passes.analysis.alias import written_args, written_memory
from ..passes.analysis.facts import DECIDED
from ..passes.analysis.precision import FP32
from ..runtime.run_graph import Draws, GraphRun, is_random
from .planned_graph import PlannedGraph

# Backwards altogether, and at least so many for a batch.
PROBES, LEAST_PROBES = 8, 2
# Between these multiples of the independent estimate, the other is taken for scatter.
_SCATTER = (0.25, 3.0)
# Outputs of fewer elements give too few weights to see more than scatter.
_FEW = 16


@dataclass
class Sensitivity:
    """What rounding does.

    Attributes:
        squares: The squared error of the result, by the tensor that is rounded.
        reads: The same of what one reader alone reads rounded, by (tensor, reader).
        beyond: Tensors that do not fit the low dtype.
        scatter: Standard deviation of the result's squared error, as a share of its mean.
    """

    squares: dict[Node, float] = field(default_factory=dict)
    reads: dict[tuple[Node, Node], float] = field(default_factory=dict)
    beyond: set[Node] = field(default_factory=set)
    scatter: float = 0.0


# A tensor, or (tensor, reader).
Gate = Node | tuple[Node, Node]


class EqualDraws(GraphRun):
    """A run that draws float32's random numbers at every node, in any dtype."""

    def _call(self, node: Node, args: tuple, kwargs: dict[str, Any]) -> Any:
        result = super()._call(node, args, kwargs)
        fixed = isinstance(node.target, HigherOrderOperator) or not is_random(node) or written_args(node)
        if fixed or self._draws is None or not self._draws.moved(node.name):
            return result
        self._draws.start(node.name)
        args, kwargs = pytree.tree_map_only(Tensor, _widened, (args, kwargs))
        assert callable(node.target)
        return in_dtypes_of(node.target(*args, **kwargs), result)


class GatedRun(EqualDraws):
    """A run of the float32 graph whose every tensor has a gradient.

    Attributes:
        gated: Puts a gate at what a node reads: (reader, what it reads, its value).
    """

    gated: Callable[[Node, Node, Any], Any]

    def _call(self, node: Node, args: tuple, kwargs: dict[str, Any]) -> Any:
        if node.target is SET_GRAD_ENABLED:
            return None
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: self.gated(node, n, self.values[n]))
        if node.target is torch.ops.aten.detach.default:
            return args[0]
        return super()._call(node, args, kwargs)


class _Gate(Function):
    """Passes a value on; its backward notes the gradient times the error."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, value: Tensor, error: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        ctx.error, ctx.note = error, note
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        ctx.note(gradient * ctx.error)
        return None, gradient, None, None


class Probes:
    """Gates for runs of a model's graphs, and what backwards through them show.

    Args:
        low_dtype: The dtype whose rounding is meant.
    """

    def __init__(self, low_dtype: torch.dtype):
        self._low_dtype = low_dtype
        self._generator = torch.Generator().manual_seed(0)
        self._token = torch.zeros((), requires_grad=True)
        self._beyond: set[Node] = set()
        self._own: dict[Node, float] = defaultdict(float)
        self._sums: dict[Gate, Tensor | float] = {}
        self._together: dict[Gate, float] = defaultdict(float)
        self._apart: dict[Gate, Tensor | float] = defaultdict(float)
        self._totals: list[list[float]] = []
        self._total: Tensor | float = 0.0
        self._backwards, self._is_wide = 0, True

    def run_part(self, graph: PlannedGraph, inputs: Sequence[Any], draws: Draws) -> Sequence[Any]:
        """Runs one graph with gates; returns its outputs, through which gradients flow."""
        run = GatedRun(graph.graph_module, inputs, draws)
        run.gated = lambda reader, read, value: self._read(graph, reader, read, value)
        skipped = written_memory(graph.graph_module.graph)
        with torch.enable_grad():
            for node, value in run:
                if node in graph.payers and node not in skipped:
                    run.values[node] = self._gated(graph, run, node, value)
        return run.outputs

    def backward(self, outputs: Sequence[Tensor], weights: Sequence[float], count: int) -> None:
        """Runs backwards from random weights of the outputs.

        Args:
            outputs: Floating-point tensors of what the model returned.
            weights: How much each counts; each is divided by its norm, too.
            count: How many backwards.
        """
        chosen = [(o, w) for o, w in zip(outputs, weights, strict=True) if o.requires_grad and w > 0]
        if not chosen:
            return
        self._is_wide &= sum(output.numel() for output, _ in chosen) >= _FEW
        self._totals.append([])
        for step in range(count):
            self._sums, self._total = {}, 0.0
            total = torch.stack([self._weighed(output, weight) for output, weight in chosen]).sum()
            # The gates note what they see; the token's own gradient is of no use.
            torch.autograd.grad(total, self._token, retain_graph=step < count - 1, allow_unused=True)
            for node, value in self._sums.items():
                self._together[node] += float(value) ** 2
            self._totals[-1].append(float(self._total))
        self._backwards += count

    def _weighed(self, output: Tensor, weight: float) -> Tensor:
        finite = output.detach().isfinite()
        norm = output.detach().masked_fill(~finite, 0).double().norm().clamp(min=1e-30)
        random = torch.randn(output.shape, generator=self._generator).to(output.device)
        return (random * output).masked_fill(~finite, 0).sum().cpu().double() * (weight / float(norm))

    def result(self, graphs: Iterable[PlannedGraph]) -> Sensitivity:
        """Returns what was seen of the graphs' tensors; without any gradient, their own errors count."""
        found = Sensitivity(beyond=set(self._beyond), scatter=self._scatter())
        for graph in graphs:
            for tensor in graph.payers:
                found.squares[tensor] = self._square(tensor) if self._backwards else self._own[tensor]
            if self._backwards:
                found.reads |= {read: self._square(read) for read in graph.reads}
        return found

    def _scatter(self) -> float:
        """Returns how far squared errors scatter: as far as random weights of the outputs see them scatter.

        With errors of covariance C, the squared norm of the error and v C v, for normal v, have one variance.
        """
        groups = [g for g in self._totals if len(g) > 1 and sum(g) > 0]
        shares = [variance(group) / mean(group) ** 2 for group in groups]
        return sqrt(mean(shares)) if shares else 0.0

    def _square(self, gate: Gate) -> float:
        count = self._backwards
        apart, together = float(self._apart[gate]) / count, self._together[gate] / count
        scatters = not self._is_wide or _SCATTER[0] * apart <= together <= _SCATTER[1] * apart
        return apart if scatters else together

    # -- gates -----------------------------------------------------------------------------------

    def _gated(self, graph: PlannedGraph, run: GraphRun, node: Node, value: Any) -> Any:
        if graph.roots[node] != (node,):
            return value
        leaves, spec = pytree.tree_flatten(value)
        errors = pytree.tree_leaves(self._errors(graph, run, node, value))
        for index, (leaf, error) in enumerate(zip(leaves, errors, strict=True)):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.float32:
                leaves[index] = self._gate(node, leaf, error)
        return pytree.tree_unflatten(leaves, spec)

    def _read(self, graph: PlannedGraph, reader: Node, read: Node, value: Any) -> Any:
        """Returns what a node reads, with a gate where others read the same tensor."""
        gate = (graph.roots[read][0], reader)
        if gate not in graph.reads or not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        error = (value.detach().to(self._low_dtype).float() - value.detach()).nan_to_num(0, 0, 0)
        return self._gate(gate, value, error)

    def _gate(self, gate: Gate, value: Tensor, error: Tensor) -> Tensor:
        token = self._token.to(value.device)
        found: Tensor = _Gate.apply(token, value, error, lambda product: self._note(gate, product))
        return found

    def _note(self, gate: Gate, product: Tensor) -> None:
        product = product.nan_to_num(0, 0, 0)
        self._sums[gate] = self._sums.get(gate, 0.0) + product.sum(dtype=torch.float64)
        square = product.double().square().sum()
        self._apart[gate] = self._apart[gate] + square
        if isinstance(gate, Node):
            self._total = self._total + square

    @torch.no_grad()
    def _errors(self, graph: PlannedGraph, run: GraphRun, node: Node, value: Any) -> Any:
        """Returns what low precision would add to each tensor that a node makes."""
        computed = self._computed_low(graph, run, node)

        def error(leaf: Any, low: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dtype != torch.float32:
                return None
            finite = leaf.isfinite()
            found = leaf.to(self._low_dtype).float() - leaf if low is None else low
            found = found.masked_fill(~finite, 0)
            if node in run.unwritten:  # says nothing; what is written there later may still be rounded
                return found.nan_to_num(0, 0, 0)
            if not found.isfinite().all() and node not in graph.problem.out_of_range:
                self._beyond.add(node)
            found = found.nan_to_num(0, 0, 0)
            norm = leaf.masked_fill(~finite, 0).double().norm()
            self._own[node] += float((found.double().norm() / norm.clamp(min=1e-30)).square())
            return found

        leaves, spec = pytree.tree_flatten(value)
        lows = computed if computed is not None else [None] * len(leaves)
        return pytree.tree_unflatten([error(*pair) for pair in zip(leaves, lows, strict=True)], spec)

    def _computed_low(self, graph: PlannedGraph, run: GraphRun, node: Node) -> list[Any] | None:
        """Returns the error of the low kernel for rounded inputs; None where only rounding counts."""
        variable = graph.problem.variables.get(node)
        if variable is None or variable.pinned is FP32 or not isinstance(node.target, OpOverload):
            return None
        if is_random(node) or written_args(node):
            return None
        narrowed = {o.tensor for o in graph.problem.facts[node].operands if o.rule in DECIDED}

        def low(tensor: Node) -> Any:
            value = run.values[tensor]
            return value.to(self._low_dtype) if tensor in narrowed else value

        def wide(tensor: Node) -> Any:
            return low(tensor).float() if tensor in narrowed else run.values[tensor]

        try:
            found = node.target(*map_arg(node.args, low), **map_arg(node.kwargs, low))
        except RuntimeError:  # the kernel wants all its floats in one dtype, and some are not to be narrowed
            return None
        exact = node.target(*map_arg(node.args, wide), **map_arg(node.kwargs, wide))
        pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(exact), strict=True)
        return [_difference(a, b) for a, b in pairs]


def _difference(low: Any, exact: Any) -> Tensor | None:
    if not isinstance(exact, Tensor) or not exact.is_floating_point():
        return None
    return (low.float() - exact.float()).masked_fill(~exact.isfinite(), 0)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
