"""What `explain` returns: rows of plain values, and their tables for people."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from .errors import AmpGraphError, did_you_mean
from .graph_view import human_bytes, short_line
from .tables import Column, table


@dataclass(frozen=True)
class NodeRow:
    """One node of the rewritten graph that is not an inserted cast.

    Attributes:
        name: The node's name in the graph.
        label: How people know it: a parameter's path, ``split[0]``, else the name.
        kind: ``"input"``, ``"parameter"``, ``"op"``, ``"clamp"`` (inserted, before the cast of a mask),
            ``"graph"`` (the body of a higher-order op) or ``"output"``.
        op: ``"aten.conv2d"``.
        module: Path of the innermost module, as in ``named_modules()``.
        dtype: The dtype of its result (several, joined by commas).
        shape: ``"2x8x16"``.
        op_class: ``"white"``, ``"black"``, ``"gray"``, ``"clear"`` or ``""``.
        by: Who decided, see `Decision`.
        reason: Why, in one sentence.
        line: ``file:line`` of the code that made it, outside torch.
        reads_cast: Names of the inserted casts that it reads.
        widens: Labels of the low operands that its kernel widens itself.
    """

    name: str
    label: str
    kind: str
    op: str
    module: str
    dtype: str
    shape: str
    op_class: str
    by: str
    reason: str
    line: str
    reads_cast: tuple[str, ...]
    widens: tuple[str, ...]


@dataclass(frozen=True)
class CastRow:
    """One inserted cast.

    Attributes:
        name: The cast node's name in the graph.
        tensor: Label of the tensor that it reads.
        src: Its dtype before.
        dst: Its dtype after.
        shape: ``"2x8x16"``.
        bytes: Bytes read plus bytes written.
        is_parameter: Whether the tensor is a parameter, buffer or constant.
        clamped: Whether it is a mask, clamped into the low dtype's range before the cast.
        users: Labels of the nodes that share the cast.
        src_reason: Why the tensor has the dtype it has.
        dst_reason: Why the first user needs the other one.
    """

    name: str
    tensor: str
    src: str
    dst: str
    shape: str
    bytes: int
    is_parameter: bool
    clamped: bool
    users: tuple[str, ...]
    src_reason: str
    dst_reason: str


@dataclass(frozen=True)
class Totals:
    """Counts over one graph, for one forward.

    Attributes:
        casts: Inserted casts.
        activation_casts: Those of activations.
        parameter_casts: Those of parameters, buffers and constants.
        cast_bytes: Bytes that all casts read and write.
        activation_cast_bytes: Those of activation casts.
        parameter_cast_bytes: Those of parameter casts.
        traffic: Modelled bytes that all kernels and casts read and write.
    """

    casts: int
    activation_casts: int
    parameter_casts: int
    cast_bytes: int
    activation_cast_bytes: int
    parameter_cast_bytes: int
    traffic: int


@dataclass(frozen=True)
class Explanation:
    """What `explain` returns; ``str()`` is a table for people.

    Attributes:
        model: Class name of the converted model.
        policy: The policy's repr, or ``""`` where only a graph module was given.
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
        optimal: Whether the placement is proven minimal for the policy's objective; False for the autocast
            rule, which minimises nothing.
    """

    model: str
    policy: str
    low_dtype: str
    graph: str
    bodies: dict[str, Explanation]
    nodes: tuple[NodeRow, ...]
    casts: tuple[CastRow, ...]
    totals: Totals
    baselines: dict[str, Totals]
    widened: int
    optimal: bool

    def __str__(self) -> str:
        return self.table()

    def table(self, casts_only: bool = False) -> str:
        """Returns the tables: nodes (unless ``casts_only``), casts, totals."""
        parts = [self._title()]
        if not casts_only:
            parts.append(_node_table(self.nodes))
        parts += [_cast_table(self.casts) if self.casts else "no casts", self._summary()]
        parts += [f"== {name} ==\n{body.table(casts_only)}" for name, body in self.bodies.items()]
        return "\n\n".join(parts)

    def why(self, name: str) -> str:
        """Returns, in a few lines, why one node or cast is what it is.

        Args:
            name: A node's name or label, or a cast node's name.

        Raises:
            AmpGraphError: The graph has no such node.
        """
        for cast in self.casts:
            if cast.name == name:
                return _why_cast(cast)
        for node in self.nodes:
            if name in (node.name, node.label):
                return self._why_node(node)
        known = [n for row in self.nodes for n in (row.name, row.label)] + [c.name for c in self.casts]
        raise AmpGraphError(f"the graph has no node {name!r}.{did_you_mean(name, dict.fromkeys(known))}")

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings, integers and booleans; bytes are integers."""
        return json.loads(json.dumps(asdict(self)))

    def to_json(self, indent: int | None = 2) -> str:
        """Returns `to_dict` as JSON; keys and entries come in the same order every time."""
        return json.dumps(self.to_dict(), indent=indent)

    def _title(self) -> str:
        counts = Counter(n.dtype for n in self.nodes if n.kind == "op")
        ops = ", ".join(f"{count} {dtype or 'other'}" for dtype, count in counts.most_common())
        where = "" if self.graph in ("", "1 of 1") else f" (graph {self.graph})"
        policy = f"\n{self.policy}" if self.policy else ""
        return f"{self.model}{where}: {sum(counts.values())} ops ({ops}), {len(self.casts)} casts{policy}"

    def _summary(self) -> str:
        rows = [("this graph", self.totals)]
        rows += [(_BASELINE_NAMES.get(k, k), v) for k, v in self.baselines.items()]
        lines = [table(_TOTAL_COLUMNS, [_total_cells(name, total) for name, total in rows])]
        lines.append(f"widened inside kernels, without a cast: {self.widened}")
        proof = "proven optimal" if self.optimal else "not proven optimal"
        lines.append(f"placement: {proof}")
        return "\n".join(lines)

    def _why_node(self, node: NodeRow) -> str:
        what = (node.op or node.kind) + (f" in module {node.module!r}" if node.module else "")
        lines = [f"{node.label}: {what}, {node.dtype} {node.shape}", f"  decided by {node.by}: {node.reason}"]
        casts = {c.name: c for c in self.casts}
        read = [casts[name] for name in node.reads_cast]
        lines += [f"  reads {c.tensor} cast from {c.src} to {c.dst}" for c in read]
        lines += [f"  widens {name} inside the kernel" for name in node.widens]
        if node.line:
            lines.append(f"  at {node.line}")
        return "\n".join(lines)


