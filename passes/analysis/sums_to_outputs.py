"""Finds sums of exact and low values that are the results of a graph: a forecast plus the mean of its past.

Analysis only. A result of 300 is a multiple of 2 in bfloat16, however small the part is that the low ops
computed. The autocast rule adds in float32, because one operand is float32. A result leads to an output, or
to a loss, through sums, moves, and products with exact values alone. What a norm reads, too, is the hidden
state of a network and no result: `x + attention(norm(x))`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node

from ampgraph._compat import OpOverload
from ampgraph.ops.lists import OpClass

from .facts import is_cast
from .graph_walk import kind, operand, root, values_read
from .norms import norm_at
from .problem import Hazard

if TYPE_CHECKING:
    from .traces import Tracer

_SUMS = frozenset(("add", "sub", "rsub", "addcmul", "lerp", "subtract"))
_NORMS = frozenset(("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"))
_PRODUCTS = frozenset(("mul", "div", "multiply", "divide", "true_divide"))
# What a loss is computed by, besides the ops that are called losses.
_LOSSES = frozenset(("mean", "sum", "abs", "square", "pow", "neg", "linalg_vector_norm"))


def find_sums_to_outputs(tracer: Tracer) -> dict[Node, Hazard]:
    """Returns the sums, and what lies between them and the outputs."""
    results = _results(tracer)
    hidden = _hidden_states(results, tracer)
    found: dict[Node, Hazard] = {}
    for node in tracer.facts:  # in the graph's order, so that a sum comes before what reads it
        if node not in results or root(node) in hidden or not _is_float32_by_rule(node, tracer):
            continue
        read = [n for n in values_read(node) if root(n) not in hidden]
        first = next((n for n in read if tracer.facts[n].dtype_source in found), None)
        exact = next((n for n in read if _is_exact(n, tracer)), None) if kind(node) in _SUMS else None
        owner = tracer.facts[node].dtype_source
        if exact is not None:
            found[owner] = Hazard(f"adds the exact {exact.name!r} to a low value, for an output", exact)
        elif first is not None:
            found[owner] = Hazard(f"leads from {first.name!r} to an output", first)
    return found


def _results(tracer: Tracer) -> set[Node]:
    """Returns the nodes that lead to an output through sums, moves and scales alone."""
    found: set[Node] = set()
    for node in reversed([*tracer.facts]):
        if any(
            user.op == "output" or (user in found and _leads_on(user, node, tracer)) for user in node.users
        ):
            found.add(node)
    return found


def _hidden_states(results: set[Node], tracer: Tracer) -> set[Node]:
    """Returns what norms read; views and casts of it left out."""
    if not results:
        return set()
    read = [operand(node) for node in tracer.facts if kind(node) in _NORMS]
    read += [norm.x for norm in map(norm_at, tracer.facts) if norm]
    return {root(n) for n in read}


def _leads_on(user: Node, read: Node, tracer: Tracer) -> bool:
    """Whether an error of an operand is about as large in the result."""
    if not isinstance(user.target, OpOverload):
        return True  # an item
    name = kind(user)
    if name in _PRODUCTS:
        return all(n is read or not tracer.traces[n].moved for n in values_read(user))
    is_loss = name in _LOSSES or name.endswith("_loss")
    return name in _SUMS or is_loss or is_cast(user) or tracer.facts[user].op_class is OpClass.CLEAR


def _is_float32_by_rule(node: Node, tracer: Tracer) -> bool:
    return node.op == "call_function" and tracer.traces[node].moved and tracer.keeps(node)


def _is_exact(node: Node, tracer: Tracer) -> bool:
    """Whether a value is no number, and made of inputs or positions, but of no low op."""
    trace = tracer.traces[node]
    if trace.moved or trace.few or tracer.facts[node].dtype is None:
        return False
    return trace.given or not trace.measured
