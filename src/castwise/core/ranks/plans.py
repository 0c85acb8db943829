"""Check at the start of a training run that all ranks have the same plan, before their losses could differ."""

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
    """Raise on every rank if the ranks have different plans. All ranks must call this.

    Args:
        plan: This rank's plan.
        ranks: All ranks.
        failure: The error that keeps this rank from going on, or None.

    Raises:
        PlanError: The plans differ. The message names the ranks and the fields that differ.
        RankError: Some ranks have a ``failure``. If all ranks have the same one, each raises its own ``failure``
            instead.
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
    """Raise on every rank if a region of a plan matches no module on any rank. All ranks must call this.

    ``matched`` contains the patterns of regions that match a module of this rank.

    Raises:
        PatternError: A region matches no module. The message names its pattern.
    """
    everywhere = set().union(*ranks.meet(matched))
    for region in plan.regions:
        if not region.is_type and region.pattern not in everywhere:
            raise PatternError(
                f"pipeline: Region({shown(region.pattern)}) matches no module of any stage. A '*' stays within one level and '**' "
                "crosses levels; paths are those inside each stage's module."
            )


def _differing(plans: list[Plan]) -> list[str]:
    """Return the fields in which plans differ, each as text with its values."""
    out = []
    for field in dataclasses.fields(Plan):
        values = list(dict.fromkeys(repr(getattr(plan, field.name)) for plan in plans))
        if len(values) > 1 and field.name != "provenance":
            out.append(f"{field.name} ({' and '.join(values[:3])})")
    return out
