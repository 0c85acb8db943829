"""``sine``: a network of 1x1 convolutions learns a quantised wave from pixel coordinates.

Most of its memory is activations of ``size x size`` pixels, which a low format halves. Its work is matrix products between
these activations. This is the ideal case for mixed precision. Batch normalization and the steps of the target make it harder
than it looks.

Source: the example of AMD's article "Automatic mixed precision in PyTorch using AMD GPUs" (ROCm blogs, 2024), where
    a 512x512 grid trains 1.86 times as fast under torch.autocast and in 49.8 % less memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from castwise.errors import WorkloadError
from castwise.lab.workloads.workload import Workload

FREQUENCY = (4.0, 2.0)
"""Number of periods of the wave over the width and over the height."""


def grid(size: int) -> Tensor:
    """Return the coordinates of pixels as fp32 ``[2, size, size]``: x, along the last axis, and y, both from 0 to 1.

    ``size`` is at least 2.
    """
    line = torch.linspace(0.0, 1.0, size, dtype=torch.float64, device="cpu")
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack((x, y)).float()


def quantised_wave(size: int, bins: int = 4, frequency: tuple[float, float] = FREQUENCY) -> Tensor:
    """Return the sum of a cosine along x and a cosine along y, quantised to ``bins`` equally wide levels from 0 to 1.

    The result is fp32 ``[size, size]``; ``frequency`` has the periods along x and along y.
    """
    line = torch.linspace(0.0, 1.0, size, dtype=torch.float64, device="cpu")
    across, down = (torch.cos(2.0 * math.pi * f * line) for f in frequency)
    wave = across[None, :] + down[:, None]
    low, high = wave.min(), wave.max()
    level = ((wave - low) / (high - low) * bins).floor().clamp(max=bins - 1)
    return (level / (bins - 1)).float()


class WaveNet(nn.Module):
    """A network that treats each pixel alone: 1x1 convolutions, with batch normalization and ReLU after each hidden layer.

    Args:
        hidden: Channels of the hidden layers.
        layers: Hidden layers after the first convolution.
    """

    def __init__(self, hidden: int = 256, layers: int = 2) -> None:
        super().__init__()
        widths = [2] + [hidden] * (layers + 1)
        self.body = nn.Sequential()
        for before, after in itertools.pairwise(widths):
            self.body.extend((nn.Conv2d(before, after, 1), nn.BatchNorm2d(after), nn.ReLU()))
        self.head = nn.Conv2d(hidden, 1, 1)

    def forward(self, coordinates: Tensor) -> Tensor:
        """Predict the wave, ``[batch, 1, height, width]``, from coordinates ``[batch, 2, height, width]``."""
        prediction: Tensor = self.head(self.body(coordinates))
        return prediction


def _batches(size: int, bins: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the whole grid again and again. It is the same for every seed, because it is the whole data set."""
    batch = (grid(size)[None], quantised_wave(size, bins)[None, None])
    while True:
        yield batch


def _adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    coordinates, target = batch
    return functional.mse_loss(model(coordinates), target)


def _predict(size: int, model: nn.Module) -> Tensor:
    device = next(model.parameters()).device
    prediction: Tensor = model(grid(size)[None].to(device))
    return prediction[0, 0].detach().float().cpu()


def _evaluate(size: int, bins: int, model: nn.Module) -> dict[str, float]:
    prediction, target = _predict(size, model), quantised_wave(size, bins)
    nearest = (prediction * (bins - 1)).round().clamp(0, bins - 1) / (bins - 1)
    right = (nearest - target).abs() < 0.5 / (bins - 1)
    return {
        "pixels_right": float(right.double().mean()),
        "mse": float(functional.mse_loss(prediction, target)),
    }


def _picture(size: int, bins: int, model: nn.Module) -> dict[str, Tensor]:
    return {"target": quantised_wave(size, bins), "prediction": _predict(size, model)}


def sine(size: int | None = None, hidden: int = 256, layers: int = 2, bins: int = 4) -> Workload:
    """Make the ``sine`` workload.

    Args:
        size: Pixels per side, at least 16; by default the article's 512 if torch finds an accelerator, and 128 on
            a CPU, where a step on the larger grid takes seconds.
        hidden: Channels of the hidden layers.
        layers: Hidden layers after the first convolution.
        bins: Levels of the target, at least 2.

    Raises:
        WorkloadError: An option out of range.
    """
    if size is None:
        size = 512 if torch.accelerator.is_available() else 128
    if size < 16 or hidden < 1 or layers < 0 or bins < 2:
        raise WorkloadError(
            f"workload 'sine': size={size}, hidden={hidden}, layers={layers}, bins={bins}; needs size >= 16, "
            "hidden >= 1, layers >= 0 and bins >= 2"
        )
    return Workload(
        name="sine",
        model=partial(WaveNet, hidden, layers),
        optimizer=_adam,
        batches=partial(_batches, size, bins),
        loss=_loss,
        evaluate=partial(_evaluate, size, bins),
        description=f"1x1 convolutions with batch normalization ({layers} hidden layers of {hidden}) learn a wave of "
        f"{bins} levels on {size}x{size} pixels",
        picture=partial(_picture, size, bins),
    )
