"""Planted failures of served models: one place of a small model loses its digits in a low format, and its outputs go wrong.

Each case has a sound twin, in which the same place computes in fp32. Models are not trained: what is tested is whether a format
computes them, not what they have learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 64
FEATURES = 32
CLASSES = 10
BOTH = ("bf16", "fp16")


class Place(nn.Module):
    """The fragile place of a model, or its sound twin, which computes in fp32."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.sound = sound

    def wide(self, x: Tensor) -> Tensor:
        """Return the tensor in fp32 in a sound place, and as it is in a fragile one."""
        return x.float() if self.sound else x


class Squares(Place):
    """Divides by a norm that is a root of summed squares, which are above fp16's largest number."""

    def forward(self, x: Tensor) -> Tensor:
        big = self.wide(x) * 300.0
        return big / (big * big).sum(-1, keepdim=True).sqrt()


class Underflow(Place):
    """A product of small numbers that is scaled up afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        small = self.wide(x) * 2e-4
        return small * small * 2e7


class Offset(Place):
    """Adds an offset and subtracts it again."""

    def __init__(self, sound: bool, size: float = 1000.0) -> None:
        super().__init__(sound)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return (self.wide(x) + self.size) - self.size


class Cosines(Place):
    """Weights by a softmax with temperature 0.001 of cosines that are all close to 1, as in retrieval."""

    def __init__(self, sound: bool) -> None:
        super().__init__(sound)
        self.keys = nn.Parameter(1.0 + 0.1 * torch.randn(24, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        query = functional.normalize(1.0 + 0.1 * self.wide(x), dim=-1)
        keys = functional.normalize(self.keys, dim=-1).to(query.dtype)
        cosines = (query.unsqueeze(-2) * keys).sum(-1)
        return torch.softmax(cosines / 0.001, -1) @ self.keys.to(query.dtype)


class Variance(Place):
    """Standardises by a variance that is the mean square less the squared mean."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(x) + 20.0
        variance = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square()
        return (x - 20.0) / variance.clamp_min(1e-2).sqrt()


class Shifted(Place):
    """A layer norm of numbers with a large mean."""

    def __init__(self, sound: bool) -> None:
        super().__init__(sound)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.wide(x) + 300.0)


class Surprise(Place):
    """The logarithm of one minus a probability close to 1."""

    def forward(self, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.wide(x) * 4.0 + 5.0)
        return torch.log(1.0 - p)


class Routed(Place):
    """Takes one of eight experts by the largest score, where the scores have a large offset."""

    def __init__(self, sound: bool) -> None:
        super().__init__(sound)
        self.router = nn.Linear(WIDTH, 8)
        self.experts = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.wide(self.router(x)) + 300.0
        return x * self.experts[scores.argmax(-1)]


class Accumulated(Place):
    """Adds up many small terms one after another."""

    def forward(self, x: Tensor) -> Tensor:
        term = self.wide(x) / 2000.0
        total = term * 1000.0
        for _ in range(1000):
            total = total + term
        return total


