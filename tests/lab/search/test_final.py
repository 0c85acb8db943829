"""The final: real starts of plans on tiny models, and its text for made-up times."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from castwise import Plan, Workload
from castwise.core.plans.words import in_words
from castwise.lab.parity.parity import ParityTest
from castwise.lab.parity.probes import Prober
from castwise.lab.passes.regions import find_parts
from castwise.lab.search import decision, starts
from castwise.lab.search.axes import AUTOCAST, FP32
from castwise.lab.search.contest import LATE, Entry
from castwise.lab.search.context import Context, Settings
from castwise.lab.search.decision import ROUNDS, Decision
from castwise.lab.search.fastest import each_numerics_first, formats_not_reached
from castwise.lab.search.fates import Fate
from castwise.lab.search.final import Final
from castwise.lab.search.part_costs import Cost
from castwise.lab.search.reference import refer
from castwise.lab.search.sound import low_share
from castwise.lab.search.state import Search
from castwise.lab.timing.processes import NotThereError
from tests.lab.search.conftest import final_of, raced, within
from tests.lab.search.test_choices import CPU, SlowWhenLow, loss, workload
from tests.soak import some

FUSED = Plan.parse("bf16-mixed+optimizer=fused")
REGION = Plan.parse("bf16-mixed+regions.0=fp32")
LOWEST = Plan.parse("bf16-mixed+regions.2=fp32")
"""A plan under which :class:`SlowWhenLow` is slow, since its inputs are low."""


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "ROUNDS", 3)


def why(final: Final, plan: Plan, chosen: Plan) -> str:
    """Return the final's reason for not choosing a plan."""
    fate = final.fate(plan, chosen)
    return "" if fate is None else fate.reason


def timed(speeds: dict[Plan, float], **options: object) -> Final:
    """Return a final with the given seconds per step and 0.1 % of noise."""
    times = [
        [[seconds * (1.0 + 0.001 * ((s + r) % 2)) for r in range(3)] for s in range(3)]
        for seconds in speeds.values()
    ]
    return Final(list(speeds), times_s=times, **options)  # type: ignore[arg-type]


def test_plans_are_started_until_the_slow_one_is_known(searching: Callable[[Workload], Search]) -> None:
    search = searching(workload(SlowWhenLow))
    final = final_of(search, [AUTOCAST], time.monotonic() + 60.0)
    assert final.decision is not None
    assert (final.decision.chosen, final.decision.decided) == (0, True)
    assert next(final.in_turn([FP32, AUTOCAST])) == FP32
    ratio = final.ratio(AUTOCAST, FP32)
    assert ratio is not None
    assert ratio.high < 1.0
    assert 2 <= ratio.n <= final.starts  # a plan known to be slower leaves
    assert not final.doubt(FP32)
    assert final.losses[FP32]
    assert len(final.losses[FP32]) == len(final.losses[AUTOCAST])


def test_what_fails_in_a_process_of_its_own_is_out_with_its_reason(
    searching: Callable[[Workload], Search],
) -> None:
    class Fragile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is torch.bfloat16:
                raise NotImplementedError("no kernel for bf16")
            return x * 2

    search = searching(workload(Fragile))
    final = final_of(search, [AUTOCAST], time.monotonic() + 60.0)
    assert list(final.in_turn([FP32, AUTOCAST])) == [FP32]
    assert search.journal.fate(AUTOCAST) == Fate("failed", "not supported by this device: no kernel for bf16")


def test_a_fault_of_the_code_comes_out_of_its_process(searching: Callable[[Workload], Search]) -> None:
    class Faulty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is torch.bfloat16:
                raise IndexError("no such row")
            return x * 2

    with pytest.raises(IndexError, match="no such row"):
        final_of(searching(workload(Faulty)), [AUTOCAST], time.monotonic() + 60.0)


