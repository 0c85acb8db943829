"""The plans that reach the final, from made-up times of a race."""

from __future__ import annotations

from collections.abc import Callable

from castwise import Plan, Workload
from castwise.lab.search.axes import AUTOCAST, FP32, numerics_of, storage_of
from castwise.lab.search.finalists import (
    AS_GOOD,
    FINALISTS,
    favourite,
    in_order_of_promise,
    in_vain,
    likeliest,
    room_in_final,
)
from castwise.lab.search.sound import find_sound
from castwise.lab.search.state import Search
from tests.lab.search.conftest import BEGUN, raced
from tests.lab.search.test_answer import SOUND
from tests.lab.search.test_choices import SlowWhenLow, left_for, noted, workload

FUSED = Plan.parse("bf16-mixed+optimizer=fused")
REGION = Plan.parse("bf16-mixed+regions.0=fp32")


def with_regions(count: int) -> Plan:
    """Return a plan with ``count`` regions; more regions are more complex."""
    return Plan.parse(
        "+".join(["bf16-mixed", *(f"regions.{'.'.join('0' * n)}=fp32" for n in range(1, count + 1))])
    )


def test_the_fastest_of_the_race_and_the_simplest_of_those_as_fast_come_to_the_final(
    searching: Callable[[Workload], Search],
) -> None:
    others = [with_regions(count) for count in range(FINALISTS + 1, 0, -1)]
    search = searching(workload(SlowWhenLow))
    places = {plan: 1.0 + 0.0105 * place for place, plan in enumerate([*others, AUTOCAST])}
    contest = raced(search, {FP32: 2.0, **places})
    assert likeliest(search.journal, contest, [FP32, *others, AUTOCAST]) == [FP32, *others[:FINALISTS]]
    why = f"not in the final: its {FINALISTS} places went to faster or simpler plans"
    assert noted(search) == dict.fromkeys([*others[FINALISTS:], AUTOCAST], why)
    assert likeliest(search.journal, contest, [FP32, AUTOCAST]) == [FP32, AUTOCAST]
    assert likeliest(search.journal, contest, [FP32]) == [FP32]


def test_what_a_simpler_plan_is_as_fast_as_in_the_race_is_neither_tested_nor_in_the_final(
    searching: Callable[[Workload], Search],
) -> None:
    """Such a plan could only win by chance.

    Two low numerics still reach the final, as one may be refused on fresh batches.
    Plans with different storage are not compared this way: in bench/bench_race.py the race is off by up to 4 %.
    """
    master, worse, as_is, layout = (
        Plan.parse(line)
        for line in (
            "bf16-master", "bf16-mixed+regions.0=fp32", "bf16-master+ops.exp=fp32", "bf16-master+memory_format=channels_last",
        )
    )  # fmt: skip
    search = searching(workload(SlowWhenLow))
    places = {as_is: 1.0, master: 1.005, layout: 1.006, AUTOCAST: 1.05, worse: 1.06}
    contest = raced(search, {FP32: 2.0, **places})
    assert in_vain(contest, worse, [FP32, AUTOCAST]) is None  # AUTOCAST may be refused
    assert in_vain(contest, worse, [FP32, AUTOCAST, master]) == AUTOCAST
    assert (
        in_vain(contest, master, [AUTOCAST, worse, layout]) is None
    )  # others differ in storage or are more complex
    assert likeliest(search.journal, contest, [FP32, *places]) == [FP32, master, AUTOCAST]
    assert noted(search) == {
        **dict.fromkeys([as_is, layout], f"not in the final: bf16-master {AS_GOOD}"),
        worse: f"not in the final: bf16-mixed {AS_GOOD}",
    }
    search.begun = BEGUN
    search.parity = dict.fromkeys(map(numerics_of, [master, AUTOCAST]), SOUND)
    sound = find_sound(search, [master, AUTOCAST, FP32, worse, as_is, layout]).plans
    assert sound == [master, AUTOCAST, FP32, layout]  # layout has the numerics of master
    assert search.journal.fates[as_is].reason == f"not tested: bf16-master {AS_GOOD}"


