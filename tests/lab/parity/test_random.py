"""Models that draw random numbers: the verdict is that of real training, in which draws depend on the format."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import castwise

LOW = ["bf16", "fp16"]


class Noisy(nn.Module):
    """A classifier that passes its features through a random function."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.middle, self.after = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self._draw = draw

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self._draw(self.before(x)))
        return self.after(functional.gelu(self._draw(self.middle(x))))


def _verdict(draw: Callable[[Tensor], Tensor], low: str) -> castwise.ParityResult:
    prototypes = torch.randn(4, 16)
    labels = [torch.randint(4, (16,)) for _ in range(32)]
    batches = [(0.7 * prototypes[label] + torch.randn(16, 16), label) for label in labels]
    return castwise.parity(
        Noisy(draw), lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]), batches, f"{low}-mixed",
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    )  # fmt: skip


SOUND: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.2),
    "dropout by hand": lambda x: x * (torch.rand_like(x) > 0.2) / 0.8,
    "dropout by a tensor of chances": lambda x: x * torch.bernoulli(torch.full_like(x, 0.8)) / 0.8,
    "normal noise": lambda x: x + 0.3 * torch.randn_like(x),
    "uniform noise": lambda x: x + torch.empty_like(x).uniform_(-0.5, 0.5),
    "exponential noise": lambda x: x - 0.3 * torch.log1p(-torch.rand_like(x)),
    "Gumbel noise": lambda x: torch.tanh(x - 0.3 * torch.log(-torch.log(torch.rand_like(x)))),
    "rrelu": lambda x: functional.rrelu(x.float(), training=True).to(x.dtype),
    "a rare event": lambda x: torch.where(torch.rand(x.shape) < 1e-3, 60.0, x),
    "a code by multinomial": lambda x: x * functional.one_hot(
        torch.multinomial(torch.softmax(x.detach(), -1), 1)[:, 0], x.shape[-1]
    ).add(1),
}  # fmt: skip
BROKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "exponential noise": lambda x: x - 0.3 * torch.log(torch.rand_like(x)),
    "Gumbel noise": lambda x: x - 0.3 * torch.log(-torch.log1p(-torch.rand_like(x))),
    "the inverse of a draw": lambda x: x + 1e-3 / torch.empty_like(x).uniform_(),
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", SOUND)
def test_sound_draws_pass(name: str, low: str) -> None:
    found = _verdict(SOUND[name], low)
    assert found.verdict == "pass", found.reason
    assert found.strayed == 0
    assert found.microbatches == 32


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", BROKEN)
def test_a_draw_of_0_that_fp32_never_makes_fails(name: str, low: str) -> None:
    found = _verdict(BROKEN[name], low)
    assert found.verdict == "fail"
    assert "not finite" in found.reason


def test_a_rare_event_that_a_format_makes_frequent_fails() -> None:
    found = _verdict(lambda x: torch.where(torch.rand_like(x) < 1e-4, 60.0, x), "bf16")
    assert found.verdict == "fail", found.reason
