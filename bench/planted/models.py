"""A held-out suite of planted failures.

It was written without reading the search and committed before any search had run on it.
The search is older than both suites, so neither suite was fixed before it. But nothing in this suite was fitted to
what the search finds. The models differ in shape and in the position of the fragile place, and each sound twin
computes the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from castwise import Workload
from planted import places

WIDTH = 48
TOKENS = 16
BATCH = 16
CLASSES = 8

Task = Literal["class", "wave", "bucket"]
Low = Literal["bf16", "fp16"]


class Block(nn.Module):
    """A residual pair of linear layers; maps ``[..., WIDTH]`` to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Stack(nn.Module):
    """A classifier of samples; the place is one of the trunk's stages, before or after its block."""

    def __init__(self, place: nn.Module, at: int) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.LayerNorm(WIDTH)
        stages: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), Block()]
        stages.insert(at, place)
        self.trunk = nn.Sequential(*stages)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.trunk(self.scale(self.stem(x))).mean(1)))


class Pooled(nn.Module):
    """A classifier of samples; the place is the pooling."""

    def __init__(self, place: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.block = Block()
        self.scale = nn.LayerNorm(WIDTH)
        self.bring = nn.Linear(WIDTH, WIDTH)
        self.pool = place
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.pool(self.bring(self.scale(self.block(self.stem(x)))))))


class Attend(nn.Module):
    """The linear layers around an attention core."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.core = core
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.core(self.query(x), self.key(x), self.value(x)))


class Attentive(nn.Module):
    """A classifier of samples; the place is the attention core."""

    def __init__(self, place: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attend(place)
        self.block = Block()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.attention(self.norm(self.stem(x)))).mean(1))


class Indexed(nn.Module):
    """A model with an output per token, computed from features and an integer; the place combines the two."""

    def __init__(self, place: nn.Module, out: int) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.before = Block()
        self.bring = nn.Linear(WIDTH, WIDTH)
        self.join = place
        self.after = Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, out)

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        x = self.join(self.bring(self.before(self.stem(x))), number)
        return self.head(self.norm(self.after(x)))


def _stack(at: int, place: nn.Module) -> nn.Module:
    return Stack(place, at)


def _indexed(out: int, place: nn.Module) -> nn.Module:
    return Indexed(place, out)


def _model(frame: Callable[[nn.Module], nn.Module], place: type[places.Place], sound: bool) -> nn.Module:
    return frame(place(sound))


def _optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=3e-3)


def _batches(task: Task, seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield noisy tokens around a prototype of their class, with labels, or with numbers and targets based on them."""
    prototypes = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(4242))
    table = torch.randint(CLASSES, (16,), generator=torch.Generator().manual_seed(4243))
    generator = torch.Generator().manual_seed(10_000 + seed)
    while True:
        label = torch.randint(CLASSES, (BATCH,), generator=generator)
        x = torch.randn(BATCH, TOKENS, WIDTH, generator=generator)
        x = x + (0.35 if task == "class" else 1.0) * prototypes[label].unsqueeze(1)
        number = torch.randint(4100, 8100, (BATCH, 1), generator=generator) + torch.arange(TOKENS)
        if task == "class":
            yield x, label
        elif task == "bucket":
            yield x, number, table[number % 16]
        else:
            wave = torch.sin(number * 0.9 + label.unsqueeze(1) * (6.2832 / CLASSES))
            yield x, number, wave + 0.2 * torch.randn(BATCH, TOKENS, generator=generator)


