"""Queries about ATen kernels for the passes; the data is in `ampgraph.ops.kernel_tables`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import compress
from typing import NamedTuple, TypeVar

import torch

from .._compat import VERSION, OpOverload
from . import kernel_tables

T = TypeVar("T")
_NUMBER_TYPES = ("Tensor", "number", "Optional[number]", "Optional[Tensor]")
# Numbers that are elements of a result, although the schema calls them parameters (float).
_FILL_NAMES = ("value", "padding_value")


@cache
def is_composite(target: OpOverload) -> bool:
    """Whether the op is composed of others, so that torch does not check the aliases in its schema."""
    return target.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd)


@cache
def is_dropout(target: OpOverload) -> bool:
    """Whether the op is a dropout, which returns its input if it drops nothing."""
    return _listed(kernel_tables.DROPOUTS, target)


@cache
def reads_strides(target: OpOverload) -> bool:
    """Whether the op reads its input's memory with explicit strides, beyond the input itself."""
    return _listed(kernel_tables.STRIDED, target)


@cache
def may_convert(target: OpOverload) -> bool:
    """Whether the op changes its input's dtype, or returns the input if the dtype is equal."""
    return _listed(kernel_tables.CONVERTING, target)


@cache
def overload_name(target: OpOverload) -> str:
    """Returns ``"aten.softmax.int"``; a default overload is spelled out, ``"aten.relu.default"``."""
    return str(target).replace("::", ".")


@cache
def argument_names(target: OpOverload) -> tuple[str, ...]:
    """Returns the names of the arguments, in the order of the schema."""
    return tuple(argument.name for argument in target._schema.arguments)


@cache
def written_slots(target: OpOverload) -> tuple[tuple[int, str], ...]:
    """Returns position and name of the arguments that the op writes in place."""
    aliases = (argument.alias_info for argument in target._schema.arguments)
    written = (alias is not None and alias.is_write for alias in aliases)
    return tuple(compress(enumerate(argument_names(target)), written))


@cache
def number_slots(target: OpOverload) -> tuple[tuple[int, str], ...]:
    """Returns position and name of the arguments whose numbers are values like those of tensors."""
    arguments = target._schema.arguments
    are_numbers = (str(a.type) in _NUMBER_TYPES or a.name in _FILL_NAMES for a in arguments)
    return tuple(compress(enumerate(argument_names(target)), are_numbers))


@cache
def packet_name(target: OpOverload) -> str:
    """Returns ``"aten.softmax"`` for each overload of softmax."""
    return overload_name(target).rsplit(".", 1)[0]


@cache
def lookup_names(target: OpOverload) -> tuple[str, ...]:
    """Returns the names to look an op up by, most specific first.

    An in-place op ends with the names of its functional form: ``aten.add_.Tensor``, ``aten.add_``,
    ``aten.add.Tensor``, ``aten.add``.
    """
    packet = packet_name(target)
    overload = overload_name(target).rsplit(".", 1)[1]
    names: tuple[str, ...] = (f"{packet}.{overload}", packet)
    if not (packet.endswith("_") and not packet.endswith("__") and target._schema.is_mutable):
        return names
    functional = packet[:-1]
    return (*names, f"{functional}.{overload}", functional)


@cache
def functional_name(target: OpOverload) -> str:
    """Returns the name of the op's functional form below ``aten.``: ``"add"`` for ``aten.add_.Tensor``."""
    return lookup_names(target)[-1].removeprefix("aten.")


def _aten_names(target: OpOverload) -> list[str]:
    return [name.removeprefix("aten.") for name in lookup_names(target) if name.startswith("aten.")]


def _row(table: Mapping[str, T], target: OpOverload) -> T | None:
    return next((table[name] for name in _aten_names(target) if name in table), None)


def _listed(names: frozenset[str], target: OpOverload) -> bool:
    return any(name in names for name in _aten_names(target))


@cache
def promotes(target: OpOverload) -> bool:
    """Whether the kernel reads a low and a float32 operand in one pass and returns the promoted dtype.

    An in-place form reads them too, but keeps the dtype of the tensor it writes.
    """
    return _listed(kernel_tables.PROMOTES, target) or (
        VERSION >= (2, 13) and _listed(kernel_tables.PROMOTES_SINCE_2_13, target)
    )


@cache
def dtype_arg(target: OpOverload) -> str | None:
    """Returns the argument that makes the op compute and return float32 from a low input, if it has one."""
    likes = _listed(kernel_tables.LIKES, target)
    return _row(kernel_tables.DTYPE_ARG, target) or ("dtype" if likes else None)


