"""Searches that have begun."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from castwise import Plan, Workload
from castwise.lab.search.contest import Contest, Entry
from castwise.lab.search.search import Settings
from castwise.lab.search.state import SearchState

CPU = torch.device("cpu")
BEGUN: Any = SimpleNamespace(
    optimizer="AdamW", arrived=False, as_given=None, parts=(), used=frozenset(), numerics=SimpleNamespace(left=lambda: 1000), images=False,
    test=SimpleNamespace(
        floor=None, repeat=None, range=SimpleNamespace(scales=lambda: None),
        prober=SimpleNamespace(passes=0, model=torch.nn.Identity()),
    ),
)  # fmt: skip
"""A reference whose gradients nobody asks for: there are passes left, and what tests with them has no other method."""


@pytest.fixture
def searching() -> Iterator[Callable[[Workload], SearchState]]:
    with contextlib.ExitStack() as stack:

        def make(made: Workload) -> SearchState:
            search = SearchState(made, CPU, Settings(formats=("fp32", "bf16"), budget_s=60.0))
            stack.enter_context(search.home)
            search.contest = Contest(made, CPU)
            return search

        yield make


def raced(search: SearchState, times_s: dict[Plan, float]) -> Contest:
    """A contest in which plans took so many seconds per step."""
    assert search.contest is not None
    for plan, seconds in times_s.items():
        entry = search.contest.entries[plan] = Entry(plan)
        entry.times_s = [seconds] * 4
    return search.contest
