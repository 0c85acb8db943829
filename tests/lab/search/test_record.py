"""The evidence of a search, from a search with results set by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from castwise.core.plans.plan import Plan
from castwise.lab.parity.damage import Estimate
from castwise.lab.parity.parity import ParityResult
from castwise.lab.search.answer import why
from castwise.lab.search.contest import Contest, Entry
from castwise.lab.search.context import Context, Settings
from castwise.lab.search.evidence import Verification
from castwise.lab.search.fates import Fate
from castwise.lab.search.final import Final, ran_as
from castwise.lab.search.finalists import AS_GOOD
from castwise.lab.search.record import evidence
from castwise.lab.search.state import Choice, Search
from castwise.lab.workloads.workload import find_workload
from tests.here import DEVICE

PLAN, FP32 = Plan.preset("bf16-mixed"), Plan.preset("fp32")
FUSED = Plan.parse("bf16-mixed+optimizer=fused")


def finding(value: float, verdict: str) -> ParityResult:
    damage = Estimate(value, value / 2, 2 * value, value, 0.0, 1.0, 0.0, 1.0, 1.0)
    return ParityResult(PLAN, verdict, f"damage {value}", damage, None, (), 0.0, 0.0)  # type: ignore[arg-type]


def searched() -> Search:
    return Search(
        Context(find_workload("sine?size=16"), torch.device(DEVICE), Settings(formats=("fp32", "bf16")))
    )


def test_a_plan_that_training_decided_on_is_shown_as_fresh_batches_found_it() -> None:
    search = searched()
    search.parity[PLAN] = finding(0.2, "fail")
    search.choice = Choice(PLAN, finding(0.3, "fail"))
    search.choice = dataclasses.replace(
        search.choice, verification=Verification(58, 8, 0.00016, 0.00055, 0.0106, 0.0005, "not worse")
    )
    search.complete = True
    chosen, baseline = evidence(search).candidates
    assert (chosen.status, chosen.parity and chosen.parity.value) == ("chosen", 0.3)
    assert (baseline.status, baseline.parity) == ("baseline", None)
    assert chosen.parity is not None
    assert chosen.parity.verdict == "decided by training"
    said = (
        "over 8 pairs of 58 steps its loss differs from fp32's by 0.00016 (at most 0.00055 with 95 % confidence; allowed are 0.011, "
        "0.56 % of the decrease of fp32's loss)"
    )
    assert chosen.parity.reason == f"damage 0.3; {said}"
    assert any(
        line.endswith(f"relative error of an update), so training runs decided: {said}.")
        for line in why(search)
    )
    assert any("The parity test was undecided (damage 0.3; " in line for line in why(search))


def test_a_plan_that_training_cleared_and_that_was_not_taken_is_a_tie_with_what_training_said() -> None:
    search = searched()
    search.parity[PLAN] = finding(0.2, "fail")
    search.training[PLAN] = Verification(58, 8, 0.00016, 0.00055, 0.0106, 0.0005, "not worse")
    search.final = Final([FP32, PLAN], times_s=[[[1.0] * 4, [1.01] * 4], [[1.0] * 4, [1.0] * 4]])
    search.choice = Choice(FP32)
    search.complete = True
    _, row = evidence(search).candidates
    assert row.status == "tie"
    assert row.parity is not None
    assert row.parity.verdict == "decided by training"


def test_a_compiled_plan_that_was_refused_is_not_called_sound() -> None:
    search = searched()
    search.parity[PLAN] = finding(0.001, "pass")
    search.choice = Choice(PLAN, finding(0.001, "pass"))
    for mode, why_not in (
        ("default", Fate("failed", "not compiled: its gradient differs")),
        ("max-autotune", Fate("late", "3 s are left")),
    ):
        search.journal.decide(dataclasses.replace(PLAN, compile=mode), why_not)
    rows = {row.plan: (row.status, row.reason) for row in evidence(search).candidates}
    assert rows[f"{PLAN}+compile=default"] == ("rejected", "not compiled: its gradient differs")
    assert rows[f"{PLAN}+compile=max-autotune"] == ("not tried", "3 s are left")


def test_a_plan_that_was_shown_and_never_tested_is_not_rejected_for_being_as_fast() -> None:
    search = searched()
    slower, other = Plan.parse("bf16-mixed+memory_format=channels_last"), Plan.preset("bf16-master")
    search.parity[PLAN] = finding(0.001, "pass")
    search.choice = Choice(PLAN, finding(0.001, "pass"))
    times = [[[seconds] * 3, [seconds * 1.001] * 3] for seconds in (2.0, 1.0, 1.0, 1.5)]
    search.final = Final([FP32, PLAN, other, slower], times_s=times)
    search.journal.decide(other, Fate("untried", "not tested: the passes were spent"))
    rows = {row.plan: (row.status, row.reason) for row in evidence(search).candidates}
    assert rows[str(other)][0] == "not tried"
    assert rows[str(other)][1].startswith("not tested: the passes were spent; in the final: as fast as the ")
    assert rows[str(slower)][0] == "rejected"
    assert rows[str(slower)][1].startswith("not faster: takes 1.50 (")


def test_the_time_of_a_step_and_the_speed_tell_the_same() -> None:
    """A plan that left early was timed while the machine was fast; its time is shown relative to the same starts."""
    search = searched()
    early, late = [0.5, 0.52, 0.54], [1.0, 1.04, 1.08]
    search.final = Final(
        [FP32, PLAN], times_s=[[[2 * t for t in early], *[[2 * t for t in late]] * 3], [early]]
    )
    rows = {row.plan: row for row in evidence(search).candidates}
    mine, base = rows[str(PLAN)], rows[str(FP32)]
    assert mine.speedup is not None
    assert mine.time is not None
    assert base.time is not None
    assert base.time.median_s / mine.time.median_s == pytest.approx(mine.speedup.value)
    assert mine.time.q1_s / mine.time.median_s == pytest.approx(0.51 / 0.52)


@pytest.mark.parametrize("why", [ran_as(FUSED), Fate("spared", f"not in the final: bf16-mixed {AS_GOOD}")])
def test_a_sound_plan_that_did_not_come_to_the_final_for_another_as_good_is_not_rejected(why: Fate) -> None:
    search = searched()
    search.parity[PLAN] = finding(0.001, "pass")
    search.race = Contest(search.context.workload, search.context.device)
    other = Plan.preset("bf16-master")
    for plan in (PLAN, other):
        search.contest.entries[plan] = Entry(plan, [1.0])
        search.journal.decide(plan, why)
    search.parity[other] = finding(0.3, "fail")
    search.journal.refuse(other, "damage 0.3")
    rows = {row.plan: (row.status, row.reason) for row in evidence(search).candidates}
    assert rows[str(PLAN)] == ("sound", why.reason)
    assert rows[str(other)] == ("rejected", "damage 0.3")


@pytest.mark.parametrize("verdict", ["pass", "fail"])
def test_training_decides_only_what_gradients_leave_open(verdict: str) -> None:
    search = searched()
    search.choice = Choice(PLAN, finding(0.001 if verdict == "pass" else 0.3, verdict))
    trained = Verification(58, 8, 0.1, 0.2, 0.0106, 0.0005, "not worse" if verdict == "pass" else "not shown")
    search.choice = dataclasses.replace(search.choice, verification=trained)
    chosen = evidence(search).candidates[0]
    assert chosen.parity is not None
    assert chosen.parity.verdict == verdict


@pytest.mark.parametrize(("verdict", "status"), [("pass", "sound"), ("undecided", "rejected")])
def test_other_plans_are_sound_if_they_passed_and_nothing_spoke_against_them(
    verdict: str, status: str
) -> None:
    search = searched()
    search.parity[PLAN] = finding(math.inf if verdict != "pass" else 0.001, verdict)
    assert {c.plan: c.status for c in evidence(search).candidates} == {
        "fp32": "baseline",
        "bf16-mixed": status,
    }
    search.journal.decide(PLAN, Fate("failed", "out of memory"))
    assert [(c.status, c.reason) for c in evidence(search).candidates][1] == ("rejected", "out of memory")


def test_the_record_says_what_the_plan_computes_in_and_the_lines_it_was_held_to() -> None:
    search = searched()
    search.choice = Choice(PLAN, finding(0.001, "pass"))
    record = evidence(search)
    assert (record.compute, record.goal, record.formats) == ("bf16", "time", ("fp32", "bf16"))
    assert dict(record.lines) == {"pass": 0.01, "fail": 0.1, "adam_pass": 0.03, "adam_fail": 0.3}
    assert not {"goal", "formats"} & set(record.settings)


def test_where_memory_is_what_counts_it_is_what_speaks_against_a_plan() -> None:
    """Regression: fp32's row said "as fast as the chosen plan", which was slower, and seven rows had no reason."""
    true, master = Plan.preset("bf16-true"), Plan.preset("bf16-master")
    search = Search(
        Context(
            find_workload("sine?size=16"),
            torch.device(DEVICE),
            Settings(formats=("fp32", "bf16"), goal="memory"),
        )
    )
    search.peaks = {true: 1000, FP32: 2600, PLAN: 1300, master: 1001}
    search.final = Final([FP32, true], times_s=[[[1.0] * 4] * 2, [[1.3] * 4] * 2])
    search.choice = Choice(true, finding(0.001, "pass"))
    search.complete = True
    reasons = {Plan.parse(row.plan): row.reason for row in evidence(search).candidates}
    assert reasons[FP32] == "takes 160 % more memory"
    assert reasons[PLAN] == "takes 30 % more memory"
    assert reasons[master] == "takes as much memory, and is no simpler"


