"""The op lists of other systems, as data, in ATen names.

Only the classes are theirs; the mapping to ATen and the wording are ours. Ops that a system handles inside
another one (``cross_entropy_loss`` calls ``log_softmax``) stand under the class they come out with.
"""

from __future__ import annotations

from ampgraph.op_data import Rows

# torch 2.13, CUDA autocast. The first rows of each class are the macros of ATen/autocast_mode.h word for word
# (a test compares them with the installed header); "redispatch" rows are composites that reach a listed op.
TORCH_LOWER_PRECISION_FP = Rows(
    "white",
    "torch autocast: lower_precision_fp",
    """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv
    linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention""",
)
TORCH_FP32 = Rows(
    "black",
    "torch autocast: fp32",
    """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
    upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa""",
)
TORCH_FP32_SET_OPT_DTYPE = Rows(
    "black",
    "torch autocast: fp32 through its dtype argument",
    """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList""",
)
TORCH_FP32_APPEND_DTYPE = Rows(
    "black", "torch autocast: fp32 by an appended dtype argument", "norm.Scalar norm.ScalarOpt_dim"
)
TORCH_PROMOTE = Rows(
    "gray",
    "torch autocast: promote to the widest input",
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
)
TORCH_BANNED = Rows(
    "black",
    "torch autocast refuses this op (unsafe in low precision); float32 is the safe form",
    "binary_cross_entropy",
)
TORCH_OTHERS = (
    Rows(
        "white",
        "torch autocast: lower_precision_fp, registered with its backend",
        "cudnn_convolution cudnn_convolution_transpose _cudnn_rnn",
    ),
    Rows(
        "white",
        "torch autocast: redispatches to a lower_precision_fp op",
        """conv_transpose2d conv_transpose3d _convolution_mode linalg_matmul lstm gru rnn_tanh rnn_relu
        _scaled_dot_product_attention_math""",
    ),
    Rows(
        "black",
        "torch autocast: redispatches to an fp32 op",
        """pow square softmax log_softmax special_softmax special_log_softmax special_logsumexp special_expm1
        special_log1p special_erfinv arccos arcsin cross_entropy_loss nll_loss_nd frobenius_norm
        linalg_norm pairwise_distance norm_except_dim _weight_norm cumulative_trapezoid trapezoid trapz""",
    ),
)
TORCH = (
    TORCH_LOWER_PRECISION_FP,
    TORCH_FP32,
    TORCH_FP32_SET_OPT_DTYPE,
    TORCH_FP32_APPEND_DTYPE,
    TORCH_PROMOTE,
    TORCH_BANNED,
    *TORCH_OTHERS,
)
# What autocast does not know keeps torch's own type promotion: it follows its inputs.
TORCH_UNLISTED = "torch autocast: not listed, follows its inputs"
