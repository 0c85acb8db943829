"""Summarise in text the models of an :class:`~castwise.Amp` and the updates that were lost to rounding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import nn

from castwise.core import masters
from castwise.core.amounts import size
from castwise.core.model.arrival import PACKED, is_sealed
from castwise.core.plans.plan import Plan
from castwise.core.plans.text import some
from castwise.core.session.dropped import DroppedUpdates
from castwise.core.session.members import Members


def summarise(members: Members, plan: Plan, dropped: DroppedUpdates) -> Iterator[str]:
    """Yield the lines of the summary: one for each model, and then those about updates that were lost to rounding.

    The line of a model says in which formats its parameters are stored, and in which they were before ``prepare``.
    """
    for model in members.models:
        yield f"{type(model).__name__}: {', '.join(_kinds(model, members))}"
    for kind, why in dropped.unmeasured.items():
        yield f"dropped updates are not measured for {kind}: {why}"
    seen = f"({dropped.moved:,} measured at {dropped.looks} of {dropped.steps} steps)"
    if dropped.share == 0:
        yield f"no update is lost to rounding to {plan.compute} {seen}"
    elif dropped.share is not None:
        instead = f"the plan {plan.compute + '-master'!r}" if plan.stores_low else "master='fp32' in the plan"
        yield (
            f"rounding to {plan.compute} dropped {dropped.share:.1%} of the updates {seen}; use fp32 masters to keep them: {instead}"
        )


def say_restored(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield one line that names the buffers that were restored after skipped steps, or no line if there were none."""
    if counts:
        often = [name if count == 1 else f"{name} ({count} times)" for name, count in counts.items()]
        yield f"buffers restored after skipped steps had made them non-finite: {some(often)}"


def _kinds(model: nn.Module, members: Members) -> Iterator[str]:
    counts: dict[str, int] = defaultdict(int)
    more, known = 0, members.arrived.get(model, {})
    for parameter in model.parameters():
        if is_sealed(parameter) or parameter.dtype in PACKED:
            kind = "quantised"
        else:
            stored, arrived = parameter.dtype, known.get(parameter, parameter.dtype)
            kind = f"in {_name(stored)}"
            kind += " with fp32 masters" if masters.master_of(parameter) is not None else ""
            if parameter in known:
                kind += " as they arrived" if arrived is stored else f" that arrived in {_name(arrived)}"
            kind += "" if parameter.requires_grad else ", frozen"
            grown = stored.itemsize - arrived.itemsize
            more += masters.local(parameter).numel() * grown
        counts[kind] += parameter.numel()
    yield from (f"{count:,} parameters {kind}" for kind, count in counts.items())
    if more > 0:
        yield f"widened by {size(more)}"


def _name(dtype: object) -> str:
    known = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
    text = str(dtype).removeprefix("torch.")
    return known.get(text, text)