def test_a_plan_that_failed_in_a_later_start_of_the_final_is_no_tie() -> None:
    """Regression: a plan that failed after its first start was listed as equally fast within the error."""
    search = searched()
    search.parity[PLAN] = finding(0.001, "pass")
    search.final = Final([FP32, PLAN], times_s=[[[1.0] * 4, [1.01] * 4], [[1.0] * 4]], failed={PLAN})
    search.journal.decide(PLAN, Fate("failed", "gradients are not finite", "final"))
    search.complete = True
    rows = {row.plan: (row.status, row.reason) for row in evidence(search).candidates}
    assert rows[str(PLAN)] == ("rejected", "gradients are not finite")
    assert not any("as fast" in sentence for sentence in evidence(search).why)


@pytest.mark.parametrize("refused", ["bf16-mixed+optimizer=fused", "bf16-mixed+host_memory=keep"])
def test_what_speaks_against_numerics_speaks_against_each_plan_of_them(refused: str) -> None:
    """Regression: the second look refused a plan, but its twin with another optimizer kernel stayed sound."""
    search = searched()
    search.parity[PLAN] = finding(5.0, "fail")
    search.final = Final([FP32, PLAN], times_s=[[[1.0] * 4, [1.01] * 4], [[1.0] * 4, [1.01] * 4]])
    search.journal.decide(PLAN, Fate("spared", "as good"))
    search.journal.refuse(Plan.parse(refused), "after 4 steps: damage 5")
    search.complete = True
    rows = {row.plan: (row.status, row.reason) for row in evidence(search).candidates}
    assert rows[refused] == rows[str(PLAN)] == ("rejected", "after 4 steps: damage 5")
    search.journal.clear(PLAN)
    assert not search.journal.refusal(PLAN)


def test_a_round_that_ended_in_its_middle_leaves_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: if some plans had one time more than others, the whole record was lost silently."""
    search = searched()
    search.race = Contest(search.context.workload, torch.device(DEVICE))
    other = Plan.preset("bf16-master")
    for plan, times in ((FP32, [1.0, 1.0]), (PLAN, [0.5, 0.5]), (other, [0.4])):
        search.race.entries[plan] = Entry(plan, list(times))
    rows = {row.plan: row.reason for row in evidence(search).candidates}
    assert "2.50 times as fast as fp32" in rows[str(other)]
