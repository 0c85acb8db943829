"""Compare tuned plans with a grid of plans set by hand, and repeated searches with each other.

The workloads are the built-in ones and architectures of transformers. The grid is {fp32, autocast bf16, bf16
parameters with fp32 masters} x {contiguous, channels_last for models of images} x {optimizer as given, fused}. With
--compiled, the fastest of these in each format is compiled too (which takes up to a minute each), and the searches
use ``compile="auto"``.

Each workload is searched several times. ``same``: all searches chose one plan. ``alike``: format, parameter storage,
memory format and regions are the same in all. ``pairs_alike`` counts the pairs of searches of one workload that agree
on format, parameter storage and memory format.

A first race finds the best plan of the grid. Then this plan, fp32, one-line torch.autocast (bf16-mixed) and the plans
of the searches are raced again with new starts. All ratios come from this second race, because choosing the best plan
and comparing with it on the same rounds would favour the grid. ``over_giving_back`` is the speedup from keeping host
memory. ``agrees``: the speedup over fp32 that each search reported and that of the second race have overlapping
intervals. If a step of one-line autocast takes more than ten times as long as fp32's, because the processor has no
bf16 units, the ratio is reported (``autocast_times_as_long``) and low formats are not raced. Built-in workloads are
also searched with a budget of 30 s, and ``within`` counts the resulting plans that are at most 5 % slower than that
of the first long search.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import math
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import castwise
from architectures import ARCHITECTURES
from castwise import Plan, Workload
from castwise.lab.search.final import Final
from castwise.lab.timing import timing
from castwise.lab.timing.apart import start_apart
from castwise.lab.timing.failures import cannot_run
from castwise.lab.timing.processes import Home, portable
from castwise.lab.timing.runners import TrainingRun
from castwise.lab.workloads.workload import find_workload
from common import RESULTS, sentence, show, store
from gpu import LARGE

BUILT_IN = {
    "cpu": ("sine?size=128", "gpt", "digits"),
    "cuda": ("sine?size=512", "gpt", "gpt?layers=6&width=768", LARGE, "digits"),
}
FORMATS = ("fp32", "bf16-mixed", "bf16-master")
SHORT_S, SHORT_WITHIN = 30.0, 1 / 1.05
"""The budget of a short search in seconds, and the least speed of its plan relative to the long search's for ``within``."""
ROUNDS, GRID_ROUNDS = 8, 6
LAST = 10
"""Number of last steps whose mean loss is compared."""


def autocast_times_as_long(workload: Workload, device: torch.device) -> float:
    """Return the time of one-line autocast divided by fp32's, from two steps of each; only large ratios show."""
    runs = {name: TrainingRun(workload, Plan.preset(name), device) for name in FORMATS[:2]}
    laps = timing.race(list(runs.items()), rounds=1, steps=1, device=device, warmup=1, hopeless=math.inf)
    for run in runs.values():
        run.close()
    fp32, low = (statistics.median(lap.seconds) for lap in laps.values())
    return low / fp32


def grid(workload: Workload, formats: Sequence[str] = FORMATS) -> list[Plan]:
    """Return the plans that users try by hand."""
    model = workload.model()
    images = any(isinstance(m, torch.nn.Conv2d) for m in model.modules())
    layouts = ("as_is", "channels_last") if images else ("as_is",)
    return [
        dataclasses.replace(Plan.preset(name), memory_format=layout, optimizer=step)
        for name, layout, step in itertools.product(formats, layouts, ("as_given", "fused"))
    ]


def compiled(race: Final) -> list[Plan]:
    """Return the fastest plan of each format, compiled."""
    fastest: dict[Plan, Plan] = {}
    for plan in sorted(race.plans, key=lambda plan: statistics.median(race.seconds(plan))):
        fastest.setdefault(dataclasses.replace(plan, memory_format="as_is", optimizer="as_given"), plan)
    return [dataclasses.replace(plan, compile="default") for plan in fastest.values()]


def raced(
    workload: Workload | str, plans: Sequence[Plan], device: torch.device, starts: int, rounds: int
) -> Final:
    """Time plans in turns, each in its own process, over several starts; leave out plans that cannot run."""
    with Home() as home:
        found = start_apart(home, portable(workload), plans, device, starts=starts, rounds=rounds)
    for timed in found:
        error = timed[-1].error
        if error is not None and not cannot_run(error):
            raise error
    well = {plan: timed for plan, timed in zip(plans, found, strict=True) if timed[-1].error is None}
    return Final(
        list(well),
        times_s=[[one.times_s for one in timed] for timed in well.values()],
        losses={plan: timed[0].losses for plan, timed in well.items()},
    )


