"""`ExplanationData`: the content of a report as rows of plain values, for text and differences."""

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
        graph: The position among the model's graphs, ``"1 of 1"``, or ``""``.
        bodies: The bodies of its higher-order ops (``torch.cond`` ...), each with a separate explanation.
            They are not in the totals, because a graph does not determine how often each body runs;
            ``body_casts`` and ``body_low_ops`` count them once each.
        nodes: Every node but the inserted casts, in graph order.
        casts: Every inserted cast, in graph order.
        totals: Counts of this graph.
        baselines: The same counts for ``"autocast"`` (the rule of ``torch.autocast`` on the same graph and
            lists) and ``"fp32"``, from the cost model.
        widened: Number of operands that float32 kernels widen, without a cast.
        gap: Upper bound on the distance to the minimum of the objective, in bytes; see `Plan`.
        advice: Hardware advice for low ops.
        keeps_low_copies: Whether a converted model casts its parameters once per update (shadow weights). The
            totals count these casts in every forward.
        coverage: Share of the model inside its graphs, just in time; None ahead of time.
        own_casts: Casts of the model's code that change a dtype in this graph. In float32 many do nothing
            (``x.to(torch.float32)`` in a norm). They are ops, in the traffic and not among the casts.
        own_cast_bytes: Bytes that these read and write.
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
    own_casts: int = 0
    own_cast_bytes: int = 0

    @property
    def optimal(self) -> bool:
        """Whether the placement is proven minimal for the policy's objective."""
        return self.gap == 0

    @property
    def modules(self) -> tuple[ModuleRow, ...]:
        """Counts of each module, in the order of execution."""
        return module_rows(self.nodes, self.casts, self.low_dtype)

    @property
    def operators(self) -> dict[str, dict[str, int]]:
        """Number of calls of each operator in each dtype; inserted casts are ``"cast (inserted)"``."""
        return operator_counts(self.nodes, self.casts)

    @property
    def body_casts(self) -> int:
        """Number of casts in the bodies, and in bodies inside them."""
        return sum(len(body.casts) + body.body_casts for body in self.bodies.values())

    @property
    def body_low_ops(self) -> int:
        """Number of low ops in the bodies, and in bodies inside them."""
        return sum(body._low_ops() + body.body_low_ops for body in self.bodies.values())

    def _low_ops(self) -> int:
        return sum(n.is_float_op and n.is_low(self.low_dtype) for n in self.nodes)

    @property
    def low_share(self) -> float:
        """Share of the ops with a decided dtype that run low, from 0 to 1."""
        ops = [n for n in self.nodes if n.is_float_op]
        return sum(n.is_low(self.low_dtype) for n in ops) / len(ops) if ops else 0.0
