"""The facts about each node before decisions: its dtype, its class, and the rules of its operands."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch.fx import Node

from ampgraph._compat import OpOverload, size_hint
from ampgraph.ops import kernels
from ampgraph.ops.lists import OpClass

from .arguments import argument

_CASTS = ("aten.to", "aten._to_copy", "prims.convert_element_type")


class OperandRule(enum.Enum):
    """The dtypes that a kernel accepts in one argument."""

    NODE_DTYPE = "the node's own dtype"
    PROMOTED = "either: a float32 node widens a low operand itself, if another operand is float32"
    DTYPE_ARG = "either: a float32 node widens it itself when its dtype argument says so"
    EITHER = "either, without effect on the result's dtype"
    SOURCE_DTYPE = "the dtype it had in the source"


# The placement chooses their dtype.
FREE = (OpClass.GRAY, OpClass.CLEAR)
# The rules under which the label of a node decides in which dtype it computes with the operand.
DECIDED = frozenset({OperandRule.NODE_DTYPE, OperandRule.PROMOTED, OperandRule.DTYPE_ARG})


class Operand(NamedTuple):
    """One argument through which a node reads a tensor: ``(args, kwargs)`` path, tensor, rule."""

    path: tuple[int | str, ...]
    tensor: Node
    rule: OperandRule
    follow: bool


@dataclass(slots=True)
class NodeFacts:
    """The facts about one node before decisions.

    Attributes:
        dtype: The floating dtype that it produced in the source, if managed.
        dtype_source: The node whose label applies: itself; for ``getitem`` the multi-output op, for
            ``x.type_as(other)`` the source of ``other``.
        operands: How it reads managed tensors.
        op: What is known of its op, for an ATen op.
        op_class: Its class in the op lists, with the reason from the data.
        fixed_dtype: A dtype that the source names explicitly (a user's cast, ``dtype=``).
        elements: Total number of elements of its managed outputs.
        wide_results: Results of a multi-output op, by index, that stay float32 when it runs low (statistics).
        refuses_low: Why the op cannot run low although no table lists it; empty if it can.
        moves_data: Whether it costs memory traffic (views and inputs do not).
        mutated: Whether the tensor lives in memory that some node writes in place.
        reads_whole_storage: Whether ``as_strided`` reads memory beyond the tensor that it is given.
        is_parameter: Whether it is a parameter, buffer or constant of the module, or a view of one.
        returned_input_view: Whether it is a view of the caller's own memory that the graph returns.
        reads_sparse: Whether it reads a sparse or nested tensor, which nothing here casts.
        reads_other_low: Whether it reads a low dtype that is not the policy's.
    """

    dtype: torch.dtype | None
    dtype_source: Node
    operands: list[Operand] = field(default_factory=list)
    op: kernels.Op | None = None
    op_class: OpClass | None = None
    class_reason: str = ""
    fixed_dtype: torch.dtype | None = None
    elements: int = 0
    wide_results: frozenset[int] = frozenset()
    refuses_low: str = ""
    moves_data: bool = False
    mutated: bool = False
    reads_whole_storage: bool = False
    is_parameter: bool = False
    returned_input_view: bool = False
    reads_sparse: bool = False
    reads_other_low: bool = False

    @property
    def keeps_memory(self) -> bool:
        """Whether it must keep the memory and the dtype that it has in the source."""
        return self.mutated or self.reads_whole_storage or self.returned_input_view


Facts = dict[Node, NodeFacts]


def followed(node: Node, facts: Facts) -> list[Node]:
    """Returns the nodes whose labels apply to the tensors that a node reads and whose dtypes it follows."""
    return [facts[operand.tensor].dtype_source for operand in facts[node].operands if operand.follow]


def tensors(node: Node) -> list[torch.Tensor]:
    """Returns the (fake) tensors that a node produces."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, (list, tuple)) else []


def element_count(tensor: torch.Tensor) -> int:
    """Returns the number of elements of a fake tensor, symbolic sizes by their hints."""
    count = tensor.numel()
    return count if type(count) is int else prod(map(size_hint, tensor.shape))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is neither sparse nor nested nor in a library's own layout."""
    return tensor.layout == torch.strided and not tensor.is_nested


def is_on_cpu(node: Node) -> bool:
    """Whether the first tensor that a node produces is on a CPU."""
    return tensors(node)[0].device.type == "cpu"


def saves_large_statistics(node: Node, low_dtype: torch.dtype) -> bool:
    """Whether a norm would save 1/sqrt(variance + eps) for its backward in a dtype that cannot hold it.

    The CPU kernels save their statistics in the dtype of weight and bias, the CUDA kernels in float32.
    """
    if not kernels.statistics_slots(node.target) or not is_on_cpu(node):  # type: ignore[arg-type]
        return False
    eps = argument(node, "eps")
    return isinstance(eps, float) and 0 < eps < torch.finfo(low_dtype).max ** -2


def has_kernel(node: Node, low_dtype: torch.dtype) -> bool:
    """Whether an ATen op has a kernel for ``low_dtype`` on the device of its tensors."""
    found = tensors(node) or [t for n in node.all_input_nodes for t in tensors(n)]
    device = found[0].device.type if found else ""
    return not kernels.fp32_only(node.target, device, low_dtype)  # type: ignore[arg-type]


def is_cast(node: Node) -> bool:
    """Whether the node is an explicit dtype conversion (one that names its dtype)."""
    if not isinstance(node.target, OpOverload) or kernels.packet_name(node.target) not in _CASTS:
        return False
    return argument(node, "dtype") is not None
