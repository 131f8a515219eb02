"""The default op lists, as data: which ATen ops run low, in float32, follow their inputs or move values.

Names are those of ``torch.ops.aten`` before dispatch: ``softmax`` is every overload of the packet,
``softmax.int`` is one overload, which overrides its packet. In-place forms resolve to their functional name.

The lists start from torch's CUDA autocast (torch 2.13). If a row differs, its reason says so. "fp32 inside"
means that the kernel accumulates in float32 and rounds only its result.
"""

from __future__ import annotations

from typing import NamedTuple

from . import kernel_tables


class OpGroup(NamedTuple):
    """Ops that share one rule. ``when`` names a predicate; ``otherwise`` is the class if it is false."""

    cls: str
    reason: str
    ops: str
    when: str = ""
    otherwise: str = ""


DEFAULT_WHITE = (
    OpGroup(
        "white",
        "convolution: fp32 inside, fastest in low",
        """conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
        _convolution _convolution_mode convolution_overrideable convolution_backward cudnn_convolution
        cudnn_convolution_transpose cudnn_convolution_relu cudnn_convolution_add_relu mkldnn_convolution
        miopen_convolution miopen_convolution_transpose miopen_depthwise_convolution thnn_conv2d slow_conv3d
        slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d
        _conv_depthwise2d conv_depthwise3d""",
        when="has_weight_gradient",
        otherwise="black",
    ),
    OpGroup(
        "white",
        "matrix product: fp32 inside, fastest in low",
        """linear matmul mm bmm mv addmm addmv addbmm baddbmm chain_matmul linalg_multi_dot
        linalg_vecdot linalg_matmul inner _addmm_activation mkldnn_linear linear_backward matmul_backward
        _grouped_mm""",
    ),
    OpGroup(
        "white",
        "matrix product: fp32 inside, fastest in low",
        "einsum",
        when="sums_products",
        otherwise="gray",
    ),
    OpGroup(
        "white",
        "matrix product behind a reshape; torch only promotes it and so misses a GEMM",
        "tensordot",
        when="sums_products",
        otherwise="gray",
    ),
    OpGroup(
        "white",
        "matrix product behind a reshape; torch only promotes it and so misses a GEMM",
        "bilinear _trilinear",
    ),
    OpGroup(
        "white",
        "attention: softmax is fp32 inside, flash kernels need low inputs",
        """scaled_dot_product_attention _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
        _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
        _scaled_dot_product_attention_math _flash_attention_forward _efficient_attention_forward
        _native_multi_head_attention _transformer_encoder_layer_fwd""",
    ),
    OpGroup(
        "white",
        "recurrent layer: its time is in matrix products",
        """lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell
        _thnn_fused_gru_cell _cudnn_rnn miopen_rnn mkldnn_rnn_layer""",
    ),
)

DEFAULT_BLACK = (
    OpGroup(
        "black",
        "grows fast: overflows float16",
        """exp exp2 expm1 cosh sinh pow float_power square ldexp logaddexp logaddexp2 logsumexp
        special_logsumexp special_exp2 special_expm1 _foreach_exp matrix_exp linalg_matrix_exp matrix_power
        linalg_matrix_power linalg_vander vander""",
    ),
    OpGroup(
        "black",
        "steep where its argument is small",
        """log log10 log1p log2 reciprocal rsqrt xlogy special_xlogy special_xlog1py special_log1p
        special_entr logit special_logit""",
    ),
    OpGroup(
        "black",
        "angles must not be rounded (rotary tables); torch leaves sin and cos alone",
        "sin cos sinc special_sinc affine_grid_generator polar view_as_complex complex angle",
    ),
    OpGroup(
        "black",
        "sampling positions: one rounding moves them by pixels in a large image",
        "grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback cudnn_grid_sampler",
    ),
    OpGroup("black", "its backward squares its input, which overflows", "addcdiv asinh arcsinh"),
    OpGroup("black", "steep near a pole", "tan acos asin arccos arcsin acosh arccosh atanh arctanh"),
    OpGroup(
        "black",
        "special function: its precision is the reason to call it",
        """erfc erfinv digamma lgamma mvlgamma polygamma i0 igamma igammac special_airy_ai special_bessel_j0
        special_bessel_j1 special_bessel_y0 special_bessel_y1 special_digamma special_erf special_erfc
        special_erfcx special_erfinv special_gammainc special_gammaincc special_gammaln special_i0
        special_i0e special_i1 special_i1e special_log_ndtr special_multigammaln special_ndtr special_ndtri
        special_polygamma special_psi special_spherical_bessel_j0 special_zeta special_modified_bessel_i0
        special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
        special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_chebyshev_polynomial_t
        special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
        special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l
        special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t
        special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
        special_shifted_chebyshev_polynomial_w""",
    ),
    OpGroup(
        "black",
        "probabilities: small ones vanish in low; the kernel reads low and writes float32",
        """softmax log_softmax special_softmax special_log_softmax _softmax _log_softmax _safe_softmax
        _masked_softmax""",
    ),
    OpGroup(
        "black",
        "log-probabilities feed losses; torch leaves log_sigmoid alone",
        "softplus log_sigmoid log_sigmoid_forward",
    ),
    OpGroup(
        "black",
        "long sum or product: the result overflows or swamps its terms",
        """sum nansum prod cumsum cumprod logcumsumexp trace trapezoid trapz cumulative_trapezoid sum_to_size
        histc histogram histogramdd""",
    ),
    OpGroup(
        "black",
        "adds into its result in the result's own dtype, one rounding per term",
        """scatter_add scatter_reduce scatter.reduce scatter.value_reduce index_add index_reduce
        segment_reduce embedding_dense_backward""",
    ),
    OpGroup(
        "black",
        "norm or variance: squares overflow, differences cancel",
        """norm frobenius_norm nuclear_norm linalg_norm linalg_vector_norm linalg_matrix_norm norm_except_dim
        native_norm renorm dist cdist _cdist_forward _euclidean_dist pdist _pdist_forward pairwise_distance
        cosine_similarity var std var_mean std_mean cov corrcoef _weight_norm _weight_norm_interface""",
    ),
    OpGroup(
        "black",
        "loss: its value and first gradients need float32",
        " ".join(sorted(kernel_tables.LOSSES)),
    ),
    OpGroup(
        "black",
        "transform without (reliable) low-precision kernels",
        """stft istft fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn
        fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
        _fft_c2r _fft_r2c _fft_c2c""",
    ),
    OpGroup(
        "black",
        "decomposition or solver: no low-precision kernel",
        " ".join(sorted(kernel_tables.SOLVERS)),
    ),
    OpGroup(
        "black",
        "statistics: interpolates between or draws from exact values",
        """quantile nanquantile multinomial poisson normal binomial _sample_dirichlet _standard_gamma
        nextafter""",
    ),
    OpGroup(
        "black",
        "fake quantisation: the grid must not be rounded again",
        """fake_quantize_per_tensor_affine fake_quantize_per_channel_affine fused_moving_avg_obs_fake_quant
        fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask
        _fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine""",
    ),
)

