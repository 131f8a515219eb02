"""Finds values that may leave the low range for ordinary inputs, and their readers.

Analysis only. The only data are those of parameters and buffers. `magnitudes` finds the values that may be
too large or too small. Their producers and readers are pinned until the value is in range again. A reader
that saturates (sigmoid) may read the value low, because an infinity gives the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch.fx import GraphModule, Node

from ampgraph.ops.lists import OpClass

from .cancellation import find_cancellations
from .facts import FREE, Facts, NodeFacts, followed
from .graph_walk import kind, values_read
from .magnitudes import Sizes
from .precision import FP32, LOW, Precision
from .problem import Hazard
from .ranges import Extents, find_range_pins
from .size_rules import size_of_op
from .zero_rows import find_zero_rows

_SATURATES = ("sigmoid", "special_expit", "hardsigmoid", "tanh", "erf", "hardtanh", "relu6", "sign", "sgn")
_MAY_RUN_LOW = (OpClass.WHITE, *FREE)


class Values:
    """What is known of the values in a graph. It does not depend on rules, so several plans may share it.

    Attributes:
        facts: What is known of the graph's nodes.
        low_dtype: The low dtype.
        pins: Ops that cannot run low because of their values, and why; see `find_range_pins`.
        out_of_range: Tensors that hold such values, and why.
    """

    def __init__(self, graph_module: GraphModule, facts: Facts, low_dtype: torch.dtype) -> None:
        self.facts, self.low_dtype = facts, low_dtype
        self._extents = Extents(graph_module)
        self.pins, self.out_of_range = find_range_pins(facts, low_dtype, self._extents)

    @cached_property
    def hazards(self) -> dict[Node, Hazard]:
        """The ops that may run low but must stay float32 because of the range of their values."""
        facts, limits = self.facts, torch.finfo(self.low_dtype)
        sizes = Sizes(facts, self.low_dtype, self._extents, size_of_op)
        others = find_cancellations(facts, sizes, self.low_dtype) | find_zero_rows(facts, sizes)
        found: dict[Node, Hazard] = {}
        for node, fact in facts.items():
            if fact.dtype is not torch.float32 or fact.dtype_source is not node:
                continue
            may_run_low = fact.op is not None and fact.op_class in _MAY_RUN_LOW
            if may_run_low and (hazard := _hazard_of(node, fact, sizes, limits) or others.get(node)):
                found[node] = hazard
        return found


def find_range_hazards(values: Values, fixed: Mapping[Node, Precision], follows: bool) -> dict[Node, Hazard]:
    """Returns the nodes that must stay float32 because of the range of their values.

    Args:
        values: What is known of the graph's values.
        fixed: The labels that something above the op lists decides.
        follows: Whether gray and clear ops follow their inputs; what is float32 anyway is left out then.
    """
    found = {node: hazard for node, hazard in values.hazards.items() if node not in fixed}
    return _low_otherwise(found, values.facts, fixed) if follows else found


def _hazard_of(node: Node, fact: NodeFacts, sizes: Sizes, limits: torch.finfo) -> Hazard | None:
    name = str(limits.dtype)
    own = sizes[node]
    if fact.op_class is OpClass.WHITE and not own.large:
        return None
    read = values_read(node)
    large = next((n for n in read if sizes[n].large), None)
    if own.large and not any(sizes[n].large and sizes[n].large in own.large for n in read):
        return Hazard(own.large, fed_low=True)
    if large is not None and kind(node) not in _SATURATES:
        return Hazard(f"reads {large.name!r}: {sizes[large].large}", large, fed_low=True)
    flushed = limits.tiny * limits.eps * 16  # a few of the smallest numbers
    small = next((n for n in (*read, node) if 0 < sizes[n].eps < flushed and sizes[n].low < flushed), None)
    if small is None:
        return None
    return Hazard(
        f"{small.name!r} may be as small as {sizes[small].eps:.3g}, which is 0 in {name}", small, fed_low=True
    )


def _low_otherwise(
    found: Mapping[Node, Hazard], facts: Facts, fixed: Mapping[Node, Precision]
) -> dict[Node, Hazard]:
    """Leaves out what follows a float32 value anyway, and what moves low values as they are."""
    labels: dict[Node, Precision] = {}
    kept: dict[Node, Hazard] = {}
    for node, fact in facts.items():
        if fact.dtype is None:
            continue
        if fact.dtype_source is not node:
            labels[node] = labels[fact.dtype_source]
            continue
        if node in fixed:
            labels[node] = fixed[node]
        elif fact.op_class in FREE:
            labels[node] = Precision.following(labels[source] for source in followed(node, facts))
        else:
            labels[node] = LOW if fact.op_class is OpClass.WHITE else FP32
        if labels[node] is LOW and node in found and found[node].fed_low:
            kept[node], labels[node] = found[node], FP32
    return kept
