"""An explanation as text and as Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..errors import AmpGraphError
from .explanation_data import ExplanationData
from .layers import Repeat, repeats
from .rows import CastRow, Totals
from .sections import (
    advice_sections,
    casts_section,
    module_sections,
    nodes_section,
    operators_section,
    shares_section,
    steps_section,
    totals_section,
)
from .tables import Section, printable

# In graphs with more nodes, repeated layers are shown once.
LARGE = 200


@dataclass(frozen=True)
class Extent:
    """The extent of a report; see `Explanation.table` for the fields."""

    casts_only: bool = False
    peers: Mapping[str, Totals] = field(default_factory=dict)
    shares: Mapping[str, Totals] = field(default_factory=dict)
    top: int | None = None
    all_layers: bool | None = None

    def __post_init__(self) -> None:
        if self.top is not None and (not isinstance(self.top, int) or self.top < 1):
            raise AmpGraphError(f"top={self.top!r}: expected a number of rows, 1 or more, or None.")

    def of_body(self) -> Extent:
        """Returns the extent for the body of a higher-order op, which has no peers."""
        return Extent(self.casts_only, {}, {}, self.top, self.all_layers)

    def repeats(self, explanation: ExplanationData) -> tuple[Repeat, ...]:
        """Returns the layers that are shown once."""
        shown = (len(explanation.nodes) <= LARGE) if self.all_layers is None else self.all_layers
        return () if shown else repeated_layers(explanation)


def repeated_layers(explanation: ExplanationData) -> tuple[Repeat, ...]:
    """Returns the layers whose nodes and casts are equal except for names."""
    nodes = [
        (n.module, (n.op, n.dtype, n.shape, n.op_class, n.by, _nameless(n.reason), n.line, len(n.widens)))
        for n in explanation.nodes
        if n.kind != "parameter"
    ]
    casts = [
        (c.module, (c.src, c.dst, c.shape, c.is_parameter, c.clamped, len(c.users), *_reasons(c)))
        for c in explanation.casts
    ]
    return repeats([*nodes, *casts])


def _reasons(cast: CastRow) -> tuple[str, str]:
    return _nameless(cast.src_reason), _nameless(cast.dst_reason)


def _nameless(reason: str) -> str:
    return re.sub(r"'[^']*'", "''", reason)


def text(explanation: ExplanationData, extent: Extent) -> str:
    """Returns the report as plain text; see `Explanation.table`."""
    parts = [
        *_coverage(explanation),
        _title(explanation),
        *(s.text() for s in _sections(explanation, extent)),
    ]
    inner = extent.of_body()
    parts += [f"== {name} ==\n{text(body, inner)}" for name, body in explanation.bodies.items()]
    return "\n\n".join(parts)


def markdown(explanation: ExplanationData, extent: Extent, body: str = "") -> str:
    """Returns the report as Markdown, see `Explanation.to_markdown`; ``body`` goes before the title."""
    title, *policy = _title(explanation).splitlines()
    parts = [
        f"# {body}{title}".replace("<", "&lt;"),
        *_coverage(explanation),
        *(f"`{line}`" for line in policy),
    ]
    parts += [s.markdown() for s in _sections(explanation, extent)]
    parts += [markdown(b, extent.of_body(), f"{name}: ") for name, b in explanation.bodies.items()]
    return "\n\n".join(parts)


def _coverage(explanation: ExplanationData) -> Iterator[str]:
    if explanation.coverage is not None:
        yield printable(str(explanation.coverage))


def _title(explanation: ExplanationData) -> str:
    counts = Counter(n.dtype for n in explanation.nodes if n.kind == "op")
    ops = ", ".join(f"{count} {dtype or 'other'}" for dtype, count in counts.most_common())
    where = "" if explanation.graph in ("", "1 of 1") else f" (graph {explanation.graph})"
    policy = f"\n{explanation.policy}" if explanation.policy else ""
    head = f"{explanation.model}{where}: {sum(counts.values())} ops ({ops}), {len(explanation.casts)} casts"
    return printable(head + policy + _in_bodies(explanation))


def _in_bodies(explanation: ExplanationData) -> str:
    if not explanation.bodies:
        return ""
    counts = f"{explanation.body_casts} casts and {explanation.body_low_ops} low ops"
    return (
        f"\nnot counted: {counts} in {len(explanation.bodies)} bodies (torch.cond, loops ..), which are "
        "planned separately and reported below, and in explanation.bodies"
    )


def _sections(explanation: ExplanationData, extent: Extent) -> Iterator[Section]:
    once, top = extent.repeats(explanation), extent.top
    if not extent.casts_only:
        yield nodes_section(explanation, once, top)
    yield casts_section("Casts", explanation.casts, once, top)
    if not extent.casts_only:
        yield operators_section(explanation, top)
        yield from module_sections(explanation, once, top)
        yield from advice_sections(explanation)
    yield totals_section(explanation, extent.peers)
    if not extent.casts_only:
        yield steps_section(explanation)
    if extent.shares:
        yield shares_section(extent.shares)
