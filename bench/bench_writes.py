"""What it costs to look for writes to parameters that torch does not count, on the built-in GPT under bf16-master.

The same loop with and without the look at a few elements of every parameter before each step, in interleaved rounds. Beside
it what the look takes by itself, of which a busy machine moves less.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch

from castwise.core.masters import attachment_of
from castwise.core.masters.pairs import Pairs
from castwise.lab.workloads.workload import Workload, find_workload
from common import Results, arguments, compare
from loops import Loop, training_by_castwise

PLAN = "bf16-master"
LOOKS = 200


class Unwatched(Loop):
    """A loop whose steps look for nothing."""

    def before(self, steps: int) -> None:
        """Take the look away."""
        self._look, Pairs.look = Pairs.look, lambda pairs: None  # type: ignore[method-assign]

    def after(self) -> None:
        """Give it back."""
        Pairs.look = self._look  # type: ignore[method-assign]


def unwatched(workload: Workload, device: torch.device) -> Loop:
    """The loop of the README, whose steps look for nothing."""
    return Unwatched(training_by_castwise(workload, PLAN, device).step)


def look_us(workload: Workload, device: torch.device) -> dict[str, object]:
    """What one look takes on the host, the median of many."""
    import castwise

    model = workload.model().to(device)
    optimizer = workload.optimizer(model.parameters())
    with castwise.Amp(PLAN, device=device) as amp:
        amp.prepare(model, optimizer)
        attachment = attachment_of(optimizer)
        assert attachment is not None
        times = []
        for _ in range(LOOKS):
            begin = time.perf_counter()
            attachment._pairs.look()
            times.append((time.perf_counter() - begin) * 1e6)
        count = len(attachment.stored)
    return {"look": f"{count} parameters", "looks": LOOKS, "look_us": statistics.median(times)}


def main() -> None:
    """Measure and write ``results/writes-<device>.json``."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    device = torch.device(options.device)
    workload = find_workload("gpt")
    with Results("writes", device, __doc__, options.budget) as results:
        with results.part("the look by itself"):
            results.add(look_us(workload, device))
        with results.part("steps"):
            results.add(
                *compare(
                    [
                        ("without the look", partial(unwatched, workload, device)),
                        ("castwise bf16-master", partial(training_by_castwise, workload, PLAN, device)),
                    ],
                    rounds=options.rounds,
                    steps=options.steps,
                    device=device,
                    unit="ms",
                    seconds=results.share(1),
                    relative=0.05,
                )
            )


if __name__ == "__main__":
    main()
