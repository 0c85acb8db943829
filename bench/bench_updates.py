"""Calibrate the threshold of the update test: the share of updates that is lost without masters against final loss.

Small models are trained for 600 steps in fp32, and in bf16 and fp16 without masters, with optimizers that lose hardly
any, some or almost all of their updates. ``lost`` is the largest share of the optimizer's update that rounding loses
in the first 259 steps (``castwise.lab.parity.updates``). ``elements`` is the share of elements whose update is
dropped at step 5, on which the test was formerly based. ``loss`` is the mean loss of the last 60 steps minus fp32's,
as a share of the fall of fp32's loss, with mean and standard error over seeds. ``harmful``: the one-sided lower 95 %
bound of ``loss`` exceeds the margin of training runs (``castwise.lab.search.pairs.MARGIN``), or the loss is not
finite. ``harmless``: the upper bound does not exceed it.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import castwise
from castwise import Plan, Workload
from castwise.lab.parity.updates import Training, one_update, stored_change, update_loss
from castwise.lab.search.pairs import MARGIN
from castwise.lab.timing.runners import TrainingRun
from castwise.lab.workloads.digits import split
from common import Results, arguments

STEPS, LAST, SEEDS = 600, 60, 3
T95 = 2.92
"""One-sided 95 % point of Student's t for two degrees of freedom."""
CPU = torch.device("cpu")

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    **{f"Adam {lr:g}": lambda p, lr=lr: torch.optim.Adam(p, lr=lr) for lr in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)},
    **{f"SGD {lr:g} momentum": lambda p, lr=lr: torch.optim.SGD(p, lr=lr, momentum=0.9) for lr in (1e-2, 1e-1)},
    "SGD 0.1": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam 0.003, one group 1e-05": lambda p: slow_group(list(p)),
}  # fmt: skip


def slow_group(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam with the first layer in a separate group with a low learning rate."""
    return torch.optim.Adam([{"params": parameters[:2], "lr": 1e-5}, {"params": parameters[2:], "lr": 3e-3}])


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross entropy, or the mean squared error for floating-point targets."""
    x, y = batch
    return (
        nn.functional.mse_loss(model(x), y)
        if y.is_floating_point()
        else nn.functional.cross_entropy(model(x), y)
    )


def quadrants(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of 16 numbers per sample, in four classes by a quadratic rule."""
    fixed = torch.Generator().manual_seed(7)
    one, two = (torch.randn(16, 4, generator=fixed) for _ in range(2))
    generator = torch.Generator().manual_seed(seed + 1)
    while True:
        x = torch.randn(64, 16, generator=generator)
        yield x, (x @ one + 0.3 * (x @ two) ** 2).argmax(1)


def sines(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of 16 numbers per sample; the targets are sines of projections."""
    truth = torch.randn(16, 4, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed + 1)
    while True:
        x = torch.randn(32, 16, generator=generator)
        yield x, torch.sin(x @ truth)


def digits(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of handwritten digits as 64 numbers per sample."""
    images, labels, _, _ = split()
    generator = torch.Generator().manual_seed(seed + 1)
    while True:
        which = torch.randint(len(images), (64,), generator=generator)
        yield images[which].flatten(1), labels[which]


JOBS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Iterator[Any]]]] = {
    "quadrants": (lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)), quadrants),
    "digits": (lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), digits),
    "sines": (lambda: nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)), sines),
}  # fmt: skip


def trained(job: Workload, plan: Plan, seed: int) -> tuple[float, float]:
    """Return the first loss and the mean of the last losses; both are NaN if the run diverges."""
    run = TrainingRun(job, plan, CPU, seed)
    try:
        run.block(STEPS)
        return run.losses[0], statistics.fmean(run.losses[-LAST:])
    except castwise.CastwiseError:
        return math.nan, math.nan
    finally:
        run.close()


def dropped(job: Workload, plan: Plan) -> float:
    """Return the share of elements whose update is lost to rounding at step 5."""
    dtype = torch.bfloat16 if plan.compute == "bf16" else torch.float16
    torch.manual_seed(0)
    moved = lost = 0
    for _, old, update in one_update(
        Training(job.model(), job.loss, iter(job.batches(0)), job.optimizer, CPU)
    ):
        moved += int((update != 0).sum())
        lost += int(((update != 0) & (stored_change(old, update, dtype) == 0)).sum())
    return lost / moved


def main() -> None:
    """Train every job and write ``results/updates-cpu.json``."""
    parser = arguments(__doc__)
    parser.add_argument("--job", choices=JOBS, action="append")
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    with Results("updates", CPU, __doc__, options.budget) as results:
        for name, (model, batches) in JOBS.items():
            for words, make in OPTIMIZERS.items():
                job = Workload(name, model, make, batches, loss)
                fp32 = [trained(job, Plan.preset("fp32"), seed) for seed in range(SEEDS)]
                for preset in ("bf16-true", "fp16-true"):
                    plan = Plan.preset(preset)
                    torch.manual_seed(0)
                    updates = update_loss(Training(model(), loss, batches(0), make, CPU), plan)
                    worse = [
                        (trained(job, plan, seed)[1] - last) / (first - last)
                        for seed, (first, last) in enumerate(fp32)
                    ]
                    finite = all(map(math.isfinite, worse))
                    mean = statistics.fmean(worse) if finite else math.inf
                    error = statistics.stdev(worse) / math.sqrt(SEEDS) if finite else 0.0
                    harmful = mean - T95 * error > MARGIN
                    results.add({
                        "job": name, "optimizer": words, "plan": preset, "lost": None if updates.broken else updates.lost,
                        "at_step": updates.step, "refused": updates.why, "elements": dropped(job, plan),
                        "loss": mean if finite else None, "standard_error": error if finite else None,
                        "effect": "harmful" if harmful else "harmless" if mean + T95 * error <= MARGIN else "not shown",
                    })  # fmt: skip


if __name__ == "__main__":
    main()
