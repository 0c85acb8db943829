"""Measure the peak memory of plans, each in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.errors import CastwiseError
from castwise.lab.search.context import Context
from castwise.lab.timing.memory import measure_memory

LEAST_S = 10.0
"""With less time left than this, peak memory is not measured at all."""
EACH_S = 8.0
"""With less time left than this, no further process that measures peak memory is started."""


def measure_peaks(
    context: Context,
    peaks: dict[Plan, int],
    plans: Sequence[Plan],
    compiles_s: Mapping[Plan, float] = MappingProxyType({}),
) -> Sequence[Plan]:
    """Measure the peak memory, in bytes, of the plans that are missing in ``peaks``, and add it to ``peaks``.

    Args:
        context: The job to tune.
        peaks: Bytes by plan.
        plans: The plans to measure.
        compiles_s: Seconds that compiling takes, for each plan that is compiled.

    Returns:
        The plans that were not measured because the time ran out.
    """
    journal = context.journal

    def measure(plan: Plan) -> int | None:
        what, serves = context.spec or context.workload, context.settings.goal == "inference"
        found = measure_memory(
            what, plan, context.device, seed=context.settings.seed, training=not serves, inference=serves,
            home=context.home,
        )  # fmt: skip
        return found.inference_peak_bytes if serves else found.training_peak_bytes

    for number, plan in enumerate(plans):
        if plan in peaks:
            continue
        if context.left_s() < EACH_S + compiles_s.get(plan, 0.0):
            journal.undecided.append(
                f"Peak memory of {len(plans) - number} plans was not measured: the time ran out."
            )
            return plans[number:]
        journal.tell(in_words(plan), number, len(plans))
        try:
            here = context.ranks.at(f"the memory of {plan}")
            peak = here.worst(partial(measure, plan), lambda found: found or 0)
        except (CastwiseError, OSError) as error:
            journal.notes.append(f"{in_words(plan)}: {error}")
            continue
        if peak is not None:
            peaks[plan] = peak
    return ()
