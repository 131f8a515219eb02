"""Finds values that rounding would spoil.

Analysis only. A node is *exact* if it does not depend on any op that the autocast rule moves to another
dtype, through floats, integers or memory. A node is *kept* if the rule does not move it itself. These nodes
must stay in the source's dtype:

- *positions*: exact arithmetic on values computed only from integers, buffers and constants. The position
  2,047 is 2,048 in bfloat16, and its angles are wrong. Short matrix products of positions count (angles by
  ``einsum``, rotated grids), although the lists name them white. Values from a small set (masks) do not
  count, because rounding moves each value as a whole.
- *arithmetic on inputs*: exact values that are computed from floating inputs, up to the last op that may
  magnify a rounding: sums, differences, norms, logarithms. Rounded times of day differ by nothing, and
  ``log(1 - p)`` is infinite for a rounded ``p``.
- *results* that no low op feeds, and what they are made of: a window of an input that the model returns.
- *differences* of values that the autocast rule keeps, and what they are made of, down to the low ops: equal
  parts cancel, and what rounding changed is left. Hidden states do not count: their own mean subtracted, as
  norms do, and branches that norms scaled. At O3 only differences of exact values count.
- *targets*: exact values that losses compare; not at O3 (see `losses`).
- *linear systems*: kept values that lead into a decomposition or a solver, which magnify errors, too.
- *long products*: kept values that lead into ``prod`` or ``cumprod``. Rounded to bfloat16, 0.999 is 1, and so
  is the product of a thousand.
- *sums of exact and low values* that are results or that differences read (see `exact_parts`); not at O3.
- *long sums* that are added term by term (see `running_sums`); not at O3.
- *decisions*: kept values that lead to integers, booleans, other dtypes, indices, and steps such as
  ``round``. So none is taken on less than the autocast rule computes it from.
- *choices* among results of black ops (``topk``, ``sort``, a maximum with its index), also if nothing reads
  the indices, because the backward does; not at O3.
- *angles*: kept values that lead into a periodic function, likewise.

The autocast rule keeps all of them in float32 except the products.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping

import torch
from torch.fx import Node

from ampgraph._compat import OpOverload, size_hint
from ampgraph.ops import kernels
from ampgraph.ops.lists import OpClass

from .alias import SOURCES
from .arguments import argument
from .exact_parts import DIFFERENCES, NORMS, find_exact_parts
from .facts import Facts, NodeFacts, tensors
from .graph_walk import MEANS, kind, operand, operands, root, values_read
from .losses import find_targets
from .problem import Hazard
from .running_sums import MANY, find_running_sums
from .traces import Trace, Tracer

# What joins and scales the branches of a network.
_OF_BRANCHES = frozenset(("add", "mul", "dropout"))
# Of a whole dimension or of the elements around each.
# What returns values with their indices, by which the backward distributes the gradient.
_SELECTIONS = frozenset(
    ("sort", "topk", "min", "max", "kthvalue", "median", "nanmedian", "mode", "cummax", "cummin")
)


def find_hazards(tracer: Tracer) -> dict[Node, Hazard]:
    """Returns the nodes that must stay in the source's dtype."""
    facts = tracer.facts
    needed: dict[Node, Hazard] = {}
    sums: dict[Node, Hazard] = {}
    if not tracer.lowers_black:
        sums = find_running_sums(tracer) | find_exact_parts(tracer) | find_targets(tracer)
    waiting = [(h.because, h) for h in sums.values() if h.because and not tracer.traces[h.because].moved]
    waiting += _starts(tracer)
    while waiting:
        node, hazard = waiting.pop()
        node = facts[node].dtype_source
        if node in needed or node.op in SOURCES or not tracer.keeps(node):
            continue
        needed[node] = hazard
        waiting += [(n, Hazard(hazard.reason, hazard.because or node)) for n in _floats_read(node, facts)]
    pinned = sums | needed
    return pinned | _differences_of(pinned, tracer)


def _differences_of(pinned: Mapping[Node, Hazard], tracer: Tracer) -> dict[Node, Hazard]:
    """Returns the differences of such nodes, ``x - floor(x)``, which a rounding of both would spoil."""
    facts = tracer.facts
    found: dict[Node, Hazard] = {}
    for node in facts:
        if node in pinned or kind(node) not in DIFFERENCES or not tracer.keeps(node):
            continue
        read = [facts[n].dtype_source for n in _floats_read(node, facts)]
        of = [n for n in read if n in pinned]
        if of and all(n in pinned or not tracer.traces[n].moved for n in read):
            found[node] = Hazard(f"a difference of {' and '.join(repr(n.name) for n in read)}", of[-1])
    return found


def _floats_read(node: Node, facts: Facts) -> list[Node]:
    return [n for n in values_read(node) if facts[n].dtype]


# -- what must stay exact --------------------------------------------------------------------------------


