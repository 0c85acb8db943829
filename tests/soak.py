"""Choose how many generated cases run: a selection by default, all with `CASTWISE_SOAK=1`, as in `make soak`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import pytest

A = TypeVar("A")
B = TypeVar("B")

SOAKING = bool(os.environ.get("CASTWISE_SOAK"))
soaks = pytest.mark.skipif(not SOAKING, reason="takes long: make soak")


def examples(few: int, many: int) -> int:
    """Return the number of random examples."""
    return many if SOAKING else few


def some(cases: Collection[A], every: int) -> list[A]:
    """Return every ``every``-th case, where the others test the same in another way; all in a soak."""
    return list(cases)[:: 1 if SOAKING else every]


def pairs(rows: Collection[A], columns: Collection[B], each: int = 1) -> list[tuple[A, B]]:
    """Combine each row with some columns in turn, so that all rows and columns occur; all pairs in a soak.

    Args:
        rows: The expensive dimension.
        columns: Values to combine with each row.
        each: Columns per row.
    """
    columns = list(columns)
    count = len(columns) if SOAKING else each
    return [
        (row, columns[(i * count + j) % len(columns)]) for i, row in enumerate(rows) for j in range(count)
    ]


def each_value(times: int = 1) -> pytest.MarkDecorator:
    """Run enough of a test's grid that each value of each parameter occurs that many times; all in a soak.

    A test selected by its full id always runs.
    """
    return pytest.mark.each_value(times)


def every(step: int, start: int = 0) -> pytest.MarkDecorator:
    """Run every ``step``-th of a test's parameter sets, where the others test the same in another way; all in a soak.

    A test selected by its full id always runs.
    """
    return pytest.mark.every(step, start)


def covering(cases: Sequence[Mapping[str, object]], times: int) -> set[int]:
    """Return the numbers of cases that contain each value of each parameter that often, if possible, spread evenly."""
    told = [[_key(name, value) for name, value in case.items()] for case in cases]
    met: Counter[Hashable] = Counter()
    chosen: set[int] = set()
    left = set(range(len(cases)))

    def gain(number: int) -> tuple[int, int, int]:
        counts = [met[key] for key in told[number]]
        return sum(count < times for count in counts), -sum(counts), -number

    while left and gain(best := max(left, key=gain))[0]:
        chosen.add(best)
        left.remove(best)
        met.update(told[best])
    return chosen


def _key(name: str, value: object) -> Hashable:
    return (name, type(value), value if isinstance(value, Hashable) else id(value))


def dealt(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the tests under :func:`each_value` and :func:`every` that only a soak runs."""
    families: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and (
            item.get_closest_marker("each_value") or item.get_closest_marker("every")
        ):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left: set[pytest.Item] = set()
    for family in families.values():
        kept = set(range(len(family)))
        if values := family[0].get_closest_marker("each_value"):
            kept = covering([item.callspec.params for item in family], *values.args)
        elif (steps := family[0].get_closest_marker("every")) and len(family) > 1:
            step, start = steps.args
            kept = set(range(start, len(family), step))
        left |= {item for number, item in enumerate(family) if number not in kept}
    return left
