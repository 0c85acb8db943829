"""Compare timing in one process with timing in separate processes.

Three plans that keep host memory are timed in two ways: in one process, as in the race of a search, and each in its
own process that is restarted ``STARTS`` times, as in the last stage of a search. The plans are bf16 by autocast (with
the option that makes it fast on the job), the same with the loss computed in the format of its inputs, and bf16
parameters with fp32 masters. ``storage`` is the time of autocast divided by that of masters. ``losses`` is the time
of autocast divided by that with the loss in the format of its inputs. Each has its interval, for one process
(``race``) and for separate ones (``apart``).
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
    """Return a ratio and the ends of its interval."""
    return [ratio.value, ratio.low, ratio.high]


def main() -> None:
    """Measure and write ``results/race-<device>.json``."""
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