def test_what_fp32_is_as_fast_as_is_not_worth_a_test(searching: Callable[[Workload], Search]) -> None:
    search = searching(workload(SlowWhenLow))
    contest = raced(search, {FP32: 1.0, AUTOCAST: 1.0, REGION: 1.0, Plan.preset("bf16-master"): 1.1})
    search.begun = BEGUN
    search.parity = {AUTOCAST: SOUND}  # autocast is shown, so it needs a result
    assert find_sound(search, [FP32, REGION, AUTOCAST]).plans == [FP32, AUTOCAST]
    assert search.journal.fates[REGION].reason == f"not tested: fp32 {AS_GOOD}"
    assert favourite(contest, [AUTOCAST, REGION]) == FP32


def test_few_rounds_or_noisy_ones_leave_nobody_out(searching: Callable[[Workload], Search]) -> None:
    master, as_is = Plan.preset("bf16-master"), Plan.parse("bf16-mixed+ops.exp=fp32")
    contest = raced(searching(workload(SlowWhenLow)), {FP32: 2.0, AUTOCAST: 1.0, as_is: 1.0, master: 1.0})
    sound = [FP32, AUTOCAST, master]
    assert in_vain(contest, as_is, sound) == AUTOCAST
    noisy = [1.0, 1.1, 0.9] * 4
    contest.entries[as_is].times_s[: len(noisy)] = noisy[: len(contest.entries[as_is].times_s)]
    assert in_vain(contest, as_is, sound) is None
    for entry in contest.entries.values():
        entry.times_s = entry.times_s[:1]
    assert in_vain(contest, as_is, sound) is None


def test_what_may_be_refused_together_is_no_reason_to_leave_a_third_out(
    searching: Callable[[Workload], Search],
) -> None:
    losses, layout, fp16 = (
        Plan.parse(f"{line}")
        for line in ("bf16-mixed+ops.exp=fp32", "bf16-mixed+memory_format=channels_last", "fp16-mixed")
    )
    contest = raced(
        searching(workload(SlowWhenLow)), dict.fromkeys([FP32, AUTOCAST, losses, REGION, layout, fp16], 1.0) | {FP32: 2.0}
    )  # fmt: skip
    assert in_vain(contest, REGION, [FP32, AUTOCAST, losses]) is None
    assert in_vain(contest, fp16, [FP32, AUTOCAST, losses]) is None
    assert in_vain(contest, fp16, [FP32, AUTOCAST, REGION]) == AUTOCAST
    assert in_vain(contest, layout, [FP32, AUTOCAST]) == AUTOCAST  # same numerics: both would be refused


def test_nobody_stores_alike_in_two_formats() -> None:
    one, two = map(Plan.preset, ("bf16-master", "fp16-master"))
    assert storage_of(one) != storage_of(two)
    assert storage_of(FP32) == storage_of(AUTOCAST) != storage_of(one)


def test_a_low_plan_that_is_behind_fp32_does_not_come(searching: Callable[[Workload], Search]) -> None:
    search = searching(workload(SlowWhenLow))
    master = Plan.preset("bf16-master")
    contest = raced(search, {FP32: 1.0, master: 1.15})
    assert likeliest(search.journal, contest, [FP32, master]) == [FP32]
    assert (
        search.journal.fates[master].reason
        == "not in the final: takes 1.15 times as long as fp32 in the race"
    )


def test_the_final_can_fall_back_on_simpler_numerics_that_luck_put_behind(
    searching: Callable[[Workload], Search],
) -> None:
    """Otherwise two searches of one job would store parameters in different formats, by chance."""
    masters = [
        Plan.parse(f"bf16-master{more}")
        for more in ("+optimizer=fused", "", "+memory_format=channels_last", "+regions.0=fp32")
    ]
    search = searching(workload(SlowWhenLow))
    places = {plan: 1.0 + 0.011 * place for place, plan in enumerate([*masters, FUSED, AUTOCAST])}
    contest = raced(search, {FP32: 2.0, **places})
    assert likeliest(search.journal, contest, [*masters, FUSED, AUTOCAST], most=3) == [*masters[:2], AUTOCAST]


