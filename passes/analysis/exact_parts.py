"""Finds sums of exact and low values whose rounding would show: a forecast plus the mean of its past.

Analysis only. A sum of 300 is a multiple of 2 in bfloat16, however small the part is that the low ops
computed. The autocast rule adds in float32, because one operand is float32. A value *has an exact part* if
sums, moves and products with exact values made it of an exact value. Its rounding shows in three places:

- in a difference from another such value or an exact one, ``target - forecast``, and in a variance, which
  subtracts the mean;
- in a result: an output, or a loss, that only moves, products with exact values and means lie before. What
  a norm reads is the hidden state of a network and no result: ``x + attention(norm(x))``;
- in a norm of one of these values.
"""

from __future__ import annotations

from collections.abc import Iterator
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

DIFFERENCES = frozenset(("sub", "rsub", "subtract", "diff"))
_VARIANCES = frozenset(("var", "std", "var_mean", "std_mean", "cov", "corrcoef"))
_SUMS = frozenset(("add", "addcmul", "lerp")) | DIFFERENCES
_JOINS = _SUMS | frozenset(("cat", "concat", "concatenate", "stack", "hstack", "vstack", "where"))
_PRODUCTS = frozenset(("mul", "div", "multiply", "divide", "true_divide"))
NORMS = frozenset(("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"))
# What a loss is computed by, besides the ops that are called losses; and running sums.
_LEADS_ON = frozenset(("mean", "sum", "cumsum", "abs", "square", "pow", "neg", "linalg_vector_norm"))


def find_exact_parts(tracer: Tracer) -> dict[Node, Hazard]:
    """Returns the sums, and what lies between them and where their rounding shows.

    `Hazard.because` is the exact operand where there is one, else another of these nodes.
    """
    parts = _with_exact_part(tracer)
    results = [*_results(parts, tracer)] if parts else []
    hidden = _hidden_states(tracer) if results else set()
    differences = [node for node in parts if _is_difference(node, parts, tracer)]
    differences += [
        n for node in tracer.facts if kind(node) in _VARIANCES for n in values_read(node) if n in parts
    ]
    found = _made_of(differences, parts, set(), tracer)
    shown = [node for node, of in results if any(root(n) not in hidden for n in of)]
    found = _made_of(shown, parts, hidden, tracer) | found
    return found | _norms_of(found, tracer) if found else {}


def _made_of(
    starts: list[Node], parts: dict[Node, Node], beyond: set[Node], tracer: Tracer
) -> dict[Node, Hazard]:
    """Returns the values with exact parts that some of them are made of, as far as ``beyond``."""
    found: dict[Node, Hazard] = {}
    pending = [*starts]
    while pending:
        node = pending.pop()
        owner = tracer.facts[node].dtype_source
        if owner in found:
            continue
        found[owner] = Hazard(f"an exact value plus a low one, of {parts[node].name!r}", parts[node])
        pending += [n for n in values_read(node) if n in parts and root(n) not in beyond]
    return found


def _norms_of(found: dict[Node, Hazard], tracer: Tracer) -> dict[Node, Hazard]:
    """Returns the norms that read such a sum: they subtract the exact part."""
    norms = (node for node in tracer.facts if kind(node) in NORMS and tracer.keeps(node))
    read = ((node, tracer.facts[root(operand(node))].dtype_source) for node in norms)
    return {node: Hazard(f"a norm of {of.name!r}", of) for node, of in read if of in found}


def _with_exact_part(tracer: Tracer) -> dict[Node, Node]:
    """Returns the nodes that a low op feeds and that have an exact part, with the operand that brings it."""
    found: dict[Node, Node] = {}
    for node in tracer.facts:
        if node.op != "call_function" or not tracer.traces[node].moved or not tracer.keeps(node):
            continue
        is_join = kind(node) in _JOINS
        if not is_join and found.keys().isdisjoint(node.all_input_nodes):
            continue
        read = values_read(node)
        brings = [n for n in read if _is_exact(n, tracer)] if is_join else []
        brings += [n for n in read if n in found and (is_join or _leads_on(node, n, tracer))]
        if brings:
            found[node] = brings[0]
    return found


def _is_difference(node: Node, parts: dict[Node, Node], tracer: Tracer) -> bool:
    """Whether a node subtracts such values or exact ones alone."""
    if kind(node) not in DIFFERENCES:
        return False
    read = values_read(node)
    return any(n in parts for n in read) and all(n in parts or not tracer.traces[n].moved for n in read)


def _results(parts: dict[Node, Node], tracer: Tracer) -> Iterator[tuple[Node, list[Node]]]:
    """Yields the last of these sums before an output, with the operands that bring their exact parts."""
    leads: set[Node] = set()
    for node in reversed([*tracer.facts]):
        users = (user for user in node.users if user.op == "output" or user in leads)
        if not any(user.op == "output" or _leads_on(user, node, tracer) for user in users):
            continue
        if node not in parts:
            leads.add(node)
            continue
        if kind(node) not in _SUMS:
            leads.add(node)
        yield node, [n for n in values_read(node) if n in parts or _is_exact(n, tracer)]


def _hidden_states(tracer: Tracer) -> set[Node]:
    """Returns what norms read; views and casts of it left out."""
    read = [operand(node) for node in tracer.facts if kind(node) in NORMS]
    read += [norm.x for norm in map(norm_at, tracer.facts) if norm]
    return {root(n) for n in read}


def _leads_on(user: Node, read: Node, tracer: Tracer) -> bool:
    """Whether an error of an operand is about as large in the result."""
    if not isinstance(user.target, OpOverload):
        return True  # an item
    name = kind(user)
    if name in _PRODUCTS:
        return all(n is read or not tracer.traces[n].moved for n in values_read(user))
    adds_up = name in _LEADS_ON or name.endswith("_loss")
    return name in _SUMS or adds_up or is_cast(user) or tracer.facts[user].op_class is OpClass.CLEAR


def _is_exact(node: Node, tracer: Tracer) -> bool:
    """Whether a value is no number, and made of inputs or positions, but of no low op."""
    trace = tracer.traces[node]
    if trace.moved or trace.few or tracer.facts[node].dtype is None:
        return False
    return trace.given or not trace.measured
