"""Train every recommended plan and compare its loss with fp32's.

Each built-in workload and each architecture of transformers is searched under each goal (``time``, ``memory``, and
``numerics`` in bf16). The recommended plan and fp32 are then trained from the same weights on the same batches, with
several seeds, because two runs of one seed drift apart by chance. ``worse_by`` is the plan's mean loss over the last
fifth minus fp32's, as a share of the fall of fp32's loss, as the mean over seeds. ``standard_error`` is the standard
error of this mean. ``disturbed`` shows the effect of chance alone: it is the same difference for fp32 runs from
weights changed at random by up to half a unit in the last place of bf16. A recommendation is ``worse`` if a loss is
not finite, or if its mean exceeds that of the disturbed runs (or zero, if that is larger) by more than the margin of
training runs (``castwise.lab.search.pairs.MARGIN``) plus two standard errors of the difference. Runs have ``--steps``
steps, or fewer if these would take more than ``--longest`` seconds.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from typing import Any

import torch

import castwise
from architectures import ARCHITECTURES
from bench_tune import BUILT_IN
from castwise import Plan, Workload
from castwise.lab.search.pairs import MARGIN
from castwise.lab.timing.runners import TrainingRun
from castwise.lab.workloads.workload import find_workload
from common import RESULTS, arguments, store

GOALS = ("time", "memory", "numerics")
SEEDS = 4


HALF_A_UNIT = 2.0**-9
"""Half a unit in the last place of bf16, relative to the number."""


def losses(
    workload: Workload,
    plan: Plan,
    device: torch.device,
    steps: int,
    longest_s: float,
    disturbed: bool = False,
) -> list[list[float]]:
    """Return the losses of one training run per seed; a run has fewer steps if it would take too long."""
    return [_losses(workload, plan, device, seed, steps, longest_s, disturbed) for seed in range(SEEDS)]


@torch.no_grad()
def _disturb(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.rand(parameter.shape, generator=generator).mul_(2.0).sub_(1.0).to(parameter.device)
        parameter.mul_(1.0 + HALF_A_UNIT * noise)


def _losses(
    workload: Workload,
    plan: Plan,
    device: torch.device,
    seed: int,
    steps: int,
    longest_s: float,
    disturbed: bool,
) -> list[float]:
    run = TrainingRun(workload, plan, device, seed)
    try:
        if disturbed:
            _disturb(run.model, seed)
        run.block(2)
        start = time.perf_counter()
        run.block(3)
        a_step_s = (time.perf_counter() - start) / 3
        run.block(max(0, min(steps, int(longest_s / a_step_s)) - 5))
    except castwise.CastwiseError:
        return [*run.losses, math.nan]  # the run diverged; the NaN marks it as not finite
    finally:
        run.close()
    return list(run.losses)


def judged(mine: list[list[float]], fp32: list[list[float]], disturbed: list[list[float]]) -> dict[str, Any]:
    """Compare a plan's losses with fp32's and with those of fp32 from disturbed weights."""
    shares, chance = ([share(*pair) for pair in zip(runs, fp32, strict=True)] for runs in (mine, disturbed))
    steps = min(map(len, mine + fp32))
    if not all(map(math.isfinite, shares)):
        return {"steps": steps, "by_seed": [], "worse_by": None, "standard_error": None, "worse": True}
    mean, error = statistics.fmean(shares), statistics.stdev(shares) / math.sqrt(SEEDS)
    both = math.hypot(error, statistics.stdev(chance) / math.sqrt(SEEDS))
    worse = mean - max(0.0, statistics.fmean(chance)) - 2.0 * both > MARGIN
    return {
        "steps": steps, "by_seed": shares, "worse_by": mean, "standard_error": error, "disturbed": chance, "worse": worse,
    }  # fmt: skip


def share(mine: list[float], fp32: list[float]) -> float:
    """Return by how much a plan's mean loss over the last fifth exceeds fp32's, as a share of the fall of fp32's loss.

    The result is not finite if a loss is not. If fp32's loss falls by less than 1 % of its first value, 1 % is used.
    """
    steps = min(len(mine), len(fp32))
    last = slice(steps - max(1, steps // 5), steps)
    end = statistics.fmean(fp32[last])
    return (statistics.fmean(mine[last]) - end) / max(fp32[0] - end, 0.01 * abs(fp32[0]), 1e-12)


def main() -> None:
    """Search and train; the rows of a job are written at once, and other rows in the result file stay."""
    parser = arguments(__doc__)
    parser.add_argument("--goal", choices=GOALS, action="append", help="all goals by default")
    parser.add_argument("--only", default="", help="comma-separated names of jobs")
    parser.add_argument("--search", type=float, default=60.0, help="seconds of each search")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--longest", type=float, default=30.0, help="seconds of a training run")
    options = parser.parse_args()
    device = torch.device(options.device)
    jobs: dict[str, Workload] = {name: find_workload(name) for name in BUILT_IN[device.type]}
    jobs |= {name: make() for name, make in ARCHITECTURES.items()}
    only = [name for name in options.only.split(",") if name]
    rows: list[dict[str, Any]] = []
    for name, job in jobs.items():
        if only and name not in only:
            continue
        base: list[list[float]] = []
        disturbed: list[list[float]] = []
        for goal in options.goal or GOALS:
            formats = {"formats": ("bf16",)} if goal == "numerics" else {}
            found = castwise.tune(
                job, device=device, goal=goal, budget_s=options.search, memory=False, fresh=True, **formats
            )
            row = {"job": name, "goal": goal, "plan": str(found.plan), "answer": found.answer}
            if found.plan != Plan.preset("fp32"):
                base = base or losses(job, Plan.preset("fp32"), device, options.steps, options.longest)
                disturbed = disturbed or losses(
                    job, Plan.preset("fp32"), device, options.steps, options.longest, disturbed=True
                )
                row |= judged(
                    losses(job, found.plan, device, options.steps, options.longest), base, disturbed
                )
            rows.append(row)
            print(row, flush=True)
        if rows:
            path = RESULTS / f"recommended-{device.type}.json"
            old = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
            new = {(row["job"], row["goal"]) for row in rows}
            store(
                "recommended",
                device,
                __doc__,
                [*(row for row in old if (row["job"], row["goal"]) not in new), *rows],
            )


if __name__ == "__main__":
    main()
