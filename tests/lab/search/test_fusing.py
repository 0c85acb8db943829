"""The fused optimizer is used for all finalists or none, by the time of the optimizer's part of a step."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise import Plan, Workload
from castwise.errors import DeviceError
from castwise.lab.search import final
from castwise.lab.search.axes import AUTOCAST, FP32, as_raced
from castwise.lab.search.contest import LATE, Contest
from castwise.lab.search.context import Context, Settings
from castwise.lab.search.decision import Decision
from castwise.lab.search.fastest import with_plans_from_elsewhere
from castwise.lab.search.finalists import with_lossless
from castwise.lab.search.fusing import fused_saves
from castwise.lab.search.reference import refer
from castwise.lab.search.state import Search
from castwise.lab.timing.runners import TrainingRun
from castwise.lab.timing.timing import Lap
from tests.here import DEVICE
from tests.lab.search.test_choices import CPU, left_for, workload
from tests.searches import short_finals

FUSED = Plan.parse("fp32+optimizer=fused")


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params)


def deep() -> nn.Module:
    """Return a model of 64 small tensors, with which the optimizer takes more than half of a step."""
    return nn.Sequential(nn.Linear(16, 4), *(nn.Linear(4, 4) for _ in range(30)), nn.Linear(4, 16))


DEEP = dataclasses.replace(workload(), model=deep, optimizer=adamw)


def asked(
    job: Workload, then: Callable[[Search], None] = lambda _search: None, plan: Plan = FP32
) -> tuple[bool, Search]:
    search = Search(Context(job, CPU, Settings(formats=("fp32", "bf16"))))
    search.begun = refer(search.context)
    search.race = Contest(job, CPU)
    with search.context.home, search.contest:
        search.contest.run([], 2)
        then(search)
        steps = search.contest.steps
        saves = fused_saves(search.context, search.reference, search.contest, plan)
        search.contest.steps -= steps
        return saves > 0.0, search


def test_an_optimizer_that_gains_by_its_fused_kernel_is_fused_and_its_times_are_told() -> None:
    saves, search = asked(DEEP)
    assert saves
    (note,) = search.journal.notes
    assert " AdamW" in f" {note}"
    assert "% of a step, so the final compared plans with optimizer=fused" in note


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.RMSprop(params),
        lambda params: torch.optim.AdamW(params, fused=True),
    ],
    ids=["without a fused kernel", "fused already"],
)
def test_where_there_is_nothing_to_fuse_no_step_is_run(
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    saves, search = asked(dataclasses.replace(DEEP, optimizer=optimizer))
    assert not saves
    assert not search.contest.steps


@pytest.mark.parametrize(
    ("given_s", "fused_s", "saves"),
    [
        ([0.4] * 8, [0.2] * 8, True),
        ([0.4] * 8, [0.399] * 8, False),  # 0.25 % of the step
        ([0.4] * 8, [0.41] * 8, False),
        ([0.4, 0.8] * 4, [0.4, 0.4, 0.8, 0.8] * 2, False),  # the gain could be chance
        ([0.4], [0.2], False),  # one round is not enough
        ([], [], False),  # it cannot run
    ],
)
def test_what_is_saved_counts_where_it_is_known_to_be_a_hundredth_of_the_step(
    given_s: list[float], fused_s: list[float], saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Contest, "updates", lambda *_: (Lap(list(given_s)), Lap(list(fused_s))))

    def raced(search: Search) -> None:
        search.contest.entries[FP32].times_s[:] = [1.0] * 8

    found, search = asked(DEEP, raced)
    assert found == saves
    assert (FUSED in search.journal.fates) == (not saves and bool(given_s))


@pytest.mark.parametrize(
    ("gain", "saves", "at_least", "at_most"), [(0.5, True, 8, 8), (0.1, True, 16, 64), (0.0, False, 16, 128)]
)
def test_rounds_go_on_until_they_decide(
    gain: float, saves: bool, at_least: int, at_most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU with steps of 14 ± 4 ms, eight rounds could not show that fused steps took 12 ms."""
    noise = random.Random(0)
    laps = Lap(), Lap()

    def updates(*given: Any) -> tuple[Lap, Lap]:
        *_, rounds, _least, _until, _last, enough = given
        for _ in range(rounds):
            for lap, step_s in zip(laps, (1.0, 1.0 - gain), strict=True):
                lap.times_s.append(step_s * noise.uniform(0.8, 1.2))
            if enough(*laps):
                break
        return laps

    monkeypatch.setattr(Contest, "updates", updates)

    def raced(search: Search) -> None:
        search.contest.entries[FP32].times_s[:] = [1.0] * 8

    assert asked(DEEP, raced)[0] == saves
    assert at_least <= len(laps[0].times_s) <= at_most


