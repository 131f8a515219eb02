"""How a fusing compiler runs ATen ops, as tables: names below ``aten.``, in-place ops without the underscore.

An op that no table lists fuses with its producers and its readers.
"""

from __future__ import annotations

from collections.abc import Mapping


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ATTENTION = _names(
    """
    scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention
    """
)

# With weights that compilers lay out again.
CONVOLUTIONS = _names("conv2d conv3d convolution _convolution conv_transpose2d conv_transpose3d")

# A library's kernel: operands are in memory in its compute dtype, and nothing fuses with it.
EXTERN = ATTENTION | _names(
    """
    linear matmul mm bmm addmm addbmm baddbmm addmv mv einsum conv1d conv2d conv3d convolution _convolution
    conv_transpose1d conv_transpose2d conv_transpose3d bilinear tensordot lstm gru rnn_tanh rnn_relu cdist
    sort topk cumsum cumprod logcumsumexp grid_sampler grid_sampler_2d embedding_bag ctc_loss
    upsample_bicubic2d _upsample_bilinear2d_aa
    """
)

NORMS = _names("layer_norm native_layer_norm rms_norm _fused_rms_norm")
_NORMS_IN_MEMORY = _names(
    """
    batch_norm _native_batch_norm_legit _batch_norm_impl_index native_batch_norm instance_norm group_norm
    native_group_norm
    """
)

# The op fuses with its readers. Its input is in memory, because it is read twice or in another order.
READS_MEMORY = _NORMS_IN_MEMORY | _names(
    """
    max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d
    adaptive_avg_pool2d adaptive_max_pool2d roll flip gather index index_select im2col unfold
    upsample_nearest2d upsample_bilinear2d upsample_linear1d pixel_shuffle pixel_unshuffle var_mean
    cross_entropy_loss nll_loss_nd
    """
)

# The result is in memory, and the operands are written straight into it.
CONCATENATES = _names("cat concat concatenate stack")
# A concatenation of at most this many operands is computed in the kernel of its pointwise readers.
CONCATENATED_IN_KERNEL = 8

# Views where strides or dtypes allow it, and copies elsewhere.
MAY_COPY = _names("reshape reshape_as flatten contiguous to type_as")

# Whose elements are read in an order that no kernel of the operand computes them in.
REORDERS = _names("embedding repeat tile")

# How often a forward reads its input, if more than once.
READS: Mapping[str, int] = dict.fromkeys([*_NORMS_IN_MEMORY, "cross_entropy_loss"], 2)

# How often a backward reads the input that the forward saved, if more than once.
READS_BACKWARD: Mapping[str, int] = {
    **dict.fromkeys(_NORMS_IN_MEMORY, 2),
    **dict.fromkeys(NORMS, 2),
    "group_norm": 3,
    "native_group_norm": 3,
}

# The backward needs no value of an input.
LINEAR = _names(
    """
    add sub rsub neg negative subtract clone contiguous to _to_copy type_as cat concat concatenate stack pad
    constant_pad_nd upsample_nearest2d upsample_bilinear2d upsample_linear1d avg_pool2d adaptive_avg_pool2d
    mean sum roll flip gather index index_select slice_scatter select_scatter copy repeat tile pixel_shuffle
    pixel_unshuffle dropout embedding where masked_fill expand_copy positive real imag max_pool2d max_pool1d
    relu
    """
)
PRODUCTS = _names("mul multiply")
QUOTIENTS = _names("div true_divide divide")
SUMS = _names("add sub")