_BASELINE_NAMES = {"autocast": "autocast rule", "fp32": "fp32"}
_TOTAL_COLUMNS = (
    Column("", 20),
    Column("casts", 10, right=True),
    Column("cast bytes", 12, right=True),
    Column("of activations", 14, right=True),
    Column("of parameters", 14, right=True),
    Column("modelled traffic", 16, right=True),
)
_NODE_COLUMNS = (
    Column("node", 30, keep="end"),
    Column("op", 30, keep="end"),
    Column("module", 34, keep="end"),
    Column("dtype", 9),
    Column("by", 11),
    Column("reason", 64),
    Column("line", 36, keep="end"),
)
_CAST_COLUMNS = (
    Column("tensor", 38, keep="end"),
    Column("from", 8),
    Column("to", 8),
    Column("size", 10, right=True),
    Column("kind", 10),
    Column("used by", 34),
    Column("because", 64),
)


def _node_table(nodes: tuple[NodeRow, ...]) -> str:
    shown = [n for n in nodes if n.kind in ("input", "op") and "[" not in n.label]
    left_out = sum(n.kind == "parameter" for n in nodes)
    rows = [
        (n.label, n.op or n.kind, n.module, n.dtype, n.by, _node_reason(n), short_line(n.line)) for n in shown
    ]
    text = table(_NODE_COLUMNS, rows) if rows else "no ops"
    return text + (f"\n({left_out} parameters and buffers not shown)" if left_out else "")


def _node_reason(node: NodeRow) -> str:
    return node.reason + (f"; widens {', '.join(node.widens)} in the kernel" if node.widens else "")


def _cast_table(casts: tuple[CastRow, ...]) -> str:
    return table(
        _CAST_COLUMNS,
        [
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
        ],
    )


def _why_cast(cast: CastRow) -> str:
    kind = ("clamped " if cast.clamped else "") + ("parameter" if cast.is_parameter else "activation")
    return "\n".join(
        (
            f"{cast.name}: casts {kind} {cast.tensor} from {cast.src} to {cast.dst}, {cast.bytes} bytes",
            f"  {cast.tensor} is {cast.src}: {cast.src_reason}",
            f"  {', '.join(cast.users)} needs {cast.dst}: {cast.dst_reason}",
        )
    )


def _total_cells(name: str, total: Totals) -> tuple[str, ...]:
    sizes = (total.cast_bytes, total.activation_cast_bytes, total.parameter_cast_bytes, total.traffic)
    return (name, str(total.casts), *map(human_bytes, sizes))
