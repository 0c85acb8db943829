"""Attention as separate products and a softmax, for the rule ``unfused``.

torch's fused attention is one kernel for scores, softmax and values. It saves memory, and on GPUs time; on CPUs its
backward in bf16 can take several times as long as the separate products.
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
    """Compute ``softmax(query key^T scale + mask) value`` in the inputs' format; kernels compute sums and softmax in fp32.

    Args:
        query: ``[..., L, E]``.
        key: ``[..., S, E]``.
        value: ``[..., S, Ev]``.
        attn_mask: Broadcast to ``[..., L, S]``: added to the scores, or boolean with True where attention is allowed.
        dropout_p: Probability that a weight is dropped.
        is_causal: Row i attends to columns up to i.
        scale: By default ``1 / sqrt(E)``.
        enable_gqa: Whether ``key`` and ``value`` may have fewer heads, each shared by several of ``query``.

    Returns:
        ``[..., L, Ev]``; rows without an allowed column are 0.

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
