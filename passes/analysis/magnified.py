"""Finds what leads from black ops into ops that magnify a rounding: losses, softmax, logarithms.

Analysis only, for O2, which runs gray and clear ops low where it can. Where a black op follows that sees
differences, one such rounding is no longer small: a probability near 1 becomes 1 before a cross entropy,
distances of 300 become equal before a softmax, a decoded box misses its target. The autocast rule has float32
there. What is no more exact than a low operand beside it does not count: a low score times a few learned
numbers, a residual stream.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from ampgraph._compat import OpOverload
from ampgraph.ops import kernels
from ampgraph.ops.lists import OpClass

from .cancellation import SOFTMAX
from .facts import FREE, Facts, tensors
from .graph_walk import is_zero_dim, kind, values_read
from .precision import FP32
from .problem import Hazard
from .traces import Tracer

_LOGSUMEXP = ("logsumexp", "logcumsumexp", "logaddexp")


def find_magnified(tracer: Tracer) -> dict[Node, Hazard]:
    """Returns the gray and clear ops between a black op and an op that magnifies what they round."""
    exact = _made_of_black(tracer)
    found: dict[Node, Hazard] = {}
    for reader in tracer.facts if exact else ():
        if _magnifies(reader) and tracer.keeps(reader):
            reason = f"leads from a black op into {reader.name!r}, which magnifies a rounding"
            found |= dict.fromkeys(_leading_to(reader, exact, tracer.facts), Hazard(reason, reader))
    return found


def _magnifies(node: Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    is_steep = kernels.is_loss(node.target) or kernels.is_steep(node.target)
    return is_steep or kind(node) in (*SOFTMAX, *_LOGSUMEXP)


def _leading_to(reader: Node, exact: set[Node], facts: Facts) -> Iterator[Node]:
    waiting, seen = [reader], {reader}
    while waiting:
        further = [n for n in _floats_read(waiting.pop(), facts) if n in exact and n not in seen]
        seen.update(further)
        waiting += further
        yield from further


def _floats_read(node: Node, facts: Facts) -> list[Node]:
    """Returns what makes the float tensors that a node reads; it may make several."""
    return [facts[n].dtype_source for n in values_read(node) if facts[n].dtype and not is_zero_dim(n)]


def _made_of_black(tracer: Tracer) -> set[Node]:
    """Returns the gray and clear ops, in float32 by the rule, that only such values and black ops feed."""
    facts, exact = tracer.facts, set[Node]()
    for node, fact in facts.items():
        if fact.op_class not in FREE or fact.dtype_source is not node or tracer.labels.get(node) is not FP32:
            continue
        read = _floats_read(node, facts)
        if all(map(tracer.keeps, read)) and any(_carries(n, node, exact, facts) for n in read):
            exact.add(node)
    return exact


def _carries(value: Node, node: Node, exact: set[Node], facts: Facts) -> bool:
    """Whether a value that comes from a black op is as large as each result."""
    of_black = value in exact or facts[value].op_class is OpClass.BLACK
    return of_black and facts[value].elements * len(tensors(node)) >= facts[node].elements
