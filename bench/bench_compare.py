"""Whether ``castwise.compare`` finds where an error is born.

``faults``: 24 residual layers under bf16-mixed, in one of which a product (``out``) or the layer's own sum (``sum``) is
rounded to so many bits of mantissa, bf16 having 7, forward or backward only; all 24 positions. ``found`` is the share in which
the very module is named first, ``alone`` that in which nothing else is called a birthplace. Beside it what can be read from the
errors of two runs side by side: the call with the ``largest`` error, and that with the largest ``growth`` of error from what came in
to what went out.

``clean``: built-in workloads and architectures under presets, with no fault seeded: calls, those that are called birthplaces, and
the largest own error over what rounding explains.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.inspection.faults import Stack, batch, loss

from architectures import ARCHITECTURES
from castwise import compare
from castwise.inspection.comparison import CallComparison, Comparison
from castwise.workload import Workload, find_workload
from common import Results, arguments

LAYERS = 24
BITS = (5, 4, 3, 2)
PLACES = {"out": "layers.{}.second", "sum": "layers.{}"}
PLANS = ("bf16-mixed", "fp16-mixed", "bf16-true")
BUILT_IN = ("gpt?layers=2&width=64&context=32&batch=4", "digits?width=8&batch=16", "sine?size=32")


def _error(call: CallComparison, backward: bool) -> tuple[float, float]:
    side = call.backward if backward else call.forward
    return side.error or 0.0, (side.error or 0.0) / side.incoming if side.incoming else 0.0


def _side_by_side(found: Comparison, backward: bool) -> Iterator[str]:
    """The call with the largest error and the one with the largest growth, among modules."""
    calls = [call for call in found.calls if call.path not in ("", "(loss)")]
    for which in (0, 1):
        yield max(calls, key=lambda call: _error(call, backward)[which]).path


def faults(results: Results) -> None:
    """One row for each kind of fault and its size."""
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
    """One row for each job and plan."""
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
    other = [call.excess for call in found.calls if not call.born]
    return {
        "calls": len(found.calls), "output_error": found.output_error, "gradient_error": found.gradient_error,
        "born": [[call.path, call.kind, side.where, round(side.excess, 1)] for call, side in sides if side.verdict == "born"][:8],
        "born_calls": len(found.birthplaces), "born_kinds": sorted({call.kind for call in found.birthplaces}),
        "x_rounding_of_others": max(other, default=math.nan), "strayed": found.strayed, "notes": list(found.notes),
    }  # fmt: skip


def main() -> None:
    """Seed and find."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=("faults", "clean"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, file, part in (("faults", "compare", faults), ("clean", "compare-clean", clean)):
        if options.only in (None, name):
            with Results(file, torch.device("cpu"), __doc__, options.budget) as results:
                part(results)


if __name__ == "__main__":
    main()