def speed(race: Final, plan: Plan, over: Plan) -> list[float]:
    """Return the speedup of a plan over another, with the ends of its interval."""
    ratio = race.ratio(plan, over)
    return [1.0, 1.0, 1.0] if ratio is None else [ratio.value, ratio.low, ratio.high]


def search(workload: Workload | str, device: torch.device, budget_s: float, compiles: str) -> dict[str, Any]:
    """Run one search as a user does, and return its result as part of a row."""
    start = time.perf_counter()
    result = castwise.tune(
        workload, device=device, budget_s=budget_s, memory=False, fresh=True, compile=compiles
    )
    took = time.perf_counter() - start
    evidence = result.evidence
    chosen = next(row for row in evidence.candidates if row.plan == evidence.plan)
    page = chosen.speedup
    return {
        "plan": str(dataclasses.replace(result.plan, provenance=None)), "tune_s": took, "answer": result.answer,
        "decided": not any(
            open_ in text for open_ in (" to decide: after ", "before it could choose") for text in (evidence.answer, *evidence.notes)
        ),
        "over_fp32": [1.0, 1.0, 1.0] if page is None else [page.value, page.low, page.high],
        "not_compiled": [f"{row.plan}: {row.reason}" for row in evidence.candidates if "compile=" in row.plan and row.plan != evidence.plan],
        "gradients": chosen.parity.verdict if chosen.parity is not None else None,
        "passes": evidence.passes, "commit": evidence.environment.commit,
    }  # fmt: skip


def of_format(plan: Plan) -> Plan:
    """Return a plan without minor parts: fused optimizer, kept memory, operator rules, loss scale, provenance."""
    plan = dataclasses.replace(plan, optimizer="as_given", host_memory="as_given")
    return dataclasses.replace(plan, ops={}, loss_scale=None, provenance=None)


