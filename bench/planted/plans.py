"""Trainings that harm a whole plan, with sound twins: what gradients of single updates do not show.

``updates``: parameters stored low without masters, whose small updates rounding loses, in one group or late. ``optimizer``: an
optimizer whose own arithmetic fails in fp16. ``bias``: a bias as large as the signal in gradients that are much noisier than
both. Each planted case has a twin that differs in one number and trains well.

The judge imports no gradient test and no search: it trains pairs of runs from equal weights on equal batches and compares their
last losses, for ``bias`` the error against the targets without noise. A plan *fails* if a loss is not finite or its last loss is
worse, in the mean over seeds, by more than 3 % of what fp32's loss falls (``updates``, ``optimizer``) or by a factor of more than
exp(0.03) of fp32's clean error (``bias``), with a one-sided 95 % bound above 0.

``python bench/planted/plans.py`` asks ``parity`` about every case and writes ``bench/results/planted-plans-cpu.json``.
"""

from __future__ import annotations

import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import castwise
from bench_updates import digits, loss, quadrants
from castwise import Amp, Plan, Workload
from castwise.errors import CastwiseError
from common import write

SEEDS = 3
WORSE = 0.03
T95 = 2.92
"""One-sided 95 % point of Student's t for two degrees of freedom."""

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Training:
    """A training under a plan.

    Attributes:
        kind: ``updates``, ``optimizer`` or ``bias``.
        name: Of the pair of twins.
        planted: Whether it is expected to fail.
        plan: A preset's name.
        job: The workload.
        steps: Of each run.
        clean: The error against targets without noise, for ``bias``.
    """

    kind: str
    name: str
    planted: bool
    plan: str
    job: Workload
    steps: int = 600
    clean: Callable[[nn.Module], float] | None = None


class Offset(nn.Module):
    """Adds a number and subtracts it again: bf16 keeps eight bits of the sum."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """The input, rounded to the last place of the offset."""
        return (x + self.offset) - self.offset


def mlp() -> nn.Module:
    """16 numbers to four."""
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def reader() -> nn.Module:
    """64 pixels to ten classes."""
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def regression(offset: float) -> nn.Module:
    """Eight numbers to one, through the offset."""
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1), Offset(offset))


def truth(x: Tensor) -> Tensor:
    """The clean target."""
    weights = torch.randn(8, 1, generator=torch.Generator().manual_seed(3))
    return torch.sin(x @ weights / 2.0)


def noisy(noise: float, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of 32 with noise on the targets."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(32, 8, generator=generator)
        yield x, truth(x) + noise * torch.randn(32, 1, generator=generator)


def clean_error(model: nn.Module) -> float:
    """The mean square of the error against the clean target, over the target's."""
    x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        return float((model(x).float() - truth(x)).square().mean() / truth(x).square().mean())


def adam(lr: float, **options: Any) -> Make:
    """Adam at a rate."""
    return lambda params: torch.optim.Adam(params, lr=lr, **options)


