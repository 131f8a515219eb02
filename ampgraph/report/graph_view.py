"""Reads a rewritten graph for `explain`, `draw` and `ampgraph.testing`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from ..errors import AmpGraphError
from ..marks import META_KEY, CastMark, input_mark, mark_of
from ..origin import is_item as is_item
from ..origin import label_of as label_of
from ..origin import op_name as op_name
from ..origin import user_line as user_line
from ..passes import Workspace, is_inserted_cast
from ..passes.analysis.arguments import tensor_arguments
from ..passes.analysis.facts import element_count, is_cast, tensors
from ..passes.insert_casts import is_inserted
from ..plan import Plan
from .converted import Converted

ArgumentPath = tuple[int | str, ...]

_ABBREVIATIONS = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


class Graph(NamedTuple):
    """A rewritten graph (``prefix`` is empty), or a higher-order op's body in one (``"true_graph_0/"``)."""

    prefix: str
    module: GraphModule
    plan: Plan


def rewritten(amp: object) -> tuple[GraphModule, Plan]:
    """Returns the rewritten graph module and its plan.

    Args:
        amp: An `AmpModule`, or a graph module that ampgraph rewrote.

    Raises:
        CaptureError: The module is not captured yet.
        AmpGraphError: It is something else.
    """
    if isinstance(amp, Converted):
        return amp.graph_module, amp.plan
    space = amp.meta.get(META_KEY) if isinstance(amp, GraphModule) else None
    if isinstance(amp, GraphModule) and isinstance(space, Workspace) and space.plan is not None:
        return amp, space.plan
    what = type(amp).__name__ + (" that ampgraph did not rewrite" if isinstance(amp, GraphModule) else "")
    raise AmpGraphError(f"expected what ampgraph.convert returns, or its graph_module; got a {what}.")


def with_bodies(graph_module: GraphModule, plan: Plan, prefix: str = "") -> Iterator[Graph]:
    """Yields the graph, then the bodies of its higher-order ops (``torch.cond`` ...) with their plans."""
    yield Graph(prefix, graph_module, plan)
    for name, child in graph_module.named_children():
        space = child.meta.get(META_KEY) if isinstance(child, GraphModule) else None
        if isinstance(child, GraphModule) and isinstance(space, Workspace) and space.plan is not None:
            yield from with_bodies(child, space.plan, f"{prefix}{name}/")


def kind_of(node: Node) -> str:
    """Returns ``"input"``, ``"parameter"``, ``"op"``, ``"cast"``, ``"clamp"``, ``"graph"`` or ``"output"``.

    Parameters include buffers and constants of the module. Casts are the inserted ones, and clamps stand
    before one where a mask is out of range; a cast that the user wrote is an op. A graph is the body that a
    higher-order op runs.
    """
    if node.op == "output":
        return "output"
    if node.op == "get_attr" and not values(node):
        return "graph"
    if node.op == "get_attr" or input_mark(node).is_parameter:
        return "parameter"
    if node.op == "placeholder":
        return "input"
    if is_inserted_cast(node):
        return "cast"
    return "clamp" if is_inserted(node) else "op"


def inserted_casts(graph_module: GraphModule) -> list[Node]:
    """Returns the inserted casts that remain in the graph, in graph order."""
    return [node for node in graph_module.graph.nodes if is_inserted_cast(node)]


def own_casts(graph_module: GraphModule) -> list[Node]:
    """Returns the casts of the model's own code that change a dtype in this graph."""
    casts = [node for node in graph_module.graph.nodes if is_cast(node) and not is_inserted(node)]
    return [node for node in casts if dtype_of(node) != dtype_of(node.args[0])]  # type: ignore[arg-type]


def cast_source(node: Node) -> Node:
    """Returns the tensor that an inserted cast reads, directly or through a clamp."""
    source: Node = node.args[0]  # type: ignore[assignment]
    while kind_of(source) == "clamp":
        source = source.args[0]  # type: ignore[assignment]
    return source


def casts_of(tensor: Node) -> list[Node]:
    """Returns the inserted casts of one tensor."""
    readers = list(tensor.users)
    for node in readers:
        readers += node.users if kind_of(node) == "clamp" else ()
    return [node for node in dict.fromkeys(readers) if kind_of(node) == "cast"]


def is_clamped(node: Node) -> bool:
    """Whether an inserted cast reads its tensor through a clamp."""
    return cast_source(node) is not node.args[0]


def cast_bytes(node: Node) -> int:
    """Returns the bytes that a cast node reads plus those it writes, symbolic sizes by their hints."""
    source, result = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return element_count(result) * (source.element_size() + result.element_size())


def is_parameter_cast(node: Node) -> bool:
    """Whether an inserted cast converts a parameter, buffer or constant."""
    mark = mark_of(node, CastMark)
    return mark is not None and mark.is_parameter


def operands(node: Node) -> Iterator[tuple[ArgumentPath, Node]]:
    """Yields (path, node) for each node that a node reads; paths as in `Plan.widened`."""
    return tensor_arguments(node)


def argument_at(node: Node, path: ArgumentPath) -> Node | None:
    """Returns the node that ``node`` reads at ``path``, or None where there is none."""
    return dict(operands(node)).get(path)


def short_dtype(dtype: torch.dtype) -> str:
    """Returns ``"f16"`` for torch.float16, ``"bf16"``, ``"i64"``, ``"bool"``."""
    name = dtype_name(dtype)
    letters = name.rstrip("0123456789")
    return _ABBREVIATIONS.get(letters, letters) + name[len(letters) :]


def dtype_name(dtype: torch.dtype | None) -> str:
    """Returns a dtype's name without ``torch.``; ``""`` for None."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def values(node: Node) -> list[torch.Tensor]:
    """Returns the fake tensors that a node produces."""
    return tensors(node)


def dtype_of(node: Node) -> str:
    """Returns the dtype's name; several, joined by commas, where an op's results differ."""
    return ",".join(dict.fromkeys(dtype_name(v.dtype) for v in values(node)))


def shape_of(node: Node) -> str:
    """Returns ``"2x8x16"``; ``"scalar"`` for 0-dim tensors; ``"2x8, 2"`` for several results."""
    return ", ".join("x".join(map(str, v.shape)) or "scalar" for v in values(node))


def type_of(node: Node) -> str:
    """Returns dtype and shape, ``"f16[2, 8]"``."""
    return ", ".join(f"{short_dtype(v.dtype)}[{', '.join(map(str, v.shape))}]" for v in values(node))


def short_line(line: str) -> str:
    """Returns the last folder, file and line of a ``file:line``."""
    return "/".join(Path(line).parts[-2:])


def human_bytes(count: int) -> str:
    """Returns a byte count for people: ``"512 B"``, ``"1.5 KiB"``, ``"2.0 MiB"``."""
    size: float = count
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def graph_name(amp: Any) -> str:
    """Returns the class name of the model that the graph came from."""
    return type(amp.source).__name__ if isinstance(amp, Converted) else type(amp).__name__
