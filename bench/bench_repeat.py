"""The same answer twice: each workload of ``bench_tune`` is searched three times, and what the searches chose is compared.

``same`` says that all chose one plan; ``alike`` that format, storage of parameters, memory format and regions are the same. The
speed over fp32 that each page shows is held against a race of the first search's plan and fp32 made afterwards, in processes of
its own: ``agrees`` where the intervals of all pages meet the race's.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any

import torch

import castwise
from architectures import ARCHITECTURES
from bench_tune import BUILT_IN
from castwise import Plan, Workload
from castwise.measure import stats
from castwise.measure.apart import race_apart
from castwise.measure.processes import Home, portable
from common import Results, arguments

SEARCHES, STARTS, ROUNDS = 3, 5, 8


def of_format(plan: Plan) -> Plan:
    """A plan without what hardly complicates it: the fused optimizer and rules for single operators."""
    return dataclasses.replace(plan, optimizer="as_given", ops={}, loss_scale=None, provenance=None)


def race(workload: Workload | str, plan: Plan, device: torch.device) -> stats.Ratio:
    """How many times as fast as fp32 a plan is, by starts of both in processes of their own."""
    both = [Plan.preset("fp32"), plan]
    with Home() as home:
        starts = [race_apart(home, portable(workload), both, device, rounds=ROUNDS) for _ in range(STARTS)]
    for timed in itertools.chain.from_iterable(starts):
        if timed.error is not None:
            raise timed.error
    return stats.restarts([[start[index].times_s for start in starts] for index in range(2)])[0, 1]


def measure(name: str, workload: Workload | str, device: torch.device, budget_s: float) -> dict[str, Any]:
    """One row: the searches of one workload, and the race."""
    found = []
    for _ in range(SEARCHES):
        start = time.perf_counter()
        result = castwise.tune(workload, device=device, budget_s=budget_s, memory=False, fresh=True)
        chosen = next(row for row in result.evidence.candidates if row.plan == result.evidence.plan)
        speed = chosen.speedup
        found.append({
            "plan": str(result.plan), "tune_s": time.perf_counter() - start, "answer": result.answer,
            "decided": not any("too noisy to decide" in note for note in result.evidence.notes),
            "over_fp32": None if speed is None else [speed.value, speed.low, speed.high],
        })  # fmt: skip
    plans = [Plan.parse(str(one["plan"])) for one in found]
    speed = race(workload, plans[0], device)
    pages = [one["over_fp32"] or [1.0, 1.0, 1.0] for one in found if one["plan"] == found[0]["plan"]]
    return {
        "workload": name, "same": len(set(plans)) == 1, "alike": len(set(map(of_format, plans))) == 1,
        "race_over_fp32": [speed.value, speed.low, speed.high],
        "agrees": all(page[1] <= speed.high and page[2] >= speed.low for page in pages),
        "searches": found,
    }  # fmt: skip


def main() -> None:
    """Write ``results/repeat-<device>.json``."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="names of workloads, between commas")
    parser.add_argument("--search", type=float, default=120.0, help="seconds per search")
    options = parser.parse_args()
    device = torch.device(options.device)
    jobs = [*BUILT_IN[device.type], *ARCHITECTURES]
    asked = [name for name in options.only.split(",") if name]
    if unknown := [name for name in asked if name not in jobs]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(jobs)}")
    with Results("repeat", device, __doc__, options.budget) as results:
        for name in asked or jobs:
            with results.part(name):
                workload = ARCHITECTURES[name]() if name in ARCHITECTURES else name
                results.add(measure(name, workload, device, options.search))
        rows = [row for row in results.rows if "same" in row]
        results.add(
            {key: sum(bool(row[key]) for row in rows) for key in ("same", "alike", "agrees")}
            | {"workloads": len(rows)}
        )


if __name__ == "__main__":
    main()
