"""Fixtures: searches that have started."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from castwise import Plan, Workload
from castwise.lab.search.contest import Contest, Entry
from castwise.lab.search.context import Context, Settings
from castwise.lab.search.final import Final
from castwise.lab.search.starts import race_final
from castwise.lab.search.state import Search
from tests.here import DEVICE

CPU = torch.device(DEVICE)
BEGUN: Any = SimpleNamespace(
    optimizer="AdamW", arrived=False, as_given=None, parts=(), used=frozenset(), numerics=SimpleNamespace(left=lambda: 1000), images=False,
    test=SimpleNamespace(
        floor=None, repeat=None, range=SimpleNamespace(scales=lambda: None),
        prober=SimpleNamespace(passes=0, model=torch.nn.Identity(), positions=SimpleNamespace(length=0), micros=()),
    ),
)  # fmt: skip
"""A stand-in for the reference in tests that compute no gradients; it has passes left and nothing else."""


@pytest.fixture
def searching() -> Iterator[Callable[[Workload], Search]]:
    with contextlib.ExitStack() as stack:

        def make(made: Workload) -> Search:
            search = Search(Context(made, CPU, Settings(formats=("fp32", "bf16"), budget_s=60.0)))
            stack.enter_context(search.context.home)
            search.race = Contest(made, CPU)
            return search

        yield make


def raced(search: Search, times_s: dict[Plan, float]) -> Contest:
    """Set the seconds per step of plans in the race, four rounds each, and return the contest."""
    for plan, seconds in times_s.items():
        entry = search.contest.entries[plan] = Entry(plan)
        entry.times_s = [seconds] * 4
    return search.contest


def final_of(search: Search, *args: Any) -> Final:
    """Run the final of a search."""
    return race_final(search.context, search.contest, *args)


def within(search: Search, budget_s: float) -> None:
    """Set the time budget of a search."""
    settings = dataclasses.replace(search.context.settings, budget_s=budget_s)
    search.context = dataclasses.replace(search.context, settings=settings)