def test_a_part_that_took_longer_than_a_step_did_before_saves_no_more_than_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: on a busy machine the text claimed savings of 136 % of a step."""
    monkeypatch.setattr(Contest, "updates", lambda *_: (Lap([2.0] * 8), Lap([0.1] * 8)))

    def raced(search: Search) -> None:
        search.contest.entries[FP32].times_s[:] = [1.0] * 8

    saves, search = asked(DEEP, raced)
    assert saves
    assert ": fused saves 95 % of a step" in search.journal.notes[0]


def test_no_round_of_two_optimizers_begins_far_beyond_their_time() -> None:
    """Regression: the minimum of rounds ran regardless of time, 26 s of a budget of 15 s."""
    with Contest(DEEP, CPU) as contest:
        contest.run([], 1)
        given, other = contest.updates(FP32, FUSED, 8, 4, 0.0, 0.0)
    assert len(given.times_s) == len(other.times_s) == 1


def test_a_kernel_that_cannot_run_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise DeviceError("no kernel")

    monkeypatch.setattr("castwise.core.session.apply.fuse", refuses)
    saves, search = asked(DEEP)
    assert not saves
    assert "no kernel" in left_for(search.contest, FUSED)


def test_each_step_of_a_run_says_how_long_its_optimizer_took() -> None:
    run = TrainingRun(DEEP, FP32, CPU)
    run.block(2)
    run.block(1)
    assert len(run.updates_s) == 3
    assert all(seconds > 0.0 for seconds in run.updates_s)


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("fused", [True, False])
def test_where_memory_runs_out_for_two_the_optimizer_stays_as_given(
    fused: bool, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan that ran before stays in the race."""
    step = TrainingRun.run

    def run(self: TrainingRun, steps: int) -> None:
        mine = self.amp.plan.compute == "bf16" and bool(self.optimizer.param_groups[0].get("fused")) == fused
        if mine and len(self.updates_s) > after:
            raise torch.OutOfMemoryError("out of memory")
        step(self, steps)

    def raced(search: Search) -> None:
        search.contest.run([AUTOCAST], 2)
        search.contest._close(AUTOCAST)
        monkeypatch.setattr(TrainingRun, "run", run)

    saves, search = asked(DEEP, raced, AUTOCAST)
    assert not saves
    assert search.contest.entries[AUTOCAST].left is None


def test_a_step_that_is_skipped_counts_as_any_other() -> None:
    """After an fp16 overflow the optimizer makes no step."""
    plan = Plan.parse("fp16-mixed+loss_scale.init=4294967296")
    fused = dataclasses.replace(plan, optimizer="fused")
    with Contest(DEEP, CPU) as contest:
        contest._block = 1
        given, other = contest.updates(plan, fused, 3, 3, math.inf, math.inf)
    assert len(given.seconds) == len(other.seconds) == 3


def test_a_kernel_that_was_refused_comes_to_no_final() -> None:
    with Contest(DEEP, CPU) as contest:
        contest.run([FUSED, AUTOCAST], 1)
        assert with_lossless(contest, [AUTOCAST]) == [AUTOCAST, FP32]


@pytest.mark.parametrize(("goal", "optimizer"), [("time", "as_given"), ("memory", "fused")])
def test_a_plan_from_elsewhere_keeps_the_kernel_that_nobody_looks_for_here(goal: str, optimizer: str) -> None:
    elsewhere = [Plan.parse("bf16-true+optimizer=fused+host_memory=keep")]
    search = Search(Context(DEEP, CPU, Settings(formats=("fp32", "bf16"), goal=goal), elsewhere=elsewhere))
    found = with_plans_from_elsewhere(search, [AUTOCAST])[0]
    assert (found.optimizer, found.host_memory) == (optimizer, "as_given")


