"""Doubtful plans: which of them are decided by training runs, and with which result."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch

from castwise import Plan, Workload
from castwise.core.plans.words import in_words
from castwise.lab.search.answer import _all_slower
from castwise.lab.search.axes import AUTOCAST, FP32
from castwise.lab.search.context import Context
from castwise.lab.search.fates import Fate
from castwise.lab.search.finalists import favourite
from castwise.lab.search.pairs import is_hopeless, train_pairs
from castwise.lab.search.sound import cleared, training_runs
from castwise.lab.search.state import Search
from tests.here import DEVICE
from tests.lab.search.conftest import raced
from tests.lab.search.test_choices import noted, workload

LIKE_FP32 = Plan.parse("bf16-mixed+regions.**=fp32")
"""A plan that trains bitwise like fp32."""
REPAIRED = Plan.parse("bf16-mixed+regions.0=fp32")
LOSING = Plan.parse("bf16-true")
"""A plan that trains worse: at this learning rate, rounding loses most updates of its parameters."""


@pytest.fixture
def search(searching: Callable[[Workload], Search]) -> Search:
    found = searching(workload())
    found.context = dataclasses.replace(
        found.context,
        settings=dataclasses.replace(found.context.settings, verify_steps=40, verify_seeds=4),
    )
    return found


def clear(
    search: Search, times_s: dict[Plan, float], sound: Sequence[Plan], doubtful: Sequence[Plan]
) -> list[Plan]:
    for plan in doubtful:
        search.journal.refuse(plan, "damage 0.11")
    raced(search, times_s)
    return cleared(search, sound, doubtful)


def runs(search: Search) -> int:
    return sum(stage.name == "training runs" for stage in search.journal.stages)


def test_a_plan_in_doubt_that_trains_like_fp32_is_sound(search: Search) -> None:
    assert clear(search, {FP32: 0.002, LIKE_FP32: 0.001}, [FP32], [LIKE_FP32]) == [LIKE_FP32]
    assert not search.journal.fates
    assert search.training[LIKE_FP32].verdict == "not worse"
    assert search.training[LIKE_FP32].difference == 0.0


def test_a_plan_in_doubt_that_trains_worse_is_not(search: Search) -> None:
    assert not clear(search, {FP32: 0.002, LOSING: 0.001}, [FP32], [LOSING])
    assert search.journal.refusal(LOSING).startswith(
        "damage 0.11, and in training over 2 pairs of 40 steps its loss differs"
    )


def test_batches_that_end_start_again_in_long_stages(search: Search) -> None:
    job = search.context.workload
    short = dataclasses.replace(job, batches=lambda seed: itertools.islice(job.batches(seed), 12))
    search.context = dataclasses.replace(search.context, workload=short)
    raced(search, {FP32: 0.002, LIKE_FP32: 0.001})
    trained = training_runs(search, LIKE_FP32)
    assert trained is not None
    assert trained.steps == 40


def test_what_is_sure_to_lose_by_training_is_trained_half_as_long(search: Search) -> None:
    """Training stops early if even equal losses in the remaining pairs could not show that the plan is not worse."""
    same = [1.0, 2.0, 1.5, 1.2]
    worse = [loss + more for loss, more in zip(same, (0.01, 0.012, 0.011, 0.009), strict=True)]
    assert is_hopeless(same, worse, 8, margin=0.0090)
    assert not is_hopeless(same, worse, 8, margin=0.0092)
    assert not is_hopeless(same, same, 8, margin=0.0)
    assert is_hopeless(same, [math.nan] * 4, 8, margin=1.0)
    made = (search.context.workload, LOSING, torch.device(DEVICE))
    halves, whole = (train_pairs(*made, steps=40, seeds=4, until_hopeless=early) for early in (True, False))
    assert (halves.seeds, whole.seeds) == (2, 4)
    assert "not worse" not in (halves.verdict, whole.verdict)


@pytest.mark.parametrize("rival", [AUTOCAST, Plan.parse("fp32+memory_format=channels_last")])
def test_doubt_has_to_be_worth_something(search: Search, rival: Plan) -> None:
    """A sound plan, or one in fp32, is as fast in the race, so training runs would gain nothing."""
    assert not clear(search, {FP32: 0.002, LIKE_FP32: 0.001, rival: 0.00102}, [FP32, rival], [LIKE_FP32])
    assert noted(search) == {
        LIKE_FP32: "damage 0.11; it had no training runs, since in the race it was not 3 % faster than "
        + in_words(rival)
    }
    assert not runs(search)


def test_plans_of_one_numerics_are_trained_once_and_cleared_together(search: Search) -> None:
    """Training decides for both memory formats, even for a plan that alone would not justify the runs."""
    other = dataclasses.replace(LIKE_FP32, memory_format="channels_last")
    times_s = {FP32: 0.002, LIKE_FP32: 0.001, other: 0.00199}
    assert clear(search, times_s, [FP32], [other, LIKE_FP32]) == [LIKE_FP32, other]
    assert not search.journal.fates
    assert runs(search) == 1


def test_plans_of_one_numerics_are_refused_together(search: Search) -> None:
    other = dataclasses.replace(LOSING, memory_format="channels_last")
    assert not clear(search, {FP32: 0.002, LOSING: 0.001, other: 0.00099}, [FP32], [LOSING, other])
    assert search.journal.refusal(LOSING) == search.journal.refusal(other)
    assert runs(search) == 1


def test_a_plan_is_compared_with_one_that_it_shared_no_round_with(search: Search) -> None:
    """A repaired plan is timed after the race, with fp32 only."""
    contest = raced(search, {FP32: 0.002, LIKE_FP32: 0.001, REPAIRED: 0.0019})
    contest.entries[FP32].times_s += [0.002] * 2
    contest.entries[LIKE_FP32].times_s += [None] * 2
    contest.entries[REPAIRED].times_s = [None] * 4 + [0.0019] * 2
    assert contest.ratio(LIKE_FP32, REPAIRED) is None
    assert contest.times_as_fast(LIKE_FP32, over=REPAIRED) == pytest.approx(1.9)
    assert math.isnan(contest.times_as_fast(LIKE_FP32, over=AUTOCAST))
    assert favourite(contest, [FP32, REPAIRED, LIKE_FP32]) == LIKE_FP32
    search.journal.refuse(LIKE_FP32, "damage 0.11")
    assert cleared(search, [FP32, REPAIRED], [LIKE_FP32]) == [LIKE_FP32]


def test_what_is_no_faster_than_one_that_was_cleared_is_not_trained(search: Search) -> None:
    assert clear(search, {FP32: 0.002, LIKE_FP32: 0.001, LOSING: 0.0011}, [FP32], [LOSING, LIKE_FP32]) == [
        LIKE_FP32
    ]
    assert search.journal.refusal(LOSING).endswith(
        f"in the race it was not 3 % faster than {in_words(LIKE_FP32)}"
    )
    assert runs(search) == 1


def test_without_the_time_for_training_runs_a_plan_stays_in_doubt_and_that_is_said(
    search: Search,
) -> None:
    """This holds with and without ``verify_steps``."""
    for steps in (0, 40):
        settings = dataclasses.replace(search.context.settings, verify_steps=steps)
        search.context = dataclasses.replace(search.context, settings=settings)
        search.journal.undecided.clear()
        assert not clear(search, {FP32: 2.0, LIKE_FP32: 1.0}, [FP32], [LIKE_FP32])
        assert noted(search) == {LIKE_FP32: "damage 0.11"}
        (note,) = search.journal.undecided
        assert "there was no time for training runs to decide" in note
    assert not runs(search)


def test_training_runs_leave_the_final_its_time(search: Search) -> None:
    raced(search, {FP32: 0.02, LIKE_FP32: 0.01})
    assert training_runs(search, LIKE_FP32, after_s=59.0) is None
    assert training_runs(search, LIKE_FP32) is not None


def test_training_runs_that_memory_is_too_small_for_leave_the_plan_in_doubt(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("castwise.lab.search.sound.train_pairs", too_large)
    assert not clear(search, {FP32: 0.002, LIKE_FP32: 0.001}, [FP32], [LIKE_FP32])
    assert noted(search) == {LIKE_FP32: "damage 0.11"}
    (note,) = search.journal.notes
    assert "training runs could not decide: " in note
    monkeypatch.setattr("castwise.lab.search.sound.train_pairs", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        training_runs(search, LIKE_FP32)


def test_the_runs_of_the_race_are_closed_while_training_needs_the_memory(search: Search) -> None:
    search.contest.run([LIKE_FP32], 3)
    assert search.contest._runs
    assert training_runs(search, LIKE_FP32) is not None
    assert not search.contest._runs
    search.contest.run([LIKE_FP32], 1)
    assert search.contest.ratio(LIKE_FP32, FP32) is not None


def test_a_fate_says_in_which_stage_it_was_decided(search: Search) -> None:
    other = Plan.preset("bf16-master")
    with search.journal.stage("race"), search.journal.stage("costs"):
        search.journal.decide(AUTOCAST, Fate("worse", "slow"))
    search.journal.decide(other, Fate("worse", "slow", "final"))
    search.journal.decide(FP32, Fate("spared", ""))
    assert [search.journal.fates[plan].stage for plan in (AUTOCAST, other, FP32)] == ["costs", "final", ""]
    search.journal.refuse(AUTOCAST, "damage 0.3")
    search.journal.decide(AUTOCAST, Fate("spared", "as good"))
    assert search.journal.refusal(AUTOCAST) == "damage 0.3"  # a refusal is final


def test_refused_plans_alone_do_not_say_that_all_else_is_slower(search: Search) -> None:
    found = Search(Context(search.context.workload, search.context.device, search.context.settings))
    found.journal.refuse(AUTOCAST, "damage 0.3")
    assert not _all_slower(found)
    found.journal.decide(Plan.preset("bf16-master"), Fate("worse", "slow"))
    assert _all_slower(found)
