"""Detect ranks with different plans at the start, before their losses diverge."""

from __future__ import annotations

import dataclasses

import torch.distributed as dist

from castwise.core.plans.plan import Plan
from castwise.core.plans.text import shown
from castwise.core.ranks.group import Ranks
from castwise.core.ranks.text import named
from castwise.core.ranks.waiting import Waiting
from castwise.errors import PatternError, PlanError


def check_same_plan(plan: Plan, ranks: Ranks, failure: Exception | None = None) -> None:
    """Check that all ranks have the same plan; collective.

    Args:
        plan: This rank's plan.
        ranks: All ranks.
        failure: The error because of which this rank cannot go on.

    Raises:
        PlanError: The plans differ; raised on every rank, and names the ranks and the fields.
        RankError: Some ranks cannot go on; raised on every rank, or the failure itself if all have failed alike.
    """

    def own() -> str:
        if failure is not None:
            raise failure
        return plan.to_json()

    with Waiting(ranks.group):
        plans = [Plan.from_json(text) for text in ranks.every(own)]
    holders: dict[str, list[int]] = {}
    for place, one in enumerate(plans):
        holders.setdefault(one.digest, []).append(place)
    if len(holders) == 1:
        return
    said = []
    for digest, places in holders.items():
        known = places if ranks.group is None else [dist.get_global_rank(ranks.group, at) for at in places]
        said.append(f"{named(known)}: {plans[places[0]]} (digest {digest[:12]})")
    raise PlanError(
        f"prepare: ranks were given different plans. {'; '.join(said)}. They differ in {', '.join(_differing(plans))}. Give "
        "every rank the same plan, e.g. by Plan.load of one file, or give ranks that do not act together groups of their own: "
        "Amp(plan, group=...)."
    )


def check_patterns(plan: Plan, matched: set[str], ranks: Ranks) -> None:
    """Check that every region of a plan matches a module on some rank; collective.

    ``matched`` contains the patterns that match a module of this rank.

    Raises:
        PatternError: A region matches nothing; raised on every rank, and names the pattern.
    """
    everywhere = set().union(*ranks.meet(matched))
    for region in plan.regions:
        if not region.is_type and region.pattern not in everywhere:
            raise PatternError(
                f"pipeline: Region({shown(region.pattern)}) matches no module of any stage. A '*' stays within one level and '**' "
                "crosses levels; paths are those inside each stage's module."
            )


def _differing(plans: list[Plan]) -> list[str]:
    """Fields that differ between the plans, with their values."""
    out = []
    for field in dataclasses.fields(Plan):
        values = list(dict.fromkeys(repr(getattr(plan, field.name)) for plan in plans))
        if len(values) > 1 and field.name != "provenance":
            out.append(f"{field.name} ({' and '.join(values[:3])})")
    return out
