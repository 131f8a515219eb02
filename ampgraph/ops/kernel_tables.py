"""Facts about ATen kernels as tables. They hold for every policy and every op class.

Names are those below ``aten.``: a packet or one overload. An overload's row overrides its packet's row, and
an in-place op falls back to its functional form. `ampgraph.ops.kernels` looks ops up in these tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NORM_STATE = ("weight", "bias", "running_mean", "running_var")

# Arguments that always stay float32: the kernel accepts a low input beside them.
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
# Before torch 2.13 its backward needs both operands in one dtype.
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

# With other values of this argument the backward computes a power of the input in the low dtype.
DTYPE_ARG_NEEDS: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "linalg_vector_norm": ("ord", (None, 0, 1, 2, math.inf, -math.inf)),
}

# These read only sizes and a default dtype of their tensor; with a dtype argument it may have any dtype.
LIKES: frozenset[str] = _names(
    """empty_like zeros_like ones_like full_like rand_like randn_like
    new_empty new_zeros new_ones new_full new_empty_strided"""
)

# On a CPU these accept float32 weights beside a low input and save their statistics for the backward in the
# dtype of the weights. On CUDA all must have one dtype.
STATISTICS_SLOTS: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("layer_norm", "group_norm"), ("weight", "bias")
)

# With this argument the gradient of the weight is sparse, and a cast has no backward for sparse gradients.
SPARSE_GRADIENT: Mapping[str, str] = {
    "embedding": "sparse",
    "embedding_bag": "sparse",
    "_embedding_bag": "sparse",
}

# Additive masks: a value too large for the low dtype only means "hidden", so it may be clamped before a cast.
MASK_SLOTS: Mapping[str, tuple[str, ...]] = {"scaled_dot_product_attention": ("attn_mask",)}

# Attention that knows a causal mask by a flag, ``is_causal`` beside ``attn_mask``.
CAUSAL_FLAG = _names("scaled_dot_product_attention")

# Divisors: a large one makes the result small.
DIVISOR_SLOTS: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("div", "divide", "true_divide", "floor_divide"), ("other",)
)

# The low kernel computes in float32 and rounds only its result: op(low) == round(op(float32(low))), bit for
# bit on CPU. Kernels that add in another order in low (layer_norm, log_softmax, gelu ...) are within one unit
# in the last place and are not here.
ROUNDS_ONCE = _names(
    """
    sigmoid tanh silu mish elu selu celu leaky_relu hardswish hardsigmoid hardshrink softshrink softplus
    log_sigmoid exp exp2 expm1 log log10 log1p log2 reciprocal rsqrt cos tan acos asin atan
    acosh asinh atanh erfc erfinv lgamma sinc square frac glu softmax _softmax rms_norm sum nansum mean var
    std avg_pool1d avg_pool2d adaptive_avg_pool2d
    """
)

# From torch 2.14 on their bfloat16 kernels overflow at values that float32 and one rounding still hold.
ROUNDS_ONCE_BEFORE_2_14 = _names("cosh sinh")

# No float16 and no bfloat16 kernel on any device; polar has one for float16 since torch 2.14, whose complex32
# few ops take.
FP32_ONLY = _names(
    """
    cdist pdist polar ctc_loss quantile nanquantile histogram histogramdd stft nuclear_norm cholesky
    cholesky_inverse cholesky_solve geqrf inverse det logdet slogdet _lu_with_info lu_solve ormqr pinverse qr
    svd triangular_solve linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig linalg_eigh
    linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor
    linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex
    linalg_lu_solve linalg_matrix_rank linalg_matrix_sqrth linalg_pinv linalg_polar linalg_qr linalg_slogdet
    linalg_solve linalg_solve_ex
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

# No float16 and no bfloat16 kernel on this device.
FP32_ONLY_ON: Mapping[str, frozenset[str]] = {
    "cpu": _names(
        """
        avg_pool3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa multi_margin_loss
        multilabel_margin_loss fft_fft fft_fft2
        fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_ihfft2 fft_ihfftn
        fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
        """
    ),
    "cuda": _names("angle histc igamma igammac"),  # as declared in torch's own op tests; not run here
}

# The low kernel on this device returns wrong values, or has no backward. The kernel of grid_sample computes
# positions low: it returns noise or NaN at sizes beyond about 64 (seen in torch 2.13).
BROKEN_ON: Mapping[str, frozenset[str]] = {
    "cpu": _names(
        """
        matrix_exp linalg_matrix_exp special_i1 special_i1e grid_sampler grid_sampler_2d grid_sampler_3d
        _grid_sampler_2d_cpu_fallback
        """
    ),
}

# They return their input itself outside training and for p=0; the schema does not declare this.
DROPOUTS = _names("dropout feature_dropout alpha_dropout feature_alpha_dropout")

# No kernel for one of the two low dtypes on this device.
FP32_ONLY_FOR: Mapping[tuple[str, torch.dtype], frozenset[str]] = {
    ("cpu", torch.float16): _names("rrelu rrelu_with_noise rrelu_with_noise_functional"),
    # The gradient of the weights of samples has none (torch 2.11).
    ("cuda", torch.bfloat16): _names("embedding_bag _embedding_bag"),
}

# FakeTensor runs these during a capture but cannot run them again, because they read values.
OPAQUE = _names("tensor_split.tensor_indices_or_sections narrow.Tensor")

