"""Which plans make a pass finite that is not: each is tried before it is recommended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from castwise.core.plans.formats import LOW
from castwise.core.plans.plan import PRESETS, Plan, Region, with_rule
from castwise.errors import CastwiseError, sentence
from castwise.lab.inspect.trace import OperatorRun
from castwise.lab.passes.passes import at_scale

_RESCALES = 4
_RESCALE = 2.0**-4
"""A smaller loss scale that is tried, over the one before."""
_CALLED: Mapping[str, tuple[str, ...]] = {
    "mm": ("mm", "matmul", "linear"), "addmm": ("addmm", "linear"), "bmm": ("bmm", "matmul"),
    "_softmax": ("softmax",), "_log_softmax": ("log_softmax",), "native_layer_norm": ("layer_norm",),
    "native_group_norm": ("group_norm",), "convolution": ("conv1d", "conv2d", "conv3d"),
    "linalg_vector_norm": ("norm", "linalg_vector_norm"), "_to_copy": (), "copy_": (), "lift_fresh": (),
}  # fmt: skip
"""What operators below autograd are called above it, where a plan's rules see them; none where there is nothing to rule."""


@dataclass(frozen=True)
class TriedCure:
    """A plan that was tried.

    Attributes:
        what: What of the plan differs, in words.
        plan: The whole plan.
        finite: Whether loss, gradients and buffers were finite under it.
        error: Why it could not run; empty where it did.
    """

    what: str
    plan: Plan
    finite: bool
    error: str = ""


def try_cures(
    plan: Plan,
    place: OperatorRun | None,
    model: nn.Module,
    reached: Callable[[Plan], Collection[str]],
    scaled: bool,
) -> list[TriedCure]:
    """Try plans, from the one that changes least, until one makes the pass finite and it is known what kind of cure there is.

    Args:
        plan: Under which it is not.
        place: Of the operator; None where the cause is none.
        model: To name regions of.
        reached: Runs a plan, and says what is not finite under it.
        scaled: Whether gradients alone are not finite, so that a smaller loss scale may do.

    Returns:
        All that were tried, in order.
    """
    trials: list[TriedCure] = []

    def run(what: str, candidate: Plan) -> bool:
        try:
            finite, candidate = _finite(candidate, reached)
            if finite and candidate.loss_scale != plan.loss_scale and candidate.loss_scale is not None:
                what = f"{what}{', at ' if what else ''}a loss scale of {candidate.loss_scale.init:g}"
            trials.append(TriedCure(what or "a smaller loss scale", candidate, finite))
        except CastwiseError as error:  # a rule or region that the plan or the device does not take
            trials.append(TriedCure(what, candidate, False, sentence(error)))
        return trials[-1].finite

    if scaled and plan.loss_scale is not None and run("", plan):
        return trials
    if plan.formats.isdisjoint(LOW):
        run("fp64", dataclasses.replace(plan, regions=(Region("**", compute="fp64"),)))
        return trials
    if not run("fp32", PRESETS["fp32"]):
        return trials  # then no part of it does
    for what, candidate in _narrow(plan, place, model):
        if run(what, candidate):
            break
    if "fp16" in plan.formats:
        swapped = dataclasses.replace(
            plan,
            compute="bf16" if plan.compute == "fp16" else plan.compute,
            regions=tuple(
                dataclasses.replace(region, compute="bf16") if region.compute == "fp16" else region
                for region in plan.regions
            ),
            loss_scale=None,
        )
        run("bf16 instead of fp16", swapped)
    return trials


def _finite(plan: Plan, reached: Callable[[Plan], Collection[str]]) -> tuple[bool, Plan]:
    """Whether a pass is finite, and under which plan: a loss scale is lowered where gradients overflow, as training would."""
    for _ in range(_RESCALES + 1):
        bad = reached(plan)
        scale = plan.loss_scale
        if not bad or scale is None or not all(name.startswith("gradient") for name in bad):
            return not bad, plan
        if scale.init * _RESCALE < 1.0:  # which makes gradients smaller than they are
            break
        plan = at_scale(plan, scale.init * _RESCALE)
    return False, plan


def _narrow(plan: Plan, place: OperatorRun | None, model: nn.Module) -> Iterator[tuple[str, Plan]]:
    """Plans in which one operator, or one region, from the inside out, is kept in fp32."""
    if place is None:
        return
    name = place.forward or place.operator
    for called in _CALLED.get(name, (name.strip("_"),)):
        if plan.autocasts:
            yield f"the rule ops.{called}=fp32", with_rule(plan, called, "fp32")
    path = place.module
    modules = dict(model.named_modules())
    while path:
        if not isinstance(modules.get(path), (nn.ModuleList, nn.ModuleDict)):
            yield (
                f"the region {path} in fp32",
                dataclasses.replace(plan, regions=(*plan.regions, Region(path, compute="fp32"))),
            )
        path = path.rpartition(".")[0]
