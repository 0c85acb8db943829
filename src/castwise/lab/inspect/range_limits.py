"""Decide which formats can hold a region's numbers without overflow or underflow, with reasons, and recommend a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from castwise.core import amounts
from castwise.core.plans.formats import LOW
from castwise.core.plans.plan import Plan, Region
from castwise.lab.parity.casts import Cast
from castwise.lab.parity.gradient_range import LOST, ScaleRange
from castwise.lab.parity.updates import LOST as DROPPED

if TYPE_CHECKING:
    from castwise.lab.inspect.forecast_result import RegionForecast, Spread, TensorForecast


def troubles(region: RegionForecast, formats: Sequence[str], scaled: bool = True) -> dict[str, str]:
    """Return, by format, why a region's numbers overflow or underflow in that format under a plan that autocasts.

    Formats in which they do not are absent.

    Args:
        region: The region.
        formats: The requested formats.
        scaled: Whether gradients in fp16 have a loss scale.
    """
    tensors = [tensor for tensor in region.tensors if not tensor.kept and tensor.kind != "updates"]
    return _first_reasons(region, tensors, formats, scaled)


def stored_troubles(region: RegionForecast, formats: Sequence[str]) -> dict[str, str]:
    """Return, by format, why a region's numbers overflow or underflow if every tensor, parameters included, is stored in it.

    Unlike in :func:`troubles`, tensors that the plan keeps in fp32 count too, and so do updates that rounding drops.
    """
    return _first_reasons(region, region.tensors, [name for name in formats if name in LOW], scaled=False)


def plan_trouble(region: RegionForecast, plan: Plan, formats: Sequence[str]) -> str:
    """Return why a region's numbers overflow or underflow in the formats in which a plan computes the region.

    The text is empty if they do not, or if none of these formats is in ``formats``.
    """
    asked = [name for name in region.computed if name in formats]
    if plan.stores_low and not plan.keeps_masters:
        found = {name: region.stored[name] for name in asked if name in region.stored}
    else:
        found = troubles(region, asked, scaled=plan.loss_scale is not None)
    scale = plan.loss_scale
    if (
        not found
        and "fp16" in asked
        and scale is not None
        and not scale.dynamic
        and region.scales is not None
    ):
        low, high = region.scales.lowest_scale, region.scales.highest_scale
        if not low <= scale.init <= high:
            return f"its gradients need a loss scale of {amounts.number(low)} to {amounts.number(high)}, not {amounts.number(scale.init)}"
    return next(iter(found.values()), "")


def plan_answer(regions: Sequence[RegionForecast], plan: Plan, formats: Sequence[str]) -> str:
    """Return a sentence that says in how many regions a plan's own formats can hold the numbers, without over- or underflow.

    It is empty if one of the plan's low formats is not in ``formats``.
    """
    low = [region for region in regions if region.computed]
    used = list(dict.fromkeys(name for region in low for name in region.computed))
    if not used or not set(used) <= set(formats):
        return ""
    bad = [region for region in low if region.trouble]
    said = f"{plan} computes in {amounts.listed(used)} in {len(low)} of {len(regions)} regions and holds "
    return said + (f"{len(low) - len(bad)} of them{_but(bad, bad[0].trouble)}" if bad else "all of them.")


def _but(bad: Sequence[RegionForecast], why: str) -> str:
    others = f" and {len(bad) - 1} other{'s' if len(bad) > 2 else ''}" if len(bad) > 1 else ""
    return f", but not {f'region {bad[0].path}' if bad[0].path else 'the model itself'} ({why}){others}."


def spreading(name: str, spread: Spread) -> str:
    """Return a sentence that says where overflows in a format spread to."""
    count = len(spread.reached)
    where = f"{count} other region{'s' if count > 1 else ''}" if count else "no other region"
    end = "makes gradients non-finite" if spread.gradients else "does not change the gradients"
    return f"Overflow in {name} spreads to {where} and {end}."


def _first_reasons(
    region: RegionForecast, tensors: Sequence[TensorForecast], formats: Sequence[str], scaled: bool
) -> dict[str, str]:
    out = {}
    for name in formats:
        casts = ((tensor, tensor.cast(name, scaled)) for tensor in tensors)
        reasons = [reason for tensor, cast in casts if cast is not None and (reason := _reason(tensor, cast))]
        if name in region.poles:
            function, share = region.poles[name]
            reasons.insert(0, f"{amounts.percent(share)} of the inputs of {function} become 0")
        if reasons:
            out[name] = reasons[0]
    return out


def _reason(tensor: TensorForecast, cast: Cast) -> str:
    scale = f" at a loss scale of {amounts.number(cast.scale)}" if isinstance(cast.scale, float) else ""
    if tensor.kind == "updates":
        return f"rounding loses {amounts.percent(cast.flush)} of the update" if cast.flush > DROPPED else ""
    if cast.overflow:
        share = amounts.percent(cast.overflow)
        return f"{share} of the {tensor.kind} overflow{scale}; the largest is {tensor.largest:.2g}"
    if cast.underflow > LOST:
        what = f"{amounts.percent(cast.flush)} of the {tensor.kind} become 0{scale}"
        return f"{what}, and a result loses {amounts.percent(cast.underflow)} of its squared norm"
    return ""


def recommended(regions: Sequence[RegionForecast], formats: Sequence[str], loss_scale: float) -> Plan | None:
    """Return a plan in the low format that suits the most regions, with all other regions in fp32.

    A format suits a region if the region's numbers neither overflow nor underflow in it. If both formats suit equally many regions,
    bf16 is chosen. None is returned if neither bf16 nor fp16 is in ``formats``, or if neither suits the model itself, outside its
    submodules.
    """
    plans = [
        (len(exempted), low, exempted)
        for low in LOW
        if low in formats and (exempted := _exemptions(regions, low)) is not None
    ]
    if not plans:
        return None
    _, low, exempted = min(plans, key=lambda plan: plan[0])
    plan = Plan.preset(f"{low}-mixed")
    if plan.loss_scale is not None:
        plan = dataclasses.replace(plan, loss_scale=dataclasses.replace(plan.loss_scale, init=loss_scale))
    return dataclasses.replace(plan, regions=tuple(Region(path, compute="fp32") for path in exempted))


def _exemptions(regions: Sequence[RegionForecast], low: str) -> list[str] | None:
    """Return the paths of the outermost modules whose numbers overflow or underflow in a format.

    None is returned if the model itself is one of these modules.
    """
    called = {region.path for region in regions if any(t.kind == "activations" for t in region.tensors)}
    bad = []
    for region in regions:
        if low in region.troubles:
            path = region.path
            while path and path not in called:  # a module that is never called is no region
                path = path.rpartition(".")[0]
            bad.append(path)
    if "" in bad:
        return None
    outermost = (path for path in bad if not any(path.startswith(f"{other}.") for other in bad))
    return list(dict.fromkeys(outermost))


def answer(
    regions: Sequence[RegionForecast], formats: Sequence[str], loss_scale: float, scales: ScaleRange | None
) -> str:
    """Return the result of a forecast with one sentence per format."""
    return " ".join(_sentence(regions, name, loss_scale, scales) for name in formats)


def _sentence(
    regions: Sequence[RegionForecast], name: str, loss_scale: float, scales: ScaleRange | None
) -> str:
    bad = [region for region in regions if name in region.troubles]
    how = ", scaled per tensor," if name.startswith("fp8") else ""
    if name == "fp16" and scales is not None:
        how = f", at a loss scale of {amounts.number(loss_scale)},"
        if scales.is_empty:
            how = f", at a loss scale of {amounts.number(loss_scale)} (no loss scale holds all gradients),"
    said = f"{name}{how} holds "
    if not bad:
        return f"{said}all {len(regions)} regions."
    return f"{said}{len(regions) - len(bad)} of {len(regions)} regions{_but(bad, bad[0].troubles[name])}"
