"""The text of the answer, from searches with times set by hand."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from castwise.core.plans.plan import Plan
from castwise.lab.parity.damage import Estimate
from castwise.lab.parity.parity import ParityResult
from castwise.lab.search.answer import advice, answer, tied, why
from castwise.lab.search.axes import AUTOCAST, FP32
from castwise.lab.search.contest import LATE, Contest, Entry
from castwise.lab.search.context import Context, Settings
from castwise.lab.search.decision import Decision
from castwise.lab.search.fates import Fate
from castwise.lab.search.final import Final
from castwise.lab.search.record import evidence
from castwise.lab.search.state import Choice, Search
from castwise.lab.workloads.workload import find_workload
from tests.here import DEVICE
from tests.lab.search.conftest import BEGUN

LEAN = Plan.parse("fp32+memory_format=channels_last+optimizer=fused")
SOUND = ParityResult(AUTOCAST, "pass", "", Estimate(0.001, 0.0005, 0.002, 0.001, 0.0, 1.0, 0.0, 1.0, 1.0), None, (), 0.0, 0.0)  # fmt: skip


def searched(chosen: Plan, times: dict[Plan, float], **settings: object) -> Search:
    """Return a finished search with these seconds per step, which vary by up to 0.2 % between starts."""
    search = Search(Context(find_workload("sine?size=16"), torch.device(DEVICE), Settings(**settings)))  # type: ignore[arg-type]
    search.begun, search.complete = BEGUN, True
    starts = [[[t * (1 + 0.001 * ((i + s) % 3))] * 4 for s in range(4)] for i, t in enumerate(times.values())]
    search.final = Final(list(times), times_s=starts)
    search.choice = Choice(chosen, SOUND if chosen.compute != "fp32" else None)
    return search


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("fp32", "Stay in fp32"),
        (str(LEAN), "Stay in fp32, switch to channels_last and the fused AdamW"),
        ("tf32", "Stay in fp32, let fp32 products and convolutions use tf32 internally"),
        ("fp32+fp32_matmul=bf16", "Stay in fp32, let fp32 products use bf16 internally"),
        ("bf16-mixed", "Train in bf16 by autocast"),
        ("bf16-mixed+compile=default", "Train in bf16 by autocast, compile the model"),
        ("bf16-master+optimizer=fused", "Train in bf16 with bf16 parameters and fp32 masters, switch to the fused AdamW"),
        (
            "bf16-mixed+ops.scaled_dot_product_attention=unfused+regions.head=fp32+regions.norm=fp32",
            "Train in bf16 by autocast, run scaled_dot_product_attention unfused, keep head and norm in fp32",
        ),
        (
            f"bf16-mixed+{'+'.join(f'regions.{n}=fp32' for n in 'abcd')}",
            "Train in bf16 by autocast, keep 4 regions (a, b, c, ...) in fp32",
        ),
    ],
)  # fmt: skip
def test_a_plan_is_said_as_what_to_do(line: str, said: str) -> None:
    assert advice(Plan.parse(line), "AdamW") == said


def test_what_to_do_comes_first_then_speed_and_memory() -> None:
    search = searched(LEAN, {FP32: 0.129, LEAN: 0.1, AUTOCAST: 0.15})
    search.peaks = {FP32: 1000, LEAN: 1001}
    assert re.fullmatch(
        r"Stay in fp32, switch to channels_last and the fused AdamW: 1\.29 times as fast \(1\.2\d-1\.\d+\), same memory\.",
        answer(search),
    )
    search.peaks[LEAN] = 700
    assert answer(search).endswith(", 30 % less memory.")
    assert [said.split(" (")[0] for said in why(search)] == [
        "Compared with one-line torch.autocast in bf16 it is 1.50 times as fast",
        "It computes in fp32 throughout, so its gradients are fp32's.",
    ]


@pytest.mark.parametrize("ratio", [0.97, 1.0, 1.005, 1.02, 1.3])
def test_an_interval_that_contains_1_has_no_direction(ratio: float) -> None:
    search = searched(AUTOCAST, {FP32: 0.1 * ratio, AUTOCAST: 0.1, LEAN: 0.1 * ratio})
    for said in (answer(search), *why(search)):
        for low, high in re.findall(r"\(([\d.]+)(?:-| to )([\d.]+)\)", said):
            if float(low) <= 1.0 <= float(high):
                assert "faster" not in said
                assert "times as fast" not in said


def test_what_was_measured_by_itself_is_said_where_whole_steps_do_not_show_it() -> None:
    fused = Plan.parse("fp32+optimizer=fused")
    search = searched(fused, {FP32: 0.1, fused: 0.1})
    assert search.final is not None
    search.final.saves = 0.04
    assert answer(search).startswith(
        "Stay in fp32, switch to the fused AdamW: equally fast within the error ("
    )
    search.final.choice = {fused}
    said = "Stay in fp32, switch to the fused AdamW: timed alone, the change saves 4 % of a step; whole steps are equally fast within the error"
    assert answer(search).startswith(said)
    shown = searched(fused, {FP32: 0.12, fused: 0.1})
    assert shown.final is not None
    shown.final.choice = {fused}
    assert answer(shown).startswith("Stay in fp32, switch to the fused AdamW: 1.20 times as fast (")
    more = searched(LEAN, {FP32: 0.1, LEAN: 0.1})
    assert more.final is not None
    more.final.choice = {LEAN}
    assert "by itself" not in answer(more)  # the memory format changes too


def test_what_the_race_decided_is_said_in_a_sentence_of_its_own() -> None:
    said = "In the race, where all plans trained in one process, it was 1.63 times as fast as fp32."
    known, search = (searched(AUTOCAST, {FP32: 0.16, AUTOCAST: 0.1}) for _ in range(2))
    assert known.final is not None
    assert search.final is not None
    known.final.behind = search.final.behind = {(FP32, AUTOCAST): 1.63}
    assert said not in why(known)
    search.final.times_s[1][0] = [0.2] * 4
    assert re.search(r"within the error \(0\.\d+-[\d.]+\)\.", answer(search))
    assert why(search)[0] == said


def test_fp32_is_not_called_the_fastest_of_one() -> None:
    record = evidence(searched(FP32, {FP32: 0.1}))
    assert record.answer == "Stay in fp32 as it is: no other plan was timed to the end."
    assert record.candidates[0].reason == "no other plan was timed to the end"
    slow = searched(FP32, {FP32: 0.1})
    slow.race = Contest(slow.context.workload, slow.context.device)
    slow.contest.entries[AUTOCAST] = Entry(
        AUTOCAST, left=Fate("worse", "not faster: its first steps took 39 times as long")
    )
    assert evidence(slow).answer == "Stay in fp32 as it is: every other plan that was tried is slower."
    del slow.contest.entries[AUTOCAST]
    dropped = "timed module by module, it is no faster than fp32"
    slow.journal.decide(AUTOCAST, Fate("worse", dropped))  # decided before the race
    assert evidence(slow).answer == "Stay in fp32 as it is: every other plan that was tried is slower."
    slow.contest.entries[AUTOCAST] = Entry(AUTOCAST, left=LATE)
    assert evidence(slow).answer == "Stay in fp32 as it is: no other plan was timed to the end."
    del slow.contest.entries[AUTOCAST]
    slow.journal.decide(LEAN, LATE)
    assert evidence(slow).answer == "Stay in fp32 as it is: no other plan was timed to the end."
    del slow.journal.fates[LEAN]
    slow.contest.entries[LEAN] = Entry(LEAN, left=Fate("failed", "out of memory"))
    assert evidence(slow).answer == "Stay in fp32 as it is: no other plan was timed to the end."
    unmeasured = searched(FP32, {FP32: 0.1}, goal="memory")
    assert answer(unmeasured).endswith(": no other plan's peak memory was measured; use a longer --budget.")
    large = searched(FP32, {FP32: 0.1, AUTOCAST: 0.1}, goal="memory")
    assert answer(large) == answer(unmeasured)
    large.peaks = {FP32: 1000, AUTOCAST: 1100}
    assert answer(large) == "Stay in fp32 as it is: no sound plan has a smaller peak memory."
    unknown = searched(FP32, {FP32: 0.1, AUTOCAST: 0.1})
    assert unknown.final is not None
    unknown.parity[AUTOCAST] = SOUND
    unknown.final.times_s = [[[0.1] * 3, [0.3] * 3], [[0.3] * 3, [0.1] * 3]]
    assert evidence(unknown).candidates[0].reason != "the fastest sound plan"
    slower = searched(FP32, {FP32: 0.1, AUTOCAST: 0.2})
    assert evidence(slower).candidates[0].reason == "the fastest sound plan"
    assert answer(slower) == "Stay in fp32 as it is: no sound plan is known to be faster."
    slower.journal.refuse(AUTOCAST, "damage 0.3 is above 0.1")
    assert answer(slower) == "Stay in fp32 as it is: no other plan that was timed was shown to be sound."
    slower.complete = False
    assert answer(slower) == "Stay in fp32 for now: the search ended before it could choose."


def test_an_interval_without_ends_is_no_speed() -> None:
    """Regression: after one round the answer was "equally fast within the error (0.00-inf)"."""
    search = searched(LEAN, {FP32: 0.1, LEAN: 0.1, AUTOCAST: 0.1})
    assert search.final is not None
    search.final.times_s = [[one[0][:1]] for one in search.final.times_s]
    assert answer(search).endswith(": at an unknown speed, since its times vary too much.")
    assert not any("autocast" in said for said in why(search))


def test_what_seems_faster_and_is_not_sure_enough_is_said_to_be_that() -> None:
    """A choice needs 97 % confidence and an interval shows 95 %, so 1.42 (1.09-1.85) can be too uncertain to choose."""
    search = searched(FP32, {FP32: 0.142, LEAN: 0.1})
    assert search.final is not None
    search.final.times_s[1] = [[t] * 4 for t in (0.1, 0.1085, 0.092)]
    search.final.times_s[0] = search.final.times_s[0][:3]
    ratio = search.final.ratio(LEAN, FP32)
    assert ratio is not None
    assert ratio.low > 1.01
    assert answer(search).endswith(
        "no sound plan is known with enough certainty to be faster, and fp32 is the simplest."
    )
    fate = search.final.fate(LEAN, FP32)
    assert fate is not None
    assert (
        fate.reason
        == "faster, but not with the 97% certainty that a choice needs, than the chosen plan, which is simpler"
    )


def test_what_is_undecided_is_not_said_to_lose_the_gradients() -> None:
    search = searched(LEAN, {FP32: 0.12, LEAN: 0.1, AUTOCAST: 0.05})
    search.parity[AUTOCAST] = dataclasses.replace(SOUND, verdict="undecided")
    search.journal.refuse(AUTOCAST, "more microbatches would decide")
    assert "was not shown to preserve the gradients: more microbatches would decide" in why(search)[-1]


def test_the_page_has_the_interval_by_which_it_was_decided() -> None:
    """Regression: autocast's noisy starts made the interval shown for two other plans wider than the deciding one."""
    wild, lean, base = [2.0, 1.2, 3.0], [0.1, 0.1001, 0.1], [0.105, 0.1051, 0.105]
    search = searched(LEAN, {FP32: 0.1, LEAN: 0.1, AUTOCAST: 1.0})
    final = search.final = Final(
        [FP32, LEAN, AUTOCAST],
        times_s=[[[t] * 4 for t in starts] for starts in (base, lean, wild)],
        choice={FP32, LEAN},
    )
    wide = final.ratio(LEAN, FP32)
    final.decision = Decision(1, decided=True)
    narrow = final.ratio(LEAN, FP32)
    assert wide is not None
    assert narrow is not None
    assert wide.low < 1.0 < narrow.low
    assert "1.05 times as fast" in answer(search)


