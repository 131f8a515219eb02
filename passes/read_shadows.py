"""Makes a graph read low copies of its parameters instead of casting them in every forward."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from ampgraph._compat import OpOverload
from ampgraph.marks import BoundaryMark, set_mark
from ampgraph.ops.fusion_tables import CONVOLUTIONS, EXTERN, READS_MEMORY
from ampgraph.policy.policy import LOW_DTYPES
from ampgraph.training.low_copies import shadow_weights

from .analysis.gradient_flow import Entrances, differentiable_outputs, groups, reached_by_gradients
from .analysis.graph_walk import kind
from .base import Pass
from .insert_casts import is_inserted_cast

# Weights that one call reads. The gradient of one of them takes the backward of all, so they are few.
MOST_IN_GROUP = 32


@dataclass(frozen=True)
class ReadShadows(Pass):
    """Replaces every inserted cast of a parameter by its shadow.

    Attributes:
        shadows: Parameter node name to the holder of its shadow: a placeholder of the graph, or an attribute.
        differentiable: Whether the gradient of a shadow goes to its parameter.
    """

    shadows: Mapping[str, str]
    differentiable: bool
    name: ClassVar[str] = "read_shadows"

    def run(self, graph_module: GraphModule) -> bool:
        graph = graph_module.graph
        placeholders = {n.name: n for n in graph.find_nodes(op="placeholder")}
        found = {n.name: n for n in graph.nodes if n.name in self.shadows}
        reads: dict[Node, tuple[Node, Node]] = {}  # cast -> copy, parameter
        for name, holder in self.shadows.items():
            casts = casts_of(found[name])
            shadow = placeholders.get(holder) or _attribute(graph, holder, casts[0])
            reads |= dict.fromkeys(casts, (shadow, found[name]))
        for cast, (shadow, _) in reads.items():
            if not self.differentiable or _is_detached(cast):
                cast.replace_all_uses_with(shadow)
        passing = [cast for cast in reads if cast.users]
        if passing:
            reached = reached_by_gradients(graph, differentiable_outputs(graph))
            # A compiler fills in zeros for all other gradients of one call, so these stay apart.
            alone = [[cast] for cast in passing if cast not in reached]
            together = [cast for cast in graph.nodes if cast in reads and cast.users and cast in reached]
            entrances = Entrances(graph)
            for group in (*alone, *groups(together, reached, MOST_IN_GROUP)):
                _read(graph, group, [reads[cast] for cast in group], entrances.of(group))
        for cast in reads:
            graph.erase_node(cast)
        return bool(reads)


def _is_detached(cast: Node) -> bool:
    return all(user.target is torch.ops.aten.detach.default for user in cast.users)


def _read(graph: Graph, casts: list[Node], reads: list[tuple[Node, Node]], entrance: Node) -> None:
    """Lets the users of casts read copies through one call, which passes gradients to the parameters."""
    shadows, parameters = zip(*reads, strict=True)
    with graph.inserting_before(entrance):
        call = graph.call_function(shadow_weights, (*shadows, *parameters))
        call.meta["val"] = tuple(cast.meta["val"] for cast in casts)
        set_mark(call, BoundaryMark("shadow"))
        for index, cast in enumerate(casts):
            read = graph.call_function(operator.getitem, (call, index))
            read.meta.update(cast.meta)
            set_mark(read, BoundaryMark("shadow"))
            cast.replace_all_uses_with(read)


def _attribute(graph: Graph, target: str, cast: Node) -> Node:
    with graph.inserting_before(next(iter(graph.nodes))):
        node = graph.create_node("get_attr", target)
    node.meta["val"] = cast.meta["val"]
    set_mark(node, BoundaryMark("shadow"))
    return node


def casts_of(node: Node) -> list[Node]:
    """Returns the inserted casts to a low dtype directly after a node."""
    return [user for user in node.users if is_inserted_cast(user) and user.meta["val"].dtype in LOW_DTYPES]


def is_laid_out_again(parameter: Node) -> bool:
    """Whether a compiler changes the memory layout of a parameter before kernels read it.

    Weights of convolutions get their channels next to each other, unless they have them there already. With
    one channel a group the strides alone tell the layout, and compilers read them.
    """
    readers = (user for cast in casts_of(parameter) for user in cast.users)
    if not any(kind(reader) in CONVOLUTIONS for reader in readers):
        return False
    value = parameter.meta["val"]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if value.dim() not in formats:
        return False
    return not value.is_contiguous(memory_format=formats[value.dim()]) or value.stride(1) != 1


def is_cast_by_readers(parameter: Node) -> bool:
    """Whether a compiler casts a parameter inside the kernels that read it, so that a copy saves nothing.

    This holds for most biases, weights of norms and scales. Kernels of libraries need the copy in memory.
    """
    found = list(casts_of(parameter))
    for tensor in found:
        for user in tensor.users:
            if isinstance(user.target, OpOverload) and user.target.is_view:
                found.append(user)
            elif _reads_memory(user, tensor):
                return False
    return True


def _reads_memory(reader: Node, tensor: Node) -> bool:
    name = kind(reader)
    if name == "linear" and tensor in reader.args[2:]:
        x = reader.args[0].meta["val"]  # type: ignore[union-attr]
        return x.dim() < 3 or x.is_contiguous()  # of other inputs a linear adds the bias after the product
    return not name or name in EXTERN or name in READS_MEMORY


def reads_copy(node: Node) -> bool:
    """Whether the node reads the low copy of a parameter through the boundary."""
    call = node.args[0] if node.target is operator.getitem else None
    return isinstance(call, Node) and call.target is shadow_weights