DEFAULT_GRAY = (
    OpGroup(
        "gray",
        "elementwise arithmetic: one rounding of the result",
        """add sub rsub mul div subtract multiply divide true_divide floor_divide remainder fmod addcmul
        lerp""",
        "scalars_fit",
        "black",
    ),
    OpGroup(
        "gray",
        "elementwise arithmetic: one rounding of the result",
        """addr outer ger kron dot vdot cross linalg_cross atan2 arctan2 atan arctan hypot sqrt
        erf frac deg2rad rad2deg diff gradient _add_relu""",
    ),
    OpGroup(
        "gray",
        "activation: fp32 inside, bounded by its input",
        """sigmoid tanh gelu silu mish elu selu celu leaky_relu prelu rrelu rrelu_with_noise
        rrelu_with_noise_functional hardswish hardsigmoid hardshrink softshrink glu special_expit
        _prelu_kernel""",
    ),
    OpGroup(
        "gray",
        "normalisation: statistics are fp32 inside; torch forces float32",
        """layer_norm native_layer_norm group_norm native_group_norm rms_norm _fused_rms_norm
        native_layer_norm_backward native_group_norm_backward""",
    ),
    OpGroup(
        "gray",
        "batch statistics are fp32 inside, parameters and running statistics stay float32",
        """batch_norm native_batch_norm instance_norm _native_batch_norm_legit
        _native_batch_norm_legit_no_training _native_batch_norm_legit_functional _batch_norm_with_update
        _batch_norm_no_update _batch_norm_impl_index cudnn_batch_norm miopen_batch_norm batch_norm_elemt""",
    ),
    OpGroup(
        "gray",
        "average: fp32 inside, no larger than its largest term",
        """mean nanmean avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward adaptive_avg_pool1d
        adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
        _adaptive_avg_pool2d_backward mkldnn_adaptive_avg_pool2d""",
    ),
    OpGroup("gray", "sums a few rows or windows, fp32 inside", "embedding_bag _embedding_bag col2im"),
    OpGroup(
        "gray",
        "interpolation: weighted mean of neighbours; torch forces float32",
        """upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
        _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa""",
    ),
    OpGroup(
        "gray",
        "drops and rescales",
        """dropout alpha_dropout feature_dropout feature_alpha_dropout native_dropout _fused_dropout
        native_dropout_backward bernoulli""",
    ),
    OpGroup(
        "gray",
        "its answer jumps: rounding the input first could change it",
        """eq ne lt le gt ge equal not_equal less less_equal greater greater_equal isclose allclose
        logical_and logical_or logical_xor logical_not isnan isinf isfinite isreal isposinf isneginf isin
        nonzero nonzero_static nonzero_numpy argwhere is_nonzero count_nonzero any all sign sgn signbit
        heaviside ceil floor round trunc fix special_round argmax argmin argsort bucketize searchsorted
        unique_dim unique_consecutive unique_dim_consecutive _unique _unique2 item _local_scalar_dense
        frexp bincount one_hot""",
    ),
    OpGroup(
        "gray",
        "returns positions too: rounding the input first would make ties",
        "sort topk msort kthvalue mode max.dim min.dim median.dim nanmedian.dim cummax cummin _aminmax",
    ),
    OpGroup("gray", "depends on limits or a threshold", "nan_to_num threshold", "scalars_fit", "black"),
)

