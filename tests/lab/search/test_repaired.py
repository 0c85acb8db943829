"""A search in which the fastest plan fails the parity test and is repaired."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise import Plan, Workload
from castwise.lab.parity.parity import ParityResult
from castwise.lab.search import final
from castwise.lab.search.axes import AUTOCAST, FP32, numerics_of
from castwise.lab.search.repair import NumericsSearch
from tests.here import DEVICE
from tests.lab.search.test_repair import Offset, batches, loss, model
from tests.searches import short_finals

FUSED = Plan.parse("bf16-mixed+optimizer=fused")


class SlowInFP32(nn.Module):
    """A module that takes 10 ms for fp32 inputs."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float32:
            time.sleep(0.01)
        return x * 2


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params)


JOB = Workload("fragile", lambda: model(2, nn.Linear(16, 16), SlowInFP32(), Offset()), adamw, batches, loss)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    short_finals(monkeypatch, 2)


def found(job: Workload = JOB, goal: str = "time") -> castwise.TuneResult:
    return castwise.tune(
        job, device=DEVICE, formats=("fp32", "bf16"), goal=goal, budget_s=40, memory=False, fresh=True
    )


def test_a_plan_that_was_repaired_is_timed_and_can_be_chosen() -> None:
    result = found()
    assert result.plan.compute == "bf16"
    assert ("4", "fp32") in [(region.pattern, region.compute) for region in result.plan.regions]
    row = next(row for row in result.evidence.candidates if row.status == "chosen")
    assert row.speedup is not None
    assert row.speedup.low > 1.0


def test_a_plan_that_was_repaired_is_weighed_too() -> None:
    result = found(goal="memory")
    repaired = [row for row in result.evidence.candidates if Plan.parse(row.plan).regions]
    assert repaired
    assert all(row.peak_bytes is not None for row in repaired)


def test_numerics_that_were_refused_are_not_tested_again_for_their_like(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients do not depend on the fused optimizer."""
    asked: list[Plan] = []

    def fails(self: NumericsSearch, plan: Plan) -> ParityResult:
        asked.append(numerics_of(plan))
        result = self.find(plan)
        wrong = dataclasses.replace(result.damage, value=9.0, low=8.0, high=10.0)
        return dataclasses.replace(result, verdict="fail", reason="damage 9", damage=wrong, adam=wrong)

    def in_turn(self: final.Final, *_: object) -> Iterator[Plan]:
        self.plans = (AUTOCAST, FUSED, FP32)
        return iter(self.plans)

    monkeypatch.setattr(NumericsSearch, "verify", fails)
    monkeypatch.setattr(final.Final, "in_turn", in_turn)
    result = found(dataclasses.replace(JOB, model=lambda: model(2, nn.Linear(16, 16), SlowInFP32())))
    assert result.plan == FP32
    assert asked == [AUTOCAST]
    rows = {Plan.parse(row.plan): row.reason for row in result.evidence.candidates}
    assert rows[AUTOCAST] == rows[FUSED] == "on fresh batches: damage 9"


def test_a_plan_with_every_part_in_fp32_is_no_answer() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) + 3000.0) - 3000.0

    torch.manual_seed(0)
    result = castwise.tune(
        model=nn.Sequential(Broken(16, 16), Broken(16, 10)), loss=loss, batches=batches, goal="numerics", formats=("bf16",), memory=False, device=DEVICE,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3), fresh=True, budget_s=30,
    )  # fmt: skip
    assert str(result.plan) == "fp32"
    assert any(
        "unless every part of the model stays in fp32; the plan is fp32" in note
        for note in result.evidence.notes
    )
