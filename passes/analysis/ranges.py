"""Finds values that the low dtype cannot hold, and the ops that must stay in float32 because of them.

Analysis only. It checks three kinds of values: Python numbers among an op's arguments, the elements of
parameters, buffers and constants, and results of ops that keep such values large (a mask of ``finfo.min``
added to attention scores). Every dtype holds infinities. The values of inputs are not known; one that is only
added to what a softmax reads counts as a mask.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator

import torch
from torch.fx import Node
from torch.nn import Module

from ampgraph._compat import FakeTensor, without_transforms
from ampgraph.marks import input_mark
from ampgraph.ops import kernels
from ampgraph.ops.low_range import is_outside, misfit

from .added_masks import is_added_mask, keeps_size
from .alias import SOURCES
from .arguments import argument, argument_name
from .facts import Facts, Operand, OperandRule, is_dense, saves_large_statistics
from .graph_walk import kind, values_read
from .products import terms

_ARITHMETIC = ("add", "sub", "rsub", "mul", "multiply", "div", "divide", "true_divide")


def find_range_pins(
    facts: Facts, low_dtype: torch.dtype, extents: Extents
) -> tuple[dict[Node, str], dict[Node, str]]:
    """Looks for values that the low dtype cannot hold.

    Returns:
        For each op that cannot run low because of them, the reason; and the same for each tensor that
        holds them (an additive mask may still be clamped into range on its way to a low op).
    """
    pins: dict[Node, str] = {}
    out_of_range: dict[Node, str] = {}
    for node, fact in facts.items():
        if fact.dtype_source is not node:
            if fact.dtype_source in out_of_range:
                out_of_range[node] = out_of_range[fact.dtype_source]
            continue
        if node.op in SOURCES and fact.is_parameter and fact.dtype is torch.float32:
            if is_outside(peak := extents.peak(node), low_dtype):
                out_of_range[node] = f"{node.name!r} holds {peak:.4g}, outside {low_dtype}'s range"
            continue
        if node.op == "placeholder" and fact.dtype is torch.float32 and is_added_mask(node, facts):
            out_of_range[node] = f"{node.name!r} may mask with numbers outside {low_dtype}'s range"
        if fact.op is None or fact.dtype is None:
            continue
        named = [*named_numbers(node)]
        if own := _number_reason(node, named, low_dtype):
            pins[node] = own
        slots = [s for s in fact.operands if s.tensor in out_of_range and not _is_harmless(node, s)]
        if not slots and not named:
            continue
        if slots:
            pins.setdefault(node, out_of_range[slots[0].tensor])
        large = [out_of_range[s.tensor] for s in slots if not _divides(node, argument_name(node, s.path))]
        if is_large := any(_makes_large(node, *each, low_dtype) for each in named):
            large.insert(0, pins[node])
        if large and (is_large or keeps_size(node, fact.op_class) or _spreads(node, facts, extents)):
            out_of_range[node] = large[0]
    return pins, out_of_range


def may_be_infinite(tensor: Node, out_of_range: Container[Node]) -> bool:
    """Whether a tensor outside the low range may hold infinities too; inputs and buffers may."""
    found = {tensor: None}
    stack = [tensor]
    while stack:
        node = stack.pop()
        large = [n for n in node.all_input_nodes if n in out_of_range]
        if node.op != "call_function" or _may_overflow(node, bool(large)):
            return True
        stack += [n for n in large if n not in found]
        found |= dict.fromkeys(large)
    return False


def _may_overflow(node: Node, reads_large: bool) -> bool:
    """Whether the result may leave the range of float32."""
    given = [abs(number) for number in numbers(node)]
    if math.inf in given:
        return True
    has_other = kind(node) in _ARITHMETIC and len(node.all_input_nodes) > 1
    return reads_large and (has_other or any(number > 1 for number in given))


def _makes_large(node: Node, name: str, number: float, low_dtype: torch.dtype) -> bool:
    """Whether a number takes the result out of the range: a large one, or a divisor near zero."""
    if _divides(node, name):
        return 0 < abs(number) * torch.finfo(low_dtype).max < 1
    return is_outside(number, low_dtype)


def _spreads(node: Node, facts: Facts, extents: Extents) -> bool:
    """Whether a matrix product spreads a mask: it reads nothing that was learned."""
    if terms(node) is None:
        return False
    seen, waiting = {node}, [node]
    while waiting:
        for read in values_read(waiting.pop()):
            if facts[read].is_parameter and not extents.is_constant(read):
                return False
            if read not in seen:
                seen.add(read)
                waiting.append(read)
    return True


def _divides(node: Node, name: str) -> bool:
    return name in kernels.divisor_slots(node.target)


def _is_harmless(node: Node, operand: Operand) -> bool:
    if operand.rule is OperandRule.SOURCE_DTYPE:
        return True
    return argument_name(node, operand.path) in kernels.mask_slots(node.target)


def _number_reason(node: Node, named: list[tuple[str, float]], low_dtype: torch.dtype) -> str | None:
    if saves_large_statistics(node, low_dtype) and argument(node, "weight") is None:
        return f"1/sqrt(eps) with eps={argument(node, 'eps'):.4g} is not held by {low_dtype}"
    return next(filter(None, (misfit(number, low_dtype) for _, number in named)), None)


def numbers(node: Node) -> Iterator[float]:
    """Yields the Python numbers in arguments that take a tensor or a scalar value."""
    return (number for _, number in named_numbers(node))


def named_numbers(node: Node) -> Iterator[tuple[str, float]]:
    """Yields them with the names of the arguments."""
    args, kwargs = node.args, node.kwargs
    for position, name in kernels.number_slots(node.target):  # type: ignore[arg-type]
        value = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value


class Extents:
    """The least and the largest finite element of each parameter, buffer and constant, looked up once.

    Args:
        root: The graph module, or another module that has its attributes.
    """

    def __init__(self, root: Module) -> None:
        self._root = root
        self._found: dict[Node, tuple[float, float] | None] = {}

    def __getitem__(self, node: Node) -> tuple[float, float] | None:
        """Returns them; None where they are not known."""
        if node not in self._found:
            self._found[node] = self._look_up(node)
        return self._found[node]

    def peak(self, node: Node) -> float:
        """Returns the largest magnitude; 0 where it is not known."""
        return max(map(abs, self[node] or (0.0,)))

    def tops(self, node: Node) -> tuple[float, float] | None:
        """Returns the least and the largest of the rows' largest finite elements; None where not known."""
        table = _attribute(self._root, str(node.target)) if node.op == "get_attr" else None
        if not isinstance(table, torch.Tensor) or table.dim() == 0 or self[node] is None:
            return None
        return _extent(table.detach().amax(-1))

    def is_constant(self, node: Node) -> bool:
        """Whether training probably does not change it: a buffer or a constant."""
        return is_table(self._root, node)

    def _look_up(self, node: Node) -> tuple[float, float] | None:
        if node.op == "get_attr":
            return _extent(_attribute(self._root, str(node.target)))
        peak = input_mark(node).peak
        return (-peak, peak) if peak else None


