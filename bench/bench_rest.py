"""Measure how much longer the first steps of a block take when other plans ran just before, with and without a pause.

fp32 and bf16, twice each, train in separate processes that run ``STEPS`` steps in turns, each block after a pause of
0 or 10 ms. ``steady_ms`` is the median time of the second half of a block's steps. ``extra_ms`` is, for each step of
the first half, its median time minus ``steady_ms``. A process that trains alone would not have this extra time, so
the last stage of a search pauses before each block (``castwise.lab.timing.apart.REST_S``).
"""

from __future__ import annotations

import contextlib
import statistics

import torch

from architectures import ARCHITECTURES
from blocks import steps_in_turn
from castwise.lab.timing.apart import REST_S
from castwise.lab.timing.processes import Home, Process, portable
from common import Results, arguments

STEPS, ROUNDS = 8, 16
JOBS = ("gpt?layers=2&width=64&context=32&batch=8", "sine?size=32", "bert", "vit", "resnet")
PLANS = ("fp32+host_memory=keep", "bf16-mixed+host_memory=keep")
RESTS = (0.0, REST_S)
KINDS = [(line, rest_s) for line in PLANS for rest_s in RESTS]


def block(process: Process, steps: int) -> list[float]:
    """Run some steps in a process and return the seconds of each."""
    process.send(steps)
    return list(process.answer())


def measure(job: str) -> list[dict[str, object]]:
    """Return a row for each plan and pause."""
    made = ARCHITECTURES[job]() if job in ARCHITECTURES else job
    with Home() as home, contextlib.ExitStack() as stack:
        runs = [home.start(steps_in_turn, portable(made), *kind) for kind in KINDS]
        for run in runs:
            stack.callback(run.close)
        for run in runs:
            run.answer()
        for run in runs:
            block(run, STEPS)
        taken = [[block(run, STEPS) for run in runs] for _ in range(ROUNDS)]
    rows = []
    for place, (line, rest_s) in enumerate(KINDS):
        mine = [turn[place] for turn in taken]
        steady = statistics.median(step for steps in mine for step in steps[STEPS // 2 :])
        extra = [1e3 * (statistics.median(column) - steady) for column in zip(*mine, strict=True)]
        rows.append(
            {"job": job, "plan": line, "rest_ms": 1e3 * rest_s, "steady_ms": 1e3 * steady, "extra_ms": extra[: STEPS // 2]}
        )  # fmt: skip
    return rows


def main() -> None:
    """Measure and write ``results/rest-cpu.json``."""
    given = arguments(__doc__).parse_args()
    with Results("rest", torch.device("cpu"), __doc__, given.budget) as results:
        for job in JOBS:
            for row in measure(job):
                results.add(row)


if __name__ == "__main__":
    main()
