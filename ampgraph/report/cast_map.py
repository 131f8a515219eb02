"""The cast map as text: one line a node, for the whole graph or around selected nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.fx import GraphModule, Node

from ..plan import Plan
from . import graph_view as view

# Lines of context before and after each selected line.
CONTEXT = 2
# A message shows at most this many selected nodes.
SHOWN = 20


def cast_lines(graph_module: GraphModule, plan: Plan) -> dict[Node, str]:
    """Returns the line of every node that the cast map shows, in graph order, bodies last."""
    lines: dict[Node, str] = {}
    for graph in view.with_bodies(graph_module, plan):
        for node in graph.module.graph.nodes:
            shown = node.op == "output" or view.kind_of(node) == "op"
            if shown and not view.is_item(node) and (line := _line(node, graph.plan)):
                lines[node] = graph.prefix + line
    return lines


def _line(node: Node, plan: Plan) -> str:
    """Returns a node's line; ``""`` if it has no floating dtype and reads no cast."""
    reads = list(view.operands(node))
    floats = [v.dtype for v in view.values(node) if v.is_floating_point()] if node.op != "output" else []
    if not floats and not any(view.kind_of(source) == "cast" for _, source in reads):
        return ""
    dtypes = "/".join(dict.fromkeys(map(view.short_dtype, floats)))
    head = f"{node.name}: {dtypes}" if dtypes else node.name
    widened = set(plan.widened)
    shown = ", ".join(_operand(source, (node.name, path) in widened, plan) for path, source in reads)
    return f"{head} <- {shown}" if shown else head


def _operand(node: Node, widened: bool, plan: Plan) -> str:
    if view.kind_of(node) == "cast":
        source, dtype = view.cast_source(node), view.values(node)[0].dtype
        same = [cast for cast in view.casts_of(source) if view.values(cast)[0].dtype == dtype]
        number = f"#{same.index(node) + 1}" if same.index(node) else ""
        label = view.label_of(source)
        return f"cast{number}({f'clamp({label})' if view.is_clamped(node) else label})"
    if widened and view.values(node)[0].dtype == plan.low_dtype:
        return f"widen({view.label_of(node)})"
    return view.label_of(node)


def excerpt(lines: dict[Node, str], marked: Collection[Node], notes: dict[Node, str] | None = None) -> str:
    """Returns the marked lines (``> ``) with a few lines of context, and ``...`` for omitted lines.

    Args:
        lines: See `cast_lines`.
        marked: Selected nodes; nodes without a line are skipped.
        notes: Text to add under a marked line.
    """
    order = list(lines)
    at = [i for i, node in enumerate(order) if node in marked]
    shown = at[:SHOWN]
    near = sorted({j for i in shown for j in range(i - CONTEXT, i + CONTEXT + 1) if 0 <= j < len(order)})
    text: list[str] = []
    for previous, i in zip([-1, *near], near, strict=False):
        if i > previous + 1:
            text.append("  ...")
        text.append(("> " if i in shown else "  ") + lines[order[i]])
        if i in shown and notes and order[i] in notes:
            text.append(f"    {notes[order[i]]}")
    if near and near[-1] < len(order) - 1:
        text.append("  ...")
    return "\n".join([*text, *left_out(at)])


def left_out(things: Sequence[object]) -> list[str]:
    """Returns a line that counts the omitted entries of a message."""
    return [f"(and {len(things) - SHOWN} more)"] if len(things) > SHOWN else []
