"""Decide whether the plans of the final comparison use the fused optimizer, by timing the optimizer alone.

The fused optimizer changes no gradients, and its time does not depend on the compute format. It is timed separately, within
steps of the plan most likely to win the final comparison. In this way a gain of 1 % of a step shows in a few rounds. If the
fused optimizer were a separate candidate, every plan would race twice, and the noise in the rest of the step would hide such a
gain. If it gains enough, all plans of the final comparison use it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.core.session.fused import can_fuse, is_fused
from castwise.lab.search.contest import LATE, Contest
from castwise.lab.search.context import Context
from castwise.lab.search.fates import Fate
from castwise.lab.search.reference import Reference
from castwise.lab.timing.timing import WARMUP, Lap, speedup

LEAST_ROUNDS, ROUNDS, MOST_ROUNDS = 4, 8, 128
"""The fewest rounds, the rounds before the first check, and the most rounds. A check whether the times decide follows after
``ROUNDS`` rounds and after each doubling."""
SHARE, MOST_SHARE = 0.1, 0.2
"""Shares of the budget. After ``SHARE`` only ``LEAST_ROUNDS`` run. No round runs if these would take more than
``MOST_SHARE``."""
WORTH = 0.01
"""Share of a step that the fused kernel must save, so that the plans of the final comparison use it."""


def fused_saves(context: Context, reference: Reference, contest: Contest, plan: Plan) -> float:
    """Return the share of a plan's step that the fused optimizer saves; 0 if a sufficient saving is not certain on every rank.

    If it saves enough, a note with the times of both optimizers is added to the journal.
    """
    ranks, journal = context.ranks, context.journal
    optimizer = context.workload.optimizer(reference.model.parameters())
    fits = can_fuse(optimizer) and not is_fused(optimizer) and not reference.test.prober.sparse
    if not ranks.at("the optimizer").same(fits):
        return 0.0
    fused = dataclasses.replace(plan, optimizer="fused")
    entry = contest.entries[plan]
    standing = entry.left
    step_s = statistics.median(entry.lap.seconds)
    budget_s, left_s = context.settings.budget_s, context.left_s()
    needs_s = 2 * (WARMUP + LEAST_ROUNDS) * step_s
    if ranks.at("the time left").same(needs_s > min(MOST_SHARE * budget_s, left_s)):
        journal.decide(fused, LATE)
        journal.undecided.append("The fused optimizer was not timed: the time ran out.")
        return 0.0
    begin = ranks.now()

    def decided(given_s: Lap, fused_s: Lap) -> bool:
        rounds = len(given_s.times_s)
        if rounds < ROUNDS or rounds & (rounds - 1):
            return False
        least, _, most = _saved(given_s, fused_s, step_s) or (0.0, 0.0, 0.0)
        return ranks.at("the rounds of two optimizers").same(least >= WORTH or most < WORTH)

    given_s, fused_s = contest.updates(
        plan,
        fused,
        MOST_ROUNDS,
        LEAST_ROUNDS,
        begin + SHARE * budget_s,
        begin + MOST_SHARE * budget_s,
        decided,
    )
    entry.left = standing  # it ran before; lack of memory for two models at once does not count against it
    saved = _saved(given_s, fused_s, step_s)
    if saved is None:  # it cannot run
        return 0.0
    part_s, then_s = statistics.median(given_s.seconds), statistics.median(fused_s.seconds)
    (least, likely, _), part_s, then_s = ranks.at("the fused optimizer").worst(
        lambda: (saved, part_s, then_s), lambda found: -found[0][0]
    )
    name = type(optimizer).__name__
    took = f"{name} takes {1e3 * part_s:.3g} ms of a step of {in_words(plan)}, and fused {name} {1e3 * then_s:.3g} ms"
    if context.device.type != "cpu":
        took = f"a step of {in_words(plan)} takes {1e3 * part_s:.3g} ms with {name}, and {1e3 * then_s:.3g} ms with fused {name}"
    if least < WORTH:
        why = f"{took}; {len(given_s.seconds)} rounds do not show that fused {name} saves {WORTH:.0%} of the step"
        journal.decide(fused, Fate("worse", why))
        return 0.0
    journal.notes.append(
        f"{took[:1].upper()}{took[1:]}: fused saves {100.0 * likely:.0f} % of a step, so the final compared plans with "
        "optimizer=fused."
    )
    return likely


def _saved(given_s: Lap, fused_s: Lap, step_s: float) -> tuple[float, float, float] | None:
    """Return bounds of the share of a step that the fused kernel saves.

    Returns:
        The lower bound, the estimate and the upper bound; None if one of the two plans cannot run.
    """
    ratio = speedup(given_s, fused_s)
    if ratio is None:
        return None
    part_s = statistics.median(given_s.seconds)
    share = part_s / max(step_s, part_s)  # the step was timed at a different moment
    least, likely, most = (1.0 - (1.0 / r if r else math.inf) for r in (ratio.low, ratio.value, ratio.high))
    return share * least, share * likely, share * most
