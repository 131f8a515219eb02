"""The frozen result of analysis: a dtype and a reason for every node, and every cast with its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Decision:
    """The dtype of one node and the reason.

    Attributes:
        dtype: The node's floating dtype, or None if no pass may change it (integers, bool, float64 ...).
        by: The rule that decided: ``"source"``, ``"user cast"``, ``"guard"``, ``"rule"``, ``"hazard"``,
            ``"list"``, ``"range"``, ``"kernel"``, ``"alias"``, ``"what if"``, ``"propagation"``
            or ``"placement"``.
        reason: One sentence for the user.
        op_class: ``"white"``, ``"black"``, ``"gray"``, ``"clear"`` or None.
        because: Nodes whose dtype is the reason, nearest first.
    """

    dtype: torch.dtype | None
    by: str
    reason: str
    op_class: str | None = None
    because: tuple[str, ...] = ()


class Use(NamedTuple):
    """One place where a node reads a tensor: the consumer's name and the path into its arguments."""

    node: str
    path: tuple[int | str, ...]


@dataclass(frozen=True)
class Cast:
    """One cast to insert: ``tensor`` from ``src`` to ``dst``, shared by all ``uses``.

    Attributes:
        bytes: Bytes the cast reads plus bytes it writes; symbolic sizes count with their hints.
        is_parameter: Whether the tensor is a parameter, buffer or constant (or a view of one).
        reason: The reason for each of the two dtypes.
        saturates: Whether the tensor is an additive mask with values outside the low range, which are
            clamped into it before the cast.
        keeps_infinity: Whether such a mask may hold -inf, which the clamp leaves as it is.
    """

    tensor: str
    src: torch.dtype
    dst: torch.dtype
    uses: tuple[Use, ...]
    bytes: int
    is_parameter: bool
    reason: str
    saturates: bool = False
    keeps_infinity: bool = False


@dataclass(frozen=True)
class Cost:
    """Modelled bytes of a labelling.

    Attributes:
        traffic: Bytes that an eager forward reads and writes.
        cast_bytes: The share of casts.
        casts: Number of casts.
        activation_cast_bytes: The share of casts of activations.
        activation_casts: Number of casts of activations.
        backward: Bytes that an eager backward reads and writes.
        saved: Bytes that an eager forward saves for the backward.
        fused_forward: Bytes of a forward in fused kernels.
        fused_backward: Bytes of a backward in fused kernels.
        fused_saved: Bytes saved between them.
    """

    traffic: int = 0
    cast_bytes: int = 0
    casts: int = 0
    activation_cast_bytes: int = 0
    activation_casts: int = 0
    backward: int = 0
    saved: int = 0
    fused_forward: int = 0
    fused_backward: int = 0
    fused_saved: int = 0

    @property
    def step(self) -> int:
        """Bytes of an eager forward and backward."""
        return self.traffic + self.backward

    @property
    def fused(self) -> int:
        """Bytes of a forward and backward in fused kernels."""
        return self.fused_forward + self.fused_backward


@dataclass(frozen=True)
class Plan:
    """The decision for each node, the resulting casts, and their cost compared with the baselines.

    Attributes:
        decisions: One entry for every node of the normalized graph, in graph order.
        casts: The casts to insert, in graph order.
        widened: Uses that read a low tensor and compute in float32 inside the kernel, without a cast.
        dtype_args: Node name to the argument that makes its kernel compute in float32.
        low_dtype: The policy's low dtype.
        cost: Modelled bytes of this plan.
        baselines: The same figures for ``"fp32"`` and ``"autocast"`` on the same graph and lists.
        gap: Upper bound on the distance to the minimum of the policy's objective, in bytes: 0 for a proven
            minimum, None if no bound is known (the autocast rule, which minimises nothing).
        saved_low: Norms whose backward reads their normalized values in the low dtype: the nodes that return
            the results.
        saved_softmax: Softmax nodes whose backward reads their probabilities in the low dtype.
        wide_gradients: Matrix products whose kernels give the gradients of their weights in float32.
    """

    decisions: Mapping[str, Decision]
    casts: tuple[Cast, ...]
    widened: tuple[Use, ...]
    dtype_args: Mapping[str, str]
    low_dtype: torch.dtype
    cost: Cost
    baselines: Mapping[str, Cost] = field(default_factory=dict)
    gap: int | None = 0
    saved_low: tuple[str, ...] = ()
    saved_softmax: tuple[str, ...] = ()
    wide_gradients: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("decisions", "dtype_args", "baselines"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def optimal(self) -> bool:
        """Whether the placement is proven minimal for the policy's objective."""
        return self.gap == 0

    def explained(self, nodes: Iterable[str], more: str) -> dict[str, Decision]:
        """Returns the decisions, with more in the reasons of some nodes."""
        given = {name: self.decisions[name] for name in nodes}
        added = {name: replace(d, reason=f"{d.reason}; {more}") for name, d in given.items()}
        return {**self.decisions, **added}

    def __getitem__(self, node: str) -> Decision:
        return self.decisions[node]

    def __reduce__(self):
        args = (
            dict(self.decisions),
            self.casts,
            self.widened,
            dict(self.dtype_args),
            self.low_dtype,
            self.cost,
        )
        chosen = self.saved_low, self.saved_softmax, self.wide_gradients
        return (Plan, (*args, dict(self.baselines), self.gap, *chosen))

    def __deepcopy__(self, memo: dict) -> Plan:
        return self