@cache
def dtype_arg_needs(target: OpOverload) -> tuple[str, tuple[object, ...]] | None:
    """Returns the argument and its values for which `dtype_arg` applies to the backward; None: any."""
    return _row(kernel_tables.DTYPE_ARG_NEEDS, target)


@cache
def fp32_slots(target: OpOverload) -> tuple[str, ...]:
    """Returns the names of the arguments that stay float32 in every precision."""
    return _row(kernel_tables.FP32_SLOTS, target) or ()


@cache
def follow_slots(target: OpOverload) -> tuple[str, ...] | None:
    """Returns the arguments whose dtype a gray op follows, or None if all floating tensors count."""
    return _row(kernel_tables.FOLLOW_SLOTS, target)


@cache
def any_slots(target: OpOverload) -> tuple[str, ...]:
    """Returns the arguments that accept any floating dtype and do not affect the result's dtype."""
    return _row(kernel_tables.ANY_SLOTS, target) or ()


@cache
def statistics_slots(target: OpOverload) -> tuple[str, ...]:
    """Returns the arguments whose dtype sets the dtype of a norm's saved statistics on a CPU."""
    return _row(kernel_tables.STATISTICS_SLOTS, target) or ()


@cache
def sparse_gradient_arg(target: OpOverload) -> str | None:
    """Returns the argument that makes the gradient of the op's weight sparse, if it has one."""
    return _row(kernel_tables.SPARSE_GRADIENT, target)


@cache
def mask_slots(target: OpOverload) -> tuple[str, ...]:
    """Returns the names of the arguments that are additive masks."""
    return _row(kernel_tables.MASK_SLOTS, target) or ()


@cache
def has_causal_flag(target: OpOverload) -> bool:
    """Whether ``is_causal`` can take the place of the op's ``attn_mask``."""
    return _listed(kernel_tables.CAUSAL_FLAG, target)


@cache
def divisor_slots(target: OpOverload) -> tuple[str, ...]:
    """Returns the names of the arguments that the op divides by."""
    return _row(kernel_tables.DIVISOR_SLOTS, target) or ()


@cache
def rounds_once(target: OpOverload) -> bool:
    """Whether the low kernel equals the float32 kernel with its result rounded."""
    return _listed(kernel_tables.ROUNDS_ONCE, target) or (
        VERSION < (2, 14) and _listed(kernel_tables.ROUNDS_ONCE_BEFORE_2_14, target)
    )


@cache
def fp32_only(target: OpOverload, device_type: str = "", low_dtype: torch.dtype | None = None) -> bool:
    """Whether the op has no low-precision kernel that can be used.

    Args:
        target: The op.
        device_type: The device; ``""`` asks for all devices.
        low_dtype: The dtype; None asks for both.
    """
    names = kernel_tables.FP32_ONLY | kernel_tables.FP32_ONLY_ON.get(device_type, frozenset())
    names |= kernel_tables.BROKEN_ON.get(device_type, frozenset())
    if low_dtype is not None:
        names |= kernel_tables.FP32_ONLY_FOR.get((device_type, low_dtype), frozenset())
    return _listed(names, target)


def wants_contiguous_rows(device: torch.device) -> bool:
    """Whether the device's kernels for attention refuse a mask whose last stride is not 1.

    Torch 2.14 says so of all GPUs; seen for CUDA alone.
    """
    return device.type != "cpu"


def writes_wide_products(device: torch.device) -> bool:
    """Whether the device's matrix product takes low factors and writes float32 (``torch.mm(out_dtype=)``).

    CUDA has it from torch 2.8. Compiled for it on torch 2.14; not tried on a device, nor on ROCm.
    """
    return device.type == "cuda" and torch.version.hip is None


@cache
def wants_one_dtype(target: OpOverload) -> bool:
    """Whether the op's kernels refuse float32 beside low, although FakeTensor does not."""
    return _listed(kernel_tables.ONE_DTYPE, target)


@cache
def is_opaque(target: OpOverload) -> bool:
    """Whether FakeTensor cannot run the op a second time."""
    return _listed(kernel_tables.OPAQUE, target)


@cache
def has_functional_form(target: OpOverload) -> bool:
    """Whether autograd differentiates the functional form of an in-place op like the op itself."""
    functional = target._schema.name.split("::")[1].removesuffix("_")
    overload = getattr(getattr(torch.ops.aten, functional, None), target._overloadname, None)
    if overload is None or _listed(kernel_tables.IN_PLACE_ONLY, target):
        return False
    # Forms that torch generates for functionalization have no derivative.
    return torch.Tag.generated not in overload.tags


@cache
def is_view(target: OpOverload) -> bool:
    """Whether the result may share its input's memory, so that the op itself moves no bytes."""
    if _listed(kernel_tables.VIEW_LIKE, target):
        return True
    if may_convert(target):
        return False
    aliases = (result.alias_info for result in target._schema.returns)
    return any(alias is not None and not alias.is_write for alias in aliases)


