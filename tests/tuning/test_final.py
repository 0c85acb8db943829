"""The final: real starts of tiny plans, and what it says of times that are made up."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
import torch
from tests.tuning.test_choices import CPU, SlowWhenLow, loss, workload
from torch import Tensor, nn

from castwise import Plan, Workload
from castwise.tuning import final as final_
from castwise.tuning.axes import name_of
from castwise.tuning.contest import Contest, Entry
from castwise.tuning.decision import Decision
from castwise.tuning.fastest import FINALISTS, likeliest
from castwise.tuning.final import Final, race_final
from castwise.tuning.search import Settings
from castwise.tuning.state import AUTOCAST, FP32, SearchState

FUSED = Plan.parse("bf16-mixed+optimizer=fused")
REGION = Plan.parse("bf16-mixed+regions.0=fp32")


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_, "ROUNDS", 3)


def searching(made: Workload) -> SearchState:
    search = SearchState(made, CPU, Settings(formats=("fp32", "bf16"), budget_s=60.0))
    search.contest = Contest(made, CPU)
    return search


def timed(speeds: dict[Plan, float], **options: object) -> Final:
    """A final in which plans took so many seconds per step, with one in a thousand of noise."""
    times = [
        [[seconds * (1.0 + 0.001 * ((s + r) % 2)) for r in range(3)] for s in range(3)]
        for seconds in speeds.values()
    ]
    return Final(list(speeds), times_s=times, **options)  # type: ignore[arg-type]


def test_plans_are_started_until_the_slow_one_is_known() -> None:
    search = searching(workload(SlowWhenLow))
    final = race_final(search, [AUTOCAST], (), time.monotonic() + 60.0)
    assert final.decision == Decision(0, True, frozenset({1}))
    assert next(final.in_turn([FP32, AUTOCAST])) == FP32
    ratio = final.ratio(AUTOCAST, FP32)
    assert ratio is not None
    assert ratio.high < 1.0
    assert ratio.n == final.starts >= 3
    assert not final.doubt(FP32)
    assert final.losses[FP32]
    assert len(final.losses[FP32]) == len(final.losses[AUTOCAST])


def test_what_fails_in_a_process_of_its_own_is_out_with_its_reason() -> None:
    class Fragile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is torch.bfloat16:
                raise NotImplementedError("no kernel for bf16")
            return x * 2

    final = race_final(searching(workload(Fragile)), [AUTOCAST], (), time.monotonic() + 60.0)
    assert list(final.in_turn([FP32, AUTOCAST])) == [FP32]
    assert final.reason(AUTOCAST, FP32) == "not supported by this device: no kernel for bf16"


def test_a_fault_of_the_code_comes_out_of_its_process() -> None:
    class Faulty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is torch.bfloat16:
                raise IndexError("no such row")
            return x * 2

    with pytest.raises(IndexError, match="no such row"):
        race_final(searching(workload(Faulty)), [AUTOCAST], (), time.monotonic() + 60.0)


def test_equal_plans_have_equal_losses() -> None:
    same = Plan.parse("fp32+fp32_matmul=ieee")
    final = race_final(searching(workload()), [same, AUTOCAST], (), time.monotonic() + 60.0)
    assert final.losses[same] == final.losses[FP32]
    assert len(final.losses[AUTOCAST]) == len(final.losses[FP32])


def test_a_workload_that_cannot_be_sent_is_timed_here_and_that_is_said() -> None:
    lock = threading.Lock()

    def locked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with lock:
            return loss(model, batch)

    search = searching(dataclasses.replace(workload(SlowWhenLow), loss=locked))
    final = race_final(search, [AUTOCAST], (), time.monotonic() + 60.0)
    assert next(final.in_turn([FP32, AUTOCAST])) == FP32
    (note,) = search.notes
    assert note.startswith("The finalists were timed once, in one process: workload 'tiny' cannot be sent")
    assert "file.py:attribute" in note


def test_refused_plans_make_room_for_the_next() -> None:
    final = timed({FP32: 2.0, AUTOCAST: 1.0, REGION: 0.5})
    assert list(final.in_turn([FP32, AUTOCAST, REGION])) == [REGION, AUTOCAST, FP32]


def test_ties_go_to_the_simpler_plan_and_doubt_loses_them() -> None:
    speeds = {FP32: 2.0, AUTOCAST: 1.0, REGION: 0.99}
    assert next(timed(speeds).in_turn([FP32, AUTOCAST, REGION])) == AUTOCAST
    assert next(timed(speeds, doubtful=[AUTOCAST]).in_turn([FP32, AUTOCAST, REGION])) == REGION


def test_reasons_name_what_the_interval_knows() -> None:
    final = timed({FP32: 2.0, AUTOCAST: 1.0, FUSED: 0.98, REGION: 1.0})
    assert final.reason(FP32, AUTOCAST).startswith("not faster: takes 2.00 (")
    assert final.reason(FUSED, AUTOCAST) == "at most 3 % faster than the chosen plan, which is simpler"
    assert final.reason(REGION, AUTOCAST) == "as fast as the chosen plan, which is simpler"
    assert final.reason(Plan.preset("bf16-true"), AUTOCAST) == ""


def test_a_machine_too_noisy_to_decide_is_said_with_how_much_is_open() -> None:
    times = {FP32: 2.0, AUTOCAST: 1.0, REGION: 0.96}
    final = timed(times, decision=Decision(1, decided=False))
    assert f"{name_of(REGION)} may still be up to 4% faster than the chosen plan" in final.doubt(AUTOCAST)
    assert "--budget" in final.doubt(AUTOCAST)
    assert not final.doubt(REGION)  # nothing is open there
    assert not timed(times, decision=Decision(1, decided=True)).doubt(AUTOCAST)


def test_the_fastest_of_the_race_and_the_simplest_of_those_as_fast_come_to_the_final() -> None:
    plain = AUTOCAST
    others = [Plan.parse(f"bf16-mixed+regions.{'.'.join('0' * n)}=fp32") for n in range(1, FINALISTS + 2)]
    search = searching(workload(SlowWhenLow))
    assert search.contest is not None
    for place, plan in enumerate([FP32, *others, plain]):
        entry = search.contest.entries[plan] = Entry(plan)
        entry.times_s = [2.0 if plan == FP32 else 1.0 + 0.001 * place] * 4
    left = likeliest(search, search.contest, [FP32, *others, plain])
    assert left == [FP32, *others[: FINALISTS - 1], plain]
    assert search.passed_over == dict.fromkeys(
        others[FINALISTS - 1 :], f"not in the final: {FINALISTS} others were faster in the race"
    )
    assert likeliest(search, search.contest, [FP32, plain]) == [FP32, plain]
