"""List the rules of operators as data: those of torch.autocast for each device, and those of Apex's O1.

Source: aten/src/ATen/autocast_mode.h and autocast_mode.cpp in PyTorch 2.11 to 2.15; apex/amp/lists at
NVIDIA/apex e13873de. The tests compare each native table with the kernels that the installed torch has
registered and with what those kernels do to their inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Rule = Literal["lower", "fp32", "widest", "as_is", "unfused", "banned"]


@dataclass(frozen=True)
class Group:
    """Operators that share a rule and the reason for it.

    Attributes:
        rule: One of the rules.
        reason: Why the operators have this rule, in a clause.
        ops: The names of the operators, separated by blanks.
        only_low: Whether the rule holds only for some inputs; :class:`~castwise.core.plans.rules.Row` says for which.
    """

    rule: Rule
    reason: str
    ops: str
    only_low: bool = False


_MATRIX = "a product of matrices: matrix units take low inputs and sum in fp32"
_CONV = "a convolution: matrix units take low inputs and sum in fp32"
_ATTENTION = "two matrix products around a softmax, which the kernels keep in fp32"
_RNN = "a recurrent layer consists of matrix products, and its fused kernels need one format throughout"
_PRELU = "runs in the low format of the layer before it instead of the fp32 of its slope parameter"
_RANGE = "overflows fp16 for moderate inputs, or amplifies rounding where it is steep"
_SUMS = "adds or multiplies many terms: results overflow fp16, and bf16 rounds small terms away"
_NORM = "its statistics are sums of squares, which overflow fp16"
_LOSS = "computes the loss, a reduction over the batch"
_DISTANCE = "differences that are squared and summed lose their leading digits"
_RESIZE = "interpolation weights need more digits than a low format has"
_SAMPLE = "sampling positions need more digits than a low format has"
_COPY = "resizing runs in one format whatever its mode"
_MIXED = "takes tensors of one format: mixed formats are cast to the widest"
_BCE = "its derivative overflows fp16 near 0 and 1: use binary_cross_entropy_with_logits"
_LINALG = "factorisations and solvers lack low kernels and amplify rounding"
_FFT = "lacks a low kernel on the CPU and sums many terms"
_CPU_KERNEL = "its low kernel on the CPU is missing or slow"
_ORDER = "interpolates between order statistics and lacks a low kernel"

_FACTORS = """_lu_with_info cholesky cholesky_inverse cholesky_solve geqrf inverse linalg_cholesky
linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_matrix_sqrth linalg_qr
linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve orgqr ormqr
pinverse qr svd triangular_solve"""

_UPSAMPLE = (
    Group(
        "fp32",
        _RESIZE,
        """upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
        upsample_bicubic2d _upsample_bicubic2d_aa""",
    ),
    Group(
        "fp32",
        _COPY,
        """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d""",
    ),
)

CUDA: Final = (
    Group(
        "lower",
        _CONV,
        """_convolution convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
        conv_transpose3d cudnn_convolution cudnn_convolution_transpose""",
    ),
    Group(
        "lower",
        _MATRIX,
        """addbmm addmm addmv addr baddbmm bmm chain_matmul einsum linalg_multi_dot linalg_vecdot linear
        matmul mm mv""",
    ),
    Group("lower", _ATTENTION, "scaled_dot_product_attention _scaled_dot_product_flash_attention"),
    Group(
        "lower",
        _RNN,
        """_cudnn_rnn _thnn_fused_gru_cell _thnn_fused_lstm_cell gru_cell lstm_cell rnn_relu_cell
        rnn_tanh_cell""",
    ),
    Group("lower", _PRELU, "prelu"),
    Group(
        "fp32",
        _RANGE,
        "acos asin cosh erfinv exp expm1 log log10 log1p log2 pow reciprocal rsqrt sinh softplus tan",
    ),
    Group("fp32", _SUMS, "cumprod cumsum log_softmax logsumexp prod softmax sum"),
    Group(
        "fp32",
        _NORM,
        """cosine_similarity frobenius_norm group_norm layer_norm linalg_matrix_norm linalg_vector_norm
        native_layer_norm norm nuclear_norm renorm rms_norm""",
    ),
    Group(
        "fp32",
        _LOSS,
        """binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss huber_loss kl_div
        l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d
        poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss""",
    ),
    Group("fp32", _DISTANCE, "cdist dist pdist"),
    Group("fp32", _LINALG, "linalg_matrix_sqrth"),
    *_UPSAMPLE,
    Group(
        "widest",
        _MIXED,
        "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot",
    ),
    Group("banned", _BCE, "binary_cross_entropy"),
)
"""The rules of torch.autocast on CUDA, and on other accelerators for those operators that they list as well."""

CPU: Final = (
    Group(
        "lower",
        _CONV,
        "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d",
    ),
    Group("lower", _MATRIX, "_addmm_activation addbmm addmm baddbmm bmm linalg_vecdot linear matmul mm"),
    Group("lower", _ATTENTION, "_native_multi_head_attention scaled_dot_product_attention"),
    Group("lower", _RNN, "mkldnn_rnn_layer"),
    Group("lower", _PRELU, "prelu"),
    Group("fp32", _SUMS, "prod trace"),
    Group("fp32", _DISTANCE, "cdist"),
    Group(
        "fp32",
        _LOSS,
        """binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss
        ctc_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss
        multilabel_margin_loss multilabel_margin_loss_forward nll_loss nll_loss2d poisson_nll_loss
        smooth_l1_loss soft_margin_loss triplet_margin_loss""",
    ),
    Group("fp32", _SAMPLE, "_grid_sampler_2d_cpu_fallback grid_sampler grid_sampler_2d grid_sampler_3d"),
    Group(
        "fp32",
        _CPU_KERNEL,
        """adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d fake_quantize_per_tensor_affine
        fractional_max_pool2d fractional_max_pool3d max_pool3d max_unpool2d max_unpool3d polar
        reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
        view_as_complex""",
    ),
    Group("fp32", _ORDER, "nanquantile quantile"),
    Group(
        "fp32",
        _FFT,
        """fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2
        fft_irfftn fft_rfft fft_rfft2 fft_rfftn stft""",
    ),
    Group("fp32", _LINALG, _FACTORS),
    Group("widest", _MIXED, "cat index_copy stack"),
)
"""The rules of torch.autocast on CPUs."""

_NORMS = "batch_norm group_norm instance_norm layer_norm native_layer_norm rms_norm"

REFUSES: Final = """addmv bilinear cross dot embedding_bag group_norm index_add index_put inner instance_norm layer_norm
lerp linalg_cross linalg_multi_dot masked_scatter mv native_layer_norm rms_norm scatter scatter_add tensordot vdot"""
"""Operators that refuse an fp32 tensor together with bf16 or fp16 ones. batch_norm is left out, since some tables cast
all inputs of these operators to bf16 or fp16, and its statistics must keep their format."""

STORED_LOW: Final = (
    Group("widest", "its kernel refuses weights in a lower format than its input", _NORMS, only_low=True),
    Group("widest", _MIXED, " ".join(op for op in REFUSES.split() if op not in _NORMS.split())),
    Group(
        "lower",
        "part of the kernel of a whole layer, which takes tensors of one format",
        "_addmm_activation _native_multi_head_attention",
        only_low=True,
    ),
    Group(
        "fp32",
        _LINALG,
        f"""{_FACTORS} det linalg_det linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_lu
        linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_pinv linalg_slogdet
        linalg_solve_ex linalg_solve_triangular linalg_vander logdet matrix_exp nuclear_norm pdist slogdet""",
    ),
)
"""Further rules for parameters stored in bf16 or fp16, needed because torch.autocast assumes that weights are fp32."""

MPS_DIFFERS: Final = (
    Group("lower", _CONV, "_mps_convolution"),
    Group("fp32", "MPS lacks a low kernel for it", "conv_transpose3d"),
    Group("fp32", _NORM, "batch_norm"),
)
"""The rules of torch.autocast on MPS that CUDA's table lacks, or has in another form."""

