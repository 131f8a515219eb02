"""The first node of a graph whose value is not finite.

`ampgraph.watch` looks at the model's own run. After an overflow whose cause may be the forward, `look_for`
runs the next calls a second time, by the side, for `LossScaler.last_overflow`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .._compat import OpOverload, no_dispatch_modes
from ..marks import input_mark
from ..origin import label_of, module_path, op_name, user_line
from ..passes import is_boundary
from ..passes.analysis.alias import SOURCES, AliasSets, written_args
from ..passes.insert_casts import is_inserted
from ..passes.read_shadows import reads_copy
from ..training.overflow import Sight
from ..training.scaler import LossScaler
from .options import Options
from .run_graph import GraphRun, floats, is_meant, updated_statistics
from .shadow_weights import SHADOW_PREFIX


class First(NamedTuple):
    """The first node whose value is not finite.

    Attributes:
        node: An op of the model, a cast or a low copy.
        given: The input whose infinities led to its NaN, if any did.
    """

    node: Node
    given: Node | None = None


class Flag(NamedTuple):
    """Whether a node's tensor has NaN, and whether it has infinities; on its device.

    Attributes:
        node: The node.
        found: The two answers.
        is_written: Whether the tensor is the model's doing, and not what was in memory.
    """

    node: Node
    found: Tensor
    is_written: bool = True


def look_for(graph_module: GraphModule, inputs: Sequence[Any], scaler: LossScaler, options: Options) -> None:
    """Tells the scaler the first node that is not finite, if there is one; the model stays as it was.

    The graph runs node by node, without gradients, and each value is dropped after its last use.

    Args:
        graph_module: The rewritten graph, without the loss-scaling boundary.
        inputs: One value for each placeholder.
        scaler: Has asked, see `OverflowLog.looks`.
        options: Those of the model.
    """
    if any(map(_communicates, graph_module.graph.nodes)):
        return  # other ranks may not look, and would be waited for
    tensors = [x for x in (*inputs, *graph_module.parameters()) if isinstance(x, Tensor)]
    devices = {t.device for t in tensors if t.is_cuda}
    with torch.no_grad(), torch.random.fork_rng(devices), no_dispatch_modes():
        first = first_of(list(_flags(graph_module, inputs)))
    if first is None:
        return
    node = first.given or maker_of(first.node)
    op = op_name(node) or node.op
    if node.op in SOURCES and first.given is None and is_inserted(first.node):
        dtype = str(first.node.meta["val"].dtype).removeprefix("torch.")
        op = f"cast to {dtype}"  # what was given is finite
    path = ".".join(part for part in (options.block, module_path(node)) if part)
    scaler.guard.overflows.saw(Sight(name_of(node), path, op, user_line(node)))


def _flags(graph_module: GraphModule, inputs: Sequence[Any]) -> Iterator[Flag]:
    run = GraphRun(graph_module, inputs)
    for node, value in run:
        if node.target is not operator.getitem:  # what it takes was looked at
            is_written = node not in run.unwritten
            yield from (Flag(node, flag_of(t), is_written) for t in floats(value) if has_values(t))


def _communicates(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and "c10d" in node.target.namespace


def has_values(tensor: Tensor) -> bool:
    """Whether there is something to look at."""
    return tensor.layout == torch.strided and tensor.numel() > 0


def flag_of(tensor: Tensor) -> Tensor:
    """Returns whether a tensor has NaN, and whether it has infinities; does not wait for the device."""
    tensor = tensor.detach()
    return torch.stack([tensor.isnan().any(), tensor.isinf().any()])


def read(flags: Sequence[Flag]) -> list[list[bool]]:
    """Reads flags: the only wait for the device."""
    device = flags[0].found.device if flags else None
    return torch.stack([flag.found.to(device) for flag in flags]).tolist() if flags else []


def first_of(flags: Sequence[Flag], found: Sequence[list[bool]] | None = None) -> First | None:
    """Returns the first node whose value is not finite.

    Infinities that are meant do not count, nor what they lead to; NaN always does, except in statistics that
    batch norms only update, and in memory that is not written yet.

    Args:
        flags: Those of the values, in the order of the run.
        found: What they say, if they were read.
    """
    meant: dict[Node, Node | None] = {}  # with the input that they come from
    aliases = cache(AliasSets)
    answers = read(flags) if found is None else found
    for (node, _, is_written), (is_nan, is_inf) in zip(flags, answers, strict=False):
        if not (is_nan or is_inf) or _is_only_updated(node):
            continue
        inputs = [behind_boundary(node)] if reads_copy(node) else node.all_input_nodes
        origins = [meant[n] for n in map(behind_boundary, inputs) if n in meant]
        is_infinity_meant = _is_own(node) or bool(origins)
        given = next(filter(None, origins), None)
        if is_written and (is_nan or not is_infinity_meant):
            return First(node, given)
        if is_infinity_meant:
            origin = node if node.op == "placeholder" else given
            meant |= dict.fromkeys((node, *_written_by(node, aliases)), origin)
    return None


def _written_by(node: Node, aliases: Callable[[Graph], AliasSets]) -> list[Node]:
    """Returns the nodes in whose memory a node writes: who reads them later reads what it wrote."""
    return [member for argument in written_args(node) for member in aliases(node.graph).of(argument)]


def _is_only_updated(node: Node) -> bool:
    """Whether norms update a value by the statistics of the batch, and nothing reads it."""
    return bool(node.users) and all(node in updated_statistics(user) for user in node.users)


def _is_own(node: Node) -> bool:
    """Whether infinities here are the user's: written in the code, kept in a buffer, or given (a mask)."""
    mark = input_mark(node)
    is_weight = node.name.startswith(SHADOW_PREFIX) or (mark.is_parameter and not mark.is_table)
    return is_meant(node) or (node.op == "placeholder" and not is_weight)


def maker_of(node: Node) -> Node:
    """Returns the model's own node behind a cast and the boundary."""
    node = behind_boundary(node)
    while is_inserted(node):
        node = behind_boundary(node.args[0])  # type: ignore[arg-type]
    return node


def name_of(node: Node) -> str:
    """Returns a readable name; that of its parameter for a low copy."""
    return label_of(node).removeprefix(SHADOW_PREFIX)


def is_passed_on(node: Node) -> bool:
    """Whether the boundary passes a value on, which has its flag already; it makes low copies, though."""
    return is_boundary(node) and not reads_copy(node)


def behind_boundary(node: Node) -> Node:
    """Returns the tensor that a node of the loss-scaling boundary passes on; any other node as it is."""
    while is_boundary(node) and node.op == "call_function":
        source = node.args[0]
        assert isinstance(source, Node)
        if node.target is operator.getitem:
            passed = source.args[len(source.args) - len(source.meta["val"]) :]
            source = passed[int(node.args[1])]  # type: ignore[arg-type]
            assert isinstance(source, Node)
        node = source
    return node
