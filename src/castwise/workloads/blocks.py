"""A pre-norm transformer block, shared by the workloads."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Attention", "Block"]


class Attention(nn.Module):
    """Multi-head self-attention on ``functional.scaled_dot_product_attention``.

    Args:
        width: Features, a multiple of ``heads``.
        heads: Attention heads.
        causal: Whether a position sees earlier ones alone.
    """

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions; ``[batch, length, width]`` in and out."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention and a two-layer network, each behind a layer norm and beside a residual.

    Args:
        width: Features.
        heads: Attention heads.
        causal: Whether a position sees earlier ones alone.
    """

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """One layer; ``[batch, length, width]`` in and out."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out
