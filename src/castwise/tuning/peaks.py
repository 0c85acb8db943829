"""Peak memory of plans within a search, each measured in a process of its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from castwise.errors import CastwiseError
from castwise.measure import ranks
from castwise.measure.memory import measure_memory
from castwise.plans.plan import Plan
from castwise.tuning.axes import name_of, simplicity
from castwise.tuning.state import SearchState

__all__ = ["measure_peaks", "peak_and_simplicity"]

LEAST_S = 8.0
"""With less time left than this no further process is started."""


def measure_peaks(search: SearchState, plans: Sequence[Plan]) -> None:
    """Measure peak memory of plans that have not been measured yet; ``search.peaks`` has it afterwards."""

    def measure(plan: Plan) -> int | None:
        what, seed = search.spec or search.workload, search.settings.seed
        return measure_memory(what, plan, search.device, seed=seed, inference=False).training_peak_bytes

    for number, plan in enumerate(plans):
        if plan in search.peaks:
            continue
        if search.left_s() < LEAST_S:
            search.notes.append(
                f"Peak memory of {len(plans) - number} plans was not measured: the time was spent."
            )
            break
        search.say(search.now, name_of(plan), number, len(plans))
        try:
            peak = ranks.worst(
                f"the memory of {plan}", functools.partial(measure, plan), lambda found: found or 0
            )
        except (CastwiseError, OSError) as error:
            search.notes.append(f"{name_of(plan)}: {error}")
            continue
        if peak is not None:
            search.peaks[plan] = peak


def peak_and_simplicity(search: SearchState, plan: Plan) -> tuple[float, int]:
    """What plans are sorted by for ``goal="memory"``: peak memory to within a hundredth, then simplicity.

    A plan that was not measured comes last.
    """
    peak = search.peaks.get(plan)
    return (math.inf if peak is None else round(math.log(peak) * 100), simplicity(plan))
