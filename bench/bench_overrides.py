"""Measure the overhead of one overridden operator, in microseconds per call on 4x4 tensors, with one CPU thread.

Gradients are off, so that only the operator and its dispatch are timed. Each operator is compared with the same call
without castwise in four places: inside the plan's autocast region, in a torch.autocast region while the plan is
active, outside any region while the plan is active, and in a torch.autocast region after the plan was closed. An
operator that is not overridden is measured as well.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import castwise
from castwise import Plan
from common import write


def loop_us(function: Callable[[], Any], calls: int) -> float:
    """Return the mean time of one call, in microseconds."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return 1e6 * (time.perf_counter() - start) / calls


def main() -> None:
    """Measure and write ``results/overrides-<device>.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    x = torch.randn(4, 4, device=device)
    low = x.bfloat16()
    operators: dict[str, Callable[[], Any]] = {
        "exp (overridden)": lambda: torch.exp(x),
        "mm (overridden)": lambda: torch.mm(low, low),
        "relu (not overridden)": lambda: torch.relu(x),
    }
    plan = Plan(compute="bf16", ops={"exp": "fp32", "mm": "as_is"})

    def native() -> Any:
        return torch.autocast(device.type, dtype=torch.bfloat16)

    def collect(where: Callable[[], Any]) -> dict[str, float]:
        with where():
            return {name: loop_us(function, options.calls) for name, function in operators.items()}

    samples: dict[str, list[dict[str, float]]] = {}
    with torch.no_grad():
        for _ in range(options.rounds):
            before_plain, before_native = collect(contextlib.nullcontext), collect(native)
            region = castwise.autocast(plan, device_type=device.type)
            live = {
                "inside the plan": (collect(lambda region=region: region), before_native),
                "in torch.autocast while the plan is live": (collect(native), before_native),
                "outside any region while the plan is live": (collect(contextlib.nullcontext), before_plain),
            }
            del region
            gc.collect()
            live["in torch.autocast after it was closed"] = (collect(native), before_native)
            for place, (now, before) in live.items():
                samples.setdefault(place, []).append({name: now[name] - before[name] for name in operators})
    rows = []
    for place, found in samples.items():
        for name in operators:
            values = sorted(sample[name] for sample in found)
            quarter = len(values) // 4
            rows.append({
                "place": place,
                "operator": name,
                "extra_us": statistics.median(values),
                "q1_us": values[quarter],
                "q3_us": values[-quarter - 1],
            })
    write("overrides", device, __doc__, rows)


if __name__ == "__main__":
    main()