# FakeTensor accepts float32 beside low operands here; the kernels do not.
ONE_DTYPE = _names("index_put _index_put_impl _unsafe_index_put")

# In-place ops whose functional form autograd cannot differentiate.
IN_PLACE_ONLY = _names("copy_")

# Arguments that accept any floating dtype and do not affect the result's dtype.
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

# These only copy where a view is impossible, or lack the alias annotation.
VIEW_LIKE = _names("_unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk _reshape_alias")
STRIDED = _names("as_strided as_strided_copy")
# They may return their input (some schemas declare it), but they can also change the dtype.
CONVERTING = _names("to type_as _autocast_to_reduced_precision _autocast_to_full_precision")

# Their result is memory that nobody has written, or, of a resized tensor, may end with such memory.
UNINITIALIZED = _names(
    """empty empty_like empty_permuted empty_quantized empty_strided new_empty new_empty_strided
    _empty_affine_quantized _empty_per_channel_affine_quantized resize resize_as _resize_output"""
)

# They keep elements of their first argument, besides views and casts: copies, and writes to a part of it.
KEEPS_ELEMENTS = _names(
    """clone _to_copy lift_fresh_copy index_put _unsafe_index_put _index_put_impl index_copy index_fill
    index_add index_reduce masked_fill masked_scatter scatter scatter_add scatter_reduce put select_scatter
    slice_scatter diagonal_scatter as_strided_scatter fill_diagonal"""
)

# Observers: what they write has no gradients (torch's derivatives.yaml), and gets its size in the first call.
WRITES_STATE = _names("fused_moving_avg_obs_fake_quant _fused_moving_avg_obs_fq_helper")

# They read only sizes, strides, dtype or device of a tensor.
SHAPE_ONLY = _names(
    """sym_size sym_numel sym_stride sym_storage_offset size numel stride dim is_contiguous
    _assert_tensor_metadata randint_like"""
)
SHAPE_SLOTS: Mapping[str, tuple[str, ...]] = {
    "expand_as": ("other",),
    "view_as": ("other",),
    "reshape_as": ("other",),
    "type_as": ("other",),
    "to.other": ("other",),
}

# Matrix products: positions of arguments and the dimensions that are summed over.
CONTRACTED: Mapping[str, tuple[tuple[int, int], ...]] = {
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "linear", "inner", "linalg_matmul"), ((0, -1),)),
    **dict.fromkeys(("addmm", "addmv", "baddbmm"), ((1, -1),)),
    "addbmm": ((1, 0), (1, -1)),
    "bilinear": ((0, -1), (1, -1)),
}

# A small error of the argument may cause a jump of the result. Division jumps only with a rounding mode.
STEPS = _names(
    """round special_round floor ceil trunc fix frac floor_divide remainder fmod sign sgn heaviside
    fake_quantize_per_tensor_affine fake_quantize_per_channel_affine"""
)

# For large angles the relative error of a low dtype is a whole turn.
PERIODIC = _names("sin cos tan sinc special_sinc")

# A sum or difference before them decides how near their argument is to 0 or to 1.
STEEP = _names(
    """log log2 log10 log1p special_log1p logit special_logit xlogy special_xlogy special_xlog1py
    acos arccos asin arcsin acosh arccosh atanh arctanh"""
)

# Decompositions and solvers: an error of the matrix grows by its condition number.
SOLVERS = _names(
    """cholesky cholesky_inverse cholesky_solve linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det
    linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv
    linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu
    linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matrix_rank linalg_matrix_sqrth
    linalg_pinv linalg_polar linalg_qr
    linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals
    linalg_tensorinv linalg_tensorsolve inverse pinverse det logdet slogdet svd qr geqrf orgqr ormqr
    lu_solve lu_unpack triangular_solve _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex
    _linalg_svd _lu_with_info"""
)

LOSSES = _names(
    """mse_loss l1_loss smooth_l1_loss huber_loss cross_entropy_loss nll_loss nll_loss2d nll_loss_nd
    nll_loss_forward nll_loss2d_forward binary_cross_entropy binary_cross_entropy_with_logits kl_div
    poisson_nll_loss cosine_embedding_loss hinge_embedding_loss margin_ranking_loss
    multilabel_margin_loss multilabel_margin_loss_forward multi_margin_loss soft_margin_loss
    triplet_margin_loss ctc_loss _ctc_loss"""
)

# Products, powers, selections, averages, and activations with bounded slopes: none subtracts values that may
# be equal. A difference from an average has exact operands by itself.
KEEPS_RELATIVE_ERROR = _names(
    """mul multiply div divide true_divide neg negative positive abs absolute outer ger kron
    sqrt rsqrt square pow reciprocal rms_norm _fused_rms_norm linalg_vector_norm norm
    mean avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d
    maximum minimum max min amax amin aminmax fmax fmin cummax cummin max_pool1d max_pool2d max_pool3d
    max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d sort topk msort kthvalue median mode
    clamp clip clamp_min clamp_max relu relu6 leaky_relu prelu _prelu_kernel hardtanh threshold
    sigmoid tanh hardsigmoid hardswish silu gelu elu selu celu mish softsign
    dropout native_dropout feature_dropout alpha_dropout feature_alpha_dropout bernoulli"""
)