def _loss(task: Task, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Compute the loss in fp32, outside the model."""
    answer = model(*batch[:-1]).float()
    if task == "wave":
        return functional.mse_loss(answer.squeeze(-1), batch[-1])
    return functional.cross_entropy(answer.flatten(0, -2), batch[-1].flatten())


@dataclass(frozen=True)
class Case:
    """A model with one fragile place.

    Attributes:
        name: Name of the case.
        formats: The formats among bf16 and fp16 for which the place is fragile.
        fragile: Path of the planted module.
        frame: Builds the model around the place.
        place: Class of the place, sound or not.
        why: The error in the low format.
        task: The task of the model.
    """

    name: str
    formats: tuple[Low, ...]
    fragile: str
    frame: Callable[[nn.Module], nn.Module]
    place: type[places.Place]
    why: str
    task: Task = "class"

    def make(self, sound: bool) -> Workload:
        """Return the workload with the fragile place, or its sound twin."""
        return Workload(
            name=f"{self.name}-{'sound' if sound else 'planted'}",
            model=partial(_model, self.frame, self.place, sound),
            optimizer=_optimizer,
            batches=partial(_batches, self.task),
            loss=partial(_loss, self.task),
            description=self.why,
        )


def units(model: nn.Module) -> list[str]:
    """Return the paths of all modules except containers."""
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return [name for name, module in model.named_modules() if name and not isinstance(module, containers)]


def sound_modules(case: Case) -> list[str]:
    """Return the paths of the leaf modules outside the planted one, which no plan needs to exempt."""
    model = case.make(sound=False).model()
    return [
        name
        for name, module in model.named_modules()
        if name
        and not any(module.children())
        and name != case.fragile
        and not name.startswith(f"{case.fragile}.")
    ]


_BOTH: tuple[Low, ...] = ("bf16", "fp16")
_FP16: tuple[Low, ...] = ("fp16",)

CASES = (
    Case("variance", _BOTH, "trunk.1", partial(_stack, 1), places.Variance,
         "the difference of numbers around 10,000 is a variance of 1"),
    Case("sinusoid", _BOTH, "join", partial(_indexed, 1), places.Sinusoid,
         "positions in the thousands lose their last digits, and so do their angles", "wave"),
    Case("rotary", _BOTH, "join", partial(_indexed, 1), places.Rotary,
         "positions of thousands lose their last digits, and their angles with them", "wave"),
    Case("log-mean-exp", _FP16, "pool", Pooled, places.SmoothMaximum,
         "exponentials of tens leave fp16"),
    Case("softmax-offset", _BOTH, "trunk.1", partial(_stack, 1), places.Assignment,
         "differences of 1 vanish beside a common 5,000"),
    Case("epsilon", _FP16, "trunk.2", partial(_stack, 2), places.Epsilon,
         "1e-8 is zero in fp16, so that padding is 0/0"),
    Case("squared-error", _FP16, "trunk.1", partial(_stack, 1), places.SquaredError,
         "squares of differences of 8-bit values leave fp16"),
    Case("prefix-sum", _BOTH, "trunk.1", partial(_stack, 1), places.PrefixSum,
         "windows are small differences of large running sums"),
    Case("small-norm", _FP16, "trunk.1", partial(_stack, 1), places.SmallNorm,
         "squares of 1e-4 are zero in fp16, and so is the norm"),
    Case("whitening", _BOTH, "trunk.1", partial(_stack, 1), places.Whitening,
         "the covariance is a small difference of large products"),
    Case("attention-overflow", _FP16, "attention.core", Attentive, places.Attention,
         "products leave fp16 before they are scaled"),
    Case("attention-mask", _FP16, "attention.core", Attentive, places.MaskedAttention,
         "-1e9 is -inf in fp16, and a row of -inf is NaN after softmax"),
    Case("tiny-gradient", _FP16, "trunk.1", partial(_stack, 1), places.TinyGradient,
         "gradients fall below fp16 between two factors that cancel"),
    Case("leak", _BOTH, "pool", Pooled, places.Leak,
         "steps of 1e-4 are less than half a unit in the last place"),
    Case("softplus", _FP16, "trunk.1", partial(_stack, 1), places.Softplus,
         "exponentials of dozens leave fp16"),
    Case("buckets", _BOTH, "join", partial(_indexed, CLASSES), places.Buckets,
         "whole numbers of thousands are not whole in a low format", "bucket"),
    Case("global-response", _FP16, "trunk.2", partial(_stack, 2), places.GlobalResponse,
         "a sum of a thousand squares leaves fp16"),
    Case("finite-difference", _BOTH, "trunk.1", partial(_stack, 1), places.FiniteDifference,
         "a step of 1e-4 is lost beside 1"),
    Case("quadratic", _BOTH, "trunk.1", partial(_stack, 1), places.Quadratic,
         "the formula subtracts two nearly equal numbers"),
)  # fmt: skip
