"""Compare forecasts with actual runs in the low formats, region by region.

A forecast is made from an fp32 run alone. Then the same weights, batches and random numbers run under the plan, and
the non-finite values and the zeros in its tensors are counted. For each region and kind of tensor (activations,
gradients, gradients of weights) these two shares, minus those of the fp32 run, are compared with the forecast. A
share agrees if it differs by at most one percentage point. An overflow or underflow in one region spreads to the
next, which a forecast does not know. On a CPU, fp16 products are computed in fp32 and rounded. In addition, the
forecast for fp16 is compared with the run for models with a numerically fragile module (bench/planted) and for their
sound twins.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

import architectures
import castwise
from castwise import Plan, Workload
from castwise.core.plans.formats import LOW_DTYPES
from castwise.lab.inspect.forecast import Forecast, TensorForecast
from castwise.lab.inspect.plan_casts import PlanCasts
from castwise.lab.inspect.watch import Kind, Site
from castwise.lab.parity.batches import endless
from castwise.lab.parity.probes import Prober
from castwise.lab.passes.isolation import undisturbed
from castwise.lab.workloads.workload import find_workload
from common import Results, arguments
from planted.cases import CASES

MICROBATCHES = 2
CLOSE = 0.01
"""Two shares agree if they differ by at most this."""
BUILT_IN = ("sine?size=64", "digits", "gpt?layers=4&width=128")
PLANS = ("fp16-mixed", "fp16-mixed+loss_scale=none", "bf16-mixed", "fp16-true", "bf16-true")
Key = tuple[str, Kind, bool]


class Seen:
    """Counts of a run under a plan: of all values, of non-finite values and of zeros, by region and kind."""

    def __init__(self, casts: PlanCasts, dtype: torch.dtype) -> None:
        self.sums: dict[Key, list[int]] = defaultdict(lambda: [0, 0, 0])
        self._casts, self._dtype = casts, dtype

    def look(self, kind: Kind, site: Site, tensor: Tensor) -> None:
        """Count the values of a tensor; a tensor that the plan casts at its use is cast first."""
        kept = self._casts.keeps(kind, site)
        held = tensor if kept or tensor.dtype in LOW_DTYPES else tensor.to(self._dtype)
        sums = self.sums[site.path, kind, kept]
        sums[0] += held.numel()
        sums[1] += int((~torch.isfinite(held)).sum())
        sums[2] += int((held == 0).sum())


def run(job: Workload, model: torch.nn.Module, plan: Plan, device: torch.device) -> dict[Key, list[int]]:
    """Run a plan on the microbatches of a forecast."""
    with undisturbed():
        batches = endless(job.batches, "bench")(0)
        prober = Prober(model, job.loss, batches, device, call="bench", dither="fp32")
        prober.extend(MICROBATCHES)
        casts = PlanCasts()
        prober.observe(plan, [0], casts.observing)
        seen = Seen(casts, plan.compute_dtype)
        prober.observe(plan, range(MICROBATCHES), casts.watch(seen.look).observing)
    return seen.sums


def zeros(tensor: TensorForecast) -> float:
    """Return the share of values that are zero in fp32."""
    histogram = tensor.histogram
    return histogram.zeros / max(1, histogram.zeros + sum(histogram.counts))


def compare(found: Forecast, seen: dict[Key, list[int]], scaled: bool) -> dict[str, Any]:
    """Return how often shares agree, over regions and kinds and over whole regions, and where they differ most."""
    (format,) = found.formats
    close: dict[str, list[bool]] = {"overflow": [], "flush": []}
    whole, worst, lost = [], [], {"overflow": 0.0, "flush": 0.0}
    any_seen = any_said = False
    for region in found.regions:
        here = []
        for tensor in region.tensors:
            sums = seen.get((region.path, tensor.kind, tensor.kept))
            cast = tensor.cast(format, scaled)
            if tensor.kept or sums is None or cast is None:
                continue
            real = {
                "overflow": max(0.0, sums[1] / sums[0] - tensor.not_finite / tensor.count),
                "flush": max(0.0, sums[2] / sums[0] - zeros(tensor)),
            }
            any_seen, any_said = any_seen or real["overflow"] > 0, any_said or cast.overflow > 0
            for what, share in real.items():
                said = getattr(cast, what)
                close[what].append(abs(share - said) <= CLOSE)
                here.append(close[what][-1])
                lost[what] = max(lost[what], said)
                worst.append((
                    abs(share - said),
                    f"{region.path or '(model)'} {tensor.kind} {what}: said {said:.3f}, seen {share:.3f}",
                ))
        if here:
            whole.append(all(here))
    worst.sort(reverse=True)
    return {
        "regions": len(whole), "regions_agree": sum(whole) / max(1, len(whole)),
        "overflow_agrees": sum(close["overflow"]) / max(1, len(close["overflow"])),
        "flush_agrees": sum(close["flush"]) / max(1, len(close["flush"])),
        "tensors": len(close["flush"]), "overflow_said": any_said, "overflow_seen": any_seen,
        "largest_said": lost, "worst": [said for error, said in worst[:3] if error > CLOSE],
    }  # fmt: skip


def row(job: Workload, name: str, device: torch.device) -> dict[str, Any]:
    """Return the row of one job under one plan."""
    torch.manual_seed(0)
    model = job.model()
    plan = Plan.parse(name)
    found = castwise.forecast(
        model, job.loss, job.batches, (plan.compute,), plan=plan, microbatches=MICROBATCHES, device=device
    )
    scale = plan.loss_scale
    if scale is not None:
        plan = dataclasses.replace(plan, loss_scale=dataclasses.replace(scale, init=found.loss_scale))
    seen = run(job, model, plan, device)
    said = {"job": job.name, "plan": name, "loss_scale": found.loss_scale if scale is not None else None}
    return (
        said
        | compare(found, seen, scale is not None)
        | {"troubled": [r.path for r in found.regions if r.troubles]}
    )


def main() -> None:
    """Compare on the models with a fragile module, then on every job."""
    parser = arguments(__doc__)
    parser.add_argument("--jobs", nargs="*", default=[*BUILT_IN, *architectures.ARCHITECTURES])
    parser.add_argument("--plans", nargs="*", default=PLANS)
    parser.add_argument("--planted", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    with Results("forecast", device, __doc__, options.budget) as results:
        for case in CASES if options.planted else ():
            for sound in (False, True):
                with results.part(case.name):
                    job = case.workload(sound)
                    found = row(job, "fp16-mixed", device)
                    results.add(found | {"planted": case.name, "sound": sound, "shows_in": case.formats})
        for name in options.jobs:
            make = architectures.ARCHITECTURES.get(name)
            job = find_workload(name) if make is None else make()
            for plan in options.plans:
                with results.part(f"{name} {plan}"):
                    results.add(row(job, plan, device))


if __name__ == "__main__":
    main()