def test_equal_plans_have_equal_losses(
    searching: Callable[[Workload], Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision, "MOST", 1)  # only the first start records losses
    same = Plan.parse("fp32+fp32_matmul=ieee")
    final = final_of(searching(workload()), [same, AUTOCAST], time.monotonic() + 60.0)
    assert final.losses[same] == final.losses[FP32]
    assert len(final.losses[AUTOCAST]) == len(final.losses[FP32])


def test_a_workload_that_cannot_be_sent_is_timed_here_and_that_is_said(
    searching: Callable[[Workload], Search],
) -> None:
    timed_here(searching(dataclasses.replace(workload(SlowWhenLow), loss=threading_loss())), "cannot be sent")


@pytest.mark.parametrize("of", some(["loss", "model"], 2))
def test_a_workload_that_another_process_cannot_run_is_timed_here_and_that_is_said(
    searching: Callable[[Workload], Search], monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """The module exists only in this process, or the model needs state that was set up only here."""
    job, here = workload(SlowWhenLow), os.getpid()

    def model() -> nn.Module:
        if os.getpid() != here:
            raise AttributeError("nothing was set up")
        return job.model()

    module = types.ModuleType("only_here")
    exec("def loss(model, batch): return model(batch[0]).square().mean()", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    made = dataclasses.replace(job, **{of: {"loss": module.loss, "model": model}[of]})
    timed_here(searching(made), "does not run in another process")


def timed_here(search: Search, why: str) -> None:
    final = final_of(search, [AUTOCAST], time.monotonic() + 60.0)
    assert next(final.in_turn([FP32, AUTOCAST])) == FP32
    assert final.starts == 1
    (note,) = search.journal.notes
    assert note.startswith(f"The finalists were timed once, in one process: workload 'tiny' {why}")
    assert "file.py:attribute" in note


def test_refused_plans_make_room_for_the_next() -> None:
    final = timed({FP32: 2.0, AUTOCAST: 1.0, REGION: 0.5})
    assert list(final.in_turn([FP32, AUTOCAST, REGION])) == [REGION, AUTOCAST, FP32]


def test_what_left_for_the_speed_of_a_refused_plan_is_chosen_before_fp32() -> None:
    """Such a plan has fewer starts than fp32, which is started to the end."""
    final = timed({FP32: 2.0, AUTOCAST: 1.0, REGION: 0.5})
    del final.times_s[1][2:]
    assert list(final.in_turn([FP32, AUTOCAST, REGION])) == [REGION, AUTOCAST, FP32]


def test_once_a_plan_is_refused_the_others_are_started_until_it_is_decided_between_them(
    searching: Callable[[Workload], Search],
) -> None:
    """Regression: fp32 was chosen after two starts, though a quarter slower with 95 % (but not 99 %) confidence."""
    search = searching(workload(SlowWhenLow))
    within(search, 600.0)
    final = final_of(search, [LOWEST, AUTOCAST], time.monotonic())  # no time after two starts
    assert final.starts == 2
    assert final.decision is not None
    before, steps = final.decision, search.contest.steps
    turns = final.in_turn([FP32, AUTOCAST, LOWEST])
    assert next(turns) == FP32
    next(turns)  # only fp32 is lossless, so no time is spent on more starts
    assert final.starts == 2

    final = final_of(
        search, [same := Plan.parse("fp32+memory_format=channels_last"), AUTOCAST], time.monotonic()
    )
    assert final.starts == 2
    final.go_on([FP32, same], LOWEST.__eq__)
    assert final.starts > 2
    assert len(final.seconds(FP32)) == len(final.seconds(same)) > len(final.seconds(LOWEST))
    assert before.chosen == 0
    assert search.contest.steps > steps


def test_with_a_refused_plan_those_of_its_numerics_are_no_longer_in_it() -> None:
    """Regression: such plans were started up to twelve more times, only to be refused without a test."""
    final = timed({FP32: 2.0, AUTOCAST: 1.0, FUSED: 0.9, REGION: 0.5})
    went_on: list[list[Plan]] = []
    final.go_on = lambda left, _refused: went_on.append(list(left))
    refused: dict[Plan, str] = {}
    turns = final.in_turn([FP32, AUTOCAST, FUSED, REGION], refused.get)
    assert next(turns) == REGION
    refused.update(dict.fromkeys([REGION], "damage"))
    assert next(turns) == FUSED
    refused.update(dict.fromkeys([AUTOCAST, FUSED], "damage"))
    assert list(turns) == [FP32]
    assert went_on == [[FP32, AUTOCAST, FUSED]]


def test_a_process_that_dies_in_a_further_start_loses_no_result(
    searching: Callable[[Workload], Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    search = searching(workload(SlowWhenLow))
    same = Plan.parse("fp32+memory_format=channels_last")
    final = final_of(search, [same, AUTOCAST], time.monotonic())
    before = final.times_s

    def gone(*_: object, **__: object) -> None:
        raise NotThereError("its process was ended by signal 9")

    monkeypatch.setattr(starts, "race_apart", gone)
    final.decision = None
    final.go_on([FP32, same], AUTOCAST.__eq__)
    assert final.times_s == before
    assert search.journal.notes == [
        "The finalists were not started again: its process was ended by signal 9."
    ]
    assert list(final.in_turn([FP32, same, AUTOCAST], AUTOCAST.__eq__))


def test_further_starts_are_a_stage_of_the_search(searching: Callable[[Workload], Search]) -> None:
    search = searching(workload(SlowWhenLow))
    final = final_of(
        search, [same := Plan.parse("fp32+memory_format=channels_last"), AUTOCAST], time.monotonic()
    )
    final.go_on([FP32, same], AUTOCAST.__eq__)
    assert [stage.name for stage in search.journal.stages] == ["final"]
    assert search.journal.stages[0].steps


def test_ties_go_to_the_simpler_plan() -> None:
    speeds = {FP32: 2.0, AUTOCAST: 1.0, REGION: 0.99}
    assert next(timed(speeds).in_turn([FP32, AUTOCAST, REGION])) == AUTOCAST


def test_reasons_name_what_the_interval_knows() -> None:
    final = timed({FP32: 2.0, AUTOCAST: 1.0, FUSED: 0.98, REGION: 1.0})
    assert why(final, FP32, AUTOCAST).startswith("not faster: takes 2.00 (")
    assert why(final, FUSED, AUTOCAST) == "at most 3 % faster than the chosen plan, which is simpler"
    assert why(final, REGION, AUTOCAST) == "as fast as the chosen plan, which is simpler"
    assert why(final, Plan.preset("bf16-true"), AUTOCAST) == ""
    noisy = Final([AUTOCAST, REGION], times_s=[[[1.0] * 3, [1.3] * 3], [[1.2] * 3, [1.1] * 3]])
    assert why(noisy, REGION, AUTOCAST) == "not known to be slower than the chosen plan, which is simpler"


def test_a_machine_too_noisy_to_decide_is_said_with_how_much_is_open() -> None:
    times = {FP32: 2.0, AUTOCAST: 1.0, REGION: 0.965}
    final = timed(times, decision=Decision(1, decided=False))
    assert final.doubt(AUTOCAST) == (
        f"Undecided after 3 starts, because the machine is too noisy: {in_words(REGION)} may be up to 4 % faster than the chosen plan. A longer "
        "--budget, and an idle machine, would decide it."
    )
    assert "--budget" in final.doubt(AUTOCAST)
    few = Final(list(times), times_s=[starts[:2] for starts in final.times_s], decision=final.decision)
    assert "after 2 starts, because the time was too short: " in few.doubt(AUTOCAST)
    assert not final.doubt(REGION)  # nothing is undecided for this one
    wild = Final(
        list(times),
        times_s=[[[s], [9.0 * s]] for s in (2.0, 1.0)] + [[[2.0], [0.9]]],
        decision=final.decision,
    )
    assert f"{in_words(REGION)} may be faster than the chosen plan. " in wild.doubt(AUTOCAST)
    assert not timed(times, decision=Decision(1, decided=True)).doubt(AUTOCAST)


@pytest.mark.parametrize("why", ["refused", "failed", "beside"])
def test_nothing_is_open_about_a_plan_that_cannot_be_chosen(why: str) -> None:
    final = timed({FP32: 2.0, AUTOCAST: 1.0, REGION: 0.96}, decision=Decision(1, decided=False))
    assert final.doubt(AUTOCAST)
    if why == "failed":
        final.failed.add(REGION)
    if why == "beside":
        final.choice = {FP32, AUTOCAST}
    assert not final.doubt(AUTOCAST, lambda plan: why == "refused" and plan == REGION)


def test_a_plan_that_failed_in_a_later_start_is_not_chosen_for_its_first() -> None:
    final = timed({FP32: 2.0, AUTOCAST: 1.0, REGION: 0.5}, failed={REGION})
    assert list(final.in_turn([FP32, AUTOCAST, REGION])) == [AUTOCAST, FP32]
    assert final.fate(REGION, AUTOCAST) is None  # the journal has the reason


def test_a_plan_that_is_named_twice_is_no_evidence() -> None:
    """Regression: the zero difference between a plan and itself made all intervals narrower."""
    times = [[[0.84] * 3, [0.86] * 3], [[0.71] * 3, [0.67] * 3]]
    final = Final([FP32, AUTOCAST], times_s=times)
    ratio = final.ratio(AUTOCAST, FP32)
    assert ratio is not None
    assert ratio.low < 1.0
    assert list(final.in_turn([FP32, FP32, AUTOCAST])) == [FP32, AUTOCAST]


def test_what_left_since_it_is_slower_does_not_come_back_as_the_machine_gets_noisy() -> None:
    quiet = {FP32: 1.07, AUTOCAST: 1.0, REGION: 1.0}
    times = [[[seconds] * 3 for _ in range(2)] for seconds in quiet.values()]
    for plan, luck in ((1, (1.2, 0.8, 1.1)), (2, (0.85, 1.2, 0.9))):
        times[plan] += [[one] * 3 for one in luck]
    final = Final(list(quiet), times_s=times)
    assert list(final.in_turn([FP32, AUTOCAST, REGION])) == [AUTOCAST, REGION, FP32]


def test_where_all_run_in_one_process_they_run_all_rounds_though_the_race_is_over(
    searching: Callable[[Workload], Search],
) -> None:
    search = searching(dataclasses.replace(workload(), loss=threading_loss()))
    search.contest._deadline = time.monotonic()
    final = final_of(search, [AUTOCAST], time.monotonic() + 60.0)
    assert not final.apart
    assert len(final.seconds(AUTOCAST)) == 2 * starts.ROUNDS
    late = final_of(search, [AUTOCAST], time.monotonic())
    assert len(late.seconds(AUTOCAST)) == 1


def threading_loss() -> Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]:
    """Return a loss that cannot be sent to another process."""
    lock = threading.Lock()

    def locked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with lock:
            return loss(model, batch)

    return locked


def test_a_longer_budget_is_advised_only_where_it_would_help() -> None:
    times = {FP32: 2.0, AUTOCAST: 1.0, REGION: 0.96}
    open_ = Decision(1, decided=False)
    rounds = [[[s * (1 + 0.1 * (i % 2)) for i in range(2 * ROUNDS)]] for s in times.values()]
    here = Final(list(times), times_s=rounds, decision=open_, apart=False)
    assert here.doubt(AUTOCAST).endswith("An idle machine would decide it.")
    cut = Final(list(times), times_s=[[one[0][:3]] for one in rounds], decision=open_, apart=False)
    assert "the time was too short" in cut.doubt(AUTOCAST)
    assert "--budget" in cut.doubt(AUTOCAST)
    starts = [[[s * (1 + 0.1 * (i % 2))] for i in range(decision.MOST)] for s in times.values()]
    starts[2].reverse()
    said = Final(list(times), times_s=starts, decision=open_).doubt(AUTOCAST)
    assert "--budget" not in said
    assert "An idle machine would decide it." in said


def test_a_simpler_plan_that_is_known_to_be_slower_than_another_says_so() -> None:
    """The reason holds even if the plan may be as fast as the chosen one."""
    rounds = {FP32: [1.0, 1.0, 1.0], FUSED: [1.0, 0.9, 1.02], REGION: [0.8, 0.81, 0.8]}
    final = Final(list(rounds), times_s=[[[time] * 3 for time in times] for times in rounds.values()])
    ratio = final.ratio(FUSED, FP32)
    assert ratio is not None
    assert ratio.low < 1.0
    assert why(final, FP32, FUSED).startswith(f"not faster: {in_words(REGION)} is 1.2")


def test_what_is_passed_over_by_the_race_says_so_and_the_answer_has_no_direction() -> None:
    speeds = {FP32: [1.6, 1.6], AUTOCAST: [1.0, 1.55]}
    times = [[[time] * 3 for time in starts] for starts in speeds.values()]
    behind = {(FP32, AUTOCAST): 1.63}
    final = Final([*speeds], times_s=times, behind=behind, decision=Decision(1, decided=False))
    assert next(final.in_turn([*speeds])) == AUTOCAST
    assert why(final, FP32, AUTOCAST) == "not faster: bf16-mixed was 1.63 times as fast in the race"
    assert next(Final([*speeds], times_s=times).in_turn([*speeds])) == FP32


def test_a_race_that_the_final_contradicts_is_not_spoken_of() -> None:
    times = [[[1.6] * 3] * 2, [[1.2] * 3, [2.1] * 3], [[1.0] * 3, [2.0] * 3]]
    final = Final([FP32, AUTOCAST, REGION], times_s=times, decision=Decision(0, decided=False))
    final.behind = {(FP32, AUTOCAST): 1.3}
    assert next(final.in_turn(final.plans)) == FP32
    assert "Undecided " in final.doubt(FP32)


def test_what_failed_is_not_named_as_ahead_in_the_race_and_the_chosen_plan_first() -> None:
    times = [[[1.6] * 3] * 2, [[1.0] * 3, [1.55] * 3], [[1.0] * 3, [1.55] * 3]]
    final = Final(
        [FP32, AUTOCAST, REGION], times_s=times, behind={(FP32, REGION): 1.7, (FP32, AUTOCAST): 1.6}
    )
    assert why(final, FP32, AUTOCAST) == "not faster: bf16-mixed was 1.60 times as fast in the race"
    final.failed.add(REGION)
    del final.behind[FP32, AUTOCAST]
    assert "race" not in why(final, FP32, AUTOCAST)


def test_who_was_behind_in_the_race_is_known_of_plans_as_they_raced(
    searching: Callable[[Workload], Search],
) -> None:
    search = searching(workload())
    compiled = Plan.parse("bf16-mixed+compile=default")
    for plan, seconds in {FP32: 1.0, AUTOCAST: 0.8, REGION: 0.97}.items():
        search.contest.entries[plan] = Entry(plan, times_s=[seconds] * 8)
    found = starts._behind_in_race(search.contest, [FP32, FUSED, REGION, compiled, Plan.parse("bf16-true")])
    assert found == {(FP32, FUSED): pytest.approx(1.25), (REGION, FUSED): pytest.approx(0.97 / 0.8)}


@pytest.mark.parametrize(("budget_s", "starts"), [(60.0, 2), (1e-3, 1)])
def test_the_finalists_are_started_twice_though_the_time_is_over_but_not_far_beyond_it(
    budget_s: float, starts: int, searching: Callable[[Workload], Search]
) -> None:
    """Regression: on a machine with eight times its load, a budget of 15 s took 44 to 121 s."""
    search = searching(workload())
    within(search, budget_s)
    final = final_of(search, [AUTOCAST], time.monotonic())
    assert final.starts == starts
    assert final.decision is not None
    assert not (starts == 1 and final.decision.decided)


def test_a_race_that_ends_early_has_seen_something_of_all_numerics() -> None:
    fused, low, low_fused = map(
        Plan.parse, ("fp32+optimizer=fused", "bf16-master", "bf16-master+optimizer=fused")
    )
    order = each_numerics_first([FP32, fused, low, low_fused, FUSED, AUTOCAST])
    assert order == [AUTOCAST, FP32, low, fused, FUSED, low_fused]


def test_a_format_that_there_was_no_time_for_leaves_the_search_incomplete(
    searching: Callable[[Workload], Search],
) -> None:
    search = searching(workload())
    contest = raced(search, {FP32: 2.0})
    for plan in (AUTOCAST, FUSED):
        contest.entries[plan] = Entry(plan, left=LATE)
    assert formats_not_reached(search) == ["bf16"]
    contest.entries[FUSED] = Entry(
        FUSED, left=Fate("worse", "not faster: its first steps took 35 times as long")
    )
    assert formats_not_reached(search) == []  # a format that is this slow counts as tried
    contest.entries[FUSED] = Entry(FUSED, left=LATE)
    raced(search, {AUTOCAST: 1.0})
    assert formats_not_reached(search) == []


def test_how_much_of_a_model_runs_low() -> None:
    search = Search(Context(workload(SlowWhenLow), CPU, Settings(formats=("fp32", "bf16"))))
    model = search.context.workload.model()
    batch = next(iter(search.context.workload.batches(0)))
    parts = find_parts(model, lambda: search.context.workload.loss(model, batch))
    test = ParityTest(
        Prober(model, search.context.workload.loss, iter(search.context.workload.batches(0)), CPU)
    )
    search.begun = dataclasses.replace(refer(search.context), parts=parts, test=test)
    assert low_share(search.reference, {}, AUTOCAST) == 1.0  # no part was timed
    assert [part.pattern for part in parts] == ["0", "1", "2"]
    search.costs = {"0": Cost({"fp32": 3.0}), "1": Cost({"fp32": 0.2}), "2": Cost({"fp32": 0.8})}
    shares = {
        "bf16-mixed": 1.0,
        "bf16-mixed+regions.0=fp32": 0.25,
        "bf16-mixed+regions.*=fp32": 0.0,
        "fp32": 0.0,
    }
    assert {
        line: low_share(search.reference, search.costs, Plan.parse(line)) for line in shares
    } == pytest.approx(shares)
    nested = Plan.parse("bf16-mixed+regions.type:Sequential=fp32+regions.2=bf16")
    assert low_share(search.reference, search.costs, nested) == pytest.approx(0.2)
