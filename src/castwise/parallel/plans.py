"""Ranks that were given different plans: found at the start, not by a loss that drifts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist

from castwise.errors import PatternError, PlanError
from castwise.plans.parts import shown
from castwise.plans.plan import Plan

__all__ = ["check_patterns", "check_same_plan"]


def check_same_plan(plan: Plan, group: Any = None) -> None:
    """Compare the plan with those of the other ranks; all of them must call this.

    Args:
        plan: This rank's.
        group: The ranks that act together; None for all.

    Raises:
        PlanError: On every rank, naming the ranks and the fields that differ.
    """
    size = dist.get_world_size(group)
    plans: list[Any] = [None] * size
    dist.all_gather_object(plans, plan.to_json(), group=group)
    others = [Plan.from_json(text) for text in plans]
    if len({other.digest for other in others}) == 1:
        return
    by_digest: dict[str, list[int]] = {}
    for place, other in enumerate(others):
        rank = place if group is None else dist.get_global_rank(group, place)
        by_digest.setdefault(other.digest, []).append(rank)
    said = []
    for digest, ranks in by_digest.items():
        example = others[[other.digest for other in others].index(digest)]
        said.append(f"{_ranks(ranks)}: {example} (digest {digest[:12]})")
    fields = _differing(others)
    raise PlanError(
        f"prepare: ranks were given different plans. {'; '.join(said)}. They differ in {', '.join(fields)}. Give every rank "
        "the same plan, e.g. by Plan.load of one file, or give ranks that do not act together groups of their own: "
        "Amp(plan, group=...)."
    )


def check_patterns(plan: Plan, matched: set[str], group: Any = None) -> None:
    """See that every region of a plan matches something on some rank; all of them must call this.

    Args:
        plan: The plan.
        matched: Patterns of its regions that match a module of this rank.
        group: The ranks that hold parts of the model; None for all.

    Raises:
        PatternError: On every rank, naming the pattern.
    """
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, matched, group=group)
    for region in plan.regions:
        if not region.is_type and not any(region.pattern in some for some in everywhere):
            raise PatternError(
                f"pipeline: Region({shown(region.pattern)}) matches no module of any stage. A '*' stays within one level and '**' "
                "crosses levels; paths are those inside each stage's module."
            )


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    several = ", ".join(map(str, ranks[:8]))
    return f"ranks {several}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _differing(plans: list[Plan]) -> list[str]:
    """Fields of the plans that are not the same in all, with their values."""
    out = []
    for field in dataclasses.fields(Plan):
        if field.name == "provenance":
            continue
        values = list(dict.fromkeys(repr(getattr(plan, field.name)) for plan in plans))
        if len(values) > 1:
            out.append(f"{field.name} ({' and '.join(values[:3])})")
    return out