def test_a_step_too_long_for_the_budget_is_not_timed_again() -> None:
    def raced(search: Search) -> None:
        search.contest.entries[FP32].times_s[:] = [60.0] * 3

    saves, search = asked(DEEP, raced)
    assert not saves
    assert search.journal.fates == {FUSED: LATE}


@pytest.mark.parametrize("fuses", [True, False])
def test_finalists_are_fused_all_or_none(fuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    short_finals(monkeypatch, 2)
    monkeypatch.setattr("castwise.lab.search.fastest.fused_saves", lambda *_: 0.04 * fuses)
    monkeypatch.setattr("castwise.lab.search.fastest.keeping_saves", lambda *_: 0.0)
    result = castwise.tune(
        DEEP, device=DEVICE, formats=("fp32", "bf16"), budget_s=20, memory=False, fresh=True
    )
    rows = {Plan.parse(row.plan): row for row in result.evidence.candidates}
    raced = {plan for plan, row in rows.items() if row.rounds and row.speedup} - {FP32, AUTOCAST}
    assert {plan.optimizer for plan in raced} <= {"fused" if fuses else "as_given"}
    assert any(as_raced(plan) == FP32 for plan in raced) == fuses
    for plan in raced & {run for run in rows if run.optimizer == "fused"}:
        twin = as_raced(plan)
        if twin in rows and twin not in (FP32, AUTOCAST):
            assert rows[twin].reason == final.ran_as(plan).reason


def test_where_whole_steps_say_that_what_was_to_save_time_takes_more_fp32_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("castwise.lab.search.fastest.fused_saves", lambda *_: 0.04)
    monkeypatch.setattr("castwise.lab.search.fastest.keeping_saves", lambda *_: 0.0)

    def raced(
        _context: Context,
        _contest: Contest,
        plans: list[Plan],
        _until: float,
        beside: list[Plan],
        _given: None,
    ) -> final.Final:
        assert plans == [FUSED]
        assert beside == [FP32]
        starts = [[[step_s * (1 + 0.001 * (i % 2))] * 4 for i in range(3)] for step_s in (0.1, 0.12)]
        return final.Final([FP32, FUSED], times_s=starts, choice={FUSED}, decision=Decision(0, True))

    monkeypatch.setattr("castwise.lab.search.fastest.race_final", raced)
    result = castwise.tune(DEEP, device=DEVICE, formats=("fp32",), budget_s=20, memory=False, fresh=True)
    assert result.plan.optimizer == "as_given"
    assert any(note.startswith("Plain fp32 could be chosen too") for note in result.evidence.notes)
    assert " that can be chosen" not in result.evidence.candidates[0].reason


def test_what_fp32_gains_by_its_own_measure_is_no_choice_of_the_final(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: finals of fp32 and fused fp32 took a minute and chose either one at random."""
    short_finals(monkeypatch, 2)

    monkeypatch.setattr("castwise.lab.search.fastest.fused_saves", lambda *_: 0.04)
    monkeypatch.setattr("castwise.lab.search.fastest.keeping_saves", lambda *_: 0.0)
    # Enough for two starts on a busy machine: on other devices than the CPU, each one imports torch anew.
    asks = {"device": DEVICE, "formats": ("fp32",), "budget_s": 90, "memory": False, "fresh": True}
    result = castwise.tune(DEEP, **asks)  # type: ignore[arg-type]
    assert str(result.plan) == str(FUSED)
    rows = {Plan.parse(row.plan): row for row in result.evidence.candidates}
    assert rows[FUSED].rounds == 2 * 3  # two starts, since nothing was undecided
    assert FUSED in rows
    assert FP32 in rows
    monkeypatch.setattr("castwise.lab.search.fastest.fused_saves", lambda *_: 0.0)
    assert castwise.tune(DEEP, **asks).plan.optimizer == "as_given"  # type: ignore[arg-type]
