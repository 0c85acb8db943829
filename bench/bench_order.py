"""Compare two ways to reduce noise: the order of runs within a round, and the choice of rounds of a start that count.

Five runs train in turns, each in its own process: fp32, one-line autocast, and three that keep host memory, of which
two are copies of one plan. They are restarted ``STARTS`` times in each of two orders: ``cyclic``, in which each run
always has the same neighbours, and ``balanced``, the order of ``castwise.lab.timing.timing.turn``. ``copies`` is the
time of the second copy divided by that of the first, with its interval over starts; it would be 1 if the preceding
run had no effect. The ``sd`` columns are standard deviations between starts of the logarithm of a ratio of times:
``sd_kept`` for pairs of the runs that keep memory, ``sd_fp32`` for fp32 over each of these runs. With ``_median``,
the ratio of a start is the median over its rounds; without, it is the ratio of the means of the faster halves, as
``castwise.lab.timing.stats.restarts`` computes it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from architectures import ARCHITECTURES
from castwise import Plan
from castwise.lab.timing import apart, stats, timing
from castwise.lab.timing.processes import Home, portable
from common import Results, arguments

STARTS, ROUNDS = 8, 8
KEPT = "+optimizer=fused+host_memory=keep"
JOBS = {
    "bert": "+ops.scaled_dot_product_attention=unfused",
    "gpt": "+ops.scaled_dot_product_attention=unfused",
}
Order = Callable[[int, int], list[int]]


def cyclic(count: int, number: int) -> list[int]:
    """Return an order that is rotated by one in each round and reversed in every second round."""
    order = [(number + place) % count for place in range(count)]
    return order if number % 2 == 0 else order[::-1]


def by_median(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the logarithm of the ratio of two runs in a start, as the median over its rounds."""
    return statistics.median(math.log(a / b) for a, b in zip(one, other, strict=True))


def by_restarts(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the logarithm of the same ratio, as the last stage of a search computes it."""
    return math.log(stats.restarts([[one], [other]])[0, 1].value)


def measure(workload: str, line: str, order: Order, device: torch.device) -> dict[str, Any]:
    """Run all starts in one order and return the columns of their row."""
    made = ARCHITECTURES[workload]() if workload in ARCHITECTURES else workload
    copy, other = (Plan.parse(f"{name}{line}{KEPT}") for name in ("bf16-mixed", "bf16-master"))
    plans = [Plan.preset("fp32"), Plan.preset("bf16-mixed"), copy, copy, other]
    apart.turn = order
    try:
        with Home() as home:
            found = apart.start_apart(home, portable(made), plans, device, starts=STARTS, rounds=ROUNDS)
    finally:
        apart.turn = timing.turn
    times = [[start.times_s for start in starts] for starts in found]
    ratio = stats.restarts([times[3], times[2]])[0, 1]

    def spread(of: Callable[[Sequence[float], Sequence[float]], float], *pairs: tuple[int, int]) -> float:
        each = [statistics.variance(map(of, times[i], times[j])) for i, j in pairs]
        return math.sqrt(statistics.fmean(each))

    kept = list(itertools.combinations(range(2, len(plans)), 2))
    over = [(0, place) for place in range(2, len(plans))]
    return {
        "copies": [ratio.value, ratio.low, ratio.high],
        "sd_kept_median": spread(by_median, *kept), "sd_kept": spread(by_restarts, *kept),
        "sd_fp32_median": spread(by_median, *over), "sd_fp32": spread(by_restarts, *over),
    }  # fmt: skip


def main() -> None:
    """Measure and write ``results/order-<device>.json``."""
    given = arguments(__doc__).parse_args()
    device = torch.device(given.device)
    with Results("order", device, __doc__, given.budget) as results:
        for (name, line), order in itertools.product(JOBS.items(), (cyclic, timing.turn)):
            kind = "cyclic" if order is cyclic else "balanced"
            with results.part(f"{name}: {kind}"):
                results.add({"workload": name, "order": kind, **measure(name, line, order, device)})


if __name__ == "__main__":
    main()
