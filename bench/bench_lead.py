"""What the first steps of a block take beside the later ones, where other plans ran in between.

fp32 and bf16, twice each, train in processes of their own and take ``STEPS`` steps in turns. ``steady_ms`` is the median of the
later half of steps, ``extra_ms`` by how much the median of each earlier one is longer: what an undisturbed training would not pay,
and why the final does not time the first steps of a block (``castwise.measure.apart.LEAD``).
"""

from __future__ import annotations

import contextlib
import statistics

import torch

from architectures import ARCHITECTURES
from castwise import Plan
from castwise.measure.apart import Apart
from castwise.measure.processes import Home, portable
from common import Results, arguments

STEPS, ROUNDS = 8, 24
JOBS = ("gpt?layers=2&width=64&context=32&batch=8", "sine?size=32", "bert", "vit", "resnet")
PLANS = ("fp32+host_memory=keep", "bf16-mixed+host_memory=keep") * 2


def measure(job: str, device: torch.device) -> list[dict[str, object]]:
    """A row per plan."""
    made = ARCHITECTURES[job]() if job in ARCHITECTURES else job
    with Home() as home, contextlib.ExitStack() as stack:
        runs = [Apart(home, portable(made), Plan.parse(line), device, 0) for line in PLANS]
        for run in runs:
            stack.callback(run.close)
        for run in runs:
            run.wait()
        for run in runs:
            run.warm_up()
        taken = [[[run.steps(1) for _ in range(STEPS)] for run in runs] for _ in range(ROUNDS)]
    rows = []
    for line in dict.fromkeys(PLANS):
        mine = [block for turn in taken for plan, block in zip(PLANS, turn, strict=True) if plan == line]
        steady = statistics.median(step for block in mine for step in block[STEPS // 2 :])
        extra = [1e3 * (statistics.median(column) - steady) for column in zip(*mine, strict=True)]
        rows.append({"job": job, "plan": line, "steady_ms": 1e3 * steady, "extra_ms": extra[: STEPS // 2]})
    return rows


def main() -> None:
    """Write ``results/lead-<device>.json``."""
    given = arguments(__doc__).parse_args()
    device = torch.device(given.device)
    with Results("lead", device, __doc__, given.budget) as results:
        for job in JOBS:
            for row in measure(job, device):
                results.add(row)


if __name__ == "__main__":
    main()
