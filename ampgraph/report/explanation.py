"""The result of `explain`: rows of plain values, and methods that answer questions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from typing import Any

from ..errors import AmpGraphError, did_you_mean
from ..policy.policy import Policy
from ..runtime.coverage import Coverage
from . import text, why_text
from .advice import Advice
from .difference import Difference, difference
from .explanation_data import ExplanationData
from .read_graph import Source, source_of
from .rows import CastRow, NodeRow, Totals


@dataclass(frozen=True)
class Explanation(ExplanationData):
    """The result of `explain`; ``str()`` is a readable table.

    It has the attributes of `ExplanationData`: ``nodes``, ``casts``, ``totals``, ``baselines``,
    ``modules``, ``operators`` and others.

    Attributes:
        source: The graph, for `under`, `flip` and `peers`; None if the explanation was read from a file.
    """

    bodies: Mapping[str, Explanation]
    source: Source | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, source: Source, graph: str = "") -> Explanation:
        """Explains a rewritten graph; ``graph`` names its position among the model's graphs."""
        data = source.read(graph)
        rows = {f.name: getattr(data, f.name) for f in fields(data) if f.name != "bodies"}
        bodies = {name: cls.of(body) for name, body in source.bodies().items()}
        return cls(**rows, bodies=bodies, source=source)

    # -- reports ---------------------------------------------------------------------------------

    def __str__(self) -> str:
        return self.table()

    def table(
        self,
        casts_only: bool = False,
        peers: bool = False,
        top: int | None = None,
        all_layers: bool | None = None,
    ) -> str:
        """Returns the report as text.

        Args:
            casts_only: Show only casts and totals, without nodes, operators, modules and advice.
            peers: Add a row of totals for each peer's op lists, and the shares of lists, sharing and
                placement, see `shares`; plans the graph again.
            top: Show this many rows of each table, the most expensive first: casts by the bytes that they
                move, nodes by the casts that they read, modules by the casts inside, operators by calls.
            all_layers: Show the rows of all repeated layers (``h.0`` .. ``h.11``), whose rows differ only in
                names. False shows the first layer and the number of layers. None means True if the graph has
                at most 200 nodes.

        Raises:
            AmpGraphError: ``top`` is not a positive number.
        """
        return text.text(self, self._extent(casts_only, peers, top, all_layers))

    def to_markdown(
        self,
        casts_only: bool = False,
        peers: bool = False,
        top: int | None = None,
        all_layers: bool | None = None,
    ) -> str:
        """Returns the report as Markdown; arguments as for `table`."""
        return text.markdown(self, self._extent(casts_only, peers, top, all_layers))

    def _extent(self, casts_only: bool, peers: bool, top: int | None, all_layers: bool | None) -> text.Extent:
        found = (self.peers(), self.shares()) if peers else ({}, {})
        return text.Extent(casts_only, *found, top, all_layers)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings, integers and booleans; bytes are integers."""
        left_out = ("coverage", "source", "bodies")
        rows: dict[str, Any] = {"coverage": self.coverage}
        rows |= {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        rows |= {"optimal": self.optimal, "modules": self.modules, "operators": self.operators}
        rows |= {"body_casts": self.body_casts, "body_low_ops": self.body_low_ops}
        rows["bodies"] = {name: body.to_dict() for name, body in self.bodies.items()}
        return json.loads(json.dumps(rows, default=asdict))

    def to_json(self, indent: int | None = 2) -> str:
        """Returns `to_dict` as JSON, with a fixed order of keys and entries."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Explanation:
        """Rebuilds an explanation from `to_dict`. It can be read and compared, but not planned again.

        Raises:
            AmpGraphError: The data is not an explanation of this version.
        """
        try:
            plain = {f.name: data[f.name] for f in fields(cls) if f.name != "source"}
            plain["nodes"] = tuple(NodeRow(**_tuples(row)) for row in data["nodes"])
            plain["casts"] = tuple(CastRow(**_tuples(row)) for row in data["casts"])
            plain["advice"] = tuple(Advice(**row) for row in data["advice"])
            plain["coverage"] = data["coverage"] and Coverage.from_dict(data["coverage"])
            plain["totals"] = Totals(**data["totals"])
            plain["baselines"] = {name: Totals(**row) for name, row in data["baselines"].items()}
            plain["bodies"] = {name: cls.from_dict(body) for name, body in data["bodies"].items()}
            if plain["low_dtype"] not in ("float16", "bfloat16"):
                raise ValueError(f"low_dtype={plain['low_dtype']!r}")
            if plain["gap"] is not None and (type(plain["gap"]) is not int or plain["gap"] < 0):
                raise ValueError(f"gap={plain['gap']!r}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise AmpGraphError(f"not a report that this version of ampgraph wrote: {error!r}") from error
        return cls(**plain)

    # -- questions -------------------------------------------------------------------------------

    def node(self, name: str) -> NodeRow:
        """Returns the row of a node, by its name or label.

        Raises:
            AmpGraphError: The graph has no such node; the message names the nearest.
        """
        for row in self.nodes:
            if name in (row.name, row.label):
                return row
        if inside := [path for path, body in self.bodies.items() if body._knows(name)]:
            raise AmpGraphError(f"{name!r} is in a body: ask explanation.bodies[{inside[0]!r}].")
        known = [n for row in self.nodes for n in (row.name, row.label)] + [c.name for c in self.casts]
        raise AmpGraphError(f"the graph has no node {name!r}.{did_you_mean(name, dict.fromkeys(known))}")

    def _has(self, name: str) -> bool:
        return any(name in (row.name, row.label) for row in self.nodes)

    def _knows(self, name: str) -> bool:
        """Whether a node or a module of the graph, or of its bodies, has this name."""
        found = self._has(name) or self._of_module(name)
        return bool(found) or any(body._knows(name) for body in self.bodies.values())

    def chain(self, name: str) -> tuple[NodeRow, ...]:
        """Returns a node and the nodes that determine its dtype, up to the node that was decided first."""
        rows = {row.name: row for row in self.nodes}
        found = {self.node(name).name: self.node(name)}
        row = self.node(name)
        while following := next((n for n in row.because if n in rows and n not in found), None):
            row = found[following] = rows[following]
        return tuple(found.values())

    def why(self, name: str) -> str:
        """Returns the reasons for the dtype of a node or for a cast, as a chain.

        Args:
            name: A node's name or label, a cast node's name, or a module path, for all nodes of that module.

        Raises:
            AmpGraphError: The graph has no such node; the message names the nearest.
        """
        for cast in self.casts:
            if cast.name == name:
                return why_text.why_cast(cast)
        if inside := self._of_module(name):
            return "\n\n".join(map(self.why, inside))
        row = self.node(name)
        return why_text.why_node(row, self.chain(name), [c for c in self.casts if c.name in row.reads_cast])

    def _of_module(self, path: str) -> list[str]:
        """Returns the names of the float ops directly in a module; none if a node has that name."""
        if self._has(path):
            return []
        return [row.name for row in self.nodes if row.module == path and row.is_float_op]

    def under(self, policy: Policy | str | PathLike[str]) -> Explanation:
        """Plans the same graph under another policy and explains it, without a capture.

        Args:
            policy: As for `ampgraph.convert`; if it sets no dtype, the low dtype stays.

        Raises:
            PolicyError: The policy or its rules do not fit this graph.
        """
        return Explanation.of(self._source().under(policy))

    def flip(self, name: str) -> Difference:
        """Plans the graph again with one node in the other dtype; returns the difference.

        Raises:
            AmpGraphError: The graph has no such node, or no policy can flip it.
        """
        return self.diff(Explanation.of(self._source().flipped(self.node(name).name)))

    def diff(self, other: object) -> Difference:
        """Compares with another plan of the same model.

        Args:
            other: An `Explanation`, a converted model or its graph module; or a policy, as `under` takes it,
                for the same graph under it.
        """
        if isinstance(other, (Policy, str, PathLike)):
            other = self.under(other)
        if not isinstance(other, Explanation):
            other = Explanation.of(*source_of(other))
        return difference(self, other)

    def peers(self) -> dict[str, Totals]:
        """Returns the cost of the autocast rule with the op lists of torch, Paddle, MindSpore and OneFlow.

        Graph, rules and guards stay the same. A cast of an activation counts at each use, as in
        ``baselines["autocast"]``.
        """
        return self._source().peers()

    def shares(self) -> dict[str, Totals]:
        """Returns the modelled cost after each step from ``torch.autocast`` to this plan.

        ``"torch.autocast"`` is its rule with its lists, ``"lists"`` the same rule with the policy's lists and
        level, ``"sharing"`` the same with one cast for all readers of an activation, and ``"placement"`` this
        plan. The differences are the shares of lists, sharing and placement. If the plan saves norms low, a
        step ``"saved norms"`` follows, and if kernels give gradients of weights in float32, a step ``"weight
        gradients"``. The last step is this plan, and those before are without what follows.
        """
        return self._source().shares()

    def _source(self) -> Source:
        if self.source is None:
            raise AmpGraphError("a report read from a file can be compared, but not planned again.")
        return self.source


def _tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