def pairs_alike(searches: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return how many pairs of searches agree on format, parameter storage and memory format, of how many pairs."""
    plans = [Plan.parse(one["plan"]) for one in searches]
    kinds = [(p.compute, p.fp32_matmul, p.params, p.master, p.memory_format) for p in plans]
    pairs = list(itertools.combinations(kinds, 2))
    return sum(one == other for one, other in pairs), len(pairs)


def check_losses(name: str, race: Final, tuned: Plan) -> dict[str, float]:
    """Return the losses of fp32 and of the tuned plan after the same steps on the same batches.

    Raises:
        SystemExit: The losses differ, so the speeds cannot be compared.
    """
    fp32 = race.losses[Plan.preset("fp32")]
    base, mine = (statistics.fmean(losses[-LAST:]) for losses in (fp32, race.losses[tuned]))
    allowed = 0.05 * max(fp32[0], base) + 3.0 * statistics.stdev(fp32[-LAST:]) / LAST**0.5
    if not abs(mine - base) <= allowed:
        raise SystemExit(f"{name}: losses {base:.4g} and {mine:.4g} differ by more than {allowed:.3g}")
    return {"fp32_loss": base, "tuned_loss": mine}


def measure(
    name: str, device: torch.device, options: argparse.Namespace, found: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure one row of the table; the results of the searches are passed to ``found`` before the races start."""
    built_in = name in BUILT_IN[device.type]
    workload = name if built_in else ARCHITECTURES[name]()
    compiles = "auto" if options.compiled else "never"
    long = [search(workload, device, options.budget, compiles) for _ in range(options.searches)]
    short = [
        search(workload, device, SHORT_S, "never")
        for _ in range(options.short if built_in and not options.compiled else 0)
    ]
    tuned, *_ = plans = [Plan.parse(one["plan"]) for one in long]
    known = {
        "workload": name, "plan": str(tuned),
        "same": len(set(plans)) == 1, "alike": len(set(map(of_format, plans))) == 1, "searches": long, "short": short,
    }  # fmt: skip
    found(known)
    gc.collect()
    fp32, autocast = Plan.preset("fp32"), Plan.preset("bf16-mixed")
    made = workload if isinstance(workload, Workload) else find_workload(workload)
    slowdown = autocast_times_as_long(made, device)
    formats = FORMATS if slowdown <= timing.HOPELESS else FORMATS[:1]
    tried = raced(workload, grid(made, formats), device, 1, GRID_ROUNDS)
    if options.compiled:
        eager = min(tried.plans, key=lambda plan: statistics.median(tried.seconds(plan)))
        tried = raced(workload, [eager, *compiled(tried)], device, 1, GRID_ROUNDS)
    best = min(tried.plans, key=lambda plan: statistics.median(tried.seconds(plan)))
    shorts = [Plan.parse(one["plan"]) for one in short]
    given_back = dataclasses.replace(tuned, host_memory="as_given")
    beside = [fp32] if slowdown > timing.HOPELESS else [fp32, autocast]
    racing = list(dict.fromkeys([*beside, best, given_back, *plans, *shorts]))
    race = raced(workload, racing, device, options.starts, ROUNDS)
    losses = check_losses(name, race, tuned)
    for one, plan in zip(short, shorts, strict=True):
        one["over_long"] = speed(race, plan, tuned)
    agrees = [meet(one["over_fp32"], speed(race, plan, fp32)) for one, plan in zip(long, plans, strict=True)]
    return {
        **known,
        "best_of_grid": str(best),
        "over_fp32": speed(race, tuned, fp32),
        **(
            {"autocast_times_as_long": slowdown}
            if slowdown > timing.HOPELESS
            else {"over_autocast": speed(race, tuned, autocast)}
        ),
        "over_best_of_grid": speed(race, tuned, best),
        "over_giving_back": speed(race, tuned, given_back),
        "agrees": all(agrees),
        "fp32_ms": 1e3 * statistics.median(race.seconds(fp32)),
        "tuned_ms": 1e3 * statistics.median(race.seconds(tuned)),
        **losses,
    }


def meet(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two intervals overlap."""
    return one[1] <= other[2] and one[2] >= other[1]


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return geometric means of the speedup over one-line autocast, and counts, for the workloads that were raced."""

    def mean(values: list[float]) -> float | None:
        return math.exp(statistics.fmean(math.log(v) for v in values)) if values else None

    rows = [row for row in rows if "over_fp32" in row]
    over = {str(row["workload"]): row["over_autocast"][0] for row in rows if "over_autocast" in row}
    searches = [one for row in rows for one in row["searches"]]
    pairs = [pairs_alike(row["searches"]) for row in rows]
    short = [one for row in rows for one in row["short"]]
    return {
        "workload": "all",
        "geometric_mean_over_autocast": mean(list(over.values())),
        "without_sine": mean([value for name, value in over.items() if not name.startswith("sine")]),
        "slower_than_best_of_grid": [row["workload"] for row in rows if row["over_best_of_grid"][2] < 1.0],
        "faster_than_best_of_grid": [row["workload"] for row in rows if row["over_best_of_grid"][1] > 1.0],
        **{key: sum(row[key] for row in rows) for key in ("same", "alike", "agrees")},
        "workloads": len(rows),
        "pairs_alike": sum(alike for alike, _ in pairs),
        "pairs": sum(of for _, of in pairs),
        "decided": sum(one["decided"] for one in searches),
        "searches": len(searches),
        "median_tune_s": statistics.median([one["tune_s"] for one in searches] or [math.nan]),
        "short": len(short),
        "within": sum(one["over_long"][0] >= SHORT_WITHIN for one in short),
    }


def main() -> None:
    """Measure and write ``results/tune-<device>.json``, or ``tune-compiled-<device>.json`` with ``--compiled``.

    With ``--only``, the other rows of the file stay. A workload that fails becomes a row with its error.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", default="", help="comma-separated names")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds per search")
    parser.add_argument("--searches", type=int, default=3, help="number of searches of each workload")
    parser.add_argument(
        "--short", type=int, default=5, help="number of 30 s searches of each built-in workload"
    )
    parser.add_argument("--starts", type=int, default=5, help="number of starts of each plan in the race")
    parser.add_argument(
        "--compiled", action="store_true", help="include compiled plans in the grid and in the search"
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    built_in = BUILT_IN[device.type]
    names = [*built_in, *ARCHITECTURES]
    asked = [n for n in options.only.split(",") if n]
    chosen = (
        [n for a in asked for n in names if a == (n if a in names else n.split("?")[0])] if asked else names
    )
    if not chosen:
        parser.error(f"--only {options.only}: there are {names}")
    title = "tune-compiled" if options.compiled else "tune"
    path = RESULTS / f"{title}-{device.type}.json"
    known: dict[str, dict[str, Any]] = {}
    if options.only and path.exists():
        known = {
            r["workload"]: r
            for r in json.loads(path.read_text(encoding="utf-8"))["rows"]
            if r["workload"] != "all"
        }

    def keep(row: dict[str, Any]) -> None:
        """Write a row at once, because a long run may be ended early."""
        known[str(row["workload"])] = row
        rows = [known[n] for n in names if n in known]
        store(title, device, __doc__, [*rows, summary(rows)])
        show(row)

    failed = []
    for name in chosen:
        known.pop(name, None)
        try:
            keep(measure(name, device, options, keep))
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            keep({"workload": name} | known.get(name, {}) | {"error": sentence(error)})
            failed.append(name)
        gc.collect()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