def _starts(tracer: Tracer) -> Iterator[tuple[Node, Hazard]]:
    """Yields arithmetic on positions and inputs, and what decisions, angles and solvers are made of."""
    facts, traces = tracer.facts, tracer.traces
    for node, fact in facts.items():
        if node.op == "output":
            yield from _returned(node, tracer)
            continue
        if node.op in SOURCES:
            continue
        if fact.dtype is None:
            yield from _decided_by(node, facts, traces)
            continue
        if not isinstance(node.target, OpOverload):
            continue
        trace = traces[node]
        if why := _own_hazard(node) or _selection(node, tracer):
            if any(map(tracer.keeps, _floats_read(node, facts))):
                yield node, Hazard(f"{why}, and {trace.origin}")
        elif _is_kept_difference(node, tracer):
            yield node, Hazard(f"a difference of values, and {trace.origin}")
        elif trace.moved:
            continue
        elif _magnifies(node, fact, tracer):
            yield node, Hazard("arithmetic that may magnify a rounding, and no low op feeds it")
        elif _computes_positions(node, fact, trace):
            yield node, Hazard("computed from positions and tables alone: exact until a low op reads it")


def _returned(output: Node, tracer: Tracer) -> Iterator[tuple[Node, Hazard]]:
    """Yields results that no low op feeds: a low op may read their operands, and the cast is not theirs."""
    for node in _floats_read(output, tracer.facts):
        trace = tracer.traces[node]
        if trace.given and not (trace.moved or trace.few or tracer.lowers_black):
            yield node, Hazard("a result, and no low op feeds it")


def _magnifies(node: Node, fact: NodeFacts, tracer: Tracer) -> bool:
    """Whether the relative error of the result may be much larger than that of the operands."""
    if fact.op_class is OpClass.BLACK and tracer.lowers_black:
        return False
    if kernels.is_steep(node.target):  # type: ignore[arg-type]
        return True
    if not tracer.traces[node].given or fact.dtype is not torch.float32:
        return False
    is_listed = fact.op_class in (OpClass.GRAY, OpClass.BLACK)
    return is_listed and not kernels.keeps_relative_error(node.target)  # type: ignore[arg-type]


def _is_kept_difference(node: Node, tracer: Tracer) -> bool:
    """Whether values are subtracted that the rule has in float32, none of them a mask or zero."""
    if kind(node) not in DIFFERENCES or (tracer.lowers_black and tracer.traces[node].moved):
        return False
    read = [n for n in operands(node) if n is not None]
    values = [n for n in read if isinstance(n, Node)]
    if any(tracer.traces[n].few or not tracer.keeps(tracer.facts[n].dtype_source) for n in values):
        return False
    if not values or not all(isinstance(n, Node) or n for n in read):
        return False
    return not (tracer.traces[node].moved and _is_of_hidden_states([root(n) for n in values]))


def _is_of_hidden_states(values: list[Node]) -> bool:
    """Whether one value is the mean of the other, as in a norm that is written out, or norms made one."""
    if any(kind(n) in MEANS and root(operand(n)) in values for n in values):
        return True
    waiting, seen = [*values], {*values}
    while waiting:
        node = waiting.pop()
        if kind(node) in NORMS:
            return True
        new = [root(n) for n in values_read(node)] if kind(node) in _OF_BRANCHES else []
        waiting += [n for n in new if n not in seen]
        seen.update(new)
    return False


def _computes_positions(node: Node, fact: NodeFacts, trace: Trace) -> bool:
    if trace.measured or fact.dtype_source is not node or not fact.operands:
        return False
    return fact.op_class is OpClass.WHITE or (fact.op_class is not OpClass.CLEAR and not trace.few)


def _own_hazard(node: Node) -> str:
    """Returns the reason why the node's inputs must be exact; empty if they need not."""
    assert isinstance(node.target, OpOverload)
    if kernels.is_step(node.target) or argument(node, "rounding_mode"):
        return "its result jumps"
    if kernels.is_solver(node.target):
        return "a linear system magnifies errors"
    if (factors := _factors(node)) >= MANY:
        return f"a product of {factors} factors multiplies their roundings"
    return "a function of angles" if kernels.is_periodic(node.target) else ""


def _selection(node: Node, tracer: Tracer) -> str:
    """Returns why a choice among values needs them as they are, also if nothing reads the indices."""
    if tracer.lowers_black or kind(node) not in _SELECTIONS or not tensors(node)[1:]:
        return ""
    read = root(operand(node))
    while tracer.facts[read].op_class is OpClass.GRAY and len(_floats_read(read, tracer.facts)) == 1:
        read = root(_floats_read(read, tracer.facts)[0])
    is_black = tracer.facts[read].op_class is OpClass.BLACK and tracer.keeps(tracer.facts[read].dtype_source)
    return "its gradient goes to what it selects" if is_black else ""


def _factors(node: Node) -> int:
    """Returns how many values of its operand an op multiplies with each other."""
    if kind(node) not in ("prod", "cumprod"):
        return 0
    shape, dim = tensors(operand(node))[0].shape, argument(node, "dim")
    return math.prod(map(size_hint, shape if dim is None else shape[dim : dim + 1 or None]))


def _decided_by(node: Node, facts: Facts, traces: Mapping[Node, Trace]) -> Iterator[tuple[Node, Hazard]]:
    """Yields the floats from which a node computes integers, booleans or unmanaged floats."""
    picked = node.target is operator.getitem and node.users
    if not (picked or isinstance(node.target, OpOverload)):
        return
    kinds = ", ".join(dict.fromkeys(str(v.dtype).removeprefix("torch.") for v in tensors(node)))
    made = f"{node.name!r} makes {kinds or 'a number'} of it"
    for read in _floats_read(node, facts):
        yield read, Hazard(f"{made}, and {traces[read].origin}", node)
