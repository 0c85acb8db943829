"""A small vision transformer and a data set that needs no download: scikit-learn's handwritten digits."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

SIZE = 16
"""Side length of an image in pixels, twice that of the data set."""


class Block(nn.Module):
    """Attention and a multilayer perceptron, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int, drop_rate: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, positions, width]`` to the same shape."""
        batch, positions, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, positions, 3, self.heads, width // self.heads)
        mixed = functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, positions, width)))
        return x + self.drop(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    """A vision transformer with patches of 4x4 pixels, a class token, blocks and a head."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4, drop_rate: float = 0.1) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (SIZE // 4) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, drop_rate) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[batch, 10]`` for images ``[batch, 3, 16, 16]``."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def digits(train: bool) -> TensorDataset:
    """Return images ``[3, 16, 16]`` between -1 and 1 and their labels: 1,437 for training, or 360 for testing."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    order = order[:-360] if train else order[-360:]
    images = torch.tensor(data.images, dtype=torch.float32)[order, None] / 8 - 1
    images = functional.interpolate(images, size=SIZE, mode="bilinear").repeat(1, 3, 1, 1)  # gray to RGB
    return TensorDataset(images, torch.tensor(data.target, dtype=torch.int64)[order])
