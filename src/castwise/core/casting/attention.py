"""Attention as separate matrix products and a softmax, which the operator rule ``unfused`` uses.

torch's fused attention computes scores, softmax and values in one kernel. It saves memory, and on GPUs also time. On
CPUs its backward in bf16 can take several times as long as separate products.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from castwise.core import _torch


def unfused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``softmax(query key^T scale + mask) value`` in the dtype of the inputs, as separate operators.

    The operators' kernels compute sums and the softmax in fp32.

    Args:
        query: Shape ``[..., L, E]``.
        key: Shape ``[..., S, E]``.
        value: Shape ``[..., S, Ev]``.
        attn_mask: A tensor that is broadcast to ``[..., L, S]``. A floating mask is added to the scores. A boolean mask is
            True where attention is allowed.
        dropout_p: Probability that an attention weight is dropped.
        is_causal: Whether row i attends only to the columns up to i.
        scale: Factor of the scores. The default is ``1 / sqrt(E)``.
        enable_gqa: Whether ``key`` and ``value`` may have fewer heads than ``query``, so that several heads of ``query``
            share one of theirs.

    Returns:
        A tensor of shape ``[..., L, Ev]``. Rows without an allowed column are 0.

    Source: torch.nn.functional.scaled_dot_product_attention, whose arguments and meaning these are.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    if scale is None:
        scale = 1.0 / math.sqrt(query.size(-1))
    scores = torch.matmul(query * scale, key.transpose(-2, -1))
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
        else:
            scores = scores + attn_mask.to(scores.dtype)
        weights = _torch.tensors.safe_softmax(scores, -1)
    else:
        weights = torch.softmax(scores, -1)
    if dropout_p > 0.0:
        weights = torch.dropout(weights, dropout_p, train=True)
    return torch.matmul(weights, value)
