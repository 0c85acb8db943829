"""What each operator does with its inputs: base tables with a reason per row, and overrides on top of them.

Operators carry ATen's base names without the overload (``exp``, ``layer_norm``), an in-place name with its
underscore (``exp_``), or ``namespace::name`` for custom operators. A rule holds for every overload.

An operator without a row is not touched: its inputs pass as they are and, where it is made of other operators
(``einsum`` calls ``bmm``), those follow rows of their own.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Final, Literal, cast, get_args

import torch

from castwise import _torch
from castwise.errors import PlanError, UnknownNameError

__all__ = [
    "BASES",
    "DEVICE_TYPES",
    "RULES",
    "Row",
    "Rule",
    "base_table",
    "check_rule",
    "describe",
    "operator_overloads",
    "overrides",
]

Rule = Literal["lower", "fp32", "widest", "as_is", "banned"]
RULES: Final[tuple[Rule, ...]] = get_args(Rule)
"""``lower``: floating inputs are cast to the compute format. ``fp32``: cast to fp32. ``widest``: cast to the
widest floating format among them (fp16 with bf16 gives fp32). ``as_is``: no cast, neither here nor in the
operators that this one is made of. ``banned``: running it is an error."""

BASES: Final = ("native", "cuda", "apex", "none")
"""``native``: what torch.autocast does on the device at hand. ``cuda``: what it does on CUDA, on any device.
``apex``: the lists of Apex's opt level O1. ``none``: no operator is cast."""

DEVICE_TYPES: Final = ("cpu", "cuda", "xpu", "mps")

_OPERATOR_NAME: Final = re.compile(r"(?:[A-Za-z_]\w*::)?[A-Za-z_]\w*")


@dataclass(frozen=True)
class Row:
    """The rule of one operator.

    Attributes:
        op: ATen base name, in-place name or ``namespace::name``.
        rule: One of `RULES`.
        reason: Why, in a clause.
        only_low: ``banned`` raises only when a floating input is bf16 or fp16, as Apex does; otherwise always.
        opaque: The rule also holds inside an operator that is made of others, as in torch.autocast. False only
            in `overrides`, for an operator that the device's native list casts and the plan's table does not
            list: it gets no cast of its own and its parts are looked up again.
    """

    op: str
    rule: Rule
    reason: str
    only_low: bool = False
    opaque: bool = True


@dataclass(frozen=True)
class _Group:
    """Operators that share a rule and the reason for it."""

    rule: Rule
    reason: str
    ops: str
    only_low: bool = False

    def rows(self) -> Iterable[Row]:
        return (Row(op, self.rule, self.reason, self.only_low) for op in self.ops.split())


# --- reasons that several groups share -----------------------------------------------------------------------
_MATRIX = "a product of matrices: matrix units take low inputs and sum in fp32"
_CONV = "a convolution: matrix units take low inputs and sum in fp32"
_ATTENTION = "attention is two matrix products around a softmax that its kernels keep in fp32"
_RNN = "recurrent cells are matrix products, and fused kernels want one format throughout"
_PRELU = "elementwise with a learned slope: follows the layer before it instead of promoting to fp32"
_RANGE = "grows beyond what fp16 can hold, or amplifies rounding where the function is steep"
_SUMS = "adds or multiplies many terms, which overflow fp16 and drown small terms in bf16"
_NORM = "its statistics are sums of squares, which overflow fp16"
_LOSS = "a loss reduces over the batch and its value is what training descends"
_DISTANCE = "differences that are squared and summed lose their leading digits"
_RESIZE = "interpolation weights need more digits than a low format has"
_MIXED = "takes several tensors of one dtype: mixed formats meet in the widest"
_BCE = "its derivative leaves fp16's range near 0 and 1: use binary_cross_entropy_with_logits"
_LINALG = "factorisations and solvers have no low kernels and amplify rounding"
_FFT = "Fourier transforms have no low kernels on the CPU"
_POOL = "has no fast low kernel on the CPU"
_ORDER = "interpolates between order statistics; no low kernel on the CPU"

