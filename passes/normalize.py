"""Brings a captured graph into the form that analysis expects.

- It removes ``aten._assert_tensor_metadata`` nodes, because they assert dtypes that this compiler changes.
- It gives copies of constants their own memory: ``torch.export`` records them with that of the constant.
- It takes calls that return their input out of regions without gradients. The input keeps its gradients
  there, and a cast of it would not.
- It sets ``copy=True`` on casts of written memory, and on casts that leave gradients behind, because a plan
  may make the two dtypes equal.
- It makes in-place ops functional if the result is the same. Otherwise (a write through a view, a slice
  assignment) the written memory gets a separate node, a clone that `CleanCasts` removes again. So a cast
  before it never splits the memory in two.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from ampgraph._compat import (
    SET_GRAD_ENABLED,
    FakeTensorMode,
    OpOverload,
    evaluate,
    fake_mode_of,
    result_dtypes,
    storage_key,
)
from ampgraph.marks import StorageMark, mark_of, set_mark
from ampgraph.ops import kernels

from .analysis.alias import SOURCES, AliasSets, overlaps_itself, returned_input, written_args, written_memory
from .analysis.grad_modes import without_gradients
from .base import Pass
from .insert_casts import is_inserted_cast, set_named_argument

aten = torch.ops.aten


@dataclass(frozen=True)
class Normalize(Pass):
    """See the module docstring."""

    name: ClassVar[str] = "normalize"

    def run(self, graph_module: GraphModule) -> bool:
        graph = graph_module.graph
        modified = _drop_dtype_asserts(graph)
        modified |= _separate_copies(graph)
        has_writes = any(map(written_args, graph.nodes))
        modified |= _free_returned_inputs(graph_module)
        modified |= has_writes and _functionalize(graph)
        modified |= _let_casts_copy(graph_module)
        modified |= has_writes and _isolate_written_memory(graph)
        return modified


def _drop_dtype_asserts(graph: Graph) -> bool:
    asserts = [n for n in graph.nodes if n.target is aten._assert_tensor_metadata.default]
    for node in asserts:
        graph.erase_node(node)
    return bool(asserts)


def _separate_copies(graph: Graph) -> bool:
    copies = graph.find_nodes(op="call_function", target=aten.lift_fresh_copy.default)
    shared = [n for n in copies if _memory(n) == _memory(n.all_input_nodes[0])]
    if not shared:
        return False
    _refresh_memory(shared, AliasSets(graph), fake_mode_of(graph))
    return True


def _memory(node: Node) -> int | None:
    return storage_key(node.meta["val"])


def _free_returned_inputs(graph_module: GraphModule) -> bool:
    """Readers of a returned input read the input; a cast to the same dtype interrupts the region."""
    graph = graph_module.graph
    inside = without_gradients(graph)
    if not inside:
        return False
    mode, written = fake_mode_of(graph), written_memory(graph)
    carrying = _may_have_gradients(graph_module, inside, mode)
    modified = False
    for node, switch in inside.items():
        returned = returned_input(node, mode)
        if returned not in carrying and returned not in written:
            continue
        if not _is_conversion(node):
            node.replace_all_uses_with(returned)
        else:
            _interrupt(switch, node)
        modified = True
    return modified


def _interrupt(switch: Node, node: Node) -> None:
    """Runs a node in the grad mode that held before ``switch`` turned gradients off."""
    graph = node.graph
    with graph.inserting_before(switch):
        before = graph.call_function(torch.is_grad_enabled)
    with graph.inserting_before(node):
        on = graph.call_function(SET_GRAD_ENABLED, (before,))
    with graph.inserting_after(node):
        off = graph.call_function(SET_GRAD_ENABLED, (False,))
    before.meta["val"], on.meta["val"], off.meta["val"] = True, None, None


def _may_have_gradients(
    graph_module: GraphModule, inside: Container[Node], mode: FakeTensorMode | None
) -> set[Node]:
    """Returns the nodes that may have gradients: in regions without them, those that return such a node.

    Buffers have none; a frozen parameter may have some later.
    """
    found = set[Node]()
    for node in graph_module.graph.nodes:
        if node.target is aten.detach.default:
            continue
        if node in inside:
            if returned_input(node, mode) in found:
                found.add(node)
            continue
        if node.op == "get_attr":
            held = attrgetter(str(node.target))(graph_module)
            is_parameter = isinstance(held, torch.nn.Parameter)
            if is_parameter or (isinstance(held, torch.Tensor) and held.requires_grad):
                found.add(node)
        elif node.op == "placeholder" or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _is_conversion(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and kernels.may_convert(node.target)


def _functionalize(graph: Graph) -> bool:
    keeping = _keep_gradients(graph)
    candidates = [n for n in graph.nodes if written_args(n) and n not in keeping and _functional(n)]
    if not candidates:
        return False
    order = {n: i for i, n in enumerate(graph.nodes)}
    aliases, mode = AliasSets(graph), fake_mode_of(graph)
    modified = []
    for node in candidates:
        target = written_args(node)[0]
        if not _only_seen_through(node, target, aliases, order) or not _keeps_dtype(node, mode):
            continue
        for user in [u for u in target.users if order[u] > order[node]]:
            user.replace_input_with(target, node)
        node.target = _functional(node)
        modified.append(node)
    _refresh_memory(modified, aliases, mode)
    return bool(modified)


def _keep_gradients(graph: Graph) -> set[Node]:
    """Returns the calls in no-grad mode that write a tensor with gradients; a new result would lose them."""
    without, keeping = without_gradients(graph), set[Node]()
    for node in graph.nodes:
        if node in without and any(t not in without or t in keeping for t in written_args(node)):
            keeping.add(node)
    return keeping


def _refresh_memory(modified: list[Node], aliases: AliasSets, mode: FakeTensorMode | None) -> None:
    """Gives the results of functional ops, and the nodes that share their memory, new memory."""
    for root in {aliases.root(node) for node in modified}:
        members = aliases.of(root)
        first = next(i for i, n in enumerate(members) if n in modified)
        for node in members[first:]:
            if node.op == "call_function":
                node.meta["val"] = evaluate(node, mode)


def _functional(node: Node) -> OpOverload | None:
    """Returns the functional form of an in-place op: same overload and arguments, no underscore."""
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    if not name.endswith("_") or node.target.namespace != "aten":  # type: ignore[union-attr]
        return None
    if not kernels.has_functional_form(node.target):  # type: ignore[arg-type]
        return None
    packet = getattr(aten, name[:-1], None)
    functional = getattr(packet, node.target._overloadname, None) if packet else None  # type: ignore[union-attr]
    if functional is None or functional._schema.is_mutable:
        return None
    ours, theirs = ([str(a.type) for a in op._schema.arguments] for op in (node.target, functional))  # type: ignore[union-attr]
    return functional if ours == theirs and not node.kwargs.keys() - _names(functional) else None


def _keeps_dtype(node: Node, mode: FakeTensorMode | None) -> bool:
    """Whether the functional form returns the dtype of the memory that the in-place form writes."""
    before, node.target = node.target, _functional(node)  # type: ignore[assignment]
    try:
        return result_dtypes(node, mode) == (node.meta["val"].dtype,)
    finally:
        node.target = before


def _names(op: OpOverload) -> set[str]:
    return {a.name for a in op._schema.arguments}


def _only_seen_through(node: Node, target: Node, aliases: AliasSets, order: dict[Node, int]) -> bool:
    """Whether, after ``node`` has written ``target``, no other node reads that memory."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    if overlaps_itself(value):
        return False
    for other in aliases.of(target):
        if other.op in SOURCES:
            return False
        seen_later = any(order[u] > order[node] for u in other.users)
        if other is not target and order[other] < order[node] and seen_later:
            return False
    return True


