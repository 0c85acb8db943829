"""Test whether the starts of one search share an error, by comparing starts from several homes.

A home is the process from which a search forks its training processes (``castwise.lab.timing.processes``). Each of
``HOMES`` homes starts fp32 and a low plan ``STARTS`` times, and the homes take turns. The statistics are of the
logarithm of the ratio of fp32's time to the plan's. ``sd`` is the standard deviation between the starts of a home.
``homes_f`` is the F statistic of the homes, with 3 and 12 degrees of freedom: it exceeds 3.5 with a probability of 5
% if the home has no effect. ``times_f`` is the same for the turns. ``faults`` are page faults per step, of fp32 and
of the plan: the minimum, the median and the maximum over starts. Each job is measured twice: with the default host
memory setting, and with ``host_memory=keep`` for both plans.
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
    """Run the starts of all homes and return the columns of their row."""
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
    """Return a two-way analysis of variance, by home and turn."""
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
    """Measure and write ``results/starts-<device>.json``."""
    given = arguments(__doc__).parse_args()
    device = torch.device(given.device)
    with Results("starts", device, __doc__, given.budget) as results:
        for (name, line), memory in itertools.product(JOBS.items(), ("as_given", "keep")):
            plans = [dataclasses.replace(Plan.parse(one), host_memory=memory) for one in ("fp32", line)]
            with results.part(f"{name}: host_memory={memory}"):
                results.add({"workload": name, "plan": str(plans[1]), **measure(name, plans, device)})


if __name__ == "__main__":
    main()
