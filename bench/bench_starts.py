"""What starts of one search have in common: trainings started anew from several homes in turns, and their ratios.

A home is the process that the trainings of a search are forked from (``castwise.lab.timing.processes``). Each of ``HOMES`` starts
fp32 and a low plan ``STARTS`` times, the homes taking turns. Of the logarithm of fp32's time over the plan's, ``sd`` is the
standard deviation between starts of a home, ``homes_f`` the variance between homes over what that explains (F with 3 and 12
degrees of freedom: above 3.5 in one of twenty where homes have nothing of their own), and ``times_f`` the same between turns.
``faults`` are page faults per step of fp32 and of the plan: the least, the median and the most of the starts. Each job is
measured twice: as it is, and with both plans keeping the memory of the host (``host_memory=keep``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
from typing import Any

import torch

from castwise import Plan
from castwise.lab.timing.apart import race_apart
from castwise.lab.timing.processes import Home, portable
from common import Results, arguments

HOMES, STARTS, ROUNDS = 4, 5, 5
JOBS = {
    "sine?size=128": "bf16-mixed+memory_format=channels_last",
    "gpt": "bf16-mixed+ops.scaled_dot_product_attention=unfused+optimizer=fused",
    "digits": "bf16-mixed+memory_format=channels_last+optimizer=fused",
}


def measure(workload: str, plans: list[Plan], device: torch.device) -> dict[str, Any]:
    """What the starts of all homes give."""
    with contextlib.ExitStack() as stack:
        homes = [stack.enter_context(Home()) for _ in range(HOMES)]
        sent = portable(workload)
        turns, times_s, faults = [], ([], []), ([], [])
        for turn in range(STARTS):
            found = {}
            for home in range(HOMES) if turn % 2 == 0 else reversed(range(HOMES)):
                base, low = race_apart(homes[home], sent, plans, device, rounds=ROUNDS)
                for one, seconds, count in zip((base, low), times_s, faults, strict=True):
                    seconds += one.times_s
                    count.append(one.faults)
                logs = [math.log(a / b) for a, b in zip(base.times_s, low.times_s, strict=True)]
                found[home] = statistics.median(logs)
            turns.append([found[home] for home in range(HOMES)])
        return {
            **analysed(turns),
            "step_ms": [1e3 * statistics.median(seconds) for seconds in times_s],
            "faults": [[min(count), statistics.median(count), max(count)] for count in faults],
        }


def analysed(turns: list[list[float]]) -> dict[str, Any]:
    """Two-way analysis of variance."""
    homes = [statistics.fmean(column) for column in zip(*turns, strict=True)]
    times = [statistics.fmean(row) for row in turns]
    mean = statistics.fmean(times)
    rest = sum(
        (value - homes[h] - times[t] + mean) ** 2
        for t, row in enumerate(turns)
        for h, value in enumerate(row)
    ) / ((STARTS - 1) * (HOMES - 1))
    return {
        "speed": math.exp(mean), "sd": math.sqrt(rest),
        "homes": [math.exp(value) for value in homes],
        "homes_f": STARTS * statistics.variance(homes) / rest,
        "times_f": HOMES * statistics.variance(times) / rest,
    }  # fmt: skip


def main() -> None:
    """Write ``results/starts-<device>.json``."""
    given = arguments(__doc__).parse_args()
    device = torch.device(given.device)
    with Results("starts", device, __doc__, given.budget) as results:
        for (name, line), memory in itertools.product(JOBS.items(), ("as_given", "keep")):
            plans = [dataclasses.replace(Plan.parse(one), host_memory=memory) for one in ("fp32", line)]
            with results.part(f"{name}: host_memory={memory}"):
                results.add({"workload": name, "plan": str(plans[1]), **measure(name, plans, device)})


if __name__ == "__main__":
    main()
