"""`NumericComparison`: the error of each node's values and gradients in low precision."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from ..drawing import draw
from ..errors import AmpGraphError, did_you_mean
from ..module import AmpModule
from ..report.tables import Column, Section
from .exponent_chart import svg_chart, text_chart

# What rows can be ranked, drawn and coloured by.
COLUMNS = ("own", "accumulated", "headroom", "zeroed", "own_nonfinite", "nonfinite")
# As many rows are in the text.
LISTED = 20
# A float32 gradient this much smaller than the largest is rounding error itself.
NOISE = 2.0**-20

_TABLE = (
    Column("node", 34, keep="end"),
    Column("of", 8),
    Column("op", 26, keep="end"),
    Column("module", 30, keep="end"),
    Column("dtype", 9),
    Column("own error", 9, right=True),
    Column("accumulated", 11, right=True),
    Column("headroom", 9, right=True),
    Column("zeroed", 7, right=True),
    Column("not finite", 10, right=True),
)


@dataclass(frozen=True)
class ComparedNode:
    """The effect of low precision on the values of one node, or on their gradient.

    An error is the 2-norm of the difference from float32, divided by the 2-norm of the float32 values.

    Attributes:
        node: The node's name in the rewritten graph.
        label: The path of a parameter; for other nodes the name.
        direction: ``"forward"``: its values; ``"backward"``: their gradient.
        kind: ``"op"``, ``"cast"`` or ``"clamp"`` (inserted), and in the backward ``"parameter"`` or
            ``"input"``.
        op: ``"aten.linear"``.
        module: Path of the innermost module.
        line: ``file:line`` of the model's code.
        dtype: The dtype in the converted model.
        shape: ``"2x8"``.
        graph: The number of the graph in the call, from 1. With capture just in time, one call may run
            several graphs.
        own: The local error: the node's inputs are float32 values, rounded to its input dtypes. For a
            gradient, each node that reads the tensor gets float32 gradients. None if it is unknown.
        accumulated: The error of the converted model up to this node.
        largest: The largest finite magnitude in float32; of a gradient, times the loss scale.
        headroom: `largest`, divided by the maximum of the low dtype. Above 1 the value overflows.
        zeroed: Share of the nonzero float32 values that the node's own rounding makes zero.
        own_nonfinite: Values that the node itself makes infinite or NaN.
        nonfinite: Values that are infinite or NaN in the converted model and finite in float32.
        exponents: The number of finite nonzero float32 values by binary exponent; gradients are scaled.
        negligible: Whether a float32 gradient is smaller than 2**-20 times the largest and so consists of
            rounding errors, for example the gradient of a bias before a batch norm. `NumericComparison.worst`
            lists such rows last.
    """

    node: str
    label: str
    direction: str
    kind: str
    op: str
    module: str
    line: str
    dtype: str
    shape: str
    graph: int
    own: float | None
    accumulated: float
    largest: float
    headroom: float
    zeroed: float
    own_nonfinite: int
    nonfinite: int
    exponents: Mapping[int, int]
    negligible: bool = False


@dataclass(frozen=True)
class NumericComparison:
    """The result of `ampgraph.compare`; ``str()`` is a table of the worst rows.

    Attributes:
        model: Class name of the model.
        policy: The policy's repr.
        low_dtype: ``"float16"`` or ``"bfloat16"``.
        scale: The loss scale of the gradients; 1 without loss scaling.
        loss: The loss in float32 and in the converted model; None without a loss. With capture just in time
            the second is None.
        rows: One row per node in the order of the forward, then one row per gradient in the order of the
            backward.
    """

    model: str
    policy: str
    low_dtype: str
    scale: float
    loss: tuple[float, float | None] | None
    rows: tuple[ComparedNode, ...]

    def __str__(self) -> str:
        return self.table()

    def table(self, n: int | None = None, by: str = "own") -> str:
        """Returns the worst rows as text; see `worst`. Default: 20 rows."""
        title = f"{self.model} in {self.low_dtype} beside float32: {self._summary()}"
        return f"{title}\n\n{self._section(self.worst(LISTED if n is None else n, by)).text()}"

    def __getitem__(self, node: str) -> ComparedNode:
        """Returns the first forward row of a node.

        Raises:
            AmpGraphError: No row has this name.
        """
        return self.row(node)

    def row(self, node: str, direction: str = "forward", graph: int = 1) -> ComparedNode:
        """Returns the row of a node.

        Args:
            node: Its name or label.
            direction: ``"forward"`` or ``"backward"``.
            graph: Which graph of the call.

        Raises:
            AmpGraphError: No row has this name.
        """
        _check_direction(direction)
        rows = self._rows_of(direction, graph)
        for row in rows:
            if node in (row.node, row.label):
                return row
        names = [name for row in rows for name in (row.node, row.label)]
        raise AmpGraphError(f"graph {graph} has no {direction} row of {node!r}.{did_you_mean(node, names)}")

    def worst(self, n: int = 10, by: str = "own", direction: str | None = None) -> tuple[ComparedNode, ...]:
        """Returns the worst rows, worst first; rows that are equal stay in the order of the run.

        Args:
            n: How many.
            by: ``"own"``, ``"accumulated"``, ``"headroom"``, ``"zeroed"``, ``"own_nonfinite"`` or
                ``"nonfinite"``. Own errors name the nodes that cause something; accumulated ones name late
                nodes.
            direction: ``"forward"``, ``"backward"`` or None for both.

        Raises:
            AmpGraphError: ``by``, ``direction`` or ``n`` is not legal.
        """
        _check_column(by)
        _check_direction(direction)
        if not isinstance(n, int) or n < 0:
            raise AmpGraphError(f"n={n!r}: expected a number of rows, 0 or more.")
        rows = [row for row in self.rows if direction in (None, row.direction)]
        return tuple(sorted(rows, key=lambda row: (row.negligible, -_value(row, by)))[:n])

    def values(self, by: str = "own", direction: str = "forward", graph: int = 1) -> dict[str, float]:
        """Returns one column by node name, for `ampgraph.draw`'s ``values``."""
        _check_column(by)
        _check_direction(direction)
        return {row.node: _value(row, by) for row in self._rows_of(direction, graph)}

    def draw(
        self,
        amp: AmpModule,
        path: str | PathLike[str],
        by: str = "own",
        direction: str = "forward",
        graph: int = 1,
        **options: Any,
    ) -> Path:
        """Draws the converted model, coloured by one column.

        Args:
            amp: The model that was compared.
            path: Where to write, as for `ampgraph.draw`.
            by: The column, see `worst`.
            direction: ``"forward"`` or ``"backward"``.
            graph: Which graph of the call.
            **options: What `ampgraph.draw` takes: ``depth``, ``focus`` and others.

        Raises:
            AmpGraphError: The model has no such graph, or `ampgraph.draw` raises it.
        """
        values = self.values(by, direction, graph)
        for graph_module in amp.graph_modules:
            if values and values.keys() <= {node.name for node in graph_module.graph.nodes}:
                drawn = amp if graph_module is amp.graph_module else graph_module
                return draw(drawn, Path(path), values=values, **options)
        raise AmpGraphError(f"draw: {self.model} has no graph with the {direction} rows of graph {graph}.")

    def exponents(
        self, node: str | None = None, direction: str = "forward", graph: int = 1
    ) -> dict[int, int]:
        """Returns how many float32 values have each exponent: of one node, or of all ops of a direction."""
        _check_direction(direction)
        rows = self._ops_of(direction) if node is None else [self.row(node, direction, graph)]
        total: Counter[int] = Counter()
        for row in rows:
            total.update(row.exponents)
        return dict(sorted(total.items()))

    def histogram(
        self,
        path: str | PathLike[str] | None = None,
        *,
        node: str | None = None,
        direction: str = "forward",
        graph: int = 1,
    ) -> str:
        """Returns the histogram of exponents against the low dtype's range, as text.

        Args:
            path: Where to write it as well; ``.svg`` is a picture, ``.txt`` the text.
            node: Of which node; default: of all ops.
            direction: ``"forward"`` or ``"backward"``.
            graph: Which graph of the call, for ``node``.

        Raises:
            AmpGraphError: There is no such row, or the suffix is not legal.
        """
        counts = self.exponents(node, direction, graph)
        what = "gradients" if direction == "backward" else "values"
        title = f"{self.model}: exponents of float32 {what}" + (f" of {node}" if node else "")
        if direction == "backward" and self.scale != 1:
            title += f", times {self.scale:g}"
        text = text_chart(counts, self.low_dtype, title)
        if path is None:
            return text
        suffix = Path(path).suffix.lower()
        if suffix not in (".svg", ".txt"):
            raise AmpGraphError(f"histogram: {str(path)!r}: expected a path that ends in .svg or .txt.")
        written = svg_chart(counts, self.low_dtype, title) if suffix == ".svg" else f"{text}\n"
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(written, encoding="utf-8")
        return text

    def to_markdown(self) -> str:
        """Returns all rows as Markdown."""
        return f"# {self.model}\n\n{self._summary()}\n\n{self._section(self.rows).markdown()}"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings and numbers; infinite and undefined ones are strings."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rows"}
        data["loss"] = None if self.loss is None else [_plain(x) for x in self.loss]
        return data | {"rows": [_row_to_dict(row) for row in self.rows]}

    def to_json(self, indent: int | None = None) -> str:
        """Returns `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> NumericComparison:
        """Reads what `to_json` wrote.

        Raises:
            AmpGraphError: It is something else.
        """
        try:
            data = json.loads(text)
            loss = data["loss"]
            if loss is not None:
                loss = float(loss[0]), None if loss[1] is None else float(loss[1])
            rows = tuple(_row_from_dict(row) for row in data["rows"])
            plain = {name: data[name] for name in ("model", "policy", "low_dtype", "scale")}
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise AmpGraphError(f"not the JSON of a NumericComparison: {error!r}.") from error
        return cls(loss=loss, rows=rows, **plain)

    def _rows_of(self, direction: str, graph: int) -> list[ComparedNode]:
        return [r for r in self.rows if r.direction == direction and r.graph == graph]

    def _ops_of(self, direction: str) -> list[ComparedNode]:
        return [r for r in self.rows if r.direction == direction and r.kind not in ("cast", "clamp")]

    def _summary(self) -> str:
        parts = [self._counts(direction) for direction in ("forward", "backward")]
        parts = [part for part in parts if part]
        if self.loss is not None:
            converted = "" if self.loss[1] is None else f", {self.loss[1]:.6g} converted"
            parts.append(f"loss {self.loss[0]:.6g} in float32" + converted)
        if self.scale != 1:
            parts.append(f"gradients times {self.scale:g}")
        return "; ".join(parts or ["no floating-point values"]) + "."

    def _counts(self, direction: str) -> str:
        rows = self._ops_of(direction)
        if not rows:
            return ""
        beyond = sum(r.headroom > 1 and r.dtype == self.low_dtype for r in rows)
        broken = sum(r.nonfinite > 0 for r in rows)
        what = "nodes" if direction == "forward" else "gradients"
        return f"{len(rows)} {what}, {beyond} low and out of range, {broken} with new infinities or NaN"

    def _section(self, rows: tuple[ComparedNode, ...]) -> Section:
        cells = [
            (
                row.label if row.graph == 1 else f"{row.graph}/{row.label}",
                "value" if row.direction == "forward" else "gradient",
                row.op if row.kind == "op" else row.kind,
                row.module,
                row.dtype,
                "" if row.own is None else _number(row.own),
                _number(row.accumulated) + ("~" if row.negligible else ""),
                f"{row.headroom:.2g}",
                f"{row.zeroed:.1%}" if row.zeroed else "",
                str(row.nonfinite or ""),
            )
            for row in rows
        ]
        noted = any(row.negligible for row in rows)
        notes = ("~ the float32 values are rounding error themselves",) if noted else ()
        return Section("Nodes", _TABLE, cells, notes, empty="no floating-point values")


def marked_negligible(rows: list[ComparedNode]) -> tuple[ComparedNode, ...]:
    """Returns the rows with those gradients marked that are rounding error already in float32."""
    gradients = [row.largest for row in rows if row.direction == "backward"]
    least = max(gradients, default=0.0) * NOISE
    return tuple(
        replace(row, negligible=row.direction == "backward" and 0 < row.largest < least) for row in rows
    )


def _check_column(by: object) -> None:
    if by not in COLUMNS:
        legal = ", ".join(map(repr, COLUMNS))
        raise AmpGraphError(f"by={by!r} is not a column; legal: {legal}.{did_you_mean(str(by), COLUMNS)}")


def _check_direction(direction: object) -> None:
    if direction not in (None, "forward", "backward"):
        hint = did_you_mean(str(direction), ("forward", "backward"))
        raise AmpGraphError(f"direction={direction!r}: expected 'forward' or 'backward'.{hint}")


def _value(row: ComparedNode, by: str) -> float:
    value = getattr(row, by)
    return 0.0 if value is None else float(value)


def _number(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else str(value)


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _row_to_dict(row: ComparedNode) -> dict[str, Any]:
    floats = ("own", "accumulated", "largest", "headroom")
    exponents = {str(e): count for e, count in sorted(row.exponents.items())}
    return vars(row) | {name: _plain(getattr(row, name)) for name in floats} | {"exponents": exponents}


def _row_from_dict(data: Mapping[str, Any]) -> ComparedNode:
    own = None if data["own"] is None else float(data["own"])
    numbers = {name: float(data[name]) for name in ("accumulated", "largest", "headroom")}
    exponents = {int(e): int(count) for e, count in data["exponents"].items()}
    return ComparedNode(**{**data, **numbers, "own": own, "exponents": exponents})
