"""Indices, masks, orders and routes: errors if the format cannot hold the values, harmless differences near a tie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import castwise

LOW = ["bf16", "fp16"]
LENGTH = 320
WIDTH = 16


class Choosing(nn.Module):
    """A classifier of tokens ``[batch, LENGTH, WIDTH]`` with a stage that makes discrete choices."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.before, self.stage, self.after = nn.Linear(WIDTH, WIDTH), stage, nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(functional.gelu(self.stage(self.before(x))).mean(1))


class Stage(nn.Module):
    """A stage that applies a function to its input; the function may use two layers and a table."""

    def __init__(self, function: Callable[[Stage, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randn(4096, WIDTH) * 0.02)
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _parity(function: Callable[[Stage, Tensor], Tensor], low: str, **options: int) -> castwise.ParityResult:
    torch.manual_seed(0)
    prototypes = torch.randn(4, 1, WIDTH)
    labels = [torch.randint(4, (4,)) for _ in range(30)]
    batches = [(0.5 * prototypes[label] + torch.randn(4, LENGTH, WIDTH), label) for label in labels]
    return castwise.parity(
        Choosing(Stage(function)), lambda m, b: functional.cross_entropy(m(b[0]), b[1]), batches, f"{low}-mixed",
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    )  # fmt: skip


def _counted(like: Tensor, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Return positions as whole floats, counted with a cumulative sum of ones."""
    ones = torch.ones(like.shape[1], device=like.device, dtype=dtype)
    return start + torch.cumsum(ones, 0, dtype=dtype) - 1


def _positions(stage: Stage, x: Tensor, dtype: torch.dtype) -> Tensor:
    return x + stage.table[_counted(x, dtype, 3000).long()]


def _routed(stage: Stage, x: Tensor) -> Tensor:
    route = functional.one_hot(stage.one(x)[..., :4].argmax(-1), 4).to(x.dtype)
    return x * route.repeat_interleave(WIDTH // 4, -1)


def _overlaps(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 for each neighbouring pair of boxes that overlap, with an offset per class that keeps classes apart."""
    token = torch.arange(x.shape[1], device=x.device)
    left = (token % 7) * 1.0 + (token // 20) * 4096.0
    left, right = left.to(dtype), (left + 9.0).to(dtype)
    inside = (torch.minimum(right[1:], right[:-1]) - torch.maximum(left[1:], left[:-1])).clamp_min(0)
    return functional.pad((inside / 9.0 > 0.6).long(), (0, 1))


WRONG: dict[str, tuple[str, Callable[[Stage, Tensor], Tensor], Callable[[Stage, Tensor], Tensor]]] = {
    "positions": (
        "_to_copy", lambda s, x: _positions(s, x, x.dtype), lambda s, x: _positions(s, x, torch.float32),
    ),
    "buckets": (
        "bucketize",
        lambda s, x: x + s.table[torch.bucketize(_counted(x, x.dtype, 5000), 5000.0 + 4 * torch.arange(80.0).to(x.dtype))],
        lambda s, x: x + s.table[torch.bucketize(_counted(x, torch.float32, 5000), 5000.0 + 4 * torch.arange(80.0))],
    ),
    "floors": (
        "_to_copy",
        lambda s, x: x + s.table[(4000 * x.sigmoid()).floor().long()[..., 0]],
        lambda s, x: x + s.table[(40 * x.sigmoid()).floor().long()[..., 0]],
    ),
    "shifted boxes": (
        "gt",
        lambda s, x: x + s.table[_overlaps(x, x.dtype)],
        lambda s, x: x + s.table[_overlaps(x, torch.float32)],
    ),
    "an order of large numbers": (
        "sort",
        lambda s, x: x + s.table[(7000 + (torch.arange(LENGTH) * 37 % LENGTH)).to(x.dtype).argsort(stable=True)],
        lambda s, x: x + s.table[(7000 + (torch.arange(LENGTH) * 37 % LENGTH)).float().argsort(stable=True)],
    ),
}  # fmt: skip
NATURAL: dict[str, Callable[[Stage, Tensor], Tensor]] = {
    "relu": lambda s, x: s.other(torch.where(s.one(x) > 0, s.one(x), 0.0)),
    "max-pool": lambda s, x: functional.max_pool1d(s.one(x).mT, 4).mT,
    "a route": _routed,
    "a route and another": lambda s, x: _routed(s, s.other(_routed(s, x))),
    "top-k": lambda s, x: x * torch.zeros_like(x).scatter(-1, s.one(x).topk(4, -1).indices, 1.0),
    "an order of features": lambda s, x: x.gather(1, s.one(x).argsort(1)),
    "an embedding": lambda s, x: x + s.table[torch.arange(x.shape[1])],
    "a mask in fp32": lambda s, x: x * (torch.rand(x.shape) > 0.1),
    "a mask drawn low": lambda s, x: x * (torch.rand_like(x) > 0.1),
    "a mask drawn low, mostly 0": lambda s, x: x * (torch.rand_like(x) > 0.7),
    "a threshold on a grid": lambda s, x: x * ((8 * x.sigmoid()).round() / 8 > 0.3),
    "quantised features": lambda s, x: x + functional.one_hot((4 * x).round().clamp(0, 15).long(), 16).sum(2).to(x.dtype),
    "a codebook": lambda s, x: x + s.table[torch.cdist(s.one(x).float(), 50 * s.table[:8]).argmin(-1)],
    "places in an expert": lambda s, x: x + s.table[
        (functional.one_hot(s.one(x)[..., :4].argmax(-1), 4).float().cumsum(1).amax(-1) - 1).long()
    ],
}  # fmt: skip


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", WRONG)
def test_choices_that_the_format_cannot_hold_fail_with_their_place(name: str, low: str) -> None:
    operator, planted, _ = WRONG[name]
    found = _parity(planted, low)
    worst = found.choices[0]
    assert worst.is_wrong
    assert (worst.path, worst.operator) == ("stage", operator)
    assert worst.share > 0.05
    assert found.verdict == "fail"
    assert "in stage" in found.reason


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", WRONG)
def test_their_twins_pass(name: str, low: str) -> None:
    found = _parity(WRONG[name][2], low)
    assert not any(choice.is_wrong for choice in found.choices)
    assert found.verdict == "pass", found.reason


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", NATURAL)
def test_choices_near_a_tie_are_not_wrong(name: str, low: str) -> None:
    found = _parity(NATURAL[name], low)
    assert not any(choice.is_wrong for choice in found.choices), found.choices
    assert "choices" not in found.reason
