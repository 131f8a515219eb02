"""`Calibration`: the ranges of a model's values and gradients over many batches."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from ..errors import AmpGraphError, did_you_mean
from ..passes.analysis.fingerprint import fingerprint
from ..policy.policy import DTYPE_NAMES
from ..report.tables import Column, Section
from .statistics import ValueStatistics

FORMAT = "ampgraph calibration 1"
# As many rows are in the text.
LISTED = 20
_TABLE = (
    Column("node", 40, keep="end"),
    Column("of", 8),
    Column("peak", 10, right=True),
    Column("smallest", 10, right=True),
    Column("beyond", 8, right=True),
    Column("zeroed", 8, right=True),
    Column("not finite", 10, right=True),
)


@dataclass
class GraphStatistics:
    """What was seen of one graph.

    Attributes:
        values: Statistics of each node's floating-point result, by the node's name; those of parameters too.
        gradients: Statistics of its gradient, times the loss scale.
    """

    values: dict[str, ValueStatistics] = field(default_factory=dict)
    gradients: dict[str, ValueStatistics] = field(default_factory=dict)


@dataclass
class Calibration:
    """The result of `ampgraph.calibrate`; ``str()`` lists the values that do not fit the low dtype.

    Statistics are stored by the fingerprint of their graph. `of` raises an error for an unknown graph, so the
    calibration of another model, or of an older version of the model, cannot be used by mistake.

    Attributes:
        model: Class name of the model.
        low_dtype: The low dtype to which the shares refer.
        scale: The factor of the gradients; 1 without loss scaling.
        batches: The number of batches.
        graphs: The statistics, by the fingerprint of each graph that ran.
    """

    model: str
    low_dtype: torch.dtype
    scale: float = 1.0
    batches: int = 0
    graphs: dict[str, GraphStatistics] = field(default_factory=dict)

    def of(self, graph_module: GraphModule) -> GraphStatistics:
        """Returns what was seen of a graph, by node name.

        Args:
            graph_module: A graph without casts, as it is planned.

        Raises:
            AmpGraphError: Nothing was seen of this graph: the evidence is stale, or of another model.
        """
        if not isinstance(graph_module, GraphModule):
            raise AmpGraphError(f"Calibration.of takes a graph module, got {type(graph_module).__name__}.")
        found = self.graphs.get(fingerprint(graph_module))
        if found is None:
            raise AmpGraphError(
                f"the calibration of {self.model} has no statistics of this graph; it holds "
                f"{len(self.graphs)} other graphs. "
                "The model's code, its training mode or the sizes of its parameters differ; calibrate again."
            )
        return found

    def row(self, node: str, direction: str = "forward") -> ValueStatistics:
        """Returns the statistics of a node's values, or, with ``"backward"``, of their gradient.

        Raises:
            AmpGraphError: The node has no such statistics.
        """
        rows = self._rows(direction)
        if node not in rows:
            raise AmpGraphError(f"no {direction} statistics of {node!r}.{did_you_mean(node, rows)}")
        return rows[node]

    def __str__(self) -> str:
        gradients = f", gradients times {self.scale:g}" if self.scale != 1 else ""
        dtype = str(self.low_dtype).removeprefix("torch.")
        return f"{self.model}, {self.batches} batches, {dtype}{gradients}\n\n{self._section().text(LISTED)}"

    def to_markdown(self) -> str:
        """Returns the table as Markdown."""
        return f"# {self.model}\n\n{self._section().markdown()}"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, strings and numbers."""
        graphs = {
            key: {
                direction: {name: row.to_dict() for name, row in getattr(graph, direction).items()}
                for direction in ("values", "gradients")
            }
            for key, graph in self.graphs.items()
        }
        return {
            "format": FORMAT,
            "model": self.model,
            "low_dtype": str(self.low_dtype).removeprefix("torch."),
            "scale": self.scale,
            "batches": self.batches,
            "graphs": graphs,
        }

    def to_json(self, indent: int | None = None) -> str:
        """Returns `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Reads what `to_json` wrote.

        Raises:
            AmpGraphError: It is something else.
        """
        try:
            data = json.loads(text)
            if (found := data.get("format")) != FORMAT:
                raise ValueError(f"format {found!r}, expected {FORMAT!r}")
            dtype = DTYPE_NAMES[data["low_dtype"]]
            graphs = {key: _graph_from_dict(graph, dtype) for key, graph in data["graphs"].items()}
            scale, batches = float(data["scale"]), int(data["batches"])
            if not 0 < scale < math.inf or batches < 1:
                raise ValueError(f"scale={scale}, batches={batches}: expected positive numbers")
            return cls(str(data["model"]), dtype, scale, batches, graphs)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise AmpGraphError(f"not the JSON of a Calibration: {error!r}.") from error

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the JSON to a file.

        Raises:
            AmpGraphError: The file cannot be written.
        """
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise AmpGraphError(f"Calibration.save: {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Calibration:
        """Reads what `save` wrote.

        Raises:
            AmpGraphError: It is something else.
        """
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def _rows(self, direction: str) -> dict[str, ValueStatistics]:
        if direction not in ("forward", "backward"):
            raise AmpGraphError(f"direction={direction!r}: expected 'forward' or 'backward'.")
        parts = [
            graph.values if direction == "forward" else graph.gradients for graph in self.graphs.values()
        ]
        rows: dict[str, ValueStatistics] = {}
        for number, part in enumerate(parts, start=1):
            rows |= {name if number == 1 else f"{number}/{name}": row for name, row in part.items()}
        return rows

    def _section(self) -> Section:
        rows = [(name, "value", row) for name, row in self._rows("forward").items()]
        rows += [(name, "gradient", row) for name, row in self._rows("backward").items()]
        rows.sort(key=lambda row: (-row[2].beyond_share, -row[2].zeroed_share, -row[2].peak))
        cells = [(name, of, *_cells(row)) for name, of, row in rows]
        return Section("Ranges", _TABLE, cells, empty="no floating-point values")


def _cells(row: ValueStatistics) -> tuple[str, ...]:
    return (
        f"{row.peak:.2e}",
        f"{row.smallest:.2e}" if math.isfinite(row.smallest) else "",
        f"{row.beyond_share:.2%}" if row.beyond else "",
        f"{row.zeroed_share:.2%}" if row.zeroed else "",
        str(row.nonfinite or ""),
    )


def _graph_from_dict(data: Mapping[str, Any], dtype: torch.dtype) -> GraphStatistics:
    def read(rows: Mapping[str, Any]) -> dict[str, ValueStatistics]:
        return {str(name): ValueStatistics.from_dict(row, dtype) for name, row in rows.items()}

    return GraphStatistics(read(data["values"]), read(data["gradients"]))
