"""One model under several policies, in one table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..policy.policy import Policy
from .explanation import Explanation
from .graph_view import human_bytes
from .rows import Totals
from .tables import Column, Section

_COLUMNS = (
    Column("policy", 32),
    Column("casts", 6, right=True),
    Column("cast bytes", 12, right=True),
    Column("of activations", 14, right=True),
    Column("modelled traffic", 16, right=True),
    Column("of fp32", 8, right=True),
    Column("ops low", 8, right=True),
)
_NOTE = "under the autocast rule a cast counts at each use, as torch.autocast makes it"


@dataclass(frozen=True)
class PolicyRow:
    """The cost of a model under one policy.

    Attributes:
        name: The user's name for the policy.
        policy: Its repr.
        totals: The counts and bytes.
        low_share: Share of the ops that run low, from 0 to 1.
    """

    name: str
    policy: str
    totals: Totals
    low_share: float


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_policies`; ``str()`` is a table.

    Attributes:
        model: Class name of the model.
        rows: Float32 first, then one row for each policy.
    """

    model: str
    rows: tuple[PolicyRow, ...]

    def __str__(self) -> str:
        return f"{self.model}\n\n{self._section().text()}"

    def to_markdown(self) -> str:
        """Returns the table as Markdown."""
        return f"# {self.model}\n\n{self._section().markdown()}"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings and numbers; bytes are integers."""
        return json.loads(json.dumps(asdict(self)))

    def to_json(self, indent: int | None = 2) -> str:
        """Returns `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def _section(self) -> Section:
        fp32 = self.rows[0].totals.traffic
        rows = [
            (
                row.name,
                str(row.totals.casts),
                human_bytes(row.totals.cast_bytes),
                human_bytes(row.totals.activation_cast_bytes),
                human_bytes(row.totals.traffic),
                f"{row.totals.traffic / fp32:.0%}" if fp32 else "",
                f"{row.low_share:.0%}",
            )
            for row in self.rows
        ]
        return Section("Policies", _COLUMNS, rows, (_NOTE,))


def compare_policies(explanation: Explanation, policies: Mapping[str, Policy]) -> Comparison:
    """Plans an explained graph under each policy.

    Args:
        explanation: The explanation of the model, under any policy.
        policies: The policies by the names that the table shows.

    Raises:
        PolicyError: A policy's rules do not fit the model.
    """
    rows = [PolicyRow("fp32", "", explanation.baselines["fp32"], 0.0)]
    for name, policy in policies.items():
        planned = explanation.under(policy)
        totals = planned.baselines["autocast"] if policy.placement == "autocast" else planned.totals
        rows.append(PolicyRow(name, planned.policy, totals, planned.low_share))
    return Comparison(explanation.model, tuple(rows))