def test_a_plan_whose_numerics_were_not_found_sound_ties_with_nothing() -> None:
    """A plan that left the race but was timed in the final has not been tested itself."""
    other = Plan.parse("bf16-master+optimizer=fused")
    search = searched(LEAN, {FP32: 0.12, LEAN: 0.1, AUTOCAST: 0.1, other: 0.1})
    assert not tied(search)
    search.parity[Plan.parse("bf16-master")] = SOUND
    assert tied(search) == [other]
    search.parity[AUTOCAST] = dataclasses.replace(SOUND, verdict="fail")
    assert tied(search) == [other]


def test_unsound_autocast_is_the_reason_to_stay_in_fp32() -> None:
    search = searched(LEAN, {FP32: 0.12, LEAN: 0.1, AUTOCAST: 0.05})
    search.journal.refuse(AUTOCAST, "damage 0.3 is above 0.1")
    assert re.search(
        r"autocast in bf16 would be 2\.00 times as fast \([^)]*\), but it does not preserve the gradients: damage 0\.3",
        why(search)[-1],
    )


def test_every_plan_has_its_standing() -> None:
    other, tie = Plan.parse("bf16-master"), Plan.parse("bf16-mixed+optimizer=fused")
    search = searched(AUTOCAST, {FP32: 0.2, AUTOCAST: 0.1, other: 0.15, tie: 0.1})
    search.journal.decide(LEAN, Fate("late", "no time"))
    rows = {c.plan: c for c in evidence(search).candidates}
    assert {plan: row.status for plan, row in rows.items()} == {
        "bf16-mixed": "chosen", "fp32": "baseline", "bf16-mixed+optimizer=fused": "tie",
        "bf16-master": "rejected", str(LEAN): "not tried",
    }  # fmt: skip
    assert rows["bf16-mixed"].reason == "the simplest of the plans that are as fast within the error"
