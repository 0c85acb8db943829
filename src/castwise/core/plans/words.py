"""Describe a plan in a few words: the preset that it is based on, and the differences."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

from castwise.core.amounts import listed
from castwise.core.plans.plan import PRESETS, LossScale, Plan, Region
from castwise.errors import CastwiseError

_MOST: Final = 3
"""The largest number of regions or operators that are listed by name. More than that are counted instead."""
_RULES: Final = {
    "fp32": "in fp32", "lower": "cast to the compute format", "widest": "in the format of the widest input",
    "as_is": "not cast", "unfused": "unfused", "banned": "banned",
}  # fmt: skip


def in_words(plan: Plan | str) -> str:
    """Describe a plan, as ``bf16-mixed; conv1 and head in fp32; channels_last; fused optimizer``.

    Args:
        plan: A plan, or its one-line form. A line that this version of castwise cannot parse is returned unchanged.
    """
    if isinstance(plan, str):
        try:
            plan = Plan.parse(plan)
        except CastwiseError:
            return str(plan)
    name, base = _nearest(plan)
    return "; ".join([name, *_differences(plan, base)])


def _nearest(plan: Plan) -> tuple[str, Plan]:
    """Return the name of the preset with which a plan's one-line form begins, and the preset."""
    name = str(plan).partition("+")[0]
    return name, PRESETS[name]


def _differences(plan: Plan, base: Plan) -> Iterator[str]:
    formats: dict[str, list[str]] = {}
    for region in plan.regions:
        if region in base.regions:
            continue
        pattern = _part(region)
        if region.compute is not None:
            formats.setdefault(f"in {region.compute}", []).append(pattern)
        if region.params not in (None, region.compute):
            formats.setdefault(f"stored in {region.params}", []).append(pattern)
    for what, patterns in formats.items():
        yield f"{_listed(patterns, 'regions')} {what}"
    if gone := [_part(region) for region in base.regions if region not in plan.regions]:
        yield f"without the preset's format for {_listed(gone, 'regions')}"
    rules: dict[str, list[str]] = {}
    for op, rule in plan.ops:
        if (op, rule) not in base.ops:
            rules.setdefault(rule, []).append(op)
    for rule, ops in rules.items():
        yield f"{_listed(ops, 'operators')} {_RULES.get(rule, rule)}"
    modes: dict[str, list[str]] = {}
    for what, field in (("products", "fp32_matmul"), ("convolutions", "fp32_conv")):
        if getattr(plan, field) != getattr(base, field):
            modes.setdefault(getattr(plan, field), []).append(what)
    for mode, whats in modes.items():
        yield f"fp32 {' and '.join(whats)} in {mode}"
    if plan.memory_format != base.memory_format:
        yield plan.memory_format
    if plan.optimizer != base.optimizer:
        yield f"{plan.optimizer} optimizer"
    if plan.compile != base.compile:
        yield "compiled" + (f" ({plan.compile})" if plan.compile != "default" else "")
    if plan.host_memory != base.host_memory:
        yield "freed memory kept"
    told = {
        "regions",
        "ops",
        "fp32_matmul",
        "fp32_conv",
        "memory_format",
        "optimizer",
        "compile",
        "host_memory",
    }
    for other in dataclasses.fields(plan):
        here, there = getattr(plan, other.name), getattr(base, other.name)
        if other.name in told or not other.compare or here == there:
            continue
        yield _scale(here, there) if other.name == "loss_scale" else f"{other.name} {here}"


def _scale(scale: LossScale | None, base: LossScale | None) -> str:
    if scale is None:
        return "no loss scale"
    if base is None or scale.dynamic != base.dynamic or scale.init != base.init:
        return f"{'loss scale from' if scale.dynamic else 'static loss scale'} {scale.init:g}"
    return "other loss scale settings"


def _part(region: Region) -> str:
    """Return the name of a region as shown to users: its pattern without ``type:``, with "module" before a number."""
    pattern = region.pattern.removeprefix("type:")
    return f"module {pattern}" if pattern[0].isdigit() else pattern


def _listed(names: list[str], what: str) -> str:
    return listed(names) if len(names) <= _MOST else f"{len(names)} {what} ({', '.join(names[:2])}, ...)"