class Phases(Place):
    """Sine and cosine of a time step times frequencies."""

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        frequencies = torch.logspace(0, -3, WIDTH // 2, device=x.device).to(self.wide(x).dtype)
        angle = step.to(frequencies.dtype).unsqueeze(-1) * frequencies
        return x + torch.cat([angle.sin(), angle.cos()], -1)


class Positions(Place):
    """Looks positions up that are counted by adding ones."""

    def __init__(self, sound: bool) -> None:
        super().__init__(sound)
        self.table = nn.Embedding(4096, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(x.shape[:2], dtype=self.wide(x).dtype, device=x.device)
        return x + self.table(ones.cumsum(1, dtype=ones.dtype).long() - 1)


class Numbered(Place):
    """Looks positions up that ``arange`` gives in the format of the data."""

    def __init__(self, sound: bool) -> None:
        super().__init__(sound)
        self.table = nn.Embedding(4096, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(4096, device=x.device).to(self.wide(x).dtype)[: x.shape[1]]
        return x + self.table(at.long())


class Classifier(nn.Module):
    """A layer, a place and a layer that gives logits ``[..., 10]``."""

    def __init__(self, place: nn.Module) -> None:
        super().__init__()
        self.first, self.place, self.last = nn.Linear(FEATURES, WIDTH), place, nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        hidden = self.place(functional.gelu(self.first(x)), *more)
        return self.last(hidden)  # type: ignore[no-any-return]


class Ranker(nn.Module):
    """Scores ``[batch]`` around a large constant."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.sound = sound
        self.layers = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        score = self.layers(x).squeeze(-1)
        return (score.float() if self.sound else score) + 400.0  # type: ignore[no-any-return]


class Detector(nn.Module):
    """Boxes of several classes, shifted by their class so that boxes of two classes never overlap, then non-maximum suppression."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.sound = sound
        self.head = nn.Linear(FEATURES, 5)

    def forward(self, x: Tensor, corner: Tensor, kind: Tensor) -> dict[str, Tensor]:
        out = self.head(x)
        out = out.float() if self.sound else out
        first = corner.to(out.dtype) + out[..., :2] + (kind * 4000).to(out.dtype).unsqueeze(-1)
        boxes = torch.cat([first, first + 20.0 + out[..., 2:4].exp()], -1)
        scores = out[..., 4]
        kept = torch.stack([_suppressed(b.float(), s.float()) for b, s in zip(boxes, scores, strict=True)])
        return {"kept": kept, "scores": scores}


def _suppressed(boxes: Tensor, scores: Tensor) -> Tensor:
    """Return which boxes ``[n, 4]`` no better box overlaps by more than half."""
    start = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    end = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    inner = (end - start).clamp_min(0).prod(-1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    overlaps = inner > 0.5 * (area[:, None] + area[None, :] - inner)
    kept = torch.ones(len(boxes), dtype=torch.bool)
    for at in scores.argsort(descending=True).tolist():
        if kept[at]:
            kept &= ~(overlaps[at] & (scores < scores[at]))
    return kept


class Features(nn.Module):
    """Classifies inputs with a large mean, such as years; the first layer's bias takes the mean away."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))
        if not sound:
            first = self.layers[0]
            first.bias.data -= 2000.0 * first.weight.data.sum(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def _rows(generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randn(64, FEATURES, generator=generator),)


def _timed(generator: torch.Generator) -> tuple[Tensor, ...]:
    return (*_rows(generator), torch.randint(1000, (64,), generator=generator))


def _sequences(length: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda generator: (torch.randn(1, length, FEATURES, generator=generator),)


def _boxes(generator: torch.Generator) -> tuple[Tensor, ...]:
    corner = torch.rand(8, 40, 2, generator=generator) * 60.0
    kind = torch.randint(12, (8, 40), generator=generator)
    return torch.randn(8, 40, FEATURES, generator=generator), corner, kind


def _years(sound: bool) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda generator: (_rows(generator)[0] + (0.0 if sound else 2000.0),)


@dataclass(frozen=True)
class Case:
    """A planted failure of a served model, and its sound twin.

    Attributes:
        name: Of the case.
        formats: In which the place loses its digits.
        make: Makes the model, sound or not.
        batch: Makes a batch, the model's arguments, from a generator.
        fails: What goes wrong.
        same: Makes a batch for the sound twin, where it needs another.
    """

    name: str
    formats: tuple[str, ...]
    make: Callable[[bool], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]
    fails: str
    same: Callable[[torch.Generator], tuple[Tensor, ...]] | None = None

    def model(self, sound: bool) -> nn.Module:
        """Return the model or its twin, both with the same weights, in evaluation mode."""
        torch.manual_seed(0)
        return self.make(sound).eval()

    def batches(self, sound: bool, seed: int = 0) -> Iterator[Any]:
        """Yield batches without end."""
        generator = torch.Generator().manual_seed(seed)
        make = self.same if sound and self.same is not None else self.batch
        while True:
            yield make(generator)


def _classifier(place: type[Place]) -> Callable[[bool], nn.Module]:
    return lambda sound: Classifier(place(sound))


CASES = (
    Case("squares", ("fp16",), _classifier(Squares), _rows, "squares overflow, so the norm is infinite"),
    Case("underflow", ("fp16",), _classifier(Underflow), _rows, "products below the smallest number are 0"),
    Case("offset", BOTH, _classifier(Offset), _rows, "the offset takes the digits"),
    Case("cosines", BOTH, _classifier(Cosines), _rows, "cosines close to 1 are equal"),
    Case("variance", BOTH, _classifier(Variance), _rows, "two large numbers cancel"),
    Case("shifted-norm", BOTH, _classifier(Shifted), _rows, "the mean takes the digits"),
    Case("log-of-rest", BOTH, _classifier(Surprise), _rows, "1 - p is 0, whose logarithm is infinite"),
    Case("routing", BOTH, _classifier(Routed), _rows, "scores are equal, so the first expert is taken"),
    Case("accumulated", BOTH, _classifier(Accumulated), _rows, "terms below half a unit in the last place are lost"),
    Case("phases", BOTH, _classifier(Phases), _timed, "angles of many turns have no phase"),
    Case("counted-256", ("bf16",), _classifier(Positions), _sequences(512), "positions above 256 are not distinct"),
    Case("counted-2048", BOTH, _classifier(Positions), _sequences(3000), "positions above 2048 are not distinct"),
    Case("numbered-256", ("bf16",), _classifier(Numbered), _sequences(512), "positions above 256 are not distinct"),
    Case("numbered-2048", BOTH, _classifier(Numbered), _sequences(3000), "positions above 2048 are not distinct"),
    Case("ranking", BOTH, Ranker, _rows, "scores around 400 are equal"),
    Case("shifted-boxes", BOTH, Detector, _boxes, "boxes far from 0 have coarse corners"),
    Case("large-inputs", BOTH, Features, _years(False), "inputs around 2000 are equal", _years(True)),
)  # fmt: skip

OFFSETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


def graded(size: float) -> Case:
    """Return a case that loses the more digits the larger its offset is: none at 1, and six bits at 64."""
    return Case(f"offset {size:g}", (), lambda sound: Classifier(Offset(sound, size)), _rows, "")
