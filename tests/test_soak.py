"""The selection of a test's parameters contains each of their values and is the same each time."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.soak import SOAKING, covering, each_value, every

GRID = [
    {"plan": plan, "layout": layout, "clips": clips}
    for plan, layout, clips in itertools.product("abcde", ["one", "two", "three"], [False, True])
]


@pytest.mark.parametrize("times", [1, 2])
def test_each_value_is_met_so_often_and_evenly(times: int) -> None:
    kept = [GRID[number] for number in sorted(covering(GRID, times))]
    assert len(kept) == 5 * times
    for name, most in (("plan", times), ("layout", 2 * times), ("clips", 3 * times)):
        met = Counter(case[name] for case in kept)
        assert set(met) == {case[name] for case in GRID}
        assert times <= min(met.values()) <= max(met.values()) <= most


def test_a_value_that_is_met_less_often_is_met_where_it_is() -> None:
    cases = [{"plan": "a"}, {"plan": "b"}, {"plan": "b"}, {"plan": "b"}]
    assert covering(cases, 2) == {0, 1, 2}
    # An unhashable value counts as a value of its own.
    assert covering([{"made": [1]}, {"made": [1]}], 1) == {0, 1}


@each_value()
@pytest.mark.parametrize("one", "ab")
@pytest.mark.parametrize("other", "cd")
def test_a_grid(one: str, other: str) -> None:
    """Collected by the test below."""


@every(2, 1)
@pytest.mark.parametrize("number", range(5))
def test_a_row(number: int) -> None:
    """Collected by the test below."""


def test_what_is_left_to_a_soak_is_not_collected(request: pytest.FixtureRequest) -> None:
    found = [item.name for item in request.session.items if item.path.name == "test_soak.py"]
    if len(found) == 1:
        pytest.skip("this test was selected alone")
    assert [name for name in found if name.startswith("test_a_row")] == [
        f"test_a_row[{number}]" for number in (range(5) if SOAKING else (1, 3))
    ]
    assert [name for name in found if name.startswith("test_a_grid")] == [
        f"test_a_grid[{both}]" for both in (("c-a", "c-b", "d-a", "d-b") if SOAKING else ("c-a", "d-b"))
    ]
