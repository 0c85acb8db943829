"""``digits``: a small convolutional network or vision transformer on scikit-learn's handwritten digits."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from castwise.core.extras import needs
from castwise.errors import WorkloadError
from castwise.lab.workloads.blocks import Block, Transformer, cut, inputs, shards, target
from castwise.lab.workloads.workload import Pipeline, Workload

HELD_OUT = 360
"""Number of images held out from training, a fifth of the 1,797."""


@functools.cache
def split() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the training images and their labels, then the held-out images and their labels.

    The images are fp32 ``[1437, 1, 8, 8]``, scaled so that the training images have mean 0 and variance 1, and labels are int64
    ``[1437]``. 360 images are held out. The images are shuffled with a fixed seed.

    Raises:
        MissingLibraryError: scikit-learn, which contains the images, is not installed.
    """
    with needs("workload 'digits'"):
        from sklearn.datasets import load_digits
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0), device="cpu")
    images = torch.tensor(data.images, dtype=torch.float32, device="cpu")[order, None]
    labels = torch.tensor(data.target, dtype=torch.int64, device="cpu")[order]
    train = images[:-HELD_OUT]
    images = (images - train.mean()) / train.std()
    return images[:-HELD_OUT], labels[:-HELD_OUT], images[-HELD_OUT:], labels[-HELD_OUT:]


class DigitsNet(nn.Module):
    """Three convolutions with batch normalization, pooling, and a linear layer.

    Args:
        width: Channels of the first convolution; the others have twice as many.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits ``[batch, 10]`` of images ``[batch, 1, 8, 8]``."""
        logits: Tensor = self.head(self.features(images).mean((2, 3)))
        return logits


class DigitsViT(Transformer):
    """Vision transformer on 2x2 pixel patches, with mean pooling over positions.

    Args:
        width: Features.
        layers: Blocks.
    """

    BEFORE = ("patches", "position")

    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, width))
        heads = 4 if width % 4 == 0 else 1
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def embed(self, x: Tensor) -> Tensor:
        """Return the features of images ``[batch, 1, 8, 8]``."""
        features: Tensor = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return features

    def predict(self, x: Tensor) -> Tensor:
        """Return the logits ``[batch, 10]``."""
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


def _adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=2e-3, weight_decay=0.01)


def _batches(batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    images, labels, _, _ = split()
    draw = torch.Generator().manual_seed(seed)
    while True:
        for part in torch.randperm(len(labels), generator=draw, device="cpu").split(batch):
            if len(part) == batch:
                yield images[part], labels[part]


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def _evaluate(model: nn.Module) -> dict[str, float]:
    _, _, images, labels = split()
    device = next(model.parameters()).device
    logits = model(images.to(device)).float()
    return {
        "accuracy": float((logits.argmax(1).cpu() == labels).double().mean()),
        "held_out_loss": float(functional.cross_entropy(logits, labels.to(device))),
    }


def digits(model: Literal["conv", "vit"] = "conv", width: int | None = None, batch: int = 64) -> Workload:
    """Make the ``digits`` workload.

    Args:
        model: ``conv`` or ``vit``.
        width: Channels of the convolutional network (32) or features of the transformer (64).
        batch: Images per batch, at most 1,437.

    Raises:
        WorkloadError: An option out of range.
    """
    if (width is not None and width < 1) or not 2 <= batch <= 1437:
        raise WorkloadError(
            f"workload 'digits': width={width}, batch={batch}; needs width >= 1 and 2 <= batch <= 1437"
        )
    width = width if width is not None else (32 if model == "conv" else 64)
    kind = "convolutional network" if model == "conv" else "vision transformer"
    return Workload(
        name="digits" if model == "conv" else "digits-vit",
        model=partial(DigitsNet if model == "conv" else DigitsViT, width),
        optimizer=_adamw,
        batches=partial(_batches, batch),
        loss=_loss,
        evaluate=_evaluate,
        description=f"small {kind} (width {width}) on scikit-learn's 8x8 images of digits, {batch} at a time",
        shards=shards if model == "vit" else None,
        pipeline=Pipeline(cut, inputs, target, functional.cross_entropy) if model == "vit" else None,
    )
