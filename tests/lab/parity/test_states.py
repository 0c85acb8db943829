"""parity() names counters and averages that stop moving under a plan, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import castwise
from castwise import Plan
from castwise.lab.parity.probes import Prober
from castwise.lab.parity.states import StateTest
from tests.here import DEVICE
from tests.soak import each_value, every

Batch = tuple[Tensor, Tensor]


def batches(seed: int = 0) -> Iterator[Batch]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    while True:
        yield torch.randn(16, 8, generator=generator), torch.randint(4, (16,), generator=generator)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


class Counter(nn.Module):
    """A counter of calls; with ``low`` it counts in the format of its input."""

    def __init__(self, start: float, low: bool = False) -> None:
        super().__init__()
        self.low = low
        self.register_buffer("steps", torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.copy_((self.steps.to(x.dtype) if self.low else self.steps) + 1)
        return x


class Average(nn.Module):
    """A running mean of the squared input; with ``low`` it is computed in the format of the input."""

    def __init__(self, decay: float, low: bool = False) -> None:
        super().__init__()
        self.decay, self.low = decay, low
        self.register_buffer("mean", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            old = self.mean.to(x.dtype) if self.low else self.mean
            self.mean.copy_(self.decay * old + (1 - self.decay) * x.square().mean(0))
        return x


class Loads(nn.Module):
    """A counter of the tokens per expert; with ``low`` it counts in the format of its input."""

    def __init__(self, low: bool, is_complex: bool = False) -> None:
        super().__init__()
        self.low = low
        self.register_buffer("loads", torch.zeros(4, dtype=torch.cfloat if is_complex else torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.bincount(x[:, :4].argmax(1), minlength=4)
        old = torch.view_as_real(self.loads)[:, 1] if self.loads.is_complex() else self.loads
        old.copy_(old.to(x.dtype) + chosen.to(x.dtype) if self.low else old + chosen)
        return x


class Late(nn.Module):
    """A slow average, updated in the steps for which ``when`` is true. ``kept`` tells where steps are counted."""

    def __init__(self, when: Callable[[int], bool], kept: str, first: bool = False, low: bool = True) -> None:
        super().__init__()
        self.when, self.first, self.low = when, first, low
        self.register_buffer("mean", torch.ones(32))
        if kept == "buffer":
            self.register_buffer("steps", torch.tensor(0))
        else:
            self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x if self.low else x.float()
            if self.first and self.steps == 0:
                self.mean.copy_(x.abs().mean(0))
            elif self.when(int(self.steps)):
                self.mean.copy_(0.999 * self.mean.to(x.dtype) + 0.001 * x.abs().mean(0))
            self.steps += 1
        return x


class Largest(nn.Module):
    """A running maximum of the inputs, and a queue of the latest ones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.tensor(0.0))
        self.register_buffer("queue", torch.zeros(64, 32))
        self.register_buffer("at", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest.to(x.dtype), x.max()))
            self.queue[int(self.at) : int(self.at) + 16] = x.to(self.queue.dtype)
            self.at.copy_((self.at + 16) % 64)
        return x


class Teacher(nn.Module):
    """A moving average of a layer's weights, kept in parameters that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(32, 32), nn.Linear(32, 32)
        self.slow.load_state_dict(self.fast.state_dict())
        self.slow.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                slow.mul_(0.999).add_(fast, alpha=0.001)
        return self.fast(x)  # type: ignore[no-any-return]


class Balanced(nn.Module):
    """A sum of means that are zero except for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean += (x - x.mean()).mean()
        return x


def model(place: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), place, nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4))


def stopped(place: nn.Module, plan: str) -> dict[str, str]:
    prober = Prober(model(place), loss, batches(), torch.device(DEVICE))
    prober.extend(8)
    return StateTest(prober, adam).stopped(Plan.parse(plan))


STOPS: list[tuple[str, Callable[[], nn.Module], str, str]] = [
    ("a counter stored low", lambda: Counter(300.0), "bf16-mixed+regions.1=params:bf16", "1.steps"),
    ("a counter computed low", lambda: Counter(300.0, low=True), "bf16-mixed", "1.steps"),
    ("a counter that is young", lambda: Counter(0.0, low=True), "bf16-mixed", "1.steps"),
    ("a young counter in fp16", lambda: Counter(0.0, low=True), "fp16-mixed", "1.steps"),
    ("a slow average stored low", lambda: Average(0.999), "bf16-mixed+regions.1=params:bf16", "1.mean"),
    ("a slow average computed low", lambda: Average(0.999, low=True), "bf16-mixed", "1.mean"),
    ("several counters", lambda: Loads(low=True), "bf16-mixed", "1.loads"),
    ("one part of a complex counter", lambda: Loads(low=True, is_complex=True), "bf16-mixed", "1.loads"),
    ("an average after a warm-up", lambda: Late(lambda t: t > 0, "buffer"), "bf16-mixed", "1.mean"),
    ("one after a longer warm-up", lambda: Late(lambda t: t > 100, "buffer"), "bf16-mixed", "1.mean"),
    ("one every second step", lambda: Late(lambda t: t % 2 == 1, "buffer"), "bf16-mixed", "1.mean"),
    ("one whose steps no buffer counts", lambda: Late(lambda t: t % 2 == 1, ""), "bf16-mixed", "1.mean"),
    ("one from the first batch", lambda: Late(bool, "buffer", first=True), "bf16-mixed", "1.mean"),
    ("one from the first batch, no buffer", lambda: Late(bool, "", first=True), "bf16-mixed", "1.mean"),
    ("a teacher without masters", Teacher, "bf16-master", "1.slow.weight"),
]


