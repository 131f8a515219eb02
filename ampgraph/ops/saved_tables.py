"""What autograd saves in an eager forward, as tables: names below ``aten.``, without the underscore in place.

Source: torch's ``tools/autograd/derivatives.yaml``, and `torch.autograd.graph.saved_tensors_hooks` over the
samples of ``op_db``. An op that no table lists saves its floating-point operands, except a bias.
"""

from __future__ import annotations

from .fusion_tables import ATTENTION, PRODUCTS


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# No floating-point value.
NOTHING = _names(
    """
    add sub rsub neg negative subtract clone contiguous to _to_copy type_as cat concat concatenate stack pad
    constant_pad_nd upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
    upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa mean sum cumsum roll
    flip rot90 slice_scatter select_scatter diagonal_scatter copy repeat tile repeat_interleave pixel_shuffle
    pixel_unshuffle channel_shuffle im2col col2im unfold embedding index index_select where masked_fill
    masked_scatter scatter scatter_add index_put index_copy expand_copy positive real imag floor
    ceil round trunc frac sign triu tril diag diag_embed trace fill zero sort topk feature_dropout
    feature_alpha_dropout
    """
)

# Its result, and no operand.
RESULT = _names(
    """
    exp exp2 expm1 log_softmax _log_softmax softmax _softmax _safe_softmax relu reciprocal rsqrt sigmoid sqrt
    tan tanh
    """
)

# Its operands and its result.
BOTH = ATTENTION | _names(
    """
    amax amin logsumexp logcumsumexp cumprod prod norm linalg_vector_norm linalg_matrix_norm std cdist
    """
)

# An operand if another one has a gradient; of `addmm` and the like the first operand is a summand.
MULTILINEAR = PRODUCTS | _names(
    """
    linear matmul mm bmm mv dot einsum bilinear conv1d conv2d conv3d convolution _convolution
    conv_transpose1d conv_transpose2d conv_transpose3d tensordot outer addmm addbmm baddbmm addmv addr addcmul
    """
)
WITH_SUMMAND = _names("addmm addbmm baddbmm addmv addr addcmul")

# A tensor that the op makes for the backward (a mask, log-probabilities), as large as the first operand.
DROPOUTS = _names("dropout alpha_dropout")
INNER = DROPOUTS | _names("cross_entropy_loss l1_loss")

# Indices of 8 bytes for each element of the result.
WITH_INDICES = _names(
    """
    max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d sort topk
    """
)
# The same, and nothing else, where they return indices.
INDICES_ALONE = _names("max min median mode kthvalue")

# Their integers and masks.
INDEXED = _names(
    """
    where masked_fill masked_scatter embedding index index_select index_add index_put index_copy gather
    take_along_dim scatter scatter_add cross_entropy_loss nll_loss_nd
    """
)
