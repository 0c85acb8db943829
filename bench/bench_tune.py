"""The tuned plan against the whole hand grid, on built-in workloads and architectures of transformers.

Grid: {fp32, autocast bf16, bf16 parameters with fp32 masters} x {contiguous, channels_last where there are images} x
{optimizer as given, fused}; with --compiled, x {as it is, compiled} too, against ``tune(compile="auto")``, which takes long:
each of them compiles for up to a minute. Each workload is tuned; then the grid is raced on fresh models to find its best plan, and that
plan, fp32, one-line torch.autocast (bf16-mixed) and the tuned plan are raced again in further interleaved rounds, from which
all ratios come: choosing the best and comparing with it on the same rounds would flatter the grid by its luck.
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
from functools import partial

import torch

import castwise
from architectures import ARCHITECTURES
from castwise import Plan, Workload
from castwise.measure.stats import Ratio, paired_speedup
from castwise.measure.steps import TrainingRun
from castwise.measure.timing import Lap, paired, race
from castwise.workload import find_workload
from common import RESULTS, sentence, show, store

BUILT_IN = {
    "cpu": ("sine?size=128", "gpt", "digits"),
    "cuda": ("sine?size=512", "gpt", "gpt?layers=6&width=768", "digits"),
}
AGAIN = ("digits", "convnext")
"""Tuned twice, to see whether runs repeat."""
BLOCK_S = 0.08
LAST = 10
"""Steps whose mean loss is compared."""


def grid(workload: Workload, compiled: bool = False) -> list[Plan]:
    """The plans that people try by hand."""
    model = workload.model()
    images = any(isinstance(m, torch.nn.Conv2d) for m in model.modules())
    layouts = ("as_is", "channels_last") if images else ("as_is",)
    modes = ("as_given", "default") if compiled else ("as_given",)
    return [
        dataclasses.replace(Plan.preset(name), memory_format=layout, optimizer=step, compile=mode)
        for mode, name, layout, step in itertools.product(
            modes, ("fp32", "bf16-mixed", "bf16-master"), layouts, ("as_given", "fused")
        )
    ]


def compete(
    workload: Workload, plans: Sequence[Plan], rounds: int, device: torch.device
) -> tuple[dict[Plan, Lap], dict[Plan | str, float]]:
    """Race plans; return their laps, and the loss that each has come to at the same step of the same batches."""
    runs: dict[Plan, TrainingRun] = {}
    state = None
    try:
        for plan in plans:
            runs[plan] = TrainingRun(workload, plan, device, 1, state)
            state = state or runs[plan].weights()
        base = runs[plans[0]]
        first = race([("", base)], rounds=2, steps=1, device=device)[""].times_s
        steps = max(1, min(16, round(BLOCK_S / min(t for t in first if t is not None))))
        named = [(str(i), runs[plan]) for i, plan in enumerate(plans)]
        laps = race(named, rounds=rounds, steps=steps, device=device)
        found = {plan: laps[str(i)] for i, plan in enumerate(plans)}
        at_once = same_steps({plan: run.losses for plan, run in runs.items() if not found[plan].done})
        losses: dict[Plan | str, float] = {plan: statistics.fmean(last) for plan, last in at_once.items()}
        losses["start"] = base.losses[0]
        losses["spread"] = statistics.stdev(at_once[plans[0]]) / LAST**0.5
        return found, losses
    finally:
        for run in runs.values():
            run.close()


def same_steps(losses: Mapping[Plan, Sequence[float]]) -> dict[Plan, Sequence[float]]:
    """The last losses of the steps that every one of some runs has taken."""
    taken = min(map(len, losses.values()))
    return {plan: own[max(0, taken - LAST) : taken] for plan, own in losses.items()}


def ratio(laps: dict[Plan, Lap], plan: Plan, over: Plan) -> Ratio:
    """How many times as fast as ``over`` a plan is."""
    if plan == over:
        return Ratio(1.0, 1.0, 1.0, 0.95, len(laps[plan].times_s))
    before, after = paired(laps[over], laps[plan])
    return paired_speedup(before, after)


def measure(
    name: str,
    workload: Workload,
    device: torch.device,
    rounds: int,
    tune: Callable[[Workload], castwise.TuneResult],
    found: Callable[[dict[str, object]], None],
    compiled: bool = False,
) -> dict[str, object]:
    """One row of the table; what is known after the search is handed to ``found`` before the races."""
    start = time.perf_counter()
    result = tune(workload)
    took = time.perf_counter() - start
    tuned = dataclasses.replace(result.plan, provenance=None)
    known: dict[str, object] = {"workload": name, "plan": str(tuned), "tune_s": took, "answer": result.answer}
    found(known)
    again = dataclasses.replace(tune(workload).plan, provenance=None) if name in AGAIN else tuned
    gc.collect()
    fp32, autocast = Plan.preset("fp32"), Plan.preset("bf16-mixed")
    laps, _ = compete(workload, grid(workload, compiled), max(6, rounds // 3), device)
    best = min(laps, key=lambda plan: statistics.median(t for t in laps[plan].times_s if t is not None))
    gc.collect()
    field = list(dict.fromkeys([fp32, autocast, best, tuned, again]))
    laps, losses = compete(workload, field, rounds, device)
    allowed = 0.05 * max(losses["start"], losses[fp32]) + 3.0 * losses["spread"]
    if tuned not in losses or not abs(losses[tuned] - losses[fp32]) <= allowed:
        raise SystemExit(
            f"{name}: the losses differ by more than {allowed:.3g}, so speeds say nothing: {losses}"
        )
    chosen = next(c for c in result.evidence.candidates if c.plan == result.evidence.plan)
    over = {"fp32": fp32, "autocast": autocast, "best_of_grid": best, "second_tune": again}
    row: dict[str, object] = {"workload": name, "plan": str(tuned), "best_of_grid": str(best)}
    for key, plan in over.items():
        speed = ratio(laps, tuned, plan)
        row |= {f"over_{key}": speed.value, f"over_{key}_low": speed.low, f"over_{key}_high": speed.high}
    return {
        **row,
        "second_plan": str(again) if name in AGAIN else None,
        "fp32_ms": 1e3 * statistics.median(t for t in laps[fp32].times_s if t is not None),
        "tuned_ms": 1e3 * statistics.median(t for t in laps[tuned].times_s if t is not None),
        "fp32_loss": losses[fp32],
        "tuned_loss": losses[tuned],
        "best_of_grid_loss": losses.get(best),
        "tune_s": took,
        "passes": result.evidence.passes,
        "gradients": chosen.parity.verdict if chosen.parity is not None else None,
        "rounds": rounds,
        "answer": result.answer,
        "commit": result.evidence.environment.commit,
    }


def summary(rows: Sequence[dict[str, object]]) -> dict[str, object]:
    """Geometric means over one-line autocast, of the workloads that were raced."""

    def mean(values: list[float]) -> float | None:
        return math.exp(statistics.fmean(math.log(v) for v in values)) if values else None

    rows = [row for row in rows if "over_autocast" in row]
    over = {str(row["workload"]): float(str(row["over_autocast"])) for row in rows}
    slower = [row["workload"] for row in rows if float(str(row["over_best_of_grid_high"])) < 1.0]
    faster = [row["workload"] for row in rows if float(str(row["over_best_of_grid_low"])) > 1.0]
    return {
        "workload": "all",
        "geometric_mean_over_autocast": mean(list(over.values())),
        "without_sine": mean([value for name, value in over.items() if not name.startswith("sine")]),
        "slower_than_best_of_grid": slower,
        "faster_than_best_of_grid": faster,
    }


def main() -> None:
    """Run it; with ``--only`` the other rows of the result file stay. A workload that fails is a row with its error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", default="", help="names, between commas")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--budget", type=float, default=170.0, help="seconds per search")
    parser.add_argument(
        "--compiled", action="store_true", help="compiled plans are in the grid and in the search"
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
    known: dict[str, dict[str, object]] = {}
    if options.only and path.exists():
        known = {
            r["workload"]: r
            for r in json.loads(path.read_text(encoding="utf-8"))["rows"]
            if r["workload"] != "all"
        }

    def keep(row: dict[str, object]) -> None:
        """Written at once: a long run may be ended."""
        known[str(row["workload"])] = row
        rows = [known[n] for n in names if n in known]
        store(title, device, __doc__, [*rows, summary(rows)])
        show(row)

    failed = []
    for name in chosen:
        known.pop(name, None)
        try:
            workload = find_workload(name) if name in built_in else ARCHITECTURES[name]()
            compiles = "auto" if options.compiled else "never"
            search = partial(
                castwise.tune, device=device, memory=False, budget_s=options.budget, compile=compiles
            )
            keep(measure(name, workload, device, options.rounds, search, keep, options.compiled))
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            keep({"workload": name} | known.get(name, {}) | {"error": sentence(error)})
            failed.append(name)
        gc.collect()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
