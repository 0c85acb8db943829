"""Whether finalists should keep the memory that a step gives back: on a CPU page faults can be a tenth of it, or half.

Page faults show in a process of a plan's own alone, where the memory lies as it will in training; in the race all plans share
one. So the plan that the final is likeliest to choose runs some steps by itself, as given and keeping memory (blocks above
32 MiB go back all the same), and where the faults that this spares it cost anything the finalists come to the final with
``host_memory="keep"``. They do not race themselves as they are: faults are counted, which says more than times, whose noise
they are most of.
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
"""Share of the budget after which no further process is drawn than the least, since one alone may be lucky."""
LEFT = 0.25
"""With less than this share of the budget left none is drawn: the final has to have it."""
FAULT_S = 2.5e-7
"""Seconds that a page fault takes, and rather less than it does."""
WORTH = 0.01
"""Share of a step that its page faults have to take for the finalists to keep memory."""


def keeping_saves(context: Context, plan: Plan) -> float:
    """The share of a plan's step, in a process of its own, that page faults take which keeping memory spares it; 0 where it is small.

    On ranks, the largest share.
    """
    if context.device.type != "cpu" or not can_keep():
        return 0.0
    if context.left_s() < LEFT * context.settings.budget_s:
        context.journal.undecided.append(
            "Whether keeping freed memory saves page faults was not tried: the time ran out."
        )
        return 0.0
    context.journal.tell(f"page faults of {in_words(plan)}")
    try:
        payload = context.payload()
    except NotThereError:  # the final says so
        return 0.0
    share, given, kept = context.ranks.at("page faults").worst(lambda: _met(context, payload, plan), tuple)
    if share <= WORTH:
        return 0.0
    context.journal.notes.append(
        f"{in_words(plan)} met {given:,.0f} page faults per step in a process of its own, and {kept:,.0f} where that kept its "
        f"freed memory: at least {100.0 * share:.0f} % of its time, so that the final compared plans with host_memory=keep."
    )
    return share


def _met(context: Context, payload: bytes, plan: Plan) -> tuple[float, float, float]:
    """The least share of a step that keeping memory saves, and a step's page faults as given and kept; none where it fails.

    Of some processes the one whose heap has it give back most: which of them a training will be is luck.
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
    except Exception:  # the final says what it raises
        return 0.0, 0.0, 0.0
    return most


def _faults(context: Context, payload: bytes, plans: Sequence[Plan]) -> list[tuple[float, float]]:
    """Page faults per step of each in a process of its own, and the seconds of one; they are built together, and step in turn."""
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
