"""The difference between two plans of one model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .explanation_data import ExplanationData
from .graph_view import human_bytes
from .rows import CastRow, NodeRow, Totals
from .sections import casts_section
from .tables import Column, Section

# The text shows at most this many rows of each table; Markdown and the dict have all rows.
LISTED = 20

_NODES = (
    Column("node", 34, keep="end"),
    Column("op", 30, keep="end"),
    Column("module", 34, keep="end"),
    Column("before", 9),
    Column("after", 9),
    Column("reason after", 64),
)
_TOTALS = (Column("", 24), *(Column(title, 12, right=True) for title in ("before", "after", "change")))


@dataclass(frozen=True)
class DtypeChange:
    """A node whose dtype differs between the two plans.

    Attributes:
        node: The node's label.
        op: ``"aten.gelu"``.
        module: Path of its innermost module.
        before: Its dtype in the first plan.
        after: Its dtype in the second.
        reason: The deciding rule and the reason in the second plan.
    """

    node: str
    op: str
    module: str
    before: str
    after: str
    reason: str


@dataclass(frozen=True)
class Difference:
    """The result of `Explanation.diff` and `flip`. ``str()`` is a table. False if the plans are equal.

    Attributes:
        policies: The reprs of both policies.
        dtypes: Nodes whose dtype differs, in graph order.
        appeared: Casts that only the second plan has.
        vanished: Casts that only the first has.
        only_before: Labels of ops that only the first graph has.
        only_after: Labels of ops that only the second has.
        totals: Both plans' totals.
        low_shares: Share of the ops that run low, for each plan.
    """

    policies: tuple[str, str]
    dtypes: tuple[DtypeChange, ...]
    appeared: tuple[CastRow, ...]
    vanished: tuple[CastRow, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    totals: tuple[Totals, Totals]
    low_shares: tuple[float, float]

    def __bool__(self) -> bool:
        return bool(self.dtypes or self.appeared or self.vanished or self.only_before or self.only_after)

    def __str__(self) -> str:
        return "\n\n".join((self._title(), *self._only(), *(s.text(LISTED) for s in self._sections())))

    @property
    def casts(self) -> int:
        """Casts of the second plan minus casts of the first."""
        return self.totals[1].casts - self.totals[0].casts

    @property
    def cast_bytes(self) -> int:
        """Bytes that casts move in the second plan minus those of the first."""
        return self.totals[1].cast_bytes - self.totals[0].cast_bytes

    @property
    def traffic(self) -> int:
        """Modelled bytes that kernels and casts move in the second plan minus those of the first."""
        return self.totals[1].traffic - self.totals[0].traffic

    def costs(self) -> str:
        """Returns the additional cost of the second plan, in one line."""
        return (
            f"{self.casts:+d} casts, {_signed(self.cast_bytes)} of casts, "
            f"{_signed(self.traffic)} of modelled traffic"
        )

    def to_markdown(self) -> str:
        """Returns the tables as Markdown."""
        return "\n\n".join((f"# {self._title()}", *self._only(), *(s.markdown() for s in self._sections())))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings, integers and floats; bytes are integers."""
        return json.loads(json.dumps(asdict(self)))

    def to_json(self, indent: int | None = 2) -> str:
        """Returns `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def _title(self) -> str:
        if not self:
            return "no difference"
        counts = {
            "nodes in another dtype": len(self.dtypes),
            "casts appeared": len(self.appeared),
            "casts vanished": len(self.vanished),
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items())

    def _only(self) -> list[str]:
        sides = (("first", self.only_before), ("second", self.only_after))
        return [f"only in the {which}: {', '.join(names)}" for which, names in sides if names]

    def _sections(self) -> list[Section]:
        sections = []
        if self.dtypes:
            rows = [(c.node, c.op, c.module, c.before, c.after, c.reason) for c in self.dtypes]
            sections.append(Section("Nodes in another dtype", _NODES, rows))
        if self.appeared:
            sections.append(_marked(casts_section("Casts that appeared", self.appeared), "+"))
        if self.vanished:
            sections.append(_marked(casts_section("Casts that vanished", self.vanished), "-"))
        return [*sections, self._totals()]

    def _totals(self) -> Section:
        before, after = self.totals
        sizes = [
            ("cast bytes", before.cast_bytes, after.cast_bytes),
            ("of activations", before.activation_cast_bytes, after.activation_cast_bytes),
            ("modelled traffic", before.traffic, after.traffic),
        ]
        rows = [("casts", str(before.casts), str(after.casts), f"{after.casts - before.casts:+d}")]
        rows += [(name, human_bytes(a), human_bytes(b), _signed(b - a)) for name, a, b in sizes]
        low = self.low_shares
        rows.append(
            ("ops that run low", f"{low[0]:.0%}", f"{low[1]:.0%}", f"{100 * (low[1] - low[0]):+.0f} %")
        )
        return Section("Totals", _TOTALS, rows)


def difference(before: ExplanationData, after: ExplanationData) -> Difference:
    """Compares two plans by node and by cast, without the bodies of higher-order ops."""
    first, second = ({n.name: n for n in e.nodes if n.kind == "op"} for e in (before, after))
    changed = [(first[name], second[name]) for name in first if name in second]
    return Difference(
        policies=(before.policy, after.policy),
        dtypes=tuple(_change(a, b) for a, b in changed if a.dtype != b.dtype),
        appeared=_without(after.casts, before.casts),
        vanished=_without(before.casts, after.casts),
        only_before=tuple(row.label for name, row in first.items() if name not in second),
        only_after=tuple(row.label for name, row in second.items() if name not in first),
        totals=(before.totals, after.totals),
        low_shares=(before.low_share, after.low_share),
    )


def _change(before: NodeRow, after: NodeRow) -> DtypeChange:
    reason = f"{after.by}: {after.reason}"
    return DtypeChange(after.label, after.op, after.module, before.dtype, after.dtype, reason)


def _without(casts: Sequence[CastRow], others: Sequence[CastRow]) -> tuple[CastRow, ...]:
    """Returns the casts that ``others`` lacks: a different tensor or different dtypes."""
    left = Counter(map(_identity, others))
    missing = []
    for cast in casts:
        if left[_identity(cast)] == 0:
            missing.append(cast)
        else:
            left[_identity(cast)] -= 1
    return tuple(missing)


def _identity(cast: CastRow) -> tuple[str, str, str]:
    return cast.tensor, cast.src, cast.dst


def _marked(section: Section, mark: str) -> Section:
    rows = [(f"{mark} {row[0]}", *row[1:]) for row in section.rows]
    return Section(section.title, section.columns, rows)


def _signed(count: int) -> str:
    return ("+" if count >= 0 else "") + human_bytes(count)
