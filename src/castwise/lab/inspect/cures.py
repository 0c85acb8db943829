"""Find plans under which a forward and backward pass becomes finite; each plan is run before it is recommended."""

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
"""Factor between a loss scale and the next smaller one that is tried."""
_CALLED: Mapping[str, tuple[str, ...]] = {
    "mm": ("mm", "matmul", "linear"), "addmm": ("addmm", "linear"), "bmm": ("bmm", "matmul"),
    "_softmax": ("softmax",), "_log_softmax": ("log_softmax",), "native_layer_norm": ("layer_norm",),
    "native_group_norm": ("group_norm",), "convolution": ("conv1d", "conv2d", "conv3d"),
    "linalg_vector_norm": ("norm", "linalg_vector_norm"), "_to_copy": (), "copy_": (), "lift_fresh": (),
}  # fmt: skip
"""For operators below autograd, the names above autograd that a plan's rules use; empty for an operator without such a rule."""


@dataclass(frozen=True)
class TriedCure:
    """A plan that was run as a possible cure for non-finite values.

    Attributes:
        what: The difference from the original plan, as text.
        plan: The complete changed plan.
        finite: Whether the loss, all gradients and all buffers were finite under this plan.
        error: Why the plan could not run. Empty if it ran.
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
    """Run changed plans until it is known which kind of change makes the forward and backward pass finite.

    A smaller loss scale alone is tried first. If fp32 makes the pass finite, smaller changes follow: one operator in fp32, one
    region in fp32, and bf16 instead of fp16.

    Args:
        plan: The plan under which the pass is not finite.
        place: Where the operator ran that returned the first non-finite value; None if no operator is the cause.
        model: The model, whose module paths name the regions.
        reached: Runs a plan and returns the names of what is not finite under it.
        scaled: Whether only gradients are not finite, so that a smaller loss scale may be enough.

    Returns:
        All plans that were run, in order.
    """
    tried: list[TriedCure] = []

    def run(what: str, candidate: Plan) -> bool:
        try:
            finite, candidate = _finite(candidate, reached)
            if finite and candidate.loss_scale != plan.loss_scale and candidate.loss_scale is not None:
                what = f"{what}{', at ' if what else ''}a loss scale of {candidate.loss_scale.init:g}"
            tried.append(TriedCure(what or "a smaller loss scale", candidate, finite))
        except (CastwiseError, RuntimeError) as error:
            # The plan or device does not support the change, or an operator of the loss does not support mixed dtypes.
            tried.append(TriedCure(what, candidate, False, sentence(error)))
        return tried[-1].finite

    if scaled and plan.loss_scale is not None and run("", plan):
        return tried
    if plan.formats.isdisjoint(LOW):
        run("fp64", dataclasses.replace(plan, regions=(Region("**", compute="fp64"),)))
        return tried
    if not run("fp32", PRESETS["fp32"]):
        return tried  # if fp32 does not help, no smaller change does
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
    return tried


def _finite(plan: Plan, reached: Callable[[Plan], Collection[str]]) -> tuple[bool, Plan]:
    """Return whether loss, gradients and buffers are finite under a plan, and the plan with the loss scale of the last try.

    The loss scale is lowered while only gradients are not finite, as in training.
    """
    for _ in range(_RESCALES + 1):
        bad = reached(plan)
        scale = plan.loss_scale
        if not bad or scale is None or not all(name.startswith("gradient") for name in bad):
            return not bad, plan
        if scale.init * _RESCALE < 1.0:  # a scale below 1 makes gradients smaller
            break
        plan = at_scale(plan, scale.init * _RESCALE)
    return False, plan


def _narrow(plan: Plan, place: OperatorRun | None, model: nn.Module) -> Iterator[tuple[str, Plan]]:
    """Yield plans, each with a description, that keep one operator in fp32, then one region, from the innermost outwards."""
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
