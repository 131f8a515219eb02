"""`ExplanationData`: what a report says, as rows of plain values; text and differences read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..runtime.coverage import Coverage
from .advice import Advice
from .rows import CastRow, ModuleRow, NodeRow, Totals, module_rows, operator_counts


@dataclass(frozen=True)
class ExplanationData:
    """The rows and counts of one graph.

    Attributes:
        model: Class name of the converted model.
        policy: The policy's repr.
        low_dtype: ``"float16"`` or ``"bfloat16"``.
        graph: Which of the model's graphs this is, ``"1 of 1"``, or ``""``.
        bodies: The bodies of its higher-order ops (``torch.cond`` ...), each explained by itself: which of
            them run, and how often, a graph does not tell, so they are not in the totals.
        nodes: Every node but the inserted casts, in graph order.
        casts: Every inserted cast, in graph order.
        totals: Counts of this graph.
        baselines: The same counts for ``"autocast"`` (the rule of ``torch.autocast`` on the same graph and
            lists) and ``"fp32"``, as the cost model has them.
        widened: How many operands float32 kernels widen themselves, without a cast.
        gap: How many bytes the placement is above the least that the objective allows, at most; see `Plan`.
        advice: Rules of hardware that low ops miss.
        keeps_low_copies: Whether a converted model casts its parameters once per update (shadow weights) and
            not, as the totals count them, in every forward.
        coverage: How much of a model captured just in time its graphs hold; None ahead of time.
    """

    model: str
    policy: str
    low_dtype: str
    graph: str
    bodies: Mapping[str, ExplanationData]
    nodes: tuple[NodeRow, ...]
    casts: tuple[CastRow, ...]
    totals: Totals
    baselines: dict[str, Totals]
    widened: int
    gap: int | None
    advice: tuple[Advice, ...] = ()
    keeps_low_copies: bool = False
    coverage: Coverage | None = None

    @property
    def optimal(self) -> bool:
        """Whether the placement is proven minimal for the policy's objective."""
        return self.gap == 0

    @property
    def modules(self) -> tuple[ModuleRow, ...]:
        """What is inside each module, in the order in which they run."""
        return module_rows(self.nodes, self.casts, self.low_dtype)

    @property
    def operators(self) -> dict[str, dict[str, int]]:
        """How often each operator runs in each dtype; inserted casts are ``"cast (inserted)"``."""
        return operator_counts(self.nodes, self.casts)

    @property
    def low_share(self) -> float:
        """How much of the ops whose dtype ampgraph decides runs low, from 0 to 1."""
        ops = [n for n in self.nodes if n.is_float_op]
        return sum(n.is_low(self.low_dtype) for n in ops) / len(ops) if ops else 0.0
