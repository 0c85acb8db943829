"""Decide whether finalists keep freed memory: on a CPU page faults can take a tenth of a step, or half.

Page faults show only in a plan's own process, where memory is laid out as in training; in the race all plans share one process.
The plan most likely to win the final therefore runs some steps in its own process, once as given and once keeping memory
(blocks above 32 MiB are freed all the same). If the avoided faults cost enough, the finalists enter the final with
``host_memory="keep"``. The finalists are not raced with and without it: counting faults is more precise than comparing times,
whose noise comes mostly from faults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Sequence

from castwise.core.heap import can_keep
from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.lab.search.context import Context
from castwise.lab.timing.apart import SeparateRun
from castwise.lab.timing.processes import NotThereError

STEPS, LEAST_DRAWS, DRAWS = 2, 2, 3
SHARE = 0.05
"""Share of the budget after which only the least number of processes is tried; several are tried because one may have few
faults by chance."""
LEFT = 0.25
"""No process is started with less than this share of the budget left, which the final needs."""
FAULT_S = 2.5e-7
"""A low estimate of the seconds that a page fault takes."""
WORTH = 0.01
"""Share of a step that its page faults must take for the finalists to keep memory."""


def keeping_saves(context: Context, plan: Plan) -> float:
    """The share of a plan's step, in its own process, that keeping memory saves in page faults; 0 if it is small.

    On several ranks it is the largest share.
    """
    if context.device.type != "cpu" or not can_keep():
        return 0.0
    if context.left_s() < LEFT * context.settings.budget_s:
        context.journal.undecided.append(
            "The page faults that kept memory would save were not counted: the time ran out."
        )
        return 0.0
    context.journal.tell(f"page faults of {in_words(plan)}")
    try:
        payload = context.payload()
    except NotThereError:  # the final reports it
        return 0.0
    share, given, kept = context.ranks.at("page faults").worst(lambda: _met(context, payload, plan), tuple)
    if share <= WORTH:
        return 0.0
    context.journal.notes.append(
        f"In a process of its own, {in_words(plan)} met {given:,.0f} page faults per step, and {kept:,.0f} when it kept freed "
        f"memory. That saves at least {100.0 * share:.0f} % of a step, so the final compared plans with host_memory=keep."
    )
    return share


def _met(context: Context, payload: bytes, plan: Plan) -> tuple[float, float, float]:
    """Lower bound of the share of a step saved, and page faults per step as given and kept; zeros if the runs fail.

    Several processes are tried, and the one that saves most counts: a training may meet any of them by chance.
    """
    until = time.monotonic() + SHARE * context.settings.budget_s
    try:
        (kept, _), first = _faults(context, payload, [dataclasses.replace(plan, host_memory="keep"), plan])
        most = 0.0, 0.0, kept
        for draw in range(DRAWS):
            given, step_s = first if draw == 0 else _faults(context, payload, [plan])[0]
            most = max(most, ((given - kept) * FAULT_S / step_s, given, kept))
            if most[0] > WORTH or (draw + 1 >= LEAST_DRAWS and time.monotonic() > until):
                break
    except Exception:  # the final reports it
        return 0.0, 0.0, 0.0
    return most


def _faults(context: Context, payload: bytes, plans: Sequence[Plan]) -> list[tuple[float, float]]:
    """Page faults per step and seconds per step of each plan in its own process; all are built at once and step in turn."""
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(
                contextlib.closing(
                    SeparateRun(context.home, payload, plan, context.device, context.settings.seed)
                )
            )
            for plan in plans
        ]
        for run in runs:
            run.wait()
        times = []
        for run in runs:
            run.warm_up()
            times.append(statistics.median(run.steps(1) for _ in range(STEPS)))
    return [(run.faults, step_s) for run, step_s in zip(runs, times, strict=True)]
