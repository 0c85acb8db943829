"""Measure the cost of leaving a model's inputs in fp32 and letting its operators cast them.

A small convolutional network is trained on images of digits under ``bf16-master``. Fp32 inputs are compared with the
same batch rounded to bf16 by the loop before the model, as castwise formerly did itself. Blocks of steps are
interleaved.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch

from castwise import Plan
from castwise.core.casting.trees import cast_floating
from castwise.lab.workloads.workload import Workload, find_workload
from common import Results, arguments, compare
from loops import training_by_castwise

PLAN = Plan.parse("bf16-master")


def rounded(workload: Workload) -> Workload:
    """Return the workload with the floating-point tensors of each batch cast to bf16 when the loss is computed."""

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return workload.loss(model, cast_floating(batch, torch.bfloat16))

    return dataclasses.replace(workload, loss=loss)


def main() -> None:
    """Measure and write ``results/inputs-<device>.json``."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    device = torch.device(options.device)
    workload = find_workload("digits")
    with Results("inputs", device, __doc__, options.budget) as results, results.part("time"):
        rows = compare(
            [
                (
                    "rounded in front of the model",
                    partial(training_by_castwise, rounded(workload), PLAN, device),
                ),
                ("as they are", partial(training_by_castwise, workload, PLAN, device)),
            ],
            rounds=options.rounds,
            steps=options.steps,
            device=device,
            unit="ms",
            seconds=results.share(1),
            relative=0.05,
        )
        results.add(*rows)


if __name__ == "__main__":
    main()
