"""Decide whether the plans of the final comparison keep freed memory: on a CPU, page faults can take a tenth or half of a step.

Page faults show only in a plan's own process, where memory is laid out as in training; in the race all plans share one process.
The plan most likely to win the final comparison therefore runs some steps in processes of its own, first as given and then
keeping freed memory (blocks above 32 MiB are freed all the same). If that avoids enough page faults, all plans enter the final
comparison with ``host_memory="keep"``. They are not raced with and without kept memory. Counting page faults is more precise
than comparing times, because the noise of the times comes mostly from page faults.
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
"""Share of the budget after which only ``LEAST_DRAWS`` processes are tried. Several are tried because one process may have few
page faults by chance."""
LEFT = 0.25
"""No process is started if less than this share of the budget is left, because the final comparison needs it."""
FAULT_S = 2.5e-7
"""A low estimate of the seconds that one page fault takes."""
WORTH = 0.01
"""Share of a step that its page faults must take, so that the plans of the final comparison keep freed memory."""


def keeping_saves(context: Context, plan: Plan) -> float:
    """Return the share of a plan's step that keeping freed memory saves by avoiding page faults; 0 if it is small.

    It is measured in processes of the plan's own. On several ranks the largest share counts.
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
    except NotThereError:  # the final will report that the workload does not run in another process
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
    """Count the page faults of a plan with and without kept memory.

    Several processes are tried, and the process that saves most counts: a training may by chance be like any of them.

    Returns:
        The lower bound of the share of a step that is saved, the page faults per step as given, and those with kept memory. All
        are zero if the runs fail.
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
    except Exception:  # the final will report the error
        return 0.0, 0.0, 0.0
    return most


def _faults(context: Context, payload: bytes, plans: Sequence[Plan]) -> list[tuple[float, float]]:
    """Return page faults per step and seconds per step of each plan. Each has its own process, and they run steps in turn."""
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(
                contextlib.closing(
                    SeparateRun(
                        context.home, payload, plan, context.device, context.settings.seed, context.kind
                    )
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
