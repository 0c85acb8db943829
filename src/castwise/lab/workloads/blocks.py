"""Define transformers of pre-norm blocks for the workloads, and how to split them for tensor and pipeline parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn
from torch.nn import functional

from castwise.errors import WorkloadError

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class Attention(nn.Module):
    """Multi-head self-attention on ``functional.scaled_dot_product_attention``.

    The rows of ``qkv`` are grouped by head, each with its query, key and value. A slice of whole groups is therefore a set of
    heads.

    Args:
        width: Features, a multiple of ``heads``.
        heads: Attention heads.
        causal: Whether a position attends only to itself and earlier positions.
    """

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over positions; ``[batch, length, width]`` in and out."""
        batch, length, _ = x.shape
        qkv = self.qkv(x)
        if qkv.shape[-1] % (3 * self.head_width):
            raise WorkloadError(
                f"attention with {self.heads} heads cannot be cut into equal pieces by tensor parallelism of this size; "
                "use a size that divides the number of heads"
            )
        # Under tensor parallelism this process holds a subset of the heads.
        q, k, v = qkv.view(batch, length, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Block(nn.Module):
    """Attention and a two-layer MLP, each with a layer norm before it and a residual connection.

    Args:
        width: Features.
        heads: Attention heads.
        causal: Whether a position attends only to itself and earlier positions.
    """

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block; ``[batch, length, width]`` in and out."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Transformer(nn.Module):
    """A model that embeds its input, applies blocks and predicts from the last block's output.

    Attributes:
        BEFORE: Names of the modules that :meth:`embed` uses.
        AFTER: Names of the modules that :meth:`predict` uses.
    """

    BEFORE: ClassVar[tuple[str, ...]]
    AFTER: ClassVar[tuple[str, ...]] = ("norm", "head")
    blocks: nn.Sequential

    def embed(self, x: Tensor) -> Tensor:
        """Return the features of an input, ``[batch, length, width]``."""
        raise NotImplementedError

    def predict(self, x: Tensor) -> Tensor:
        """Return the logits for the features of the last block."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of an input."""
        return self.predict(self.blocks(self.embed(x)))


class _Stage(nn.Module):
    """A pipeline stage of a transformer: some blocks, with the embedding at the first stage and the output at the last."""

    def __init__(self, model: Transformer, blocks: nn.Module, first: bool, last: bool) -> None:
        super().__init__()
        for name in model.BEFORE if first else ():
            setattr(self, name, getattr(model, name))
        self.blocks = blocks
        for name in model.AFTER if last else ():
            setattr(self, name, getattr(model, name))
        kind = type(model)
        self._embed: Callable[..., Tensor] | None = kind.embed if first else None
        self._predict: Callable[..., Tensor] | None = kind.predict if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage, from the features of the stage before it to features.

        The first stage takes the model's input instead, and the last stage returns logits.
        """
        if self._embed is not None:
            x = self._embed(self, x)  # embed finds the modules by name, because this stage has them too
        x = self.blocks(x)
        return x if self._predict is None else self._predict(self, x)


def shards(_model: nn.Module) -> dict[str, ParallelStyle]:
    """Return how to split a model's ``blocks`` for tensor parallelism: attention by heads, the MLP by hidden features."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp.0": ColwiseParallel(),
        "blocks.*.mlp.2": RowwiseParallel(),
    }


def cut(model: nn.Module, stages: int) -> list[nn.Module]:
    """Split a transformer into pipeline stages whose numbers of blocks differ by at most one.

    Raises:
        WorkloadError: There are fewer blocks than stages.
    """
    assert isinstance(model, Transformer)
    blocks = model.blocks
    if len(blocks) < stages:
        raise WorkloadError(
            f"a model of {len(blocks)} blocks cannot be cut into {stages} stages; use more layers or fewer stages"
        )
    borders = [-(-len(blocks) * stage // stages) for stage in range(stages + 1)]
    return [
        _Stage(model, blocks[start:stop], start == 0, stop == len(blocks))
        for start, stop in itertools.pairwise(borders)
    ]


def inputs(batch: tuple[Tensor, Tensor]) -> tuple[Tensor]:
    """Return the arguments of the first pipeline stage: the first element of the batch."""
    return (batch[0],)


def target(batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the target of the loss: the second element of the batch."""
    return batch[1]