def grouped(slow: float, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam whose first layer has a rate of its own."""
    first, bias, *rest = params
    return torch.optim.Adam([{"params": [first, bias], "lr": slow}, {"params": rest, "lr": 3e-3}])


def trainings() -> Iterator[Training]:
    """All cases."""
    of = {"quadrants": (mlp, quadrants), "digits": (reader, digits)}

    def case(kind: str, name: str, plan: str, job: str, planted: Make, sound: Make) -> Iterator[Training]:
        model, batches = of[job]
        for bad, make in ((True, planted), (False, sound)):
            yield Training(kind, name, bad, plan, Workload(name, model, make, batches, loss))

    yield from case("updates", "adam", "bf16-true", "quadrants", adam(3e-4), adam(1e-2))
    yield from case("updates", "adam on digits", "bf16-true", "digits", adam(3e-4), adam(1e-2))
    yield from case("updates", "late", "bf16-true", "quadrants", adam(1e-3), adam(3e-3))
    yield from case(
        "updates", "one group", "bf16-true", "quadrants", partial(grouped, 1e-4), partial(grouped, 3e-3)
    )
    yield from case(
        "updates", "momentum", "bf16-true", "quadrants",
        lambda p: torch.optim.SGD(p, lr=3e-3, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )  # fmt: skip
    yield from case(
        "optimizer", "adam's eps", "fp16-true", "quadrants", adam(1e-3), lambda p: torch.optim.SGD(p, lr=0.1)
    )
    yield from case(
        "optimizer", "rmsprop", "fp16-true", "digits",
        lambda p: torch.optim.RMSprop(p, lr=1e-3), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    )  # fmt: skip
    yield from case(
        "optimizer", "adagrad", "fp16-true", "quadrants",
        lambda p: torch.optim.Adagrad(p, lr=1e-2), lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-3),
    )  # fmt: skip
    for noise, offset in ((3.0, 1000.0), (6.0, 1000.0), (6.0, 400.0), (12.0, 1000.0)):
        for bad, by in ((True, offset), (False, 0.0)):
            job = Workload(
                f"noise {noise:g}, offset {offset:g}", partial(regression, by), lambda p: torch.optim.SGD(p, lr=3e-3),
                partial(noisy, noise), lambda model, batch: nn.functional.mse_loss(model(batch[0]).float(), batch[1]),
            )  # fmt: skip
            yield Training("bias", job.name, bad, "bf16-mixed", job, 3000, clean_error)


def run(training: Training, plan: str, seed: int) -> tuple[float, float]:
    """The first loss and the last one, or the clean error; NaN if the run breaks off."""
    torch.manual_seed(seed)
    model = training.job.model()
    optimizer = training.job.optimizer(model.parameters())
    losses = []
    with Amp(plan, device="cpu") as amp:
        amp.prepare(model, optimizer)
        try:
            for _, batch in zip(range(training.steps), training.job.batches(seed), strict=False):
                value = training.job.loss(model, batch)
                amp.backward(value)
                amp.step(optimizer)
                optimizer.zero_grad()
                losses.append(float(value.detach()))
        except CastwiseError:
            return math.nan, math.nan
        end = statistics.fmean(losses[-training.steps // 10 :])
        return losses[0], end if training.clean is None else training.clean(model)


def judged(training: Training) -> dict[str, Any]:
    """What training says of the plan."""
    pairs = [(run(training, "fp32", seed), run(training, training.plan, seed)) for seed in range(SEEDS)]
    worse = [
        math.log(mine / end) if training.clean is not None else (mine - end) / (first - end)
        for (first, end), (_, mine) in pairs
    ]
    if not all(map(math.isfinite, worse)):
        return {"fails": True, "worse_by": None}
    mean, error = statistics.fmean(worse), statistics.stdev(worse) / math.sqrt(SEEDS)
    return {"fails": mean > WORSE and mean - T95 * error > 0.0, "worse_by": mean}


def main() -> None:
    """Judge every case, and ask the gradient test about it."""
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for one in trainings():
        torch.manual_seed(0)
        found = castwise.parity(
            one.job.model(), one.job.loss, one.job.batches, Plan.preset(one.plan), optimizer=one.job.optimizer
        )
        rows.append({
            "kind": one.kind, "case": one.name, "twin": "planted" if one.planted else "sound", "plan": one.plan,
            **judged(one), "parity": found.verdict, "reason": found.reason, "lost_updates": found.lost_updates,
        })  # fmt: skip
        print(rows[-1], flush=True)
    unsafe, safe = ([row for row in rows if row["fails"] == fails] for fails in (True, False))
    rows.append({
        "fail_in_training": len(unsafe), "passed_by_parity": sum(row["parity"] == "pass" for row in unsafe),
        "sound_in_training": len(safe), "failed_by_parity": sum(row["parity"] == "fail" for row in safe),
    })  # fmt: skip
    print(rows[-1])
    write("planted-plans", torch.device("cpu"), __doc__, rows)


if __name__ == "__main__":
    main()
