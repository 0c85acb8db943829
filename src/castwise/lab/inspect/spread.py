"""Find where overflows spread: which results become non-finite in a low format although their own values do not overflow."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence

import torch
from torch import Tensor

from castwise.core.plans.formats import LOW
from castwise.core.plans.parts import LossScale
from castwise.core.plans.plan import Plan
from castwise.lab.inspect.forecast_result import RegionForecast, Spread
from castwise.lab.inspect.watch import Kind, Site, Watch
from castwise.lab.parity.probes import Prober


def overflowing(regions: Sequence[RegionForecast], name: str) -> tuple[str, ...]:
    """Return the paths of the regions whose activations overflow in a format."""
    return tuple(
        region.path
        for region in regions
        if (tensor := region.tensor("activations")) is not None
        and (cast := tensor.cast(name)) is not None
        and cast.overflow
    )


def spread(
    prober: Prober,
    plan: Plan,
    name: str,
    sources: Sequence[str],
    loss_scale: float,
    before: Container[Site],
) -> Spread:
    """Run a plan with another low format on all microbatches of the fp32 reference, and record which results become non-finite.

    Args:
        prober: Runs the model, and holds the microbatches of the reference.
        plan: The plan whose casts are assumed.
        name: ``bf16`` or ``fp16``.
        sources: Regions whose values overflow.
        loss_scale: Used for fp16.
        before: Sites that are non-finite already in fp32, such as masks.

    Raises:
        CastwiseError: The device cannot run the plan; operators may raise other errors.
    """
    reached: dict[str, None] = {}
    gradients = False

    def look(kind: Kind, site: Site, tensor: Tensor) -> None:
        nonlocal gradients
        if site in before or bool(torch.isfinite(tensor).all()):
            return
        if kind == "activations":
            reached[site.path] = None
        gradients = gradients or kind == "weight gradients"

    prober.observe(_computing(plan, name, loss_scale), range(len(prober.micros)), Watch(look))
    return Spread(tuple(sources), tuple(path for path in reached if path not in sources), gradients)


def _computing(plan: Plan, name: str, loss_scale: float) -> Plan:
    """Return the plan with its low formats replaced by another low format, and for fp16 with a loss scale."""
    regions = tuple(
        dataclasses.replace(
            region,
            compute=name if region.compute in LOW else region.compute,
            params=name if region.params in LOW else region.params,
        )
        for region in plan.regions
    )
    return dataclasses.replace(
        plan,
        compute=name if plan.compute in LOW else plan.compute,
        regions=regions,
        loss_scale=LossScale(init=loss_scale) if name == "fp16" else None,
    )
