"""Whether finalists should step with the fused optimizer, whose kernel changes no gradients: what it saves is told by its own time.

The optimizer's part of a step is the same whatever the model computes in. Timed for itself, within steps of the plan that the
final is likeliest to choose, a gain of one step in a hundred shows in a few rounds; as a candidate beside itself every plan would
race twice, and a gain of that size is lost in the noise of the rest of the step. Where it gains anything all finalists have it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.core.session.fused import can_fuse, is_fused
from castwise.lab.search.contest import LATE
from castwise.lab.search.state import SearchState
from castwise.lab.timing.timing import WARMUP, speedup

ROUNDS, LEAST_ROUNDS = 8, 4
SHARE, MOST_SHARE = 0.1, 0.2
"""Shares of the budget: after the one there are only the least rounds, and none where these would take more than the other."""
WORTH = 0.01
"""Share of a step that the fused kernel has to save for the finalists to use it."""


def saves_time(search: SearchState, plan: Plan) -> bool:
    """Whether the fused kernel is known to save enough of a plan's step; on ranks, whether it does on all.

    A note says how long either takes.
    """
    contest, ranks, test, model = search.contest, search.ranks, search.test, search.model
    assert contest is not None
    assert test is not None
    assert model is not None
    optimizer = search.workload.optimizer(model.parameters())
    fits = can_fuse(optimizer) and not is_fused(optimizer) and not test.prober.sparse
    if not ranks.at("the optimizer").same(fits):
        return False
    fused = dataclasses.replace(plan, optimizer="fused")
    entry = contest.entries[plan]
    standing = entry.reason
    step_s = statistics.median(entry.lap.seconds)
    budget_s, left_s = search.settings.budget_s, search.left_s()
    needs_s = 2 * (WARMUP + LEAST_ROUNDS) * step_s
    if ranks.at("the time left").same(needs_s > min(MOST_SHARE * budget_s, left_s)):
        search.passed_over[fused] = LATE
        search.undecided.append("Whether the fused optimizer saves time was not tried: the time ran out.")
        return False
    begin = ranks.now()
    given_s, fused_s = contest.updates(
        plan, fused, ROUNDS, LEAST_ROUNDS, begin + SHARE * budget_s, begin + MOST_SHARE * budget_s
    )
    entry.reason = standing  # it ran before: memory that two do not find here is no reason against it
    ratio = speedup(given_s, fused_s)
    if ratio is None:  # it cannot run
        return False
    part_s = statistics.median(given_s.seconds)
    step_s = max(step_s, part_s)  # of another moment
    least, likely, part_s, then_s = ranks.at("the fused optimizer").worst(
        lambda: (
            part_s * (1.0 - (1.0 / ratio.low if ratio.low else math.inf)) / step_s,
            part_s * (1.0 - 1.0 / ratio.value) / step_s, part_s, part_s / ratio.value,
        ),
        lambda found: -found[0],
    )  # fmt: skip
    name = type(optimizer).__name__
    took = (
        f"{name} takes {1e3 * part_s:.3g} ms of a step of {in_words(plan)}, and fused {1e3 * then_s:.3g} ms"
    )
    if search.device.type != "cpu":
        took = f"a step of {in_words(plan)} takes {1e3 * part_s:.3g} ms with {name}, and {1e3 * then_s:.3g} ms where that is fused"
    if least < WORTH:
        search.passed_over[fused] = (
            f"{took}, which {len(given_s.seconds)} rounds do not know to save {WORTH:.0%} of the step"
        )
        return False
    search.spared += likely
    search.notes.append(
        f"{took[:1].upper()}{took[1:]}: it saves {100.0 * likely:.0f} % of a step, so the final compared plans with "
        "optimizer=fused."
    )
    return True
