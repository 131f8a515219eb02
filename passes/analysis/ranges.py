"""Finds values that the low dtype cannot hold, and the ops that must stay in float32 because of them.

Analysis only. It checks three kinds of values: Python numbers among an op's arguments, the elements of
parameters, buffers and constants, and results of ops that keep such values large (a mask of ``finfo.min``
added to attention scores). Every dtype holds infinities.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from ampgraph._compat import FakeTensor, OpOverload
from ampgraph.marks import input_mark
from ampgraph.ops import kernels
from ampgraph.ops.lists import OpClass

from .alias import SOURCES
from .arguments import argument, argument_name
from .facts import Facts, Operand, OperandRule, saves_large_statistics

_NUMBER_TYPES = ("Tensor", "number", "Optional[number]", "Optional[Tensor]")


def find_range_pins(
    graph_module: GraphModule, facts: Facts, low_dtype: torch.dtype
) -> tuple[dict[Node, str], dict[Node, str]]:
    """Looks for values that the low dtype cannot hold.

    Returns:
        For each op that cannot run low because of them, the reason; and the same for each tensor that
        holds them (an additive mask may still be clamped into range on its way to a low op).
    """
    limits = torch.finfo(low_dtype)
    pins: dict[Node, str] = {}
    out_of_range: dict[Node, str] = {}
    for node, fact in facts.items():
        if fact.dtype_source is not node:
            if fact.dtype_source in out_of_range:
                out_of_range[node] = out_of_range[fact.dtype_source]
            continue
        if node.op in SOURCES and fact.is_parameter and fact.dtype is torch.float32:
            if (peak := _peak(graph_module, node)) > limits.max:
                out_of_range[node] = f"{node.name!r} holds {peak:.4g}, outside {low_dtype}'s range"
            continue
        if not isinstance(node.target, OpOverload) or fact.dtype is None:
            continue
        if own := _number_reason(node, limits, low_dtype):
            pins[node] = own
        reads = (
            out_of_range[s.tensor]
            for s in fact.operands
            if s.tensor in out_of_range and not _is_harmless(node, s)
        )
        if reason := next(reads, None):
            pins.setdefault(node, reason)
        if node in pins and "outside" in pins[node] and (own or _keeps_size(node, fact.op_class)):
            out_of_range[node] = pins[node]
    return pins, out_of_range


def _is_harmless(node: Node, operand: Operand) -> bool:
    if operand.rule is OperandRule.SOURCE_DTYPE:
        return True
    return argument_name(node, operand.path) in kernels.mask_slots(node.target)


def _keeps_size(node: Node, op_class: OpClass | None) -> bool:
    return op_class is OpClass.CLEAR or kernels.promotes(node.target) or not node.all_input_nodes


def _number_reason(node: Node, limits: torch.finfo, low_dtype: torch.dtype) -> str | None:
    if saves_large_statistics(node, low_dtype) and argument(node, "weight") is None:
        return f"1/sqrt(eps) with eps={argument(node, 'eps'):.4g} is not held by {low_dtype}"
    for number in _numbers(node):
        if not math.isfinite(number) or number == 0:
            continue
        if abs(number) > limits.max:
            return f"the constant {number:.4g} is outside {low_dtype}'s range"
        if abs(number) < limits.tiny:
            return f"the constant {number:.4g} is below {low_dtype}'s smallest normal number"
    return None


def _numbers(node: Node) -> Iterator[float]:
    """Yields the Python numbers in arguments that take a tensor or a scalar value."""
    for position, parameter in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if str(parameter.type) not in _NUMBER_TYPES:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(parameter.name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield value


def _peak(graph_module: GraphModule, node: Node) -> float:
    """Returns the largest finite magnitude in a parameter, buffer or constant; 0 if unknown."""
    if node.op == "get_attr":
        return _largest_finite(_attribute(graph_module, str(node.target)))
    return input_mark(node).peak


def peak_of(value: object) -> float:
    """Returns the peak of a float32 tensor for its `InputMark`, which does not keep the tensor."""
    is_float32 = isinstance(value, torch.Tensor) and value.dtype is torch.float32
    return _largest_finite(value) if is_float32 else 0.0


def _largest_finite(tensor: object) -> float:
    if (
        not isinstance(tensor, torch.Tensor)
        or isinstance(tensor, FakeTensor)
        or tensor.is_meta
        or not tensor.numel()
    ):
        return 0.0
    with torch.no_grad():
        low, high = torch.aminmax(tensor.detach())
        peak = max(abs(float(low)), abs(float(high)))
        if math.isfinite(peak):
            return peak
        finite = tensor[torch.isfinite(tensor)]
        return float(finite.abs().max()) if finite.numel() else 0.0


def _attribute(root: torch.nn.Module, path: str) -> object:
    value: object = root
    for part in path.split("."):
        value = getattr(value, part)
    return value
