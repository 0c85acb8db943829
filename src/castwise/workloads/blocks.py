"""A pre-norm transformer block, shared by the workloads."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional

from castwise.errors import WorkloadError

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["Attention", "Block", "cut", "inputs", "shards", "target"]


class Attention(nn.Module):
    """Multi-head self-attention on ``functional.scaled_dot_product_attention``.

    The rows of ``qkv`` go head by head, each with its query, key and value, so that a piece of them is some heads.

    Args:
        width: Features, a multiple of ``heads``.
        heads: Attention heads.
        causal: Whether a position sees earlier ones alone.
    """

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions; ``[batch, length, width]`` in and out."""
        batch, length, _ = x.shape
        qkv = self.qkv(x)
        if qkv.shape[-1] % (3 * self.head_width):
            raise WorkloadError(
                f"attention with {self.heads} heads cannot be cut into equal pieces by tensor parallelism of this size; "
                "use one that divides the number of heads"
            )
        # Under tensor parallelism this process has some of the heads.
        q, k, v = qkv.view(batch, length, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
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


def shards(_model: nn.Module) -> dict[str, ParallelStyle]:
    """How tensor parallelism cuts the blocks of a model that calls them ``blocks``: by heads and by hidden features."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp.0": ColwiseParallel(),
        "blocks.*.mlp.2": RowwiseParallel(),
    }


def cut(blocks: nn.Sequential, stages: int) -> list[nn.Sequential]:
    """Cut a model's blocks into the stages of a pipeline, each of which has as many as the others or one less.

    Returns:
        The blocks of each stage, under their own names.

    Raises:
        WorkloadError: Fewer blocks than stages.
    """
    if len(blocks) < stages:
        raise WorkloadError(
            f"a model of {len(blocks)} blocks cannot be cut into {stages} stages; use more layers or fewer stages"
        )
    borders = [-(-len(blocks) * stage // stages) for stage in range(stages + 1)]
    parts: list[nn.Sequential] = []
    for start, stop in itertools.pairwise(borders):
        part = blocks[start:stop]
        assert isinstance(part, nn.Sequential)
        parts.append(part)
    return parts


def inputs(batch: tuple[Tensor, Tensor]) -> tuple[Tensor]:
    """What the first stage of a pipeline takes: the first of a pair."""
    return (batch[0],)


def target(batch: tuple[Tensor, Tensor]) -> Tensor:
    """What the loss compares with: the second of a pair."""
    return batch[1]
