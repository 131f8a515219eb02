"""The tables of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from .explanation_data import ExplanationData
from .graph_view import human_bytes, short_line
from .layers import Repeat, is_repeated, times
from .rows import CastRow, NodeRow, Totals
from .tables import Column, Section

# The text omits modules deeper than this; `Explanation.modules` has them all.
MODULE_DEPTH = 2
# At most so many nodes are named for one piece of advice.
NAMED = 3

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


def nodes_section(explanation: ExplanationData, once: Sequence[Repeat], top: int | None) -> Section:
    """Returns the table of inputs and ops."""
    nodes = explanation.nodes
    shown = [n for n in nodes if n.kind in ("input", "op") and "[" not in n.label]
    shown = [n for n in shown if not is_repeated(n.module, once)]
    notes = list(_said_once(once))
    if top is not None:
        size = {cast.name: cast.bytes for cast in explanation.casts}
        read = {n.name: times(n.module, once) * sum(size[cast] for cast in n.reads_cast) for n in shown}
        notes += _cut(shown, top, "that read the most cast bytes")
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
        once: Repeated layers; only the first layer's casts are shown.
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
            c.dst_reason if c.is_parameter else f"{c.dst_reason}; tensor: {c.src_reason}",
        )
        for c in casts
    ]
    return Section(title, CASTS, rows, tuple(notes), empty="no casts")


def operators_section(explanation: ExplanationData, top: int | None) -> Section:
    """Returns the counts of operators by dtype."""
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


def module_sections(
    explanation: ExplanationData, once: Sequence[Repeat], top: int | None
) -> Iterator[Section]:
    """Yields the table of modules, if there are any."""
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


def advice_sections(explanation: ExplanationData) -> Iterator[Section]:
    """Yields the table of advice, if there is any."""
    groups: dict[str, list[str]] = {}
    for advice in explanation.advice:
        where = advice.node + (f" ({advice.module})" if advice.module else "")
        groups.setdefault(advice.text, []).append(where)
    rows = [(what, str(len(n)) if n[0] else "", _named(n)) for what, n in groups.items()]
    if rows:
        yield Section("Advice", ADVICE, rows)


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (", .." if len(names) > NAMED else "")


def totals_section(explanation: ExplanationData, peers: Mapping[str, Totals]) -> Section:
    """Returns the table of casts and traffic, beside the baselines."""
    rows = _beside_baselines(explanation)
    rows += [(f"{name} lists", totals) for name, totals in peers.items()]
    notes: tuple[str, ...] = (
        f"widened inside kernels, without a cast: {explanation.widened}",
        f"placement: {_proof(explanation.gap)}",
    )
    if explanation.bodies:
        notes += (f"not counted: {explanation.body_casts} casts in {len(explanation.bodies)} bodies",)
    if explanation.own_casts:
        moved = human_bytes(explanation.own_cast_bytes)
        notes += (
            f"casts in the model's own code that change a dtype here: {explanation.own_casts} ({moved}); "
            "they are in the traffic, not among the casts",
        )
    if explanation.keeps_low_copies and explanation.totals.parameter_casts:
        notes += ("casts of parameters: once per update, into low copies; counted here for every forward",)
    return Section("Totals", TOTALS, [_total_cells(name, total) for name, total in rows], notes)


def steps_section(explanation: ExplanationData) -> Section:
    """Returns the estimates of a training step."""
    rows = [(name, *_step_cells(total)) for name, total in _beside_baselines(explanation)]
    return Section("Training step, modelled", STEPS, rows)


def _beside_baselines(explanation: ExplanationData) -> list[tuple[str, Totals]]:
    baselines = explanation.baselines.items()
    return [
        ("this graph", explanation.totals),
        *(("autocast rule" if name == "autocast" else name, totals) for name, totals in baselines),
    ]


def shares_section(shares: Mapping[str, Totals]) -> Section:
    """Returns the parts of lists, sharing, placement and gradients in the plan's gain."""
    names = {
        "lists": "+ lists and level",
        "sharing": "+ shared casts",
        "placement": "+ placement",
        "saved norms": "+ norms saved low",
        "saved softmax": "+ softmax saved low",
        "weight gradients": "+ wide gradients",
    }
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
