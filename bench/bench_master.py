"""Compare parameters stored in bf16 with fp32 masters to hand-written torch.autocast, on a character-level GPT.

The GPT has 4 layers of width 384, and all loops use fused AdamW. Times are from interleaved rounds. The peak memory
of one training step is from torch's allocator, each in its own process. ``by hand`` is the loop of PyTorch's
documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from castwise import Plan
from castwise.lab.timing.memory import measure_memory
from castwise.lab.workloads.workload import find_workload
from common import Results, arguments, compare
from loops import Loop, training_by_castwise, training_by_hand

SPEC = "gpt?layers=4&width=384&heads=6"
FUSED = Plan.parse("bf16-mixed+optimizer=fused")
MASTER = Plan.parse("bf16-master+optimizer=fused")


def fused(parameters: object) -> torch.optim.Optimizer:
    """Return the optimizer that every loop uses.

    At ten times this learning rate the loss rises once, and the later losses depend on every rounding error.
    """
    return torch.optim.AdamW(parameters, 1e-4, weight_decay=0.01, fused=True)  # type: ignore[arg-type]


def main() -> None:
    """Measure and write ``results/master-<device>.json``."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    device = torch.device(options.device)
    workload = find_workload(SPEC)
    count = sum(p.numel() for p in workload.model().parameters())
    loops: list[tuple[str, Callable[[], Loop]]] = [
        ("torch.autocast by hand", partial(training_by_hand, workload, device, torch.bfloat16, fused)),
        ("castwise bf16-mixed", partial(training_by_castwise, workload, FUSED, device, fused)),
        ("castwise bf16-master", partial(training_by_castwise, workload, MASTER, device, fused)),
    ]
    with Results("master", device, __doc__, options.budget) as results:
        with results.part("time"):
            rows = compare(
                loops,
                rounds=options.rounds,
                steps=options.steps,
                device=device,
                unit="ms",
                seconds=results.share(2),
                relative=0.05,
            )
            results.add(*rows)
        for spec, what in (
            (SPEC, "activations dominate"),
            (SPEC + "&batch=1&context=16", "parameters dominate"),
        ):
            with results.part(f"memory where {what}"):
                mixed, master = (
                    measure_memory(spec, plan, device, seed=0, inference=False).training_peak_bytes
                    for plan in (FUSED, MASTER)
                )
                results.add({
                    "memory": what,
                    "workload": spec,
                    "parameters": count,
                    "mixed_bytes": mixed,
                    "master_bytes": master,
                    "bytes_per_parameter_above": (master - mixed) / count,
                })


if __name__ == "__main__":
    main()
