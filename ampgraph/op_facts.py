"""Facts about ATen kernels: the same for every policy, whatever class an op is in.

The tables name ops below ``aten.``, a packet or one overload; an overload's row wins over its packet's, and
an in-place op falls back to its functional form. The functions at the end are what the passes ask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import TypeVar

import torch

from ._compat import VERSION, OpOverload

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
    "view.dtype": ("self",),  # its bits
}

# Arguments whose producers decide what a gray op runs in; the others (weights) are cast to match.
FOLLOW_SLOTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((op for op, slots in FP32_SLOTS.items() if slots is _NORM_STATE), ("input",)),
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
}

# Kernels that read a low and a float32 operand in one pass and return the promoted dtype, with the gradients
# of casting by hand. atan2, addcmul, addcdiv and pow promote too, but their backward formulas multiply low
# operands before they meet a float32 one, so they are not here.
PROMOTES = _names(
    """
    add sub rsub mul div subtract multiply divide true_divide floor_divide remainder fmod where maximum
    minimum max.other min.other fmax fmin hypot copysign logaddexp logaddexp2 xlogy clamp.Tensor outer kron
    float_power cat concat concatenate stack hstack vstack dstack row_stack column_stack block_diag eq ne lt
    le gt ge logical_and logical_or logical_xor l1_loss smooth_l1_loss
    """
)
# Before torch 2.13 its backward wants both operands in one dtype.
PROMOTES_SINCE_2_13 = _names("mse_loss")

# The dtype argument that makes an op read a low input and compute and return float32. linalg_norm and
# linalg_matrix_norm have one too, but refuse low inputs for spectral and nuclear norms. The backward of
# cumsum and cumprod rounds the gradient before it accumulates, as under torch.autocast.
DTYPE_ARG: Mapping[str, str] = dict.fromkeys(
    _names(
        """
        softmax.int log_softmax.int special_softmax special_log_softmax sum sum.dim_IntList nansum prod
        prod.dim_int cumsum cumprod mean mean.dim nanmean linalg_vector_norm
        """
    ),
    "dtype",
)

# With other values of this argument the backward raises the low input to a power in the input's dtype.
DTYPE_ARG_NEEDS: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "linalg_vector_norm": ("ord", (None, 0, 1, 2, math.inf, -math.inf)),
}

# These take only sizes (and a default dtype) from their tensor; with a dtype argument it may be anything.
LIKES: frozenset[str] = _names(
    """empty_like zeros_like ones_like full_like rand_like randn_like
    new_empty new_zeros new_ones new_full new_empty_strided"""
)

# On CPU these take float32 weights beside a low input, and save their statistics for the backward in the
# dtype of the weights. On CUDA all must have one dtype.
STATISTICS_SLOTS: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("layer_norm", "group_norm"), ("weight", "bias")
)

# With this argument set, the gradient of the weight is sparse, and a cast has no backward for that.
SPARSE_GRADIENT: Mapping[str, str] = {
    "embedding": "sparse",
    "embedding_bag": "sparse",
    "_embedding_bag": "sparse",
}

# Additive masks: what is too large for the low dtype only says "hidden", so it may be clamped on its way.
MASK_SLOTS: Mapping[str, tuple[str, ...]] = {"scaled_dot_product_attention": ("attn_mask",)}

# The low kernel computes in float32 and rounds only its result: op(low) == round(op(float32(low))), bit for
# bit on CPU. Kernels that add in another order in low (layer_norm, log_softmax, gelu ...) are within one unit
# in the last place and are not here.
ROUNDS_ONCE = _names(
    """
    sigmoid tanh silu mish elu selu celu leaky_relu hardswish hardsigmoid hardshrink softshrink softplus
    log_sigmoid exp exp2 expm1 cosh sinh log log10 log1p log2 reciprocal rsqrt cos tan acos asin atan
    acosh asinh atanh erfc erfinv lgamma sinc square frac glu softmax _softmax rms_norm sum nansum mean var
    std avg_pool1d avg_pool2d adaptive_avg_pool2d
    """
)

# No float16 and no bfloat16 kernel on any device.
FP32_ONLY = _names(
    """
    cdist pdist polar ctc_loss quantile nanquantile histogram histogramdd stft nuclear_norm cholesky
    cholesky_inverse cholesky_solve geqrf inverse det logdet slogdet lu_solve ormqr pinverse qr
    svd triangular_solve linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig linalg_eigh
    linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor
    linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex
    linalg_lu_solve linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
    linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve special_airy_ai
    special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_erfcx special_log_ndtr
    special_ndtri special_zeta special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_chebyshev_polynomial_t
    special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l
    special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w
    """
)

# Neither kernel on this device alone.
FP32_ONLY_ON: Mapping[str, frozenset[str]] = {
    "cpu": _names(
        """
        avg_pool3d _upsample_bilinear2d_aa multi_margin_loss multilabel_margin_loss fft_fft fft_fft2
        fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_ihfft2 fft_ihfftn
        fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
        """
    ),
    "cuda": _names("angle histc igamma igammac"),  # as declared in torch's own op tests; not run here
}

# They return their very input outside training and for p=0; the schema does not say so.
DROPOUTS = _names("dropout feature_dropout alpha_dropout feature_alpha_dropout")

# No kernel for one of the two dtypes alone.
FP32_ONLY_FOR: Mapping[tuple[str, torch.dtype], frozenset[str]] = {
    ("cpu", torch.float16): _names("rrelu rrelu_with_noise rrelu_with_noise_functional"),
}

# FakeTensor runs these while capturing and cannot run them again: they read values.
OPAQUE = _names("tensor_split.tensor_indices_or_sections")

# FakeTensor lets these read float32 beside low; their kernels do not.
ONE_DTYPE = _names("index_put _index_put_impl _unsafe_index_put")

# In-place ops whose functional form autograd cannot differentiate.
IN_PLACE_ONLY = _names("copy_")

# Arguments that take any floating dtype and have no say in the result's dtype.
ANY_SLOTS: Mapping[str, tuple[str, ...]] = {
    "copy_": ("src",),
    "copy": ("src",),
    "expand_as": ("other",),
    "view_as": ("other",),
    "reshape_as": ("other",),
    "to.dtype": ("self",),
    "to.other": ("self",),
    "type_as": ("self",),
    "masked_fill.Tensor": ("value",),
}

# May copy instead of aliasing, but moves no values around for its own sake; or lacks the alias annotation.
_VIEW_LIKE = _names("_unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk _reshape_alias")
_STRIDED = _names("as_strided as_strided_copy")
# They may return their input (the schema of some says so), yet they can change the dtype.
_CONVERTING = _names("to type_as _autocast_to_reduced_precision _autocast_to_full_precision")


@cache
def is_composite(target: OpOverload) -> bool:
    """Whether the op is made of others, so that what its schema says of aliases is not checked by torch."""
    return target.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd)


@cache
def is_dropout(target: OpOverload) -> bool:
    """Whether the op is a dropout, which may have nothing to do and returns its input then."""
    return _listed(DROPOUTS, target)


@cache
def reads_strides(target: OpOverload) -> bool:
    """Whether the op reads its input's memory by strides of its own, beyond the input itself."""
    return _listed(_STRIDED, target)


