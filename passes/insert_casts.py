"""Applies a plan: inserts its casts, sets its dtype arguments, updates metadata. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from ampgraph._compat import (
    SET_GRAD_ENABLED,
    HigherOrderOperator,
    OpOverload,
    evaluate,
    fake_mode_of,
    result_dtypes,
    with_dtypes,
)
from ampgraph.errors import PassError
from ampgraph.marks import CastMark, ClampMark, mark_of, set_mark
from ampgraph.ops import kernels
from ampgraph.plan import Cast

from .analysis.alias import SOURCES
from .base import Pass, workspace

aten = torch.ops.aten
_INHERITED = ("nn_module_stack", "stack_trace", "custom", "recompute", "ac_graph_id")


@dataclass(frozen=True)
class InsertCasts(Pass):
    """Inserts every cast of the plan before its first use, as ``aten.to.dtype``."""

    name: ClassVar[str] = "insert_casts"

    def requires(self, graph_module: GraphModule) -> None:
        if workspace(graph_module).plan is None:
            raise PassError(f"pass {self.name!r} needs a plan; run PlaceCasts before it.")

    def run(self, graph_module: GraphModule) -> bool:
        plan = workspace(graph_module).plan
        assert plan is not None
        graph = graph_module.graph
        nodes = {n.name: n for n in graph.nodes}
        order = {n.name: i for i, n in enumerate(graph.nodes)}
        # A cast that is shared across grad modes, or returned, must use the grad mode of its producer.
        has_modes = any(n.target is SET_GRAD_ENABLED for n in graph.nodes)
        edited: set[Node] = set()
        for cast in plan.casts:
            uses = sorted(cast.uses, key=lambda use: order[use.node])
            users = [nodes[use.node] for use in uses]
            tensor = nodes[cast.tensor]
            beside_producer = has_modes and (len(users) > 1 or users[0].op == "output")
            at = after(graph, tensor) if beside_producer else users[0]
            node = insert_cast(graph, tensor, cast, at, users[0], self.name)
            for use, user in zip(uses, users, strict=True):
                set_argument(user, use.path, node)
            edited |= {node, *users}
        for name, argument in plan.dtype_args.items():
            set_named_argument(nodes[name], argument, torch.float32)
            edited.add(nodes[name])
        refresh_metadata(graph, edited)
        return bool(edited)


def insert_cast(graph: Graph, tensor: Node, cast: Cast, before: Node, user: Node, author: str) -> Node:
    """Inserts one cast. All casts are created here; `refresh_metadata` computes their fake values."""
    with graph.inserting_before(before):
        value = _saturated(graph, tensor, cast, author) if cast.saturates else tensor
        node = graph.call_function(aten.to.dtype, (value, cast.dst))
    inherit_metadata(node, user if user.op == "call_function" else tensor)
    set_mark(node, CastMark(author, cast.reason, cast.bytes, cast.is_parameter))
    return node


def inherit_metadata(node: Node, origin: Node) -> None:
    """Gives an inserted node the module and the source line of another."""
    node.meta.update({k: origin.meta[k] for k in _INHERITED if k in origin.meta})


def _saturated(graph: Graph, tensor: Node, cast: Cast, author: str) -> Node:
    """Inserts a clamp. It keeps -inf, which softmax tells from the most negative number."""
    # Half the range: a score added to the bound must not overflow either.
    bound = torch.finfo(cast.dst).max / 2
    made = [graph.call_function(aten.clamp.default, (tensor, -bound, bound))]
    if cast.keeps_infinity:
        made.append(graph.call_function(aten.eq.Scalar, (tensor, -torch.inf)))
        made.append(graph.call_function(aten.masked_fill.Scalar, (*made, -torch.inf)))
    mark = ClampMark(author, f"{tensor.name} masks with values outside {cast.dst}'s range")
    mode = fake_mode_of(graph)
    for node in made:
        node.meta["val"] = evaluate(node, mode)
        set_mark(node, mark)
    return made[-1]


def is_inserted_cast(node: Node) -> bool:
    """Whether ampgraph inserted this cast."""
    return mark_of(node, CastMark) is not None


def is_inserted(node: Node) -> bool:
    """Whether ampgraph inserted this node: a cast, or an op of the clamp before one."""
    return is_inserted_cast(node) or mark_of(node, ClampMark) is not None


def refresh_metadata(graph: Graph, edited: Iterable[Node]) -> None:
    """Recomputes ``meta["val"]`` of the edited nodes and of later nodes whose dtype changes."""
    mode = fake_mode_of(graph)
    dirty = set(edited)
    for node in graph.nodes:
        if node not in dirty or node.op != "call_function" or _stays_as_it_was(node):
            continue
        previous = node.meta.get("val", node.args[0].meta["val"] if is_inserted_cast(node) else None)
        value = with_dtypes(previous, result_dtypes(node, mode))
        if value is previous:
            continue
        node.meta["val"] = value
        node.meta.pop("tensor_meta", None)
        dirty.update(node.users)


def _stays_as_it_was(node: Node) -> bool:
    """Whether the node reads and returns the source's dtypes under every plan."""
    if isinstance(node.target, OpOverload):
        return kernels.is_opaque(node.target)
    return isinstance(node.target, HigherOrderOperator)


def after(graph: Graph, node: Node) -> Node:
    """Returns the node before which to insert a node that directly follows ``node``."""
    if node.op in SOURCES:
        return next(n for n in graph.nodes if n.op not in SOURCES)
    return node.next


def set_argument(node: Node, path: tuple[int | str, ...], value: Node) -> None:
    """Makes ``node`` read ``value`` at a path as in `tensor_arguments`."""
    first, rest = path[0], path[1:]
    if isinstance(first, str):
        node.update_kwarg(first, _replaced(node.kwargs[first], rest, value))
    else:
        node.update_arg(first, _replaced(node.args[first], rest, value))


def _replaced(container: Any, path: tuple[int | str, ...], value: Node) -> Any:
    if not path:
        return value
    if isinstance(container, dict):
        return {k: _replaced(v, path[1:], value) if k == path[0] else v for k, v in container.items()}
    return type(container)(
        _replaced(v, path[1:], value) if i == path[0] else v for i, v in enumerate(container)
    )


def set_named_argument(node: Node, name: str, value: object) -> None:
    """Sets an argument of an ATen call by its schema name."""
    position = kernels.argument_names(node.target).index(name)  # type: ignore[arg-type]
    if position < len(node.args):
        node.update_arg(position, value)  # type: ignore[arg-type]
    else:
        node.update_kwarg(name, value)  # type: ignore[arg-type]
