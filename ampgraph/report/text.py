"""An explanation as text and as Markdown: its sections, and the answers to "why"."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import AmpGraphError
from .explanation_data import ExplanationData
from .graph_view import human_bytes, short_line
from .layers import Repeat, is_repeated, repeats, times
from .rows import CastRow, NodeRow, Totals
from .tables import Column, Section, printable

# The text omits modules deeper than this; `Explanation.modules` has them all.
MODULE_DEPTH = 2
# In graphs with more nodes, repeated layers are shown once.
LARGE = 200
# Limits on the nodes named for one piece of advice and on the links of a chain.
NAMED = 3
LINKS = 12

NODES = (
    Column("node", 30, keep="end"),
    Column("times", 5, right=True),
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
    Column("times", 5, right=True),
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
STEPS = (
    Column("", 20),
    Column("eager forward", 14, right=True),
    Column("backward", 10, right=True),
    Column("saved", 10, right=True),
    Column("fused forward", 14, right=True),
    Column("backward", 10, right=True),
    Column("saved", 10, right=True),
)
MODULES = (
    Column("module", 56, keep="end"),
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
    return printable(head + policy)


def _sections(explanation: ExplanationData, extent: Extent) -> Iterator[Section]:
    once, top = extent.repeats(explanation), extent.top
    if not extent.casts_only:
        yield _nodes(explanation, once, top)
    yield casts_section("Casts", explanation.casts, once, top)
    if not extent.casts_only:
        yield _operators(explanation, top)
        yield from _modules(explanation, once, top)
        yield from _advice(explanation)
    yield _totals(explanation, extent.peers)
    if not extent.casts_only:
        yield _steps(explanation)
    if extent.shares:
        yield _shares(extent.shares)


def _nodes(explanation: ExplanationData, once: Sequence[Repeat], top: int | None) -> Section:
    nodes = explanation.nodes
    shown = [n for n in nodes if n.kind in ("input", "op") and "[" not in n.label]
    shown = [n for n in shown if not is_repeated(n.module, once)]
    notes = list(_said_once(once))
    if top is not None:
        size = {cast.name: cast.bytes for cast in explanation.casts}
        read = {n.name: times(n.module, once) * sum(size[cast] for cast in n.reads_cast) for n in shown}
        notes += _cut(shown, top, "that read the dearest casts")
        shown = sorted(shown, key=lambda n: -read[n.name])[:top]
    left_out = sum(n.kind == "parameter" for n in nodes)
    notes += [f"({left_out} parameters and buffers not shown)"] if left_out else []
    notes += _low_on_arrival(nodes)
    rows = [
        (
            n.label,
            _times(n.module, once),
            *(n.op or n.kind, n.module, n.dtype, n.by, _reason(n), short_line(n.line)),
        )
        for n in shown
    ]
    return Section("Nodes", NODES, rows, tuple(notes), empty="no ops")


def _low_on_arrival(nodes: Sequence[NodeRow]) -> Iterator[str]:
    """Yields what the model's caller, or a wrapper such as FSDP2, had made low before the graph runs."""
    low = [node for node in nodes if node.dtype in ("float16", "bfloat16")]
    counts = Counter(node.dtype for node in low if node.kind == "parameter")
    parts = [f"{count} parameters ({dtype})" for dtype, count in counts.items()]
    inputs = ", ".join(f"{node.label} ({node.dtype})" for node in low if node.kind == "input")
    parts += [f"inputs {inputs}"] if inputs else []
    if parts:
        yield f"low on arrival: {', '.join(parts)}"


def _times(module: str, once: Sequence[Repeat]) -> str:
    count = times(module, once)
    return f"{count}x" if count > 1 else ""


def _said_once(once: Sequence[Repeat]) -> Iterator[str]:
    yield from (f"{repeat}: equal but for names, shown once" for repeat in once)


def _cut(rows: Sequence[object], top: int, which: str) -> list[str]:
    return [f"(the {top} of {len(rows)} {which})"] if len(rows) > top else []


def _reason(node: NodeRow) -> str:
    return node.reason + (f"; widens {', '.join(node.widens)} in the kernel" if node.widens else "")


def casts_section(
    title: str, casts: Sequence[CastRow], once: Sequence[Repeat] = (), top: int | None = None
) -> Section:
    """Returns a table of casts.

    Args:
        title: Its heading.
        casts: The casts.
        once: Layers of which only the first one's casts are shown.
        top: Show this many casts, those that move the most bytes first; None shows all in graph order.
    """
    notes = list(_said_once(once))
    casts = [c for c in casts if not is_repeated(c.module, once)]
    if top is not None:
        notes += _cut(casts, top, "that move the most bytes")
        casts = sorted(casts, key=lambda c: -c.bytes * times(c.module, once))[:top]
    rows = [
        (
            c.tensor,
            c.src,
            c.dst,
            human_bytes(c.bytes),
            _times(c.module, once),
            "parameter" if c.is_parameter else "activation",
            ", ".join(c.users),
            c.dst_reason if c.is_parameter else f"{c.dst_reason}; it is {c.src_reason}",
        )
        for c in casts
    ]
    return Section(title, CASTS, rows, tuple(notes), empty="no casts")