@cache
def may_convert(target: OpOverload) -> bool:
    """Whether the op changes its input's dtype, or returns it where there is nothing to change."""
    return _listed(_CONVERTING, target)


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
    """Whether the kernel reads a low and a float32 operand in one pass and returns the promoted dtype.

    An in-place form reads them too, but keeps the dtype of the tensor it writes.
    """
    return _listed(PROMOTES, target) or (VERSION >= (2, 13) and _listed(PROMOTES_SINCE_2_13, target))


@cache
def dtype_arg(target: OpOverload) -> str | None:
    """Returns the argument that makes the op compute and return float32 from a low input, if it has one."""
    return _row(DTYPE_ARG, target) or ("dtype" if _listed(LIKES, target) else None)


@cache
def dtype_arg_needs(target: OpOverload) -> tuple[str, tuple[object, ...]] | None:
    """Returns the argument, and its values, with which `dtype_arg` holds for the backward too; None: any."""
    return _row(DTYPE_ARG_NEEDS, target)


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
def statistics_slots(target: OpOverload) -> tuple[str, ...]:
    """Returns the arguments whose dtype decides, on CPU, in which dtype a norm saves its statistics."""
    return _row(STATISTICS_SLOTS, target) or ()


@cache
def sparse_gradient_arg(target: OpOverload) -> str | None:
    """Returns the argument that makes the gradient of the op's weight sparse, if it has one."""
    return _row(SPARSE_GRADIENT, target)


@cache
def mask_slots(target: OpOverload) -> tuple[str, ...]:
    """Returns the names of the arguments that are additive masks."""
    return _row(MASK_SLOTS, target) or ()


@cache
def rounds_once(target: OpOverload) -> bool:
    """Whether the low kernel equals the float32 kernel with its result rounded."""
    return _listed(ROUNDS_ONCE, target)


@cache
def fp32_only(target: OpOverload, device_type: str = "", low_dtype: torch.dtype | None = None) -> bool:
    """Whether the op has no low-precision kernel.

    Args:
        target: The op.
        device_type: Where; ``""`` asks whether there is none on any device.
        low_dtype: For which dtype; None asks whether there is none for both.
    """
    names = FP32_ONLY | FP32_ONLY_ON.get(device_type, frozenset())
    if low_dtype is not None:
        names |= FP32_ONLY_FOR.get((device_type, low_dtype), frozenset())
    return _listed(names, target)


@cache
def wants_one_dtype(target: OpOverload) -> bool:
    """Whether the op's kernels refuse float32 beside low, although FakeTensor does not."""
    return _listed(ONE_DTYPE, target)


@cache
def is_opaque(target: OpOverload) -> bool:
    """Whether FakeTensor cannot run the op a second time."""
    return _listed(OPAQUE, target)


@cache
def has_functional_form(target: OpOverload) -> bool:
    """Whether autograd differentiates the functional form of an in-place op as it does the op itself."""
    functional = target._schema.name.split("::")[1].removesuffix("_")
    overload = getattr(getattr(torch.ops.aten, functional, None), target._overloadname, None)
    if overload is None or _listed(IN_PLACE_ONLY, target):
        return False
    # Forms that torch generates for functionalization have no derivative.
    return torch.Tag.generated not in overload.tags


@cache
def is_view(target: OpOverload) -> bool:
    """Whether the result may share its input's memory, so that the op itself moves no bytes."""
    if _listed(_VIEW_LIKE, target):
        return True
    if may_convert(target):
        return False
    aliases = (result.alias_info for result in target._schema.returns)
    return any(alias is not None and not alias.is_write for alias in aliases)
