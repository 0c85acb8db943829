"""Alarm thresholds with hysteresis."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from castwise.errors import PlanError
from castwise.lab.watch.alarms import _SAYS, LINES, Alarms, Line, lines_of
from castwise.lab.watch.turns import LEAST, RECENT, Turn


def run(line: Line, values: list[float]) -> list[str]:
    """Return one letter per value: ``r`` if an alarm is raised, ``c`` if it is cleared, else ``-``."""
    alarms = Alarms({"grad_norm": line})
    out = []
    for step, value in enumerate(values):
        alarm = alarms.see("grad_norm", {"": value}, step)
        out.append("-" if alarm is None else "r" if alarm.cleared is None else "c")
    return out


@pytest.mark.parametrize(
    ("line", "values", "expected"),
    [
        (Line(2.0, 1.0), [1.5, 2.0, 2.1, 5.0, 1.5, 2.1, 0.9, 1.5, 3.0], "--r---c-r"),
        (Line(1.0, 4.0), [2.0, 1.0, 0.5, 0.1, 2.0, 0.5, 4.1, 2.0, 0.9], "--r---c-r"),  # small values are bad
        (Line(2.0, 1.0, patience=3), [3, 3, 1, 3, 3, 3, 3, 0.5, 3], "-----r-c-"),
        (Line(2.0, 1.0), [math.nan, math.nan, 0.0], "r-c"),
        (Line(1.0, 2.0), [math.nan, math.inf], "rc"),
        (Line(2.0, 1.0), [math.inf, 1.0, 0.99], "r-c"),
    ],
)
def test_an_alarm_is_raised_once_and_cleared_once(line: Line, values: list[float], expected: str) -> None:
    assert "".join(run(line, values)) == expected


def test_of_many_regions_the_worst_is_named_and_only_it() -> None:
    alarms = Alarms(LINES)
    first = alarms.see("near_overflow", {"a": 0.3, "b": 0.9, "c": 0.1}, 5)
    assert first is not None
    assert (first.region, first.value, first.line) == ("b", 0.9, 0.25)
    assert alarms.see("near_overflow", {"a": 0.95, "b": 0.1, "c": 0.1}, 6) is None
    assert (
        alarms.see("near_overflow", {"a": 0.2, "b": 0.1, "c": 0.1}, 7) is None
    )  # clear_at is not reached yet
    last = alarms.see("near_overflow", {"a": 0.1, "b": 0.1, "c": math.nan}, 8)
    assert last is None
    last = alarms.see("near_overflow", {"a": 0.1, "b": 0.1, "c": 0.1}, 9)
    assert last is not None
    assert last.cleared == 9
    assert not alarms.open


def test_optimizers_have_alarms_of_their_own() -> None:
    alarms = Alarms(LINES)
    assert alarms.see("grad_norm", {"": 1e6}, 1, optimizer=0)
    assert alarms.see("grad_norm", {"": 1e6}, 1, optimizer=1)
    assert len(alarms.open) == 2


def test_nothing_seen_is_nothing() -> None:
    assert Alarms(LINES).see("grad_norm", {}, 1) is None
    assert Alarms(lines_of({"grad_norm": None})).see("grad_norm", {"": 1e6}, 1) is None


def test_open_alarms_are_saved_and_loaded() -> None:
    one, two = Alarms(LINES), Alarms(LINES)
    one.see("lost_updates", {"": 0.9}, 3)
    two.load(one.state())
    assert two.open == one.open
    assert two.see("lost_updates", {"": 0.9}, 4) is None


@pytest.mark.parametrize("kind", LINES)
def test_every_kind_says_what_it_is_and_what_to_do(kind: str) -> None:
    line = LINES[kind]
    bad = line.raise_at * 2 if line.raise_at > line.clear_at else line.raise_at / 2
    alarms = Alarms({kind: Line(line.raise_at, line.clear_at)})
    alarm = alarms.see(kind, {"layers.3": bad}, 7, detail=lambda: " (here)")
    assert alarm is not None
    assert "{" not in re.sub(r"Region\(.*?\)", "", alarm.message)
    assert set(_SAYS) == set(LINES)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((1.0, 1.0), "raise_at and clear_at must differ"),
        ((math.nan, 1.0), "finite numbers"),
        (("1", 0.0), "finite numbers"),
        ((1.0, 0.0, 0), "patience must be a whole number >= 1"),
        ((1.0, 0.0, 1.5), "patience"),
    ],
)
def test_lines_that_cannot_be(values: tuple[Any, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Line(*values)


def test_samples_come_at_powers_of_two_and_then_every_so_often() -> None:
    turn, due = Turn(0, 6), []
    for step in range(1, 20):
        if turn.due:
            due.append(step)
        turn.count(False)
    assert due == [1, 2, 4, 6, 12, 18]
    assert Turn(0, 6, steps=11).due


def test_the_share_of_skipped_steps_is_of_the_last_ones() -> None:
    turn = Turn(0, 64)
    for step in range(200):
        turn.count(step < 100)
    assert len(turn.recent) == RECENT
    assert not any(turn.recent)
    assert turn.streak == 0


def test_a_gradient_norm_is_held_against_the_median_of_those_before() -> None:
    turn = Turn(0, 1)
    for norm in [1.0, 3.0] * (LEAST // 2):
        assert turn.over_median(norm) is None
    assert turn.over_median(None) is None
    assert turn.over_median(30.0) == 10.0
    assert turn.over_median(math.nan) != turn.over_median(math.nan)
    assert math.isfinite(max(turn.norms))
