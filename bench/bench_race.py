"""Whether a race in one process tells what processes of their own tell: of two storages, and of one.

Three plans that keep memory are raced as the tuner's race does, all in one process, and as its final does, each in a process of
its own that is started anew ``STARTS`` times: bf16 by autocast (with what makes it fast on the job), the same with losses that
follow their inputs, and bf16 parameters with fp32 masters. ``storage`` is how many times as long autocast takes as masters,
``losses`` how many times as long as with such losses, each with its interval, in the race and apart.
"""

from __future__ import annotations

import torch

from architectures import ARCHITECTURES
from castwise import Plan
from castwise.lab.search.contest import Contest
from castwise.lab.timing import stats
from castwise.lab.timing.apart import start_apart
from castwise.lab.timing.processes import Home, portable
from common import Results, arguments

STARTS, ROUNDS = 6, 8
UNFUSED = "+ops.scaled_dot_product_attention=unfused"
JOBS = {
    "bert": UNFUSED,
    "vit": UNFUSED,
    "resnet": "+memory_format=channels_last",
    "convnext": "+memory_format=channels_last",
}
PAIRS = {"storage": (0, 1), "losses": (0, 2)}


def interval(ratio: stats.Ratio) -> list[float]:
    """A ratio as rows have it."""
    return [ratio.value, ratio.low, ratio.high]


def main() -> None:
    """Write ``results/race-<device>.json``."""
    given = arguments(__doc__).parse_args()
    device = torch.device(given.device)
    with Results("race", device, __doc__, given.budget) as results:
        for name, line in JOBS.items():
            workload = ARCHITECTURES[name]()
            lines = (
                f"bf16-mixed{line}",
                f"bf16-master{line}",
                f"bf16-mixed{line}+ops.cross_entropy_loss=as_is",
            )
            plans = [Plan.parse(f"{one}+host_memory=keep") for one in lines]
            with Home() as home:
                found = start_apart(home, portable(workload), plans, device, starts=STARTS, rounds=ROUNDS)
            apart = stats.restarts([[timed.times_s for timed in starts] for starts in found])
            with Contest(workload, device) as contest:
                contest.run(plans, 2 * ROUNDS)
                race = {pair: contest.ratio(plans[pair[1]], plans[pair[0]]) for pair in PAIRS.values()}
            row = {"workload": name}
            for what, pair in PAIRS.items():
                together = race[pair]
                assert together is not None
                row |= {f"{what}_race": interval(together), f"{what}_apart": interval(apart[pair])}
            results.add(row)


if __name__ == "__main__":
    main()