@every(2)
@pytest.mark.filterwarnings("ignore:A copy of a prepared model is being updated")  # the teacher
@pytest.mark.parametrize(("place", "plan", "name"), [s[1:] for s in STOPS], ids=[s[0] for s in STOPS])
def test_state_that_stops_is_named(place: Callable[[], nn.Module], plan: str, name: str) -> None:
    found = stopped(place(), plan)
    assert name in found
    assert "does not change" in found[name] or "times as far in a few steps" in found[name]


@every(2, 1)
@each_value()
@pytest.mark.parametrize(
    ("place", "plan"),
    [
        (lambda: Counter(300.0), "bf16-mixed"),
        (lambda: Counter(300.0), "bf16-true"),
        (lambda: Counter(0.0, low=True), "fp32"),
        (lambda: Average(0.999), "bf16-master"),
        (lambda: Average(0.9, low=True), "bf16-mixed"),
        (lambda: Average(0.999, low=True), "fp16-mixed"),
        (Teacher, "bf16-mixed"),
        (lambda: Loads(low=False), "bf16-mixed"),
        (lambda: Late(lambda t: t > 0, "buffer", low=False), "bf16-mixed"),
        (lambda: Late(bool, "buffer", first=True, low=False), "bf16-mixed"),
        (lambda: Late(bool, "buffer", first=True), "fp32"),
        (Largest, "bf16-mixed"),
        (Largest, "fp16-mixed"),
        (Balanced, "bf16-mixed"),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)), "bf16-true"),
    ],
)
def test_state_that_follows_is_left_alone(place: Callable[[], nn.Module], plan: str) -> None:
    assert stopped(place(), plan) == {}


@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-master", "fp16-mixed"])
def test_batchnorm_alone_costs_no_pass(plan: str) -> None:
    prober = Prober(model(nn.GELU()), loss, batches(), torch.device(DEVICE))
    prober.extend(4)
    assert set(prober.moving) == {"2.running_mean", "2.running_var", "2.num_batches_tracked"}
    assert StateTest(prober, adam).stopped(Plan.parse(plan)) == {}
    assert prober.passes == 4


def test_batchnorm_whose_statistics_a_region_stores_low_is_looked_at() -> None:
    made = model(nn.GELU())
    made[2].momentum = 1e-4
    prober = Prober(made, loss, batches(), torch.device(DEVICE))
    prober.extend(4)
    assert "2.running_var" in StateTest(prober, adam).stopped(Plan.parse("bf16-true+regions.2=params:bf16"))


def test_code_that_takes_no_later_count_is_not_asked_for_it() -> None:
    class Scheduled(Counter):
        def forward(self, x: Tensor) -> Tensor:
            torch.arange(100)[int(self.steps)]
            return super().forward(x)

    assert stopped(Scheduled(0.0, low=True), "bf16-mixed") == {}

    class Counted(Late):
        def forward(self, x: Tensor) -> Tensor:
            torch.arange(100)[int(self.steps)]
            return super().forward(x)

    assert "1.mean" in stopped(Counted(bool, "buffer", first=True), "bf16-mixed")


@pytest.mark.sparse
def test_state_that_changes_its_format_or_shape_or_is_complex_stops_nobody() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(1))
            self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
            self.register_buffer("index", torch.tensor(0.0))
            self.register_buffer("seen", torch.zeros(3).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            self.last, self.index = x.detach(), self.index.long() + 1
            self.phase += 1j
            return x

    assert stopped(Odd(), "bf16-mixed") == {}


def test_an_optimizer_whose_step_takes_a_closure_leaves_the_weights_where_they_are() -> None:
    prober = Prober(model(Counter(300.0, low=True)), loss, batches(), torch.device(DEVICE))
    prober.extend(8)
    assert "1.steps" in StateTest(prober, torch.optim.LBFGS).stopped(Plan.parse("bf16-mixed"))


def test_the_verdict_names_the_buffer_and_the_model_is_as_before() -> None:
    made = model(Counter(300.0, low=True))
    found = castwise.parity(made, loss, batches, "bf16-mixed", optimizer=adam)
    assert found.verdict == "fail"
    assert found.stopped == ("1.steps",)
    assert found.reason == (
        "gradients are sound, but the model's state differs from fp32's: 1.steps does not change in a few steps, but in fp32 "
        "it "
        "does"
    )
    assert float(made[1].steps) == 300.0
    assert castwise.parity(made, loss, batches, "fp32", optimizer=adam)


def test_a_search_keeps_what_holds_the_state_in_fp32() -> None:
    result = castwise.tune(
        model=model(Average(0.999, low=True)), loss=loss, batches=batches, optimizer=adam, goal="numerics",
        formats=("bf16",), memory=False,
    )  # fmt: skip
    assert [region.pattern for region in result.plan.regions] == ["1"]
