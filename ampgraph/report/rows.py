"""The rows of a report: each node, cast and module of a rewritten graph as plain values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

_MANAGED = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class NodeRow:
    """One node of the rewritten graph that is not an inserted cast.

    Attributes:
        name: The node's name in the graph.
        label: Its readable name: a parameter's path, ``split[0]``, else the name.
        kind: ``"input"``, ``"parameter"``, ``"op"``, ``"clamp"`` (inserted, before the cast of a mask),
            ``"graph"`` (the body of a higher-order op) or ``"output"``.
        op: ``"aten.conv2d"``.
        module: Path of the innermost module, as in ``named_modules()``.
        dtype: The dtype of its result (several, joined by commas).
        shape: ``"2x8x16"``.
        op_class: ``"white"``, ``"black"``, ``"gray"``, ``"clear"`` or ``""``.
        by: The rule that decided, see `Decision`.
        reason: The reason, in one sentence.
        line: ``file:line`` of the code that made it, outside torch.
        reads_cast: Names of the inserted casts that it reads.
        widens: Labels of the low operands that its kernel widens.
        because: Names of the nodes whose dtype is the reason.
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
    because: tuple[str, ...] = ()

    @property
    def is_float_op(self) -> bool:
        """Whether it is an op whose dtype ampgraph decides; `getitem` does not count."""
        return is_float_op(self.kind, self.op, self.dtype)

    def is_low(self, low_dtype: str) -> bool:
        """Whether its result, or one of several, has the low dtype."""
        return low_dtype in self.dtype.split(",")


def is_float_op(kind: str, op: str, dtype: str) -> bool:
    """Whether ampgraph decides the dtype of a node's result, or of one of its results.

    Args:
        kind: As in `NodeRow.kind`.
        op: As in `NodeRow.op`.
        dtype: As in `NodeRow.dtype`.
    """
    return kind == "op" and op != "getitem" and not set(_MANAGED).isdisjoint(dtype.split(","))


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
        src_reason: The reason for the tensor's dtype.
        dst_reason: The reason for the other dtype in the first user.
        module: Path of the innermost module around all users; ``""`` for a cast of an output.
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
    module: str = ""


@dataclass(frozen=True)
class ModuleRow:
    """Counts of one module, including its submodules.

    Attributes:
        path: As in ``named_modules()``.
        ops: Ops whose dtype ampgraph decides.
        low: The ops that run low.
        casts: Inserted casts.
        cast_bytes: Bytes that these casts read and write.
    """

    path: str
    ops: int
    low: int
    casts: int
    cast_bytes: int


@dataclass(frozen=True)
class Totals:
    """Counts over one graph, for one forward.

    Attributes:
        casts: Inserted casts.
        activation_casts: Casts of activations.
        parameter_casts: Casts of parameters, buffers and constants.
        cast_bytes: Bytes that all casts read and write.
        activation_cast_bytes: Bytes that casts of activations read and write.
        parameter_cast_bytes: Bytes that casts of parameters read and write.
        traffic: Modelled bytes that all kernels and casts of an eager forward read and write.
        backward: The same for an eager backward.
        saved: Modelled bytes that an eager forward saves for the backward.
        fused_forward: Modelled bytes of a forward whose kernels a compiler fuses.
        fused_backward: The same for a backward.
        fused_saved: Modelled bytes saved between them.
    """

    casts: int
    activation_casts: int
    parameter_casts: int
    cast_bytes: int
    activation_cast_bytes: int
    parameter_cast_bytes: int
    traffic: int
    backward: int = 0
    saved: int = 0
    fused_forward: int = 0
    fused_backward: int = 0
    fused_saved: int = 0


def module_rows(nodes: Iterable[NodeRow], casts: Iterable[CastRow], low_dtype: str) -> tuple[ModuleRow, ...]:
    """Counts by module, submodules included, in the order of execution."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for node in nodes:
        for path in _prefixes(node.module) if node.is_float_op else ():
            counts[path][0] += 1
            counts[path][1] += node.is_low(low_dtype)
    for cast in casts:
        for path in _prefixes(cast.module):
            counts[path][2] += 1
            counts[path][3] += cast.bytes
    return tuple(ModuleRow(path, *row) for path, row in counts.items())


def operator_counts(nodes: Iterable[NodeRow], casts: Iterable[CastRow]) -> dict[str, dict[str, int]]:
    """Counts calls by operator and dtype, as Paddle's operator statistics do, from the graph alone."""
    found = [(n.op, n.dtype) for n in nodes if n.kind == "op" and n.op != "getitem"]
    found += [("clamp (inserted)", n.dtype) for n in nodes if n.kind == "clamp"]
    found += [("cast (inserted)", c.dst) for c in casts]
    counts: dict[str, dict[str, int]] = {}
    for name, dtype in sorted(found):
        row = counts.setdefault(name, {})
        row[dtype or "other"] = row.get(dtype or "other", 0) + 1
    return counts


def _prefixes(path: str) -> list[str]:
    """Returns ``["a", "a.b", "a.b.c"]`` for ``"a.b.c"``; nothing for the root."""
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
