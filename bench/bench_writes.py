"""Measure the cost of the check for writes to parameters that torch does not count.

The model is the built-in GPT under bf16-master. The check (the look) compares a few elements of every parameter
before each step. The same loop runs with and without it, in interleaved rounds. The check is also timed alone, which
a busy machine affects less.
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
    """A loop without the check for uncounted writes."""

    def before(self, steps: int) -> None:
        """Remove the check."""
        self._look, Pairs.look = Pairs.look, lambda pairs: None  # type: ignore[method-assign]

    def after(self) -> None:
        """Restore the check."""
        Pairs.look = self._look  # type: ignore[method-assign]


def unwatched(workload: Workload, device: torch.device) -> Loop:
    """Return the loop of the README without the check for uncounted writes."""
    return Unwatched(training_by_castwise(workload, PLAN, device).step)


def look_us(workload: Workload, device: torch.device) -> dict[str, object]:
    """Return the median time of one check on the host, in microseconds."""
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