DEFAULT_CLEAR = (
    OpGroup(
        "clear",
        "view: moves nothing",
        """view reshape _unsafe_view _reshape_alias view_as reshape_as view_as_real flatten unflatten ravel
        squeeze unsqueeze expand expand_as broadcast_to broadcast_tensors permute transpose t numpy_T mT mH
        matrix_H adjoint movedim moveaxis swapaxes swapdims select slice narrow diagonal linalg_diagonal
        split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unsafe_chunk tensor_split hsplit
        vsplit dsplit unbind unfold as_strided alias detach real imag conj resolve_conj resolve_neg positive
        atleast_1d atleast_2d atleast_3d contiguous lift lift_fresh lift_fresh_copy meshgrid data""",
    ),
    OpGroup(
        "clear",
        "copy of a view",
        """view_copy _reshape_copy permute_copy transpose_copy t_copy squeeze_copy unsqueeze_copy expand_copy
        select_copy slice_copy split_copy split_with_sizes_copy unbind_copy unfold_copy diagonal_copy
        as_strided_copy alias_copy detach_copy narrow_copy view_as_real_copy""",
    ),
    OpGroup(
        "clear",
        "copies values",
        """clone copy copy_ _to_copy to type_as cat concat concatenate stack hstack vstack dstack row_stack
        column_stack block_diag cartesian_prod combinations repeat repeat_interleave tile flip fliplr flipud
        roll rot90 tril triu diag diag_embed diagflat pixel_shuffle pixel_unshuffle channel_shuffle
        native_channel_shuffle im2col pad_sequence _pad_packed_sequence _pack_padded_sequence
        _nested_tensor_from_mask fft_fftshift fft_ifftshift to_dense resize resize_ resize_as_ conj_physical
        pin_memory""",
    ),
    OpGroup(
        "clear",
        "selects or writes values by position",
        """gather take take_along_dim index index_select masked_select embedding embedding_renorm index_copy
        scatter select_scatter slice_scatter diagonal_scatter as_strided_scatter masked_scatter put
        _unsafe_index _unsafe_masked_index""",
    ),
    OpGroup(
        "clear",
        "writes values by position",
        "index_put _unsafe_index_put _index_put_impl",
        "overwrites",
        "black",
    ),
    OpGroup(
        "clear",
        "fills with a constant or keeps the value",
        "masked_fill index_fill scatter.value where clamp clamp_min clamp_max clip hardtanh relu6",
        "scalars_fit",
        "black",
    ),
    OpGroup(
        "clear",
        "pads",
        "constant_pad_nd pad _pad_enum _pad_circular",
        "scalars_fit",
        "black",
    ),
    OpGroup(
        "clear",
        "pads with its own values",
        """reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
        replication_pad3d""",
    ),
    OpGroup(
        "clear",
        "keeps one of its inputs or changes a sign",
        """relu abs absolute neg negative maximum minimum fmax fmin max min amax amin aminmax median nanmedian
        copysign""",
    ),
    OpGroup(
        "clear",
        "keeps the largest value; any of equal positions will do",
        """max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices
        max_pool3d_with_indices max_pool2d_with_indices_backward adaptive_max_pool1d adaptive_max_pool2d
        adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d max_unpool2d max_unpool3d
        mkldnn_max_pool2d mkldnn_max_pool3d""",
    ),
    OpGroup(
        "clear",
        "nearest neighbour copies values; torch forces float32",
        """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d""",
    ),
    OpGroup(
        "clear",
        "makes a tensor of a stated dtype or like another",
        """empty empty_strided empty_permuted zeros ones full eye arange range linspace logspace scalar_tensor
        rand randn randint randperm bartlett_window blackman_window hamming_window hann_window kaiser_window
        tril_indices triu_indices fft_fftfreq fft_rfftfreq empty_like zeros_like ones_like rand_like
        randn_like randint_like new_empty new_empty_strided new_zeros new_ones zero uniform random
        exponential geometric cauchy log_normal normal_functional""",
    ),
    OpGroup(
        "clear", "fills with a constant", "full_like new_full fill fill_diagonal_", "scalars_fit", "black"
    ),
    OpGroup(
        "clear",
        "works on integers or bits",
        """bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift gcd lcm
        __and__ __or__ __xor__ __lshift__ __rshift__""",
    ),
)

DEFAULT = DEFAULT_WHITE + DEFAULT_BLACK + DEFAULT_GRAY + DEFAULT_CLEAR
