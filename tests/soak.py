"""How much runs of what is generated: enough for every day, or all of it where `CASTWISE_SOAK=1`, as in `make soak`."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TypeVar

import pytest

A = TypeVar("A")
B = TypeVar("B")

SOAKING = bool(os.environ.get("CASTWISE_SOAK"))
soaks = pytest.mark.skipif(not SOAKING, reason="takes long: make soak")


def examples(few: int, many: int) -> int:
    """How many random examples."""
    return many if SOAKING else few


def some(cases: Collection[A], every: int) -> list[A]:
    """Every so many of some cases, of which others test the same in another way; all in a soak."""
    return list(cases)[:: 1 if SOAKING else every]


def pairs(rows: Collection[A], columns: Collection[B], each: int = 1) -> list[tuple[A, B]]:
    """Some columns in turn for each row, so that all of both are met; every pair in a soak.

    Args:
        rows: What costs.
        columns: What it is combined with.
        each: Columns for a row.
    """
    columns = list(columns)
    count = len(columns) if SOAKING else each
    return [
        (row, columns[(i * count + j) % len(columns)]) for i, row in enumerate(rows) for j in range(count)
    ]
