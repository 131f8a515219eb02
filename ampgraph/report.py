"""An explanation as text and as Markdown: its sections, and the answers to "why"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .graph_view import human_bytes, short_line
from .rows import CastRow, NodeRow, Totals
from .tables import Column, Section, printable

if TYPE_CHECKING:
    from .explanation import Explanation

# Modules deeper than this are left out of the text; `Explanation.modules` has them all.
MODULE_DEPTH = 2
# As many nodes are named for one piece of advice, and as many links of a chain are shown.
NAMED = 3
LINKS = 12

NODES = (
    Column("node", 30, keep="end"),
    Column("op", 30, keep="end"),
    Column("module", 34, keep="end"),
    Column("dtype", 9),
    Column("by", 11),
    Column("reason", 64),
    Column("line", 36, keep="end"),
)
CASTS = (
    Column("tensor", 38, keep="end"),
    Column("from", 8),
    Column("to", 8),
    Column("size", 10, right=True),
    Column("kind", 10),
    Column("used by", 34),
    Column("because", 64),
)
TOTALS = (
    Column("", 20),
    Column("casts", 10, right=True),
    Column("cast bytes", 12, right=True),
    Column("of activations", 14, right=True),
    Column("of parameters", 14, right=True),
    Column("modelled traffic", 16, right=True),
)
MODULES = (
    Column("module", 40, keep="end"),
    Column("ops", 6, right=True),
    Column("low", 6, right=True),
    Column("share", 6, right=True),
    Column("casts", 6, right=True),
    Column("cast bytes", 12, right=True),
)
ADVICE = (
    Column("advice", 78),
    Column("nodes", 6, right=True),
    Column("where", 60),
)


def text(explanation: Explanation, casts_only: bool = False, peers: bool = False) -> str:
    """Returns the report as plain text; see `Explanation.table`."""
    parts = [_title(explanation), *(s.text() for s in _sections(explanation, casts_only, peers))]
    parts += [f"== {name} ==\n{text(body, casts_only)}" for name, body in explanation.bodies.items()]
    return "\n\n".join(parts)


def markdown(explanation: Explanation, casts_only: bool = False, peers: bool = False, body: str = "") -> str:
    """Returns the report as Markdown, see `Explanation.to_markdown`; ``body`` goes before the title."""
    title, *policy = _title(explanation).splitlines()
    parts = [f"# {body}{title}".replace("<", "&lt;"), *(f"`{line}`" for line in policy)]
    parts += [s.markdown() for s in _sections(explanation, casts_only, peers)]
    parts += [markdown(b, casts_only, body=f"{name}: ") for name, b in explanation.bodies.items()]
    return "\n\n".join(parts)


def _title(explanation: Explanation) -> str:
    counts = Counter(n.dtype for n in explanation.nodes if n.kind == "op")
    ops = ", ".join(f"{count} {dtype or 'other'}" for dtype, count in counts.most_common())
    where = "" if explanation.graph in ("", "1 of 1") else f" (graph {explanation.graph})"
    policy = f"\n{explanation.policy}" if explanation.policy else ""
    head = f"{explanation.model}{where}: {sum(counts.values())} ops ({ops}), {len(explanation.casts)} casts"
    return printable(head + policy)


def _sections(explanation: Explanation, casts_only: bool, peers: bool) -> Iterator[Section]:
    if not casts_only:
        yield _nodes(explanation.nodes)
    yield casts_section("Casts", explanation.casts)
    if not casts_only:
        yield _operators(explanation)
        yield from _modules(explanation)
        yield from _advice(explanation)
    yield _totals(explanation, peers)


def _nodes(nodes: Sequence[NodeRow]) -> Section:
    shown = [n for n in nodes if n.kind in ("input", "op") and "[" not in n.label]
    left_out = sum(n.kind == "parameter" for n in nodes)
    rows = [(n.label, n.op or n.kind, n.module, n.dtype, n.by, _reason(n), short_line(n.line)) for n in shown]
    notes = (f"({left_out} parameters and buffers not shown)",) if left_out else ()
    return Section("Nodes", NODES, rows, notes, empty="no ops")


def _reason(node: NodeRow) -> str:
    return node.reason + (f"; widens {', '.join(node.widens)} in the kernel" if node.widens else "")


def casts_section(title: str, casts: Sequence[CastRow]) -> Section:
    """Returns a table of casts."""
    rows = [
        (
            c.tensor,
            c.src,
            c.dst,
            human_bytes(c.bytes),
            "parameter" if c.is_parameter else "activation",
            ", ".join(c.users),
            c.dst_reason if c.is_parameter else f"{c.dst_reason}; it is {c.src_reason}",
        )
        for c in casts
    ]
    return Section(title, CASTS, rows, empty="no casts")


def _operators(explanation: Explanation) -> Section:
    dtypes = (explanation.low_dtype, "float32")
    columns = (Column("operator", 44), *(Column(d, 9, right=True) for d in dtypes), Column("other", 6, True))
    rows = []
    for name, counts in explanation.operators.items():
        known = [counts.get(d, 0) for d in dtypes]
        rows.append((name, *(str(n or "") for n in (*known, sum(counts.values()) - sum(known)))))
    return Section("Operators by dtype", columns, rows, empty="no operators")


def _modules(explanation: Explanation) -> Iterator[Section]:
    modules = explanation.modules
    shown = [m for m in modules if m.path.count(".") < MODULE_DEPTH]
    if not shown:
        return
    rows = [
        (
            m.path,
            str(m.ops),
            str(m.low),
            f"{m.low / m.ops:.0%}" if m.ops else "",
            str(m.casts),
            human_bytes(m.cast_bytes),
        )
        for m in shown
    ]
    left_out = len(modules) - len(shown)
    yield Section("Modules", MODULES, rows, (f"({left_out} inner modules not shown)",) if left_out else ())


def _advice(explanation: Explanation) -> Iterator[Section]:
    groups: dict[str, list[str]] = {}
    for advice in explanation.advice:
        where = advice.node + (f" ({advice.module})" if advice.module else "")
        groups.setdefault(advice.text, []).append(where)
    rows = [(what, str(len(n)) if n[0] else "", _named(n)) for what, n in groups.items()]
    if rows:
        yield Section("Advice", ADVICE, rows)


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (", .." if len(names) > NAMED else "")


def _totals(explanation: Explanation, peers: bool) -> Section:
    rows = [("this graph", explanation.totals)]
    rows += [("autocast rule" if k == "autocast" else k, v) for k, v in explanation.baselines.items()]
    if peers:
        rows += [(f"{name} lists", totals) for name, totals in explanation.peers().items()]
    notes: tuple[str, ...] = (
        f"widened inside kernels, without a cast: {explanation.widened}",
        f"placement: {'proven optimal' if explanation.optimal else 'not proven optimal'}",
    )
    if explanation.keeps_low_copies and explanation.totals.parameter_casts:
        notes += ("casts of parameters: once per update, into low copies; counted here for every forward",)
    return Section("Totals", TOTALS, [_total_cells(name, total) for name, total in rows], notes)


def _total_cells(name: str, total: Totals) -> tuple[str, ...]:
    sizes = (total.cast_bytes, total.activation_cast_bytes, total.parameter_cast_bytes, total.traffic)
    return (name, str(total.casts), *map(human_bytes, sizes))


def why_cast(cast: CastRow) -> str:
    """Returns why a cast is there."""
    return printable(_why_cast(cast))


def _why_cast(cast: CastRow) -> str:
    kind = ("clamped " if cast.clamped else "") + ("parameter" if cast.is_parameter else "activation")
    return "\n".join(
        (
            f"{cast.name}: casts {kind} {cast.tensor} from {cast.src} to {cast.dst}, {cast.bytes} bytes",
            f"  {cast.tensor} is {cast.src}: {cast.src_reason}",
            f"  {', '.join(cast.users)} needs {cast.dst}: {cast.dst_reason}",
        )
    )


def why_node(node: NodeRow, chain: Sequence[NodeRow], casts: Sequence[CastRow]) -> str:
    """Returns why a node has its dtype.

    Args:
        node: The node.
        chain: The node and what it has its dtype from, see `Explanation.chain`.
        casts: The inserted casts that it reads.
    """
    what = (node.op or node.kind) + (f" in module {node.module!r}" if node.module else "")
    lines = [f"{node.label}: {what}, {node.dtype} {node.shape}", f"  decided by {node.by}: {node.reason}"]
    lines += [_link(n) for n in chain[1 : LINKS + 1]]
    if len(chain) > LINKS + 1:
        lines += [f"    .. {len(chain) - LINKS - 1} more, the last:", _link(chain[-1])]
    lines += [f"  reads {c.tensor} cast from {c.src} to {c.dst}" for c in casts]
    lines += [f"  widens {name} inside the kernel" for name in node.widens]
    if node.line:
        lines.append(f"  at {node.line}")
    return printable("\n".join(lines))


def _link(node: NodeRow) -> str:
    return f"    {node.label} is {node.dtype}, decided by {node.by}: {node.reason}"