CUDA_ONLY: Final = frozenset({"_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"})
"""Operators that are kernels of CUDA's libraries, which no call reaches on another device."""

RNN_STAND_INS: Final = (Group("lower", _RNN, "gru lstm mkldnn_rnn_layer rnn_relu rnn_tanh"),)
"""The operators that run in place of ``_cudnn_rnn`` on a device that lacks it."""

_APEX_RANGE = """acos asin cosh cumprod cumsum erfinv exp expm1 log log10 log2 pow reciprocal renorm rsqrt
sinh tan"""

# The methods and operators of Python that Apex lists (``a @ b``, ``a ** b``, ``a + b``) arrive in ATen as
# matmul, pow and add. softmin, normalize and local_response_norm are Python compositions, whose parts have
# rows here.
APEX: Final = (
    Group(
        "lower",
        _CONV,
        "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d "
        "convolution",
    ),
    Group("lower", _MATRIX, "addbmm addmm addmv addr baddbmm bmm linear matmul mm mv"),
    Group("lower", f"newer than Apex; {_ATTENTION}", "scaled_dot_product_attention"),
    Group("lower", _PRELU, "prelu"),
    Group(
        "lower",
        _RNN,
        """_cudnn_rnn _thnn_fused_gru_cell _thnn_fused_lstm_cell gru_cell lstm_cell rnn_relu_cell
        rnn_tanh_cell""",
    ),
    *_UPSAMPLE,
    Group("fp32", _SAMPLE, "grid_sampler"),
    Group("fp32", _RANGE, f"gelu softplus {_APEX_RANGE}"),
    Group("fp32", _SUMS, "log_softmax prod softmax std sum var"),
    Group(
        "fp32",
        _NORM,
        "cosine_similarity group_norm layer_norm linalg_vector_norm native_layer_norm norm rms_norm",
    ),
    Group("fp32", _DISTANCE, "dist"),
    Group(
        "fp32",
        _LOSS,
        """binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss ctc_loss
        hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss
        multilabel_margin_loss nll_loss nll_loss2d nll_loss_nd poisson_nll_loss smooth_l1_loss
        soft_margin_loss triplet_margin_loss""",
    ),
    Group(
        "widest",
        _MIXED,
        """add addcdiv addcmul atan2 bilinear cat cross div dot eq equal ge gt le lt mul ne rsub stack sub
        vdot""",  # vdot calls dot, but not while a compiler traces it, so it has a row of its own
    ),
    Group("banned", _BCE, "binary_cross_entropy", only_low=True),
    Group(
        "banned",
        "its fp32 result would be rounded back into the low tensor",
        " ".join(f"{op}_" for op in _APEX_RANGE.split()),
        only_low=True,
    ),
    Group(
        "as_is",
        "Apex patches neither it nor the operators that it calls",
        f"""_sparse_addmm _sparse_mm affine_grid_generator chain_matmul corrcoef cov einsum inner linalg_matmul
        linalg_matrix_exp linalg_matrix_power linalg_multi_dot linalg_pinv matrix_exp matrix_power smm tensordot
        {_FACTORS}""",
    ),
)
"""The lists of Apex's O1, with ATen's names of the operators."""

USE_IN_PLACE: Final = {
    "arccos_": ("acos_",),
    "arcsin_": ("asin_",),
    "logsumexp": ("exp_",),
    "square_": ("pow_",),
}
"""Operators whose kernels call the in-place operators listed with them. A ban on these does not apply to such calls."""

FUNCTIONS: Final = {
    "cross_entropy": "cross_entropy_loss",
    "gaussian_nll_loss": "log, div and pow",
    "grid_sample": "grid_sampler",
    "interpolate": "upsample_nearest2d, upsample_bilinear2d and so on, depending on mode",
    "local_response_norm": "mul, avg_pool2d or avg_pool3d, pow and div",
    "lp_pool1d": "pow and avg_pool1d",
    "lp_pool2d": "pow and avg_pool2d",
    "multi_head_attention_forward": "linear and scaled_dot_product_attention",
    "normalize": "linalg_vector_norm, clamp_min and div",
    "softmin": "softmax",
    "softsign": "abs, add and div",
    "tanhshrink": "tanh and sub",
    "upsample": "upsample_nearest2d, upsample_bilinear2d and so on, depending on mode",
}
"""Functions of torch.nn.functional that are not operators, and the operators that they call."""
