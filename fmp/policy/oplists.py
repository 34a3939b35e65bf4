"""Which ops run in which precision: Apex's lists, those of torch's CUDA autocast, and what each leaves open.

Data only. Ops go by canonical names: aten's base name where torch has the op under it, else that of
`torch.nn.functional`. What a name stands for, `fmp.policy.spellings` knows.
"""

from typing import Final

Names = tuple[str, ...]
# The kind of rule, then the reason for a group of names.
Groups = dict[str, dict[str, Names]]


def _names(text: str) -> Names:
    return tuple(text.split())


# --- Apex O1 (NVIDIA/apex, apex/amp/lists). Its lists for torch, torch.nn.functional, tensors and RNNs are joined.

APEX_LOW: Final = _names("""
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear prelu
    addmm addmv addr matmul mm mv addbmm baddbmm bmm
    rnn_relu rnn_tanh gru lstm rnn_relu_cell rnn_tanh_cell gru_cell lstm_cell
""")

APEX_FULL: Final = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow
    cumprod cumsum dist norm prod std sum var renorm cpu
    interpolate grid_sample softplus softmin log_softmax softmax gelu
    layer_norm group_norm local_response_norm normalize cosine_similarity
    poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss
    margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss nll_loss
    binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss
""")

APEX_PROMOTE: Final = _names("""
    addcdiv addcmul atan2 cross bilinear dot add div mul sub eq equal ge gt le lt ne cat stack
""")

APEX_BANNED: Final = _names("binary_cross_entropy")

APEX_ADDED: Final[Groups] = {
    "low": {
        "matrix products that came to torch later": _names("""
            einsum chain_matmul linalg_multi_dot linalg_vecdot scaled_dot_product_attention _grouped_mm
        """),
        "forms of listed products that torch exposes on their own": _names("""
            convolution _convolution cudnn_convolution cudnn_convolution_transpose _addmm_activation
            _scaled_dot_product_flash_attention _native_multi_head_attention
            _thnn_fused_lstm_cell _thnn_fused_gru_cell mkldnn_rnn_layer
        """),
    },
    "full": {
        "exponentials and logarithms that torch's autocast adds": _names("log1p logsumexp"),
        "squares, norms and distances, which overflow float16": _names("""
            square linalg_norm linalg_vector_norm linalg_matrix_norm frobenius_norm nuclear_norm norm_except_dim
            cdist pdist pairwise_distance cov corrcoef
        """),
        "sums under other names": _names("sum_to_size trapezoid cumulative_trapezoid"),
        "normalizations next to the listed ones": _names("rms_norm native_layer_norm native_group_norm"),
        "losses next to the listed ones": _names("huber_loss nll_loss2d"),
        "std and var that return the mean as well": _names("std_mean var_mean"),
        "the resampling inside interpolate, called on its own": _names("""
            upsample_nearest1d upsample_nearest2d upsample_nearest3d
            _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
            upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
            upsample_bicubic2d _upsample_bicubic2d_aa
        """),
        "linear algebra without 16-bit kernels": _names("""
            cholesky cholesky_inverse cholesky_solve geqrf logdet lu lu_solve _lu_with_info ormqr qr svd
            triangular_solve pca_lowrank svd_lowrank lobpcg
            linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig linalg_eigh linalg_eigvals
            linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor
            linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex
            linalg_lu_solve linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet
            linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv
            linalg_tensorsolve linalg_vander sparse_sampled_addmm
        """),
        "matrix powers, which invert when the exponent is negative": _names("linalg_matrix_power"),
        "Fourier transforms without bfloat16 kernels": _names("""
            fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft
            fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2
            fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn stft
        """),
        "complex numbers, which bfloat16 has none of": _names("complex polar view_as_complex"),
        "special functions without 16-bit kernels": _names("""
            special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
            special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
            special_modified_bessel_k1 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
            special_spherical_bessel_j0 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
            special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_shifted_chebyshev_polynomial_t
            special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
            special_shifted_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
            special_laguerre_polynomial_l special_legendre_polynomial_p special_erfcx special_log_ndtr
            special_ndtri special_zeta
        """),
        "statistics and samplers without 16-bit kernels": _names("""
            quantile nanquantile histogram histogramdd binomial _standard_gamma _sample_dirichlet
        """),
        "layers without 16-bit kernels on CPU": _names("avg_pool3d rrelu"),
    },
    "promote": {
        "elementwise ops where a 0-dim float32 operand is rounded to the other's 16 bits": _names("""
            maximum minimum max min fmax fmin clamp clamp_min clamp_max fmod remainder floor_divide where
            hypot copysign ldexp logaddexp logaddexp2 xlogy special_xlog1py igamma igammac
        """),
        "elementwise ops that refuse mixed dtypes": _names("lerp heaviside isclose allclose"),
        "products that refuse mixed dtypes": _names("inner vdot tensordot linalg_cross _sparse_mm"),
        "writes at an index that refuse a source of another dtype": _names("""
            index_put index_add index_copy index_reduce scatter scatter_add scatter_reduce masked_scatter put
        """),
        "samplers, lookups and grids that refuse mixed dtypes": _names("""
            grid_sampler grid_sampler_2d grid_sampler_3d embedding_bag meshgrid cartesian_prod
        """),
    },
}

# --- torch 2.13, CUDA autocast (ATen/autocast_mode.h). Its three ways to reach float32 are joined.

TORCH_LOW: Final = _names("""
    _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
    cudnn_convolution cudnn_convolution_transpose prelu linear
    addmm addmv addr matmul einsum mm mv linalg_vecdot addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention
""")

TORCH_FULL: Final = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus
    layer_norm native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity
    poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
    prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum norm
""")

TORCH_PROMOTE: Final = _names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")

TORCH_BANNED: Final = _names("binary_cross_entropy")

# Mostly composites in C++: torch's autocast reaches the listed ops inside; a function mode sees one call. Not here:
# linalg_matrix_power, low for most exponents, but a negative one inverts, and nothing inverts in 16 bits.
TORCH_INSIDE: Final[Groups] = {
    "low": {
        "recurrent networks, made of linear and cells": _names("lstm gru rnn_tanh rnn_relu"),
        "covariances, a matrix product of centered data": _names("cov corrcoef"),
    },
    "full": {
        "a loss, log_softmax and nll_loss": _names("cross_entropy"),
        "powers": _names("square"),
        "norms": _names("linalg_norm pairwise_distance norm_except_dim"),
        "sums": _names("sum_to_size trapezoid cumulative_trapezoid"),
    },
    "promote": {
        "a product, tensordot": _names("inner"),
        "selections, which torch promotes otherwise under vmap if an operand is 0-dim": _names("where clamp"),
    },
}

# --- names of one and the same op

ALIASES: Final[dict[str, Names]] = {
    # Python's operators on tensors have their own table below; rsub is subtraction with its arguments swapped.
    "sub": _names("subtract rsub"),
    "mul": _names("multiply"),
    "div": _names("divide true_divide"),
    "neg": _names("negative"),
    "abs": _names("absolute"),
    "clamp": _names("clip"),
    "trunc": _names("fix"),
    "round": _names("special_round"),
    "ne": _names("not_equal"),
    "gt": _names("greater"),
    "ge": _names("greater_equal"),
    "lt": _names("less"),
    "le": _names("less_equal"),
    "acos": _names("arccos"),
    "asin": _names("arcsin"),
    "atan": _names("arctan"),
    "acosh": _names("arccosh"),
    "asinh": _names("arcsinh"),
    "atanh": _names("arctanh"),
    "atan2": _names("arctan2"),
    "digamma": _names("special_digamma special_psi"),
    "erf": _names("special_erf"),
    "erfc": _names("special_erfc"),
    "erfinv": _names("special_erfinv"),
    "exp2": _names("special_exp2"),
    "expm1": _names("special_expm1"),
    "i0": _names("special_i0"),
    "igamma": _names("special_gammainc"),
    "igammac": _names("special_gammaincc"),
    "lgamma": _names("special_gammaln"),
    "log1p": _names("special_log1p"),
    "logit": _names("special_logit"),
    "mvlgamma": _names("special_multigammaln"),
    "polygamma": _names("special_polygamma"),
    "sigmoid": _names("special_expit"),
    "log_sigmoid": _names("logsigmoid"),
    "sinc": _names("special_sinc"),
    "xlogy": _names("special_xlogy"),
    "softmax": _names("special_softmax"),
    "log_softmax": _names("special_log_softmax"),
    "logsumexp": _names("special_logsumexp"),
    "cross_entropy": _names("cross_entropy_loss"),
    "nll_loss": _names("nll_loss_nd"),
    "matmul": _names("linalg_matmul"),
    "_grouped_mm": _names("grouped_mm"),
    "outer": _names("ger"),
    "matrix_exp": _names("linalg_matrix_exp"),
    "linalg_matrix_power": _names("matrix_power"),
    "linalg_det": _names("det"),
    "linalg_inv": _names("inverse"),
    "linalg_slogdet": _names("slogdet"),
    "linalg_pinv": _names("pinverse"),
    "linalg_householder_product": _names("orgqr"),
    "trapezoid": _names("trapz"),
    "cat": _names("concat concatenate"),
    "vstack": _names("row_stack"),
    "movedim": _names("moveaxis"),
    "transpose": _names("swapaxes swapdims"),
    "interpolate": _names("upsample upsample_nearest upsample_bilinear"),
    "max_pool1d": _names("max_pool1d_with_indices"),
    "max_pool2d": _names("max_pool2d_with_indices"),
    "max_pool3d": _names("max_pool3d_with_indices"),
    "adaptive_max_pool1d": _names("adaptive_max_pool1d_with_indices"),
    "adaptive_max_pool2d": _names("adaptive_max_pool2d_with_indices"),
    "adaptive_max_pool3d": _names("adaptive_max_pool3d_with_indices"),
    "fractional_max_pool2d": _names("fractional_max_pool2d_with_indices"),
    "fractional_max_pool3d": _names("fractional_max_pool3d_with_indices"),
}

# What Python calls the op between underscores: `__matmul__`, `__rmatmul__`, `__imatmul__`. Only these, for
# `Tensor.__rand__` is a reflected `&`, not torch.rand, and `Tensor.__float__` leaves torch where `Tensor.float` casts.
OPERATORS: Final[dict[str, Names]] = {
    "add": _names("add"),
    "sub": _names("sub"),
    "mul": _names("mul"),
    "div": _names("truediv div"),
    "floor_divide": _names("floordiv"),
    "remainder": _names("mod"),
    "pow": _names("pow"),
    "matmul": _names("matmul"),
    "eq": _names("eq"),
    "ne": _names("ne"),
    "gt": _names("gt"),
    "ge": _names("ge"),
    "lt": _names("lt"),
    "le": _names("le"),
    "neg": _names("neg"),
    "positive": _names("pos"),
    "abs": _names("abs"),
    "bitwise_and": _names("and"),
    "bitwise_or": _names("or"),
    "bitwise_xor": _names("xor"),
    "bitwise_not": _names("invert"),
    "bitwise_left_shift": _names("lshift"),
    "bitwise_right_shift": _names("rshift"),
}
