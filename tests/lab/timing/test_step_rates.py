"""Steps of a workload in each format: who is timed, who is stopped, and what operators say beforehand."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from castwise import Workload
from castwise.lab.timing.limits import OperatorTime, StepProfile
from castwise.lab.timing.rates import Rate, verdict_of
from castwise.lab.timing.stats import Ratio, Summary
from castwise.lab.timing.step_rates import by_operators, measure_steps

CPU = torch.device("cpu")
NO_FP16 = {"fp16-mixed": "not asked for"}


class SlowInLow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            time.sleep(0.05)
        return super().forward(x)


class BreaksInLow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise NotImplementedError("no kernel for bf16")
        return super().forward(x)


def batches(seed: int) -> Iterator[Tensor]:
    while True:
        yield torch.ones(4, 8)


def workload(layer: type[nn.Linear] = nn.Linear) -> Workload:
    return Workload(
        "job", lambda: layer(8, 8), lambda params: torch.optim.SGD(params, lr=1e-3), batches,
        lambda model, batch: model(batch).square().mean(),
    )  # fmt: skip


def locked() -> Workload:
    lock = threading.Lock()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with lock:
            return model(batch).square().mean()

    return dataclasses.replace(workload(), loss=loss)


@pytest.mark.parametrize("job", [workload(), locked()], ids=["apart", "in this process"])
def test_every_format_has_its_steps_and_its_verdict(job: Workload) -> None:
    base, low, fp16 = measure_steps(job, CPU, NO_FP16, starts=1)
    assert (base.plan, low.plan, fp16.plan) == ("fp32", "bf16-mixed", "fp16-mixed")
    assert (base.speedup, base.verdict) == (None, None)
    assert base.time is not None
    assert low.time is not None
    assert low.speedup is not None
    assert low.speedup.level == 0.95
    assert low.speedup.n == 1  # starts, of which one says little, however many rounds it had
    assert low.verdict == verdict_of(low.speedup)
    assert (fp16.verdict, fp16.reason, fp16.time) == ("avoid", "not asked for", None)


@pytest.mark.parametrize(
    ("layer", "said"),
    [(SlowInLow, "stopped: a step takes "), (BreaksInLow, "not supported by this device: no kernel")],
)
def test_a_hopeless_or_broken_format_is_not_timed_any_further(layer: type[nn.Linear], said: str) -> None:
    _, low, _ = measure_steps(workload(layer), CPU, NO_FP16, starts=1)
    assert low.reason.startswith(said)
    assert (low.time, low.speedup, low.verdict) == (None, None, "avoid")


class StallsOnceInLow(nn.Linear):
    """As on a machine whose neighbour takes the cores for a moment."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 2:
                time.sleep(0.05)
        return super().forward(x)


def test_one_long_step_makes_no_format_hopeless() -> None:
    _, low, _ = measure_steps(workload(StallsOnceInLow), CPU, NO_FP16, starts=1)
    assert low.reason == ""
    assert low.time is not None


@pytest.mark.parametrize("where", ["fp32", "bf16"])
def test_a_fault_of_the_code_is_raised(where: str) -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_autocast_enabled("cpu") == (where == "bf16"):
                raise LookupError("a key is missing")
            return super().forward(x)

    with pytest.raises(LookupError, match="a key is missing"):
        measure_steps(workload(Broken), CPU, NO_FP16, starts=1)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.01, 1.2, "fast"),
        (0.93, 0.97, "no gain"),
        (0.95, 1.01, "no gain"),
        (0.85, 0.95, "no gain"),
        (0.5, 0.89, "avoid"),
    ],
)
def test_verdicts_go_by_the_interval(low: float, high: float, verdict: str) -> None:
    assert verdict_of(Ratio((low + high) / 2, low, high, 0.95, 9)) == verdict


def test_operators_say_how_slow_a_step_is_at_least() -> None:
    def rate(kernel: str, speedup: float) -> Rate:
        return Rate(kernel, "", "fp16", 1.0, speedup=Ratio(speedup, speedup, speedup, 0.95, 9))

    operators = (
        OperatorTime("aten::mm", 0.5, 1.0, "matmul", "matrix"),
        OperatorTime("aten::convolution", 0.3, 1.0, "convolution", "matrix"),
        OperatorTime("aten::gelu", 0.2, 1.0, None, "other"),
    )
    zero = Summary(0.1, 0.1, 0.1, 9)
    profile = StepProfile(zero, zero, 0.0, operators, 10.0, 1e-6, None)
    rates = (rate("matmul", 0.01), rate("conv3x3", 0.1), rate("conv1x1", 0.5))
    assert by_operators(profile, rates, "fp16-mixed") == pytest.approx(0.5 / 0.01 + 0.3 / 0.5 + 0.2)
    assert by_operators(profile, rates, "bf16-mixed") == pytest.approx(1.0)
