"""Operators that autocast runs in the lower precision, in float32, or in the widest dtype.

The lists are those of ``torch.amp``; a test compares them with the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Category = Literal["lower", "float32", "widest"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Only builds with CUDA register `_cudnn_rnn`, which runs an LSTM or a GRU under autocast.
LOWER: dict[str, frozenset[str]] = {
    "cpu": _words(
        """
        _addmm_activation _convolution _native_multi_head_attention addbmm addmm baddbmm bmm conv1d
        conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d linalg_vecdot
        linear matmul mkldnn_rnn_layer mm prelu scaled_dot_product_attention
        """
    ),
    "cuda": _words(
        """
        _convolution _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell
        addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc
        conv_transpose1d conv_transpose2d conv_transpose3d convolution _cudnn_rnn cudnn_convolution
        cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell
        matmul mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
        """
    ),
}
WIDEST: dict[str, frozenset[str]] = {
    "cpu": _words(
        """
        cat stack index_copy
        """
    ),
    "cuda": _words(
        """
        addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
        """
    ),
}
FLOAT32: dict[str, frozenset[str]] = {
    "cpu": _words(
        """
        _grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d
        avg_pool3d binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky
        cholesky_inverse cholesky_solve cosine_embedding_loss cross_entropy_loss ctc_loss
        fake_quantize_per_tensor_affine fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2
        fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
        fractional_max_pool2d fractional_max_pool3d geqrf grid_sampler grid_sampler_2d
        grid_sampler_3d hinge_embedding_loss huber_loss inverse kl_div l1_loss linalg_cholesky
        linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
        linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank
        linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve
        lu_solve margin_ranking_loss max_pool3d max_unpool2d max_unpool3d mse_loss multi_margin_loss
        multilabel_margin_loss multilabel_margin_loss_forward nanquantile nll_loss nll_loss2d orgqr
        ormqr pinverse poisson_nll_loss polar prod qr quantile reflection_pad1d reflection_pad2d
        replication_pad1d replication_pad2d replication_pad3d smooth_l1_loss soft_margin_loss stft
        svd trace triangular_solve triplet_margin_loss view_as_complex
        """
    ),
    "cuda": _words(
        """
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d acos asin
        binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity cumprod
        cumsum dist erfinv exp expm1 frobenius_norm group_norm hinge_embedding_loss huber_loss
        kl_div l1_loss layer_norm linalg_matrix_norm linalg_vector_norm log log10 log1p log2
        log_softmax logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
        native_layer_norm nll_loss nll_loss2d norm nuclear_norm pdist poisson_nll_loss pow prod
        reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softmax softplus sum
        tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d upsample_linear1d
        upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
        """
    ),
}
# Attention without a fused kernel (dropout on a CPU) computes in float32 for any input dtype.
_WIDE_ATTENTION = "aten::_scaled_dot_product_attention_math"


def category(scope: Sequence[str], device: str) -> Category | None:
    """Return the category of the outermost listed operator in `scope`; None if none is listed."""
    if _WIDE_ATTENTION in scope:
        return "float32"
    for name in scope:
        short = name.removeprefix("aten::")
        if short in LOWER[device]:
            return "lower"
        if short in FLOAT32[device]:
            return "float32"
        if short in WIDEST[device]:
            return "widest"
    return None
