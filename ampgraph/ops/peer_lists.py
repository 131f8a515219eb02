"""The op lists of other systems, as data, in ATen names.

Only the classes are theirs; the mapping to ATen and the wording are ours. Ops that a system handles inside
another one (``cross_entropy_loss`` calls ``log_softmax``) stand under the class they come out with.
"""

from __future__ import annotations

from ampgraph.ops.default_lists import OpGroup

# torch 2.13, CUDA autocast. The first rows of each class are the macros of ATen/autocast_mode.h word for
# word (a test compares them with the installed header); "redispatch" rows are composites that reach a
# listed op.
TORCH_LOWER_PRECISION_FP = OpGroup(
    "white",
    "torch autocast: lower_precision_fp",
    """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv
    linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention""",
)
TORCH_FP32 = OpGroup(
    "black",
    "torch autocast: fp32",
    """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss
    mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
    upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa""",
)
TORCH_FP32_SET_OPT_DTYPE = OpGroup(
    "black",
    "torch autocast: fp32 through its dtype argument",
    """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList""",
)
TORCH_FP32_APPEND_DTYPE = OpGroup(
    "black", "torch autocast: fp32 by an appended dtype argument", "norm.Scalar norm.ScalarOpt_dim"
)
TORCH_PROMOTE = OpGroup(
    "gray",
    "torch autocast: promote to the widest input",
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
)
TORCH_BANNED = OpGroup(
    "black",
    "torch autocast refuses this op (unsafe in low precision); float32 is the safe form",
    "binary_cross_entropy",
)
TORCH_OTHERS = (
    OpGroup(
        "white",
        "torch autocast: lower_precision_fp, registered with its backend",
        "cudnn_convolution cudnn_convolution_transpose _cudnn_rnn",
    ),
    OpGroup("black", "torch autocast: fp32, registered beside the macros", "linalg_matrix_sqrth"),
    OpGroup(
        "white",
        "torch autocast: redispatches to a lower_precision_fp op",
        """conv_transpose2d conv_transpose3d _convolution_mode linalg_matmul lstm gru rnn_tanh rnn_relu
        _scaled_dot_product_attention_math""",
    ),
    OpGroup(
        "black",
        "torch autocast: redispatches to an fp32 op",
        """pow square softmax log_softmax special_softmax special_log_softmax special_logsumexp special_expm1
        special_log1p special_erfinv arccos arcsin cross_entropy_loss nll_loss_nd frobenius_norm linalg_norm
        pairwise_distance norm_except_dim _weight_norm cumulative_trapezoid trapezoid trapz""",
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

# Paddle of 2023, about 2.5 (float16 lists of python/paddle/amp/amp_lists.py, gray list of
# static/amp/fp16_lists.py). Its 1-d convolutions are conv2d there; its conv3d and transposed convolutions
# are in no list, so they stay fp32. Unsure: what 3.x changed, and depthwise convolution, another and
# unlisted op there, which is conv2d here.
PADDLE_WHITE = (
    OpGroup(
        "white",
        "Paddle white list (conv2d, matmul, mul, einsum, fused attention)",
        """
        conv1d conv2d convolution linear matmul mm bmm mv addmm einsum scaled_dot_product_attention
        _native_multi_head_attention _transformer_encoder_layer_fwd
        """,
    ),
    OpGroup(
        "white", "Paddle white list (max_pool2d_with_index)", "max_pool2d_with_indices adaptive_max_pool2d"
    ),
)
PADDLE_O1_BLACK = OpGroup(
    "black",
    "Paddle black list: dangerous in low precision",
    """
    tan acos asin sinh cosh atanh cosine_similarity erfinv exp expm1 log log10 log2 reciprocal rsqrt
    pow.Tensor_Scalar pow.Scalar square sum mean prod cumprod cumsum dist pairwise_distance
    linalg_vector_norm frobenius_norm norm renorm group_norm layer_norm softmax softplus log_softmax
    cross_entropy_loss binary_cross_entropy_with_logits nll_loss nll_loss2d nll_loss_nd huber_loss
    smooth_l1_loss triplet_margin_loss
    """,
)
PADDLE_EXTRA_BLACK = OpGroup(
    "black",
    "Paddle black list at every level: slower in low precision",
    """
    embedding scatter scatter_add scatter_reduce upsample_linear1d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    """,
)
PADDLE_GRAY = OpGroup(
    "gray",
    "Paddle gray list: follows its inputs",
    """
    add sub rsub mul div maximum minimum pow.Tensor_Tensor remainder floor_divide batch_norm tanh sigmoid
    topk avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    dropout sign leaky_relu
    """,
)
PADDLE_CLEAR = OpGroup(
    "clear",
    "Paddle gray list: moves values",
    """
    max_pool1d max_pool2d max_pool3d relu relu6 flatten stack unbind slice select transpose permute t view
    reshape gather index_select index full cat split split_with_sizes chunk to _to_copy type_as rand randn
    uniform normal_functional
    """,
)
PADDLE_OD = PADDLE_WHITE
PADDLE_O1 = (*PADDLE_WHITE, PADDLE_O1_BLACK, PADDLE_EXTRA_BLACK, PADDLE_GRAY, PADDLE_CLEAR)
PADDLE_O2 = (*PADDLE_WHITE, PADDLE_EXTRA_BLACK)
PADDLE_O2_UNLISTED = "Paddle O2: runs low unless an input is float32"

# MindSpore 2.4 and later, level "auto" (documentation of mindspore.amp.auto_mixed_precision); recurrent
# cells and ReLU are from its O1 list of cells, whose black list (BatchNorm, LayerNorm) is contained here.
# Unlisted ops follow their inputs. Unsure: cross_entropy_loss, which reaches its LogSoftmax.
MINDSPORE = (
    OpGroup(
        "white",
        "MindSpore white list",
        """
        conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution linear matmul mm
        bmm mv addmm baddbmm einsum prelu outer ger lstm gru rnn_tanh rnn_relu lstm_cell gru_cell
        rnn_tanh_cell rnn_relu_cell
        """,
    ),
    OpGroup(
        "white",
        "MindSpore white list: exact in either dtype, low to keep its neighbours low",
        "relu",
    ),
    OpGroup(
        "black",
        "MindSpore black list",
        """
        pow square acos asin cosh erfinv exp expm1 log log1p reciprocal rsqrt sinh tan softplus layer_norm
        batch_norm group_norm kl_div smooth_l1_loss multilabel_margin_loss soft_margin_loss
        triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits pdist cdist renorm prod
        softmax log_softmax cumprod cumsum sum norm linalg_vector_norm cross_entropy_loss
        """,
    ),
    OpGroup(
        "gray",
        "MindSpore promote list",
        "addcdiv addcmul cross linalg_cross dot grid_sampler grid_sampler_2d grid_sampler_3d",
    ),
)
MINDSPORE_UNLISTED = "MindSpore: not listed, follows its inputs"

# OneFlow nn.Graph, about 0.9 (core/job_rewriter/auto_mixed_precision_lists.cpp). Its black list is empty:
# what no list names stays fp32, mean, exp and conv1d among them. Unsure: average and max pooling are listed
# under their older TensorFlow-style op names only; embedding stands for its gather.
ONEFLOW = (
    OpGroup(
        "white",
        "OneFlow white list",
        """
        matmul mm bmm mv linear addmm baddbmm einsum conv2d convolution prelu scaled_dot_product_attention
        _native_multi_head_attention
        """,
    ),
    OpGroup(
        "gray",
        "OneFlow gray list",
        """
        add sub rsub mul div avg_pool1d avg_pool2d avg_pool3d sigmoid tanh sqrt layer_norm dropout softmax
        gelu batch_norm cross_entropy_loss
        """,
    ),
    OpGroup(
        "clear",
        "OneFlow clear list",
        """
        gather index_select embedding max_pool1d max_pool2d max_pool3d view reshape relu transpose permute t
        cat constant_pad_nd pad tril slice select narrow flatten squeeze unsqueeze repeat unbind stack alias
        detach clone to _to_copy
        """,
    ),
)