def peak_of(value: object) -> float:
    """Returns the peak of a float32 tensor for its `InputMark`, which does not keep the tensor."""
    is_float32 = isinstance(value, torch.Tensor) and value.dtype is torch.float32
    return max(map(abs, (is_float32 and _extent(value)) or (0.0,)))


def is_table(root: Module, node: Node) -> bool:
    """Whether the node is a buffer or a constant: what the model reads and training does not change."""
    if node.op != "get_attr":
        return input_mark(node).is_table
    return not isinstance(_attribute(root, str(node.target)), torch.nn.Parameter)


def _extent(tensor: object) -> tuple[float, float] | None:
    if isinstance(tensor, torch.Tensor):
        tensor = without_transforms(tensor)  # no value leaves vmap
    if (
        not isinstance(tensor, torch.Tensor)
        or isinstance(tensor, FakeTensor)
        or tensor.is_meta
        or tensor.is_complex()
        or not is_dense(tensor)
        or not tensor.numel()
    ):
        return None
    with torch.no_grad():
        low, high = map(float, torch.aminmax(tensor.detach()))
        if not (math.isfinite(low) and math.isfinite(high)):
            finite = tensor[torch.isfinite(tensor)]
            if not finite.numel():
                return None
            low, high = map(float, torch.aminmax(finite))
        return low, high


def _attribute(root: Module, path: str) -> object:
    value: object = root
    for part in path.split("."):
        value = getattr(value, part)
    return value
