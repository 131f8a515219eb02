"""Facts about ATen kernels: the same for every policy, whatever class an op is in.

The tables name ops below ``aten.``, a packet or one overload; an overload's row wins over its packet's, and
an in-place op falls back to its functional form. The functions at the end are what the passes ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TypeVar

from torch._ops import OpOverload

T = TypeVar("T")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NORM_STATE = ("weight", "bias", "running_mean", "running_var")

# Arguments that stay float32 whatever dtype the op runs in: the kernel takes a low input beside them.
FP32_SLOTS: Mapping[str, tuple[str, ...]] = {
    "batch_norm": _NORM_STATE,
    "native_batch_norm": _NORM_STATE,
    "_native_batch_norm_legit": _NORM_STATE,
    "_native_batch_norm_legit_no_training": _NORM_STATE,
    "_native_batch_norm_legit_functional": _NORM_STATE,
    "_batch_norm_with_update": _NORM_STATE,
    "_batch_norm_no_update": _NORM_STATE,
    "_batch_norm_impl_index": _NORM_STATE,
    "cudnn_batch_norm": _NORM_STATE,
    "miopen_batch_norm": _NORM_STATE,
    "instance_norm": _NORM_STATE,
}

# Arguments whose producers decide what a gray op runs in; the others (weights) are cast to match.
FOLLOW_SLOTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(FP32_SLOTS, ("input",)),
    "layer_norm": ("input",),
    "native_layer_norm": ("input",),
    "group_norm": ("input",),
    "native_group_norm": ("input",),
    "rms_norm": ("input",),
    "_fused_rms_norm": ("input",),
    "prelu": ("self",),
    "_prelu_kernel": ("self",),
    "embedding_bag": ("weight",),
    "_embedding_bag": ("weight",),
    "dropout": ("input",),
    "grid_sampler": ("input", "grid"),
}

# Kernels that read a low and a float32 operand in one pass and return the promoted dtype.
PROMOTES: frozenset[str] = _names(
    """add sub rsub mul div subtract multiply divide true_divide floor_divide remainder fmod where maximum
    minimum fmax fmin atan2 arctan2 hypot copysign logaddexp logaddexp2 xlogy addcmul addcdiv
    pow.Tensor_Tensor cat concat concatenate stack hstack vstack dstack row_stack column_stack eq ne lt le
    gt ge logical_and logical_or logical_xor"""
)

# The dtype argument that makes an op read a low input and compute and return float32.
DTYPE_ARG: Mapping[str, str] = dict.fromkeys(
    _names("""softmax.int log_softmax.int special_softmax special_log_softmax sum sum.dim_IntList nansum prod
    prod.dim_int cumsum cumprod mean mean.dim linalg_vector_norm linalg_matrix_norm linalg_norm"""),
    "dtype",
)

# The low kernel accumulates in float32 and rounds only its result: op(low) == round(op(float32(low))).
ROUNDS_ONCE: frozenset[str] = _names(
    """softmax log_softmax _softmax _log_softmax layer_norm group_norm sum mean gelu silu sigmoid tanh exp
    log sin cos sqrt rsqrt"""
)

# No float16 or bfloat16 kernel.
FP32_ONLY: frozenset[str] = frozenset()

# Arguments that take any floating dtype and have no say in the result's dtype.
ANY_SLOTS: Mapping[str, tuple[str, ...]] = {
    "copy_": ("src",),
    "copy": ("src",),
    "expand_as": ("other",),
    "view_as": ("other",),
    "reshape_as": ("other",),
    "_to_copy": ("self",),
}

# May copy instead of aliasing, but moves no values around for its own sake; or lacks the alias annotation.
_VIEW_LIKE = _names("_unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk _reshape_alias")
# Annotated as an alias because they may return their input, yet they can change the dtype.
_NOT_VIEWS = _names("to _autocast_to_reduced_precision _autocast_to_full_precision")


@cache
def overload_name(target: OpOverload) -> str:
    """Returns ``"aten.softmax.int"``; a default overload is spelled out, ``"aten.relu.default"``."""
    return str(target).replace("::", ".")


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


def _aten_names(target: OpOverload) -> list[str]:
    return [name.removeprefix("aten.") for name in lookup_names(target) if name.startswith("aten.")]


def _row(table: Mapping[str, T], target: OpOverload) -> T | None:
    return next((table[name] for name in _aten_names(target) if name in table), None)


def _listed(names: frozenset[str], target: OpOverload) -> bool:
    return any(name in names for name in _aten_names(target))


@cache
def promotes(target: OpOverload) -> bool:
    """Whether the kernel reads a low and a float32 operand in one pass and returns the promoted dtype."""
    return _listed(PROMOTES, target)


@cache
def dtype_arg(target: OpOverload) -> str | None:
    """Returns the argument that makes the op compute and return float32 from a low input, if it has one."""
    return _row(DTYPE_ARG, target)


@cache
def fp32_slots(target: OpOverload) -> tuple[str, ...]:
    """Returns the names of the arguments that stay float32 in every precision."""
    return _row(FP32_SLOTS, target) or ()


@cache
def follow_slots(target: OpOverload) -> tuple[str, ...] | None:
    """Returns the arguments whose dtype a gray op follows, or None if all floating tensors count."""
    return _row(FOLLOW_SLOTS, target)


@cache
def any_slots(target: OpOverload) -> tuple[str, ...]:
    """Returns the arguments that take any floating dtype without a say in the result's."""
    return _row(ANY_SLOTS, target) or ()


@cache
def rounds_once(target: OpOverload) -> bool:
    """Whether the low kernel equals the float32 kernel with its result rounded."""
    return _listed(ROUNDS_ONCE, target)


@cache
def fp32_only(target: OpOverload) -> bool:
    """Whether the op has no low-precision kernel."""
    return _listed(FP32_ONLY, target)


@cache
def is_view(target: OpOverload) -> bool:
    """Whether the result may share its input's memory, so that the op itself moves no bytes."""
    if _listed(_VIEW_LIKE, target):
        return True
    if _listed(_NOT_VIEWS, target):
        return False
    aliases = (result.alias_info for result in target._schema.returns)
    return any(alias is not None and not alias.is_write for alias in aliases)