@cache
def computes_on_tensors(name: str) -> bool:
    """Whether ATen has a deterministic, functional op of that name on tensors; factories do not count."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name.endswith("_"):
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    arguments = [overload._schema.arguments for overload in overloads]
    if any(a.name == "device" for each in arguments for a in each):
        return False
    if any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads):
        return False
    return any(each and str(each[0].type) == "Tensor" for each in arguments)


@cache
def reads_no_values(target: OpOverload) -> bool:
    """Whether the op reads only sizes, dtypes and the like of its tensors."""
    return _listed(kernel_tables.LIKES | kernel_tables.SHAPE_ONLY, target)


@cache
def writes_state(target: OpOverload) -> bool:
    """Whether what the op writes in place has no gradients of its other arguments."""
    return _listed(kernel_tables.WRITES_STATE, target)


@cache
def is_uninitialized(target: OpOverload) -> bool:
    """Whether the op returns memory that nobody has written."""
    return _listed(kernel_tables.UNINITIALIZED, target)


@cache
def keeps_elements(target: OpOverload) -> bool:
    """Whether the result has elements of the first argument as they were; views and casts do not count."""
    return _listed(kernel_tables.KEEPS_ELEMENTS, target)


@cache
def shape_slots(target: OpOverload) -> tuple[str, ...]:
    """Returns the arguments whose values the op does not read, only sizes or the dtype."""
    return _row(kernel_tables.SHAPE_SLOTS, target) or ()


@cache
def contracted(target: OpOverload) -> tuple[tuple[int, int], ...] | None:
    """Returns the (argument, dimension) pairs that a matrix product sums over; None for other ops."""
    return _row(kernel_tables.CONTRACTED, target)


@cache
def is_step(target: OpOverload) -> bool:
    """Whether the op's floating result jumps at some value of its input."""
    return _listed(kernel_tables.STEPS, target)


@cache
def is_periodic(target: OpOverload) -> bool:
    """Whether the op's argument is an angle, whose absolute error matters, not its relative error."""
    return _listed(kernel_tables.PERIODIC, target)


@cache
def is_steep(target: OpOverload) -> bool:
    """Whether the function is steep near some value of its argument, such as a logarithm near 0."""
    return _listed(kernel_tables.STEEP, target)


@cache
def is_solver(target: OpOverload) -> bool:
    """Whether the op decomposes matrices or solves linear systems."""
    return _listed(kernel_tables.SOLVERS, target)


@cache
def is_loss(target: OpOverload) -> bool:
    """Whether the op compares predictions with targets; its result trains a model."""
    return _listed(kernel_tables.LOSSES, target)


@cache
def keeps_relative_error(target: OpOverload) -> bool:
    """Whether the result's relative error is about that of the operands: products, square roots, maxima.

    Also ops whose result is bounded, and whose absolute error is about that of the operands: ``tanh``.
    """
    return _listed(kernel_tables.KEEPS_RELATIVE_ERROR, target)


class Op(NamedTuple):
    """The answers of this file's functions for one op. To hash an op calls Python, so passes do it once."""

    name: str
    arguments: tuple[str, ...]
    written: tuple[tuple[int, str], ...]
    fp32_slots: tuple[str, ...]
    follow_slots: tuple[str, ...] | None
    any_slots: tuple[str, ...]
    statistics_slots: tuple[str, ...]
    shape_slots: tuple[str, ...]
    dtype_arg: str | None
    promotes: bool
    may_convert: bool
    is_view: bool
    is_opaque: bool
    is_dropout: bool
    is_composite: bool
    is_mutable: bool
    is_random: bool
    wants_one_dtype: bool
    reads_no_values: bool


@cache
def op_of(target: OpOverload) -> Op:
    """Returns what holds for each call of an op."""
    return Op(
        name=functional_name(target),
        arguments=argument_names(target),
        written=written_slots(target),
        fp32_slots=fp32_slots(target),
        follow_slots=follow_slots(target),
        any_slots=any_slots(target),
        statistics_slots=statistics_slots(target),
        shape_slots=shape_slots(target),
        dtype_arg=dtype_arg(target),
        promotes=promotes(target),
        may_convert=may_convert(target),
        is_view=is_view(target),
        is_opaque=is_opaque(target),
        is_dropout=is_dropout(target),
        is_composite=is_composite(target),
        is_mutable=target._schema.is_mutable,
        is_random=torch.Tag.nondeterministic_seeded in target.tags,
        wants_one_dtype=wants_one_dtype(target),
        reads_no_values=reads_no_values(target),
    )