# Source: aten/src/ATen/autocast_mode.h and autocast_mode.cpp in PyTorch 2.11 to 2.13. The tests compare every
# table with the kernels that the installed torch has registered, and with what they do to their inputs.
_CUDA: Final = (
    _Group(
        "lower",
        _CONV,
        "_convolution convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d "
        "cudnn_convolution cudnn_convolution_transpose",
    ),
    _Group(
        "lower",
        _MATRIX,
        "addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot",
    ),
    _Group("lower", _ATTENTION, "scaled_dot_product_attention _scaled_dot_product_flash_attention"),
    _Group(
        "lower",
        _RNN,
        "_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _cudnn_rnn",
    ),
    _Group("lower", _PRELU, "prelu"),
    _Group(
        "fp32",
        _RANGE,
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus",
    ),
    _Group("fp32", _NORM, "layer_norm native_layer_norm rms_norm group_norm"),
    _Group("fp32", _SUMS, "prod softmax log_softmax cumprod cumsum sum logsumexp"),
    _Group(
        "fp32",
        _NORM,
        "norm frobenius_norm nuclear_norm linalg_vector_norm linalg_matrix_norm renorm cosine_similarity",
    ),
    _Group(
        "fp32",
        _LOSS,
        "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss "
        "huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
        "multi_margin_loss binary_cross_entropy_with_logits",
    ),
    _Group("fp32", _DISTANCE, "dist pdist cdist"),
    _Group(
        "fp32",
        _RESIZE,
        "upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
        "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
        "upsample_bicubic2d _upsample_bicubic2d_aa",
    ),
    _Group(
        "widest",
        _MIXED,
        "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    ),
    _Group("banned", _BCE, "binary_cross_entropy"),
)

_CPU: Final = (
    _Group(
        "lower",
        _CONV,
        "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d",
    ),
    _Group("lower", _MATRIX, "addmm _addmm_activation matmul mm linalg_vecdot linear addbmm baddbmm bmm"),
    _Group("lower", _ATTENTION, "scaled_dot_product_attention _native_multi_head_attention"),
    _Group("lower", _RNN, "mkldnn_rnn_layer"),
    _Group("lower", _PRELU, "prelu"),
    _Group(
        "fp32",
        _LOSS,
        "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss ctc_loss "
        "hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss "
        "multilabel_margin_loss multilabel_margin_loss_forward nll_loss nll_loss2d poisson_nll_loss smooth_l1_loss "
        "soft_margin_loss triplet_margin_loss",
    ),
    _Group("fp32", _SUMS, "prod trace"),
    _Group("fp32", _DISTANCE, "cdist"),
    _Group("fp32", _RESIZE, "grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback"),
    _Group(
        "fp32",
        _POOL,
        "adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d fractional_max_pool2d fractional_max_pool3d max_pool3d "
        "max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d "
        "replication_pad3d fake_quantize_per_tensor_affine",
    ),
    _Group("fp32", _ORDER, "quantile nanquantile"),
    _Group(
        "fp32",
        _FFT,
        "fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn "
        "fft_rfft fft_rfft2 fft_rfftn stft polar view_as_complex",
    ),
    _Group(
        "fp32",
        _LINALG,
        "_lu_with_info cholesky cholesky_inverse cholesky_solve geqrf inverse linalg_cholesky linalg_cholesky_ex "
        "linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv "
        "linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_qr linalg_solve linalg_svd linalg_svdvals "
        "linalg_tensorinv linalg_tensorsolve lu_solve orgqr ormqr pinverse qr svd triangular_solve",
    ),
    _Group("widest", _MIXED, "cat stack index_copy"),
)

_MPS_LACKS: Final = frozenset(
    "cudnn_convolution cudnn_convolution_transpose _cudnn_rnn linalg_vecdot _scaled_dot_product_flash_attention "
    "_thnn_fused_lstm_cell _thnn_fused_gru_cell gru_cell rnn_tanh_cell rnn_relu_cell rms_norm norm vdot "
    "binary_cross_entropy upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d "
    "upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa "
    "upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa".split()
)

_MPS_DIFFERS: Final = (
    _Group("lower", _CONV, "_mps_convolution"),
    _Group("fp32", "MPS has no low kernel for it", "conv_transpose3d"),
    _Group("fp32", _NORM, "batch_norm"),
)

# Kernels of one vendor's library: no call reaches them on another device, so a table that is used elsewhere
# leaves them out. The CPU's own recurrent layer stands in for cuDNN's.
_CUDA_ONLY: Final = frozenset({"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"})
_CPU_STAND_INS: Final = (_Group("lower", _RNN, "mkldnn_rnn_layer"),)

_APEX_IN_PLACE = "Apex refuses it on low tensors: the fp32 result would be rounded back into the low one"
_APEX_FP32_NAMES: Final = (
    "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum renorm"
)

# Source: apex/amp/lists at NVIDIA/apex e13873de, in ATen's names; the tensor methods and operators of Python
# (``a @ b``, ``a ** b``, ``a + b``) arrive in ATen as matmul, pow and add.
_APEX: Final = (
    _Group(
        "lower",
        _CONV,
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution _convolution",
    ),
    _Group("lower", _MATRIX, "linear addmm addmv addr matmul mm mv addbmm baddbmm bmm"),
    _Group("lower", "younger than Apex: " + _ATTENTION, "scaled_dot_product_attention"),
    _Group("lower", _PRELU, "prelu"),
    _Group(
        "lower",
        _RNN,
        "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell "
        "_thnn_fused_gru_cell mkldnn_rnn_layer _cudnn_rnn",
    ),
    _Group(
        "fp32",
        _RESIZE,
        "upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
        "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
        "upsample_bicubic2d _upsample_bicubic2d_aa grid_sampler",
    ),
    _Group("fp32", _RANGE, "softplus gelu " + _APEX_FP32_NAMES),
    _Group("fp32", _SUMS, "softmax log_softmax prod std sum var"),
    _Group("fp32", _NORM, "layer_norm group_norm rms_norm norm linalg_vector_norm cosine_similarity"),
    _Group("fp32", _DISTANCE, "dist"),
    _Group(
        "fp32",
        _LOSS,
        "binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss ctc_loss hinge_embedding_loss "
        "huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss "
        "nll_loss_nd nll_loss2d poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss",
    ),
    _Group(
        "widest",
        _MIXED,
        "addcdiv addcmul atan2 cross bilinear dot add sub rsub div mul eq ne lt le gt ge equal cat stack",
    ),
    _Group("banned", _BCE, "binary_cross_entropy", only_low=True),
    _Group(
        "banned",
        _APEX_IN_PLACE,
        " ".join(f"{name}_" for name in _APEX_FP32_NAMES.split()),
        only_low=True,
    ),
    _Group("as_is", "Apex patches no function inside it", "einsum tensordot chain_matmul linalg_multi_dot"),
)

_UNLISTED: Final = "torch.autocast casts it on this device and the plan's table does not"
_CHOSEN: Final = "the plan says so"

# Functions of torch.nn.functional that are no operators themselves, for the error message.
_FUNCTIONS: Final[Mapping[str, str]] = {
    "cross_entropy": "the operator cross_entropy_loss",
    "grid_sample": "the operator grid_sampler",
    "interpolate": "the operators upsample_nearest2d, upsample_bilinear2d and their like, by mode",
    "upsample": "the operators upsample_nearest2d, upsample_bilinear2d and their like, by mode",
    "softmin": "the operator softmax",
    "normalize": "the operators linalg_vector_norm, clamp_min and div",
    "local_response_norm": "the operators mul, avg_pool3d, pow and div",
    "multi_head_attention_forward": "the operators linear and scaled_dot_product_attention",
    "gaussian_nll_loss": "the operators log, div and pow",
    "lp_pool2d": "the operators pow and avg_pool2d",
    "tanhshrink": "the operators tanh and sub",
    "softsign": "the operators abs and div",
    "conv": "the operators conv1d, conv2d and conv3d",
    "attention": "the operator scaled_dot_product_attention",
    "batchnorm": "the operator batch_norm",
    "layernorm": "the operator layer_norm",
}


def _table(*groups: _Group) -> dict[str, Row]:
    table: dict[str, Row] = {}
    for group in groups:
        for row in group.rows():
            assert row.op not in table, f"two rows for {row.op}"
            table[row.op] = row
    return table


@cache
def _exists(op: str) -> bool:
    namespace, _, name = op.rpartition("::")
    return hasattr(getattr(torch.ops, namespace or "aten"), name)


def _present(table: dict[str, Row]) -> Mapping[str, Row]:
    """The rows whose operators the installed torch has, so that one table serves every version."""
    return MappingProxyType({op: row for op, row in table.items() if _exists(op)})


def _check(name: str, value: str, allowed: Iterable[str], call: str) -> None:
    options = tuple(allowed)
    if value not in options:
        raise UnknownNameError(
            f"{call}: no such {name} {value!r}{_close(value, options)}. Allowed: {', '.join(options)}."
        )


def _close(name: str, options: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, tuple(options), n=3)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


@cache
def base_table(base: str, device_type: str) -> Mapping[str, Row]:
    """Rows of one base table, for the operators that the installed torch has.

    Args:
        base: One of `BASES`.
        device_type: One of `DEVICE_TYPES`; what ``native`` means depends on it.

    Returns:
        Operator name to row. Operators without a row are not touched.

    Raises:
        UnknownNameError: No such base or device type.
    """
    call = f"base_table({base!r}, {device_type!r})"
    _check("base table", base, BASES, call)
    _check("device type", device_type, DEVICE_TYPES, call)
    if base == "none":
        return MappingProxyType({})
    if base == "native" and device_type == "cpu":
        return _present(_table(*_CPU))
    if base == "native" and device_type == "mps":
        mps = {op: row for op, row in _table(*_CUDA).items() if op not in _MPS_LACKS}
        return _present(mps | {row.op: row for group in _MPS_DIFFERS for row in group.rows()})
    table = _table(*_APEX) if base == "apex" else _table(*_CUDA)
    if device_type != "cuda":
        table = {op: row for op, row in table.items() if op not in _CUDA_ONLY}
    if device_type == "cpu":
        table |= {row.op: row for group in _CPU_STAND_INS for row in group.rows()}
    return _present(table)


def check_rule(op: str, rule: str) -> None:
    """Refuse an override that could never work, without looking the operator up.

    Args:
        op: Operator name as in `Row`.
        rule: Rule name.

    Raises:
        UnknownNameError: No such rule.
        PlanError: A name that no operator can have, or a cast into an operator that writes in place.
    """
    _check("rule", rule, RULES, f"ops=({op!r}, {rule!r})")
    if not _OPERATOR_NAME.fullmatch(op):
        raise PlanError(
            f"ops=({op!r}, {rule!r}): not an operator name. Allowed: a base name without overload (exp, layer_norm), "
            "an in-place name (exp_) or namespace::name."
        )
    if _in_place(op) and rule not in ("as_is", "banned"):
        raise PlanError(
            f"ops=({op!r}, {rule!r}): an in-place operator keeps its tensor's format, so a cast would be lost. Allowed: "
            f"as_is, banned. Give the rule to {op[:-1]!r} and call that instead."
        )


def _in_place(op: str) -> bool:
    return op.endswith("_") and not op.endswith("__")


@cache
def operator_overloads(name: str) -> tuple[_torch.OpOverload, ...]:
    """The overloads that a rule for this name governs.

    Args:
        name: Operator name as in `Row`.

    Returns:
        For a plain name every overload on tensors that writes to none of its arguments; for an in-place name
        the overloads that write to their first.

    Raises:
        UnknownNameError: The installed torch has no such operator.
        PlanError: The operator has no such overload, because it writes to its arguments.
    """
    namespace, _, base = name.rpartition("::")
    if not _exists(name):
        raise UnknownNameError(_unknown(name))
    packet = getattr(getattr(torch.ops, namespace or "aten"), base)
    wanted = "in_place" if _in_place(name) else "functional"
    overloads = tuple(
        overload
        for overload in (getattr(packet, overload_name) for overload_name in packet.overloads())
        if _torch.overload_kind(overload) == wanted
    )
    if not overloads:
        raise PlanError(
            f"operator_overloads({name!r}): every overload of this operator writes to its arguments or takes no tensor, so "
            "no rule can hold for it. Give the rule to the operator that computes the value."
        )
    return overloads


def overrides(base: str, ops: Iterable[tuple[str, str]], device_type: str) -> Mapping[str, Row]:
    """Rows on which a plan differs from what torch.autocast does by itself on this device.

    Args:
        base: One of `BASES`.
        ops: Pairs of operator and rule that replace rows of the base table; a later pair wins.
        device_type: One of `DEVICE_TYPES`.

    Returns:
        Operator name to row, empty where native autocast already does all that is asked. Empty for ``none``
        without ``ops`` too, where the caller runs without autocast; with ``ops``, ``none`` turns every row of
        the native table off.

    Raises:
        UnknownNameError: No such base, device type, rule or operator.
        PlanError: An override that could never work, see `check_rule`.
    """
    return _overrides(base, tuple((op, rule) for op, rule in ops), device_type)


@cache
def _overrides(base: str, ops: tuple[tuple[str, str], ...], device_type: str) -> Mapping[str, Row]:
    native = base_table("native", device_type)
    table = dict(base_table(base, device_type))
    if base == "none" and not ops:
        return MappingProxyType({})
    for op in native.keys() - table.keys():
        # Apex patches Python functions, so what an operator calls inside is out of its reach; on CUDA the parts
        # of an operator without a row are looked up one by one.
        table[op] = Row(op, "as_is", _UNLISTED, opaque=base != "cuda")
    for name, rule in ops:
        check_rule(name, rule)
        op = name.removeprefix("aten::")
        operator_overloads(op)
        table[op] = Row(op, cast(Rule, rule), _CHOSEN)
    return MappingProxyType({op: row for op, row in sorted(table.items()) if _differs(row, native.get(op))})


def _differs(row: Row, native: Row | None) -> bool:
    if native is not None:
        return (row.rule, row.only_low) != (native.rule, native.only_low)
    # Without a native row the operator already gets no cast, but the parts it is made of may.
    return row.rule != "as_is" or (row.opaque and any(map(_torch.is_composite, operator_overloads(row.op))))


def _unknown(name: str) -> str:
    """The sentence for an operator that the installed torch does not have."""
    namespace, _, base = name.rpartition("::")
    call = f"operator {name!r}: not registered with the installed torch {torch.__version__}"
    if namespace and namespace != "aten":
        known = {schema.partition("::")[2].partition(".")[0] for schema in _torch.operator_names(namespace)}
        if not known:
            return f"{call}; nothing is registered under {namespace!r}. Import the library that registers it first."
        hint = _close(base, known)
        return f"{call}{hint}. {namespace!r} has {', '.join(sorted(known)[:8])}: import the library that registers it first."
    if base in _FUNCTIONS:
        return f"{call}: torch.nn.functional.{base} runs as {_FUNCTIONS[base]}. Name that instead."
    known = {schema.partition("::")[2].partition(".")[0] for schema in _torch.operator_names("aten")}
    return (
        f"{call}{_close(base, known)}. Allowed: an ATen base name such as exp or layer_norm, an in-place name such as "
        "exp_, or namespace::name of a custom operator whose library is imported."
    )


def describe(base: str, device_type: str) -> tuple[Row, ...]:
    """The rows of a base table in reading order: by rule, then by name."""
    return tuple(
        sorted(base_table(base, device_type).values(), key=lambda row: (RULES.index(row.rule), row.op))
    )
