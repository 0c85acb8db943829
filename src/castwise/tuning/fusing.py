"""Whether finalists should step with the fused optimizer: its kernel changes no numerics, and what it saves is told by its own time.

The optimizer's part of a step is the same whatever the model computes in. Timed for itself, within steps of the plan that the
final is likeliest to choose, a gain of one step in a hundred shows in a few rounds; as a candidate beside itself every plan would
race twice, and a gain of that size is lost in the noise of the rest of the step. Where it gains anything all finalists have it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

from castwise.fused import can_fuse, is_fused
from castwise.measure.timing import speedup
from castwise.plans.plan import Plan
from castwise.tuning.axes import name_of
from castwise.tuning.state import SearchState

ROUNDS, LEAST_ROUNDS = 8, 4
SHARE = 0.1
"""Share of the budget after which there are no more rounds than the least."""
WORTH = 0.01
"""Share of a step that the fused kernel has to save for the finalists to use it."""


def saves_time(search: SearchState, plan: Plan) -> bool:
    """Whether the fused kernel is known to save enough of a plan's step; on ranks, whether it does on all.

    A note says how long either takes.
    """
    contest, ranks, test = search.contest, search.ranks, search.test
    assert contest is not None
    assert test is not None
    assert search.model is not None
    optimizer = search.workload.optimizer(search.model.parameters())
    if (
        not ranks.at("the optimizer").same(can_fuse(optimizer) and not is_fused(optimizer))
        or test.prober.sparse
    ):
        return False
    fused = dataclasses.replace(plan, optimizer="fused")
    until = ranks.now() + SHARE * search.settings.budget_s
    given_s, fused_s = contest.updates([plan, fused], ROUNDS, LEAST_ROUNDS, until)
    ratio = speedup(given_s, fused_s) if fused_s.times_s else None
    if ratio is None:  # it cannot run
        return False
    update_s, step_s = (
        statistics.median(given_s.seconds),
        statistics.median(contest.entries[plan].lap.seconds),
    )
    shares = [
        update_s * (1.0 - (1.0 / times if times else math.inf)) / step_s for times in (ratio.low, ratio.value)
    ]
    least, likely = ranks.at("the fused optimizer").worst(lambda: shares, lambda found: -found[0])
    name = type(optimizer).__name__
    took = f"{name} takes {1e3 * update_s:.3g} ms of a step of {name_of(plan)}, and fused {1e3 * update_s / ratio.value:.3g} ms"
    if least < WORTH:
        search.passed_over[fused] = f"{took}, which is not known to save {WORTH:.0%} of the step"
        return False
    search.notes.append(
        f"{took}: {100.0 * likely:.0f} % less of the whole, so that the final compared plans with optimizer=fused."
    )
    return True