def _operators(explanation: ExplanationData, top: int | None) -> Section:
    dtypes = (explanation.low_dtype, "float32")
    columns = (Column("operator", 44), *(Column(d, 9, right=True) for d in dtypes), Column("other", 6, True))
    rows = []
    operators = list(explanation.operators.items())
    notes = [] if top is None else _cut(operators, top, "that are called most often")
    if top is not None:
        operators = sorted(operators, key=lambda row: -sum(row[1].values()))[:top]
    for name, counts in operators:
        known = [counts.get(d, 0) for d in dtypes]
        rows.append((name, *(str(n or "") for n in (*known, sum(counts.values()) - sum(known)))))
    return Section("Operators by dtype", columns, rows, tuple(notes), empty="no operators")


def _modules(explanation: ExplanationData, once: Sequence[Repeat], top: int | None) -> Iterator[Section]:
    modules = explanation.modules
    names = {f"{r.parent}.{r.first}".lstrip("."): str(r) for r in once}
    beside = {r.parent for r in once if r.parent.count(".") < MODULE_DEPTH}
    shown = [m for m in modules if m.path.count(".") < MODULE_DEPTH or m.path.rpartition(".")[0] in beside]
    shown = [m for m in shown if not is_repeated(m.path, once)]
    if not shown:
        return
    notes = [] if top is None else _cut(shown, top, "with the most bytes of casts")
    left_out = len(modules) - len(shown)
    notes += [f"({left_out} inner modules not shown)"] if left_out else []
    if top is not None:
        shown = sorted(shown, key=lambda m: -m.cast_bytes * times(m.path, once))[:top]
    rows = [
        (
            names.get(m.path, m.path),
            str(m.ops),
            str(m.low),
            f"{m.low / m.ops:.0%}" if m.ops else "",
            str(m.casts),
            human_bytes(m.cast_bytes),
        )
        for m in shown
    ]
    yield Section("Modules", MODULES, rows, tuple(notes))


def _advice(explanation: ExplanationData) -> Iterator[Section]:
    groups: dict[str, list[str]] = {}
    for advice in explanation.advice:
        where = advice.node + (f" ({advice.module})" if advice.module else "")
        groups.setdefault(advice.text, []).append(where)
    rows = [(what, str(len(n)) if n[0] else "", _named(n)) for what, n in groups.items()]
    if rows:
        yield Section("Advice", ADVICE, rows)


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (", .." if len(names) > NAMED else "")


def _totals(explanation: ExplanationData, peers: Mapping[str, Totals]) -> Section:
    rows = [("this graph", explanation.totals)]
    rows += [("autocast rule" if k == "autocast" else k, v) for k, v in explanation.baselines.items()]
    if peers:
        rows += [(f"{name} lists", totals) for name, totals in peers.items()]
    notes: tuple[str, ...] = (
        f"widened inside kernels, without a cast: {explanation.widened}",
        f"placement: {_proof(explanation.gap)}",
    )
    if explanation.keeps_low_copies and explanation.totals.parameter_casts:
        notes += ("casts of parameters: once per update, into low copies; counted here for every forward",)
    return Section("Totals", TOTALS, [_total_cells(name, total) for name, total in rows], notes)


def _steps(explanation: ExplanationData) -> Section:
    rows = [("this graph", explanation.totals)]
    rows += [("autocast rule" if k == "autocast" else k, v) for k, v in explanation.baselines.items()]
    return Section("Training step, modelled", STEPS, [(name, *_step_cells(total)) for name, total in rows])


def _shares(shares: Mapping[str, Totals]) -> Section:
    names = {"lists": "+ lists and level", "sharing": "+ shared casts", "placement": "+ placement"}
    rows = [(names.get(name, name), *_step_cells(total)) for name, total in shares.items()]
    return Section("From torch.autocast to this plan, modelled", STEPS, rows)


def _step_cells(total: Totals) -> tuple[str, ...]:
    eager = (total.traffic, total.backward, total.saved)
    return tuple(map(human_bytes, (*eager, total.fused_forward, total.fused_backward, total.fused_saved)))


def _proof(gap: int | None) -> str:
    if gap == 0:
        return "proven optimal"
    return "not proven optimal" if gap is None else f"within {human_bytes(gap)} of the optimum"


def _total_cells(name: str, total: Totals) -> tuple[str, ...]:
    sizes = (total.cast_bytes, total.activation_cast_bytes, total.parameter_cast_bytes, total.traffic)
    return (name, str(total.casts), *map(human_bytes, sizes))


def why_cast(cast: CastRow) -> str:
    """Returns the reason for a cast."""
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
    """Returns the reason for a node's dtype.

    Args:
        node: The node.
        chain: The node and the nodes that determine its dtype, see `Explanation.chain`.
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
