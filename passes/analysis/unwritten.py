"""Finds the nodes whose values are whatever was in memory: those of ``torch.empty``, before it is written.

Analysis only. Such values say nothing of the model, and may be NaN, infinite or huge in a healthy one. Some
ops keep them: views, copies, casts, and writes to a part of a tensor (``index_put``). Where such writes have
filled all of the tensor, no schema shows it; these nodes are found too. The values that were written had
their own nodes, and so has what is computed of the tensor later.
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from ampgraph._compat import OpOverload
from ampgraph.ops.kernels import is_uninitialized, keeps_elements, op_of

from .alias import AliasSets, is_whole, written_args


def unwritten(graph: Graph) -> set[Node]:
    """Returns the nodes whose values may be uninitialized memory, all of them or some."""
    if not any(map(_allocates, graph.nodes)):
        return set()
    aliases = AliasSets(graph)
    found: set[Node] = set()
    filled: set[Node] = set()  # memory that an op wrote as a whole, by its root
    for node in graph.nodes:
        kept = _kept(node)
        is_view = kept is not None and aliases.root(node) is aliases.root(kept)
        if _allocates(node) or (kept in found and not (is_view and aliases.root(node) in filled)):
            found.add(node)
        elif kept is None:
            filled.update(
                aliases.root(n) for n in written_args(node) if n in found and is_whole(n.meta["val"])
            )
    return found


def _allocates(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and is_uninitialized(node.target)


def _kept(node: Node) -> Node | None:
    """Returns the argument of which elements are in the result as they were, if the op may do that."""
    if node.target is operator.getitem:
        keeps = True
    else:
        keeps = isinstance(node.target, OpOverload) and _may_keep(node.target)
    return node.all_input_nodes[0] if keeps and node.all_input_nodes else None


def _may_keep(target: OpOverload) -> bool:
    op = op_of(target)
    return op.is_view or op.may_convert or keeps_elements(target)
