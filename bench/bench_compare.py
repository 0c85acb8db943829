"""Test whether ``castwise.compare`` finds the call that causes an error (a birthplace).

``faults``: a stack of 24 residual layers under bf16-mixed. In one layer, a product (``out``) or the layer's sum
(``sum``) is rounded to a few bits of mantissa (bf16 has 7), in forward only or in backward only. Each of the 24
layers has its turn. ``found`` is the share of positions at which the faulty module is the first birthplace, ``alone``
the share at which it is the only one. For comparison, two simpler methods compare the errors of two separate runs:
``largest`` names the call with the largest error, ``growth`` the call with the largest ratio of output error to input
error.

``clean``: built-in workloads and architectures under presets, without a fault. A row has the number of calls, of
birthplaces and of calls whose errors come from torch's kernels, with the largest error that such a call added. For
all other calls it has the largest error that a call added, relative to the error that rounding explains.

``causes``: why some calls without a fault are birthplaces. The first rows are about gradients that layers on a CPU
sum over ``rows``. ``off`` is their relative error against fp64 from the same inputs, and ``rounded`` that of the
exact result rounded once to the format. Inputs and incoming gradients are normally distributed; each value is the
median of ten draws. The other rows are about ConvNeXt with several initial layer scales. They have the birthplaces
and the largest share of a region's gradients that becomes zero in the format at the loss scale that
``castwise.forecast`` proposes. ``scales`` is the range of loss scales at which fp16 can represent the gradients.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.lab.inspect.faults import Stack, batch, loss

from architectures import ARCHITECTURES, convnext
from castwise import compare, forecast
from castwise.lab.inspect.comparison import CallComparison, Comparison
from castwise.lab.workloads.workload import Workload, find_workload
from common import Results, arguments

LAYERS = 24
BITS = (5, 4, 3, 2)
PLACES = {"out": "layers.{}.second", "sum": "layers.{}"}
PLANS = ("bf16-mixed", "fp16-mixed", "bf16-true")
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROWS, DRAWS = (16, 64, 256, 1024, 4096), 10
LAYER_SCALES = (1e-6, 1e-3, 1.0)
BUILT_IN = ("gpt?layers=2&width=64&context=32&batch=4", "digits?width=8&batch=16", "sine?size=32")


def _error(call: CallComparison, backward: bool) -> tuple[float, float]:
    side = call.backward if backward else call.forward
    return side.error or 0.0, (side.error or 0.0) / side.incoming if side.incoming else 0.0


def _side_by_side(found: Comparison, backward: bool) -> Iterator[str]:
    """Yield the paths of the call with the largest error and of the call with the largest growth, among modules."""
    calls = [call for call in found.calls if call.path not in ("", "(loss)")]
    for which in (0, 1):
        yield max(calls, key=lambda call: _error(call, backward)[which]).path


def faults(results: Results) -> None:
    """Add one row for each kind and size of fault."""
    for bits, place, backward in itertools.product(BITS, PLACES, (False, True)):
        counts: dict[str, int] = dict.fromkeys(("found", "alone", "largest", "growth"), 0)
        excess, taken = [], []
        with results.part(f"{place} {bits} {backward}"):
            for position in range(LAYERS):
                start = time.perf_counter()
                model = Stack(LAYERS, at=position, fault=(place, bits, backward))
                found = compare(model, loss, batch(), "fp32", "bf16-mixed", tries=0)
                taken.append(time.perf_counter() - start)
                where, born = PLACES[place].format(position), [call.path for call in found.birthplaces]
                largest, growth = _side_by_side(found, backward)
                excess += [call.excess for call in found.calls if call.path == where]
                for name, hit in (
                    ("found", born[:1] == [where]), ("alone", born == [where]), ("largest", largest == where),
                    ("growth", growth == where),
                ):  # fmt: skip
                    counts[name] += hit
            results.add({
                "part": "faults", "bits": bits, "place": place, "direction": "backward" if backward else "forward",
                "positions": LAYERS, **{name: hits / LAYERS for name, hits in counts.items()},
                "x_rounding_least": min(excess), "x_rounding_most": max(excess), "median_s": statistics.median(taken),
            })  # fmt: skip


def clean(results: Results) -> None:
    """Add one row for each job and plan."""
    jobs: dict[str, Callable[[], Workload]] = {
        name: lambda name=name: find_workload(name) for name in BUILT_IN
    }  # type: ignore[misc]
    for (name, make), plan in itertools.product((jobs | dict(ARCHITECTURES)).items(), PLANS):
        with results.part(f"{name} {plan}"):
            workload = make()
            torch.manual_seed(0)
            model, first = workload.model(), next(iter(workload.batches(0)))
            start = time.perf_counter()
            found = compare(model, workload.loss, first, "fp32", plan, tries=0)
            results.add({
                "part": "clean",
                "workload": name,
                "plan": plan,
                **_said(found),
                "s": time.perf_counter() - start,
            })


def _said(found: Comparison) -> dict[str, Any]:
    sides = [(call, side) for call in found.calls for side in (call.forward, call.backward)]
    other = [call.excess for call in found.calls if not call.born and not call.in_kernels]
    return {
        "calls": len(found.calls), "output_error": found.output_error, "gradient_error": found.gradient_error,
        "born": [[call.path, call.kind, side.where, round(side.excess, 1)] for call, side in sides if side.effect == "born"][:8],
        "born_calls": len(found.birthplaces), "born_kinds": sorted({call.kind for call in found.birthplaces}),
        "kernel_calls": len(found.in_kernels), "kernel_kinds": sorted({call.kind for call in found.in_kernels}),
        "kernel_largest": max((call.own for call in found.in_kernels), default=0.0),
        "x_rounding_of_others": max(other, default=math.nan), "strayed": found.strayed, "notes": list(found.notes),
    }  # fmt: skip


def causes(results: Results) -> None:
    """Add one row for each layer, format and number of rows, then one for each layer scale of ConvNeXt and plan."""
    layers: dict[str, Callable[[], nn.Module]] = {
        "LayerNorm(64)": lambda: nn.LayerNorm(64), "Embedding(2, 64)": lambda: nn.Embedding(2, 64),
    }  # fmt: skip
    cases = [
        *itertools.product(layers, FORMATS, ROWS, (False,)),
        *(("LayerNorm(64)", one, ROWS[-1], True) for one in FORMATS),
    ]
    for name, format, rows, compiled in cases:
        case = {"part": "causes", "layer": name, "format": format, "rows": rows, "compiled": compiled}
        with results.part(f"{name} {format} {rows} {compiled}"):
            results.add(*({**case, **row} for row in _off(layers[name], FORMATS[format], rows, compiled)))
    for factor, plan in itertools.product(LAYER_SCALES, PLANS[:2]):
        with results.part(f"convnext {factor} {plan}"):
            results.add(_new_convnext(factor, plan))


def _off(
    make: Callable[[], nn.Module], dtype: torch.dtype, rows: int, compiled: bool
) -> Iterator[dict[str, Any]]:
    """Yield one row for each parameter of a layer, with the error of its gradient."""
    errors: dict[str, dict[str, list[float]]] = {}
    layer = make().to(dtype)
    call = torch.compile(layer) if compiled else layer
    exact = make().double()
    exact.load_state_dict(layer.state_dict())
    for seed in range(DRAWS):
        generator = torch.Generator().manual_seed(seed)
        inputs: Any = torch.randn(rows, 64, generator=generator).to(dtype)
        if isinstance(layer, nn.Embedding):
            inputs = torch.randint(layer.num_embeddings, (rows,), generator=generator)
        came_in = torch.randn(rows, 64, generator=generator).to(dtype)
        for one, runs in ((layer, call), (exact, exact)):
            one.zero_grad()
            to = next(one.parameters()).dtype
            runs(inputs.to(to) if inputs.is_floating_point() else inputs).backward(came_in.to(to))
        for path, parameter in layer.named_parameters():
            right, grad = exact.get_parameter(path).grad, parameter.grad
            assert right is not None
            assert grad is not None
            for what, gradient in (("off", grad), ("rounded", right.to(dtype))):
                error = float((gradient.double() - right).norm() / right.norm())
                errors.setdefault(path, {}).setdefault(what, []).append(error)
    for path, both in errors.items():
        yield {"parameter": path, **{what: statistics.median(found) for what, found in both.items()}}


def _new_convnext(factor: float, plan: str) -> dict[str, Any]:
    workload = convnext(factor)
    torch.manual_seed(0)
    model, first = workload.model(), next(iter(workload.batches(0)))
    found = compare(model, workload.loss, first, "fp32", plan, tries=0)
    format = plan.partition("-")[0]
    said = forecast(model, workload.loss, workload.batches, (format,), plan=plan)
    flushes = {
        region.path: cast.flush
        for region in said.regions
        if (gradients := region.tensor("gradients")) is not None
        and (cast := gradients.cast(format)) is not None
    }
    where = max(flushes, key=flushes.__getitem__)
    return {
        "part": "causes", "model": "convnext", "layer_scale": factor, "plan": plan, "calls": len(found.calls),
        "born_calls": len(found.birthplaces), "born_kinds": sorted({call.kind for call in found.birthplaces}),
        "loss_scale": said.loss_scale, "scales": None if said.scales is None else dataclasses.asdict(said.scales),
        "largest_flush": flushes[where], "where": where,
    }  # fmt: skip


def main() -> None:
    """Run the parts and write a result file for each."""
    parser = arguments(__doc__)
    parts = {
        "faults": ("compare", faults),
        "clean": ("compare-clean", clean),
        "causes": ("compare-causes", causes),
    }
    parser.add_argument("--only", choices=parts)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, (file, part) in parts.items():
        if options.only in (None, name):
            with Results(file, torch.device("cpu"), __doc__, options.budget) as results:
                part(results)


if __name__ == "__main__":
    main()
