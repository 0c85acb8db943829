"""The judge of the held-out and the third suite: paired training of a plan and fp32, without gradient test or search.

A plan *fails* if a loss is not finite, if castwise raises an error such as a failing loss scale, if every step is
skipped, or if its loss over the last fifth of the run, averaged over seeds, is worse than fp32's by more than the
margin. The margin is the larger of the standard deviation of fp32's loss over seeds (the effect of chance alone) and
0.25 % of that loss (a smaller difference would not be noticed, and a few seeds may agree by chance). Pairs share
their weights, data and random draws. The same rule for the margin applies to every case.

``python bench/planted/paired.py`` checks the held-out suite itself and writes
``bench/results/planted-suite-cpu.json``. With ``--suite discrete`` it checks the third suite and writes
``planted-discrete-cpu.json``. In every format for which a case is fragile, the low plan must fail. The low plan with
the place in fp32, the sound twin, and fp32 with weights changed by one unit in the last place must not fail.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from castwise import Amp, Plan, Region, Workload
from castwise.errors import CastwiseError
from common import write
from planted import discrete, models
from planted.models import Case, sound_modules

STEPS = 80
SEEDS = (0, 1, 2, 3)
RELATIVE = 0.0025


@dataclass(frozen=True)
class Run:
    """One training run: the mean loss of its last fifth, the number of skipped steps, and why it stopped early."""

    loss: float
    skipped: int
    broke: str = ""


@dataclass(frozen=True)
class Verdict:
    """The judge's verdict on a plan.

    Attributes:
        fails: Whether the plan fails in training.
        why: The reason, as a clause.
        fp32_loss: fp32's loss over the last fifth, mean over seeds.
        plan_loss: The same of the plan; infinite if a run stopped early.
        margin: How much worse the plan's loss may be.
        excess: ``(plan_loss - fp32_loss) / margin``; the plan fails above 1.
        skipped: The largest number of steps that a run skipped.
    """

    fails: bool
    why: str
    fp32_loss: float
    plan_loss: float
    margin: float
    excess: float
    skipped: int


def train(workload: Workload, plan: Plan, seed: int, steps: int = STEPS, nudge: bool = False) -> Run:
    """Train from the seed's weights on its batches; ``nudge`` changes every weight by one unit in the last place."""
    torch.manual_seed(seed)
    model = workload.model()
    if nudge:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                away = torch.where(torch.rand(p.shape, generator=generator) < 0.5, -math.inf, math.inf)
                p.copy_(torch.nextafter(p, away))
    optimizer = workload.optimizer(model.parameters())
    batches = workload.batches(seed)
    losses: list[float] = []
    skipped = 0
    torch.manual_seed(seed)
    with Amp(plan, device="cpu") as amp:
        amp.prepare(model, optimizer)
        for _ in range(steps):
            loss = workload.loss(model, next(batches))
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                return Run(math.inf, skipped, f"its loss is {losses[-1]} at step {len(losses) - 1}")
            try:
                amp.backward(loss)
                skipped += amp.step(optimizer).skipped
            except CastwiseError as error:
                return Run(math.inf, skipped, f"{type(error).__name__} at step {len(losses) - 1}")
            optimizer.zero_grad()
    if skipped == steps:
        return Run(math.inf, skipped, "every step was skipped")
    return Run(statistics.fmean(losses[-(steps // 5) :]), skipped)


def train_fp32(workload: Workload, *, steps: int = STEPS, seeds: Sequence[int] = SEEDS) -> list[Run]:
    """Train in fp32 and return the run of each seed, for :func:`judge`."""
    return [train(workload, Plan.preset("fp32"), seed, steps) for seed in seeds]


def judge(
    workload: Workload,
    plan: Plan,
    *,
    reference: Sequence[Run] | None = None,
    steps: int = STEPS,
    seeds: Sequence[int] = SEEDS,
    nudge: bool = False,
) -> Verdict:
    """Judge a plan by training with it.

    Args:
        workload: The workload to train.
        plan: The plan to train under.
        reference: fp32's runs over the same seeds and steps; if None, they are run here.
        steps: Number of steps of each run.
        seeds: At least two seeds, which the margin needs.
        nudge: Change the weights by one unit in the last place, to compare fp32 with fp32.

    Returns:
        The verdict.
    """
    base = list(reference) if reference is not None else train_fp32(workload, steps=steps, seeds=seeds)
    runs = [train(workload, plan, seed, steps, nudge) for seed in seeds]
    fp32 = statistics.fmean(run.loss for run in base)
    margin = max(statistics.stdev(run.loss for run in base), RELATIVE * abs(fp32))
    skipped = max(run.skipped for run in runs)
    broken = next((run for run in runs if run.broke), None)
    if broken is not None:
        return Verdict(True, broken.broke, fp32, math.inf, margin, math.inf, skipped)
    loss = statistics.fmean(run.loss for run in runs)
    excess = (loss - fp32) / margin
    why = f"its loss is worse by {excess:.1f} margins" if excess > 1 else ""
    return Verdict(excess > 1, why, fp32, loss, margin, excess, skipped)


def low_plan(low: str, fragile: str = "") -> Plan:
    """Return the plan with the low format in the whole model, or in all of it except the fragile place."""
    plan = Plan.preset(f"{low}-mixed")
    return dataclasses.replace(plan, regions=(Region(fragile, compute="fp32"),)) if fragile else plan


def check(case: Case) -> list[dict[str, object]]:
    """Judge a case and return a row for each format."""
    planted, sound = case.make(sound=False), case.make(sound=True)
    base, base_sound = train_fp32(planted), train_fp32(sound)
    fp32 = judge(planted, Plan.preset("fp32"), reference=base, nudge=True)
    rows: list[dict[str, object]] = []
    for low in ("bf16", "fp16"):
        fragile = low in case.formats
        says = {
            "low": judge(planted, low_plan(low), reference=base),
            "cured": judge(planted, low_plan(low, case.fragile), reference=base),
            "twin": judge(sound, low_plan(low), reference=base_sound),
            "nudged_fp32": fp32,
        }
        holds = [verdict.fails == (name == "low" and fragile) for name, verdict in says.items()]
        rows.append(
            {"case": case.name, "format": low, "fragile": fragile, "path": case.fragile, "holds": all(holds),
             "fp32_loss": fp32.fp32_loss, "twin_fp32_loss": says["twin"].fp32_loss, "margin": fp32.margin,
             **{f"{name}_excess": v.excess if math.isfinite(v.excess) else str(v.excess) for name, v in says.items()},
             "low_why": says["low"].why, "skipped": {n: v.skipped for n, v in says.items()},
             "sound_modules": len(sound_modules(case))}
        )  # fmt: skip
    return rows


def main() -> None:
    """Judge a suite and write its result file."""
    parser = argparse.ArgumentParser(description="Judge a suite of planted failures itself.")
    parser.add_argument(
        "--suite", default="suite", choices=("suite", "discrete"), help="held-out, or discrete"
    )
    parser.add_argument("--only", default="", help="comma-separated names of cases; nothing is written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    rows: list[dict[str, object]] = []
    for case in (models if options.suite == "suite" else discrete).CASES:
        if options.only and case.name not in options.only.split(","):
            continue
        for row in check(case):
            rows.append(row)
            excess = "  ".join(
                f"{k[:-7]} {float(str(v)):8.2f}" for k, v in row.items() if k.endswith("_excess")
            )
            print(f"{'ok   ' if row['holds'] else 'WRONG'} {row['case']:18} {row['format']} "
                  f"{'fragile' if row['fragile'] else '       '} fp32 {row['fp32_loss']:.4f} ± {row['margin']:.4f}  "
                  f"{excess}  {row['low_why']}", flush=True)  # fmt: skip
    seconds = time.perf_counter() - started
    summary = {
        "case": "all",
        "rows": len(rows),
        "hold": sum(bool(r["holds"]) for r in rows),
        "seconds": seconds,
    }
    if options.only:
        print(summary)
    else:
        write(f"planted-{options.suite}", torch.device("cpu"), __doc__, [*rows, summary])


if __name__ == "__main__":
    main()
