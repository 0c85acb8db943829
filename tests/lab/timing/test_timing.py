"""Races on a fake clock that the candidates advance, so no test depends on the machine's speed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from castwise.lab.timing import timing
from castwise.lab.timing.timing import Lap, paired, race, turn

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def __call__(self) -> float:
        return self.now


class Candidate:
    """A candidate that advances the clock by ``cost(step number)`` in each step."""

    def __init__(self, clock: Clock, name: str, cost: Callable[[int], float]) -> None:
        self.clock, self.name, self.cost = clock, name, cost
        self.steps = 0
        self.open = 0

    def before(self, steps: int) -> None:
        self.open += 1
        self.clock.now += 100.0  # fetching data is not timed

    def run(self, steps: int) -> None:
        self.clock.order.append(self.name)
        for _ in range(steps):
            self.clock.now += self.cost(self.steps)
            self.steps += 1

    def after(self) -> None:
        self.open -= 1
        self.clock.now += 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", clock)
    return clock


def _race(
    clock: Clock, costs: dict[str, Callable[[int], float]], **options: object
) -> tuple[dict[str, Lap], dict[str, Candidate]]:
    candidates = {name: Candidate(clock, name, cost) for name, cost in costs.items()}
    laps = race(list(candidates.items()), rounds=6, steps=3, device=CPU, **options)  # type: ignore[arg-type]
    assert all(candidate.open == 0 for candidate in candidates.values())
    return laps, candidates


def test_times_are_per_step_and_leave_out_what_frames_a_block(clock: Clock) -> None:
    laps, candidates = _race(clock, {"fp32": lambda _: 2.0, "fast": lambda _: 1.0})
    assert laps["fp32"].times_s == pytest.approx([2.0] * 6)
    assert laps["fast"].times_s == pytest.approx([1.0] * 6)
    assert {c.steps for c in candidates.values()} == {2 + 6 * 3}


def test_every_round_holds_every_candidate_and_nobody_always_has_the_same_neighbour(clock: Clock) -> None:
    _race(clock, {"a": lambda _: 1.0, "b": lambda _: 1.0, "c": lambda _: 1.0})
    blocks = clock.order[6:]
    rounds = [tuple(blocks[i : i + 3]) for i in range(0, len(blocks), 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len(set(rounds)) == 6
    assert {r[0] for r in rounds} == {"a", "b", "c"}


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_each_follows_each_other_equally_often(count: int) -> None:
    follows = [pair for number in range(2 * count) for pair in itertools.pairwise(turn(count, number))]
    assert all(sorted(turn(count, number)) == list(range(count)) for number in range(2 * count))
    assert Counter(follows) == dict.fromkeys(itertools.permutations(range(count), 2), 2)


def test_a_race_that_goes_on_goes_on_with_the_order(clock: Clock) -> None:
    names = {name: lambda _: 1.0 for name in "abcd"}
    _race(clock, names)
    whole = clock.order[8:]
    clock.order.clear()
    _race(clock, names, first=2)
    assert clock.order[8 : 8 + 4 * 4] == whole[2 * 4 :]


def test_long_hopeless_steps_are_stopped_after_two(clock: Clock) -> None:
    laps, candidates = _race(clock, {"fp32": lambda _: 0.176, "fp16": lambda _: 12.16})
    assert laps["fp16"].slowdown == pytest.approx(12.16 / 0.176)
    assert candidates["fp16"].steps == 2
    assert laps["fp16"].times_s == [None] * 6
    assert candidates["fp32"].steps == 20


def test_one_step_beyond_patience_is_enough(clock: Clock) -> None:
    laps, candidates = _race(clock, {"fp32": lambda _: 1.0, "fp16": lambda _: 69.0})
    assert laps["fp16"].slowdown == pytest.approx(69.0)
    assert candidates["fp16"].steps == 1


def test_short_hopeless_steps_are_stopped_when_two_rounds_agree(clock: Clock) -> None:
    laps, candidates = _race(clock, {"fp32": lambda _: 0.001, "slow": lambda _: 0.02})
    assert laps["slow"].slowdown == pytest.approx(20.0)
    assert candidates["slow"].steps == 2 + 2 * 3


def test_a_burst_on_the_baseline_only_delays_that(clock: Clock) -> None:
    laps, candidates = _race(
        clock, {"fp32": lambda step: 0.05 if step in (2, 3, 4) else 0.001, "slow": lambda _: 0.02}
    )
    assert laps["slow"].slowdown == pytest.approx(20.0)
    assert candidates["slow"].steps == 2 + 3 * 3


def test_a_slow_start_is_not_held_against_a_candidate(clock: Clock) -> None:
    # The first step builds kernels; another process slows the second step and the first round.
    laps, _ = _race(
        clock, {"fp32": lambda _: 0.01, "late": lambda step: (20.0, *[0.5] * 4, *[0.008] * 99)[step]}
    )
    assert laps["late"].slowdown is None
    assert laps["late"].times_s[1:] == pytest.approx([0.008] * 5)


def test_the_line_can_be_moved(clock: Clock) -> None:
    laps, _ = _race(clock, {"fp32": lambda _: 0.001, "slow": lambda _: 0.02}, hopeless=30.0)
    assert laps["slow"].slowdown is None


def test_an_exception_ends_its_candidate_alone(clock: Clock) -> None:
    def breaks(step: int) -> float:
        if step == 9:
            raise ZeroDivisionError("step 9")
        return 1.0

    laps, _ = _race(clock, {"fp32": lambda _: 1.0, "bad": breaks, "good": lambda _: 1.0})
    assert isinstance(laps["bad"].error, ZeroDivisionError)
    assert laps["bad"].times_s == pytest.approx([1.0, 1.0, None, None, None, None], nan_ok=True)
    assert laps["good"].times_s == pytest.approx([1.0] * 6)
    assert [len(side) for side in paired(laps["fp32"], laps["bad"])] == [2, 2]


def test_the_others_go_on_when_the_baseline_fails(clock: Clock) -> None:
    def breaks(_step: int) -> float:
        raise ZeroDivisionError

    laps, _ = _race(clock, {"fp32": breaks, "good": lambda _: 1.0})
    assert laps["fp32"].done
    assert laps["good"].times_s == pytest.approx([1.0] * 6)


def test_blocks_are_as_long_as_the_first_steps_say_and_the_race_ends_when_it_is_told(clock: Clock) -> None:
    costs = {"fp32": lambda _: 2.0, "fast": lambda _: 1.0}
    candidates = {name: Candidate(clock, name, cost) for name, cost in costs.items()}
    laps = race(
        list(candidates.items()), rounds=6, device=CPU, is_over=lambda done: done == 2,
        steps=lambda step_s: {name: round(4.0 / took_s) for name, took_s in step_s.items()},
    )  # fmt: skip
    assert {name: candidate.steps for name, candidate in candidates.items()} == {"fp32": 2 + 4, "fast": 2 + 8}
    assert [lap.seconds for lap in laps.values()] == [[2.0, 2.0], [1.0, 1.0]]


class Elsewhere:
    """A candidate in another process that times its own blocks, until the process ends."""

    def __init__(self, name: str, told: list[str], ends_after: int) -> None:
        self.name, self.told, self.left = name, told, ends_after

    def wait(self) -> None:
        self.told.append(f"wait for {self.name}")

    def steps(self, count: int) -> float:
        self.told.append(self.name)
        if not self.left:
            raise EOFError
        self.left -= 1
        return 0.5


def test_processes_are_waited_for_before_one_takes_a_step_and_time_themselves() -> None:
    told: list[str] = []
    laps = race(
        [(name, Elsewhere(name, told, left)) for name, left in (("a", 9), ("b", 3))],
        rounds=3, steps=1, device=CPU, warmup=1,
    )  # fmt: skip
    assert told == ["wait for a", "wait for b", "a", "b", "a", "b", "b", "a", "b", "a"]
    assert laps["a"].checked() == [0.5] * 3
    assert laps["b"].times_s == [0.5, 0.5, None]
    with pytest.raises(EOFError):
        laps["b"].checked()