def _let_casts_copy(graph_module: GraphModule) -> bool:
    """Sets ``copy=True`` on casts if one of the two tensors is written, or if only the input has gradients.

    In the source they make a new tensor, because the dtypes differ. Under the plan the dtypes may be equal.
    """
    graph = graph_module.graph
    written, inside = written_memory(graph), without_gradients(graph)
    carrying = _may_have_gradients(graph_module, inside, fake_mode_of(graph)) if inside else set[Node]()
    casts = [
        n
        for n in graph.nodes
        if isinstance(n.target, OpOverload)
        and kernels.may_convert(n.target)
        and not is_inserted_cast(n)
        and (not written.isdisjoint((n, n.args[0])) or (n in inside and n.args[0] in carrying))
        and n.meta["val"].dtype != n.args[0].meta["val"].dtype
    ]
    for cast in casts:
        if cast.target is aten.type_as.default:
            cast.target = aten.to.other
        set_named_argument(cast, "copy", True)
    return bool(casts)


def _isolate_written_memory(graph: Graph) -> bool:
    written = [n for node in graph.nodes for n in written_args(node)]
    if not written:
        return False
    aliases = AliasSets(graph)
    roots = {aliases.of(n)[0]: aliases.of(n) for n in written}
    mode = fake_mode_of(graph)
    modified = False
    for first, members in roots.items():
        if any(n.op in SOURCES for n in members) or not isinstance(first.meta["val"], torch.Tensor):
            continue
        if mark_of(first, StorageMark) is not None:
            continue
        with graph.inserting_after(first):
            storage = graph.call_function(aten.clone.default, (first,))
        for user in [u for u in first.users if u is not storage]:
            user.replace_input_with(first, storage)
        storage.meta = {k: v for k, v in first.meta.items() if k != "from_node"}
        set_mark(storage, StorageMark())
        for node in (storage, *members[1:]):
            node.meta["val"] = evaluate(node, mode)
        modified = True
    return modified