def test_of_one_numerics_the_simplest_of_those_as_fast_comes_and_others_after_all_numerics(
    searching: Callable[[Workload], Search],
) -> None:
    """Otherwise the memory format of a transformer's only convolution would be decided by chance in the race."""
    layout, twin = (
        Plan.parse(f"{name}+memory_format=channels_last") for name in ("bf16-mixed", "bf16-master")
    )
    master, other = Plan.preset("bf16-master"), Plan.parse("bf16-mixed+ops.exp=fp32")
    places = {master: 1.0, twin: 1.01, layout: 1.04, AUTOCAST: 1.06, other: 1.08}
    contest = raced(searching(workload(SlowWhenLow)), {FP32: 2.0, **places})
    search = searching(workload(SlowWhenLow))
    assert likeliest(search.journal, contest, list(places), most=2) == [master, AUTOCAST]
    assert likeliest(search.journal, contest, list(places), most=3) == [master, layout, AUTOCAST]
    assert search.journal.fates[other].reason == f"not in the final: bf16-mixed {AS_GOOD}"


def test_what_the_final_wants_is_tested_before_what_is_a_little_faster_and_fp32_before_what_it_beats(
    searching: Callable[[Workload], Search],
) -> None:
    """Passes are limited: three searches of Llama found three plans, as two of them had not tested the simplest."""
    faster = [Plan.parse(f"bf16-mixed+regions.{'.'.join('0' * n)}=fp32") for n in range(1, 5)]
    slow = Plan.parse("bf16-master+ops.exp=fp32")
    places = {**{plan: 1.0 + 0.002 * place for place, plan in enumerate(faster)}, AUTOCAST: 1.04}
    contest = raced(searching(workload(SlowWhenLow)), {FP32: 2.0, **places, slow: 2.2})
    order = in_order_of_promise(contest, contest.order([*places, slow, FP32]))
    assert order == [faster[0], AUTOCAST, *faster[1:], FP32, slow]


def test_what_is_far_behind_stays_out(searching: Callable[[Workload], Search]) -> None:
    search = searching(workload(SlowWhenLow))
    contest = raced(search, {FP32: 2.0, AUTOCAST: 1.0, REGION: 1.2})
    assert likeliest(search.journal, contest, [FP32, AUTOCAST, REGION]) == [FP32, AUTOCAST]
    assert noted(search) == {REGION: "not in the final: takes 1.20 times as long as bf16-mixed in the race"}


def test_the_fastest_lossless_plan_comes_to_the_final_though_it_is_far_behind(
    searching: Callable[[Workload], Search],
) -> None:
    """Otherwise, if the low plans are refused on fresh batches, only plain fp32 would be left."""
    lossless = Plan.parse("fp32+memory_format=channels_last")
    search = searching(workload(SlowWhenLow))
    contest = raced(search, {FP32: 2.0, AUTOCAST: 1.0, REGION: 1.2, lossless: 1.5})
    assert likeliest(search.journal, contest, [AUTOCAST, REGION, lossless]) == [AUTOCAST, lossless]


def test_as_many_come_to_the_final_as_there_is_time_to_start(
    searching: Callable[[Workload], Search],
) -> None:
    others = [with_regions(count) for count in (1, 2, 3)]
    search = searching(workload(SlowWhenLow))
    contest = raced(search, {FP32: 2.0, AUTOCAST: 1.0, **dict(zip(others, (0.98, 0.96, 0.94), strict=True))})
    assert room_in_final(search.context, contest) == 2  # a step takes 2 s of a budget of 60 s
    assert likeliest(search.journal, contest, [FP32, AUTOCAST, *others], most=2) == [FP32, *others[1:]]
    assert (
        search.journal.fates[others[0]].reason
        == "not in the final: its 2 places went to faster or simpler plans"
    )
    contest.entries[FP32].times_s = [0.12] * 4
    assert room_in_final(search.context, contest) == FINALISTS


def test_the_race_tells_those_of_one_storage_apart_sooner_than_two(
    searching: Callable[[Workload], Search],
) -> None:
    """The speed of plans with masters relative to fp32 parameters shifts by some percent in separate processes."""
    master, behind, far = (
        Plan.preset("bf16-master"),
        Plan.parse("bf16-mixed+ops.exp=fp32"),
        Plan.preset("fp16-master"),
    )
    places = {master: 1.0, AUTOCAST: 1.06, behind: 1.12, far: 1.09}
    contest = raced(searching(workload(SlowWhenLow)), {FP32: 2.0, **places})
    assert contest._survivors([FP32, *places]) == [FP32, *places]  # after four rounds no plan leaves
    for entry in contest.entries.values():
        entry.times_s *= 2
    assert contest._survivors([FP32, *places]) == [FP32, master, AUTOCAST]
    assert left_for(contest, behind) == "not faster: takes 1.12 times as long as bf16-master in the race"
