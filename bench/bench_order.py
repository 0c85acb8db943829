"""Two ways to measure less noise: who follows whom in a round, and which rounds of a start count.

fp32, one-line autocast and three runs that keep memory, of which two are copies of one plan, train in turns in processes of
their own, started anew ``STARTS`` times in each of two orders: ``cyclic``, in which everybody always has the same neighbours,
and ``balanced``, that of ``castwise.lab.timing.timing.turn``. ``copies`` is how many times as long the second copy takes as the
first, with its interval over starts: 1, were it not for whom it follows. ``sd`` is the standard deviation between starts of the
logarithm of a ratio, by the median over rounds of the ratios, and by the times that ``castwise.lab.timing.stats.restarts`` takes,
the means of the faster halves: of the copies, and of fp32 over them.
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
    """Everybody moves up by one in each round, and every second round is run backwards."""
    order = [(number + place) % count for place in range(count)]
    return order if number % 2 == 0 else order[::-1]


def by_median(one: Sequence[float], other: Sequence[float]) -> float:
    """The logarithm of the ratio of two runs in a start, as the median over its rounds."""
    return statistics.median(math.log(a / b) for a, b in zip(one, other, strict=True))


def by_restarts(one: Sequence[float], other: Sequence[float]) -> float:
    """The same as the final takes it."""
    return math.log(stats.restarts([[one], [other]])[0, 1].value)


def measure(workload: str, line: str, order: Order, device: torch.device) -> dict[str, Any]:
    """What all starts in one order give."""
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
    """Write ``results/order-<device>.json``."""
    given = arguments(__doc__).parse_args()
    device = torch.device(given.device)
    with Results("order", device, __doc__, given.budget) as results:
        for (name, line), order in itertools.product(JOBS.items(), (cyclic, timing.turn)):
            kind = "cyclic" if order is cyclic else "balanced"
            with results.part(f"{name}: {kind}"):
                results.add({"workload": name, "order": kind, **measure(name, line, order, device)})


if __name__ == "__main__":
    main()
