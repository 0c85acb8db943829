"""Training runs in which a whole plan fails for reasons that single gradients do not show, with sound twins.

``updates``: parameters stored low without masters, whose small updates are lost to rounding, some only in one
parameter group or only late. ``optimizer``: an optimizer whose own arithmetic fails in fp16. ``bias``: a bias as
large as the signal in gradients whose noise is much larger than both. Each planted case has a twin that trains well;
it has another optimizer or another value of one number.

The judge uses neither the gradient test nor the search. It trains pairs of runs from the same weights on the same
batches and compares their last losses, or for ``bias`` their errors against the targets without noise. A plan *fails*
if a loss is not finite, if a run stops with an error, or if the plan is worse, averaged over seeds, by more than 3 %
of the fall of fp32's loss (``updates``, ``optimizer``) or by a factor of more than exp(0.03) of fp32's clean error
(``bias``), with a one-sided lower 95 % bound above 0.

``python bench/planted/plans.py`` also runs ``parity`` on every case, and writes
``bench/results/planted-plans-cpu.json``.
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
    """A training run under a plan.

    Attributes:
        kind: ``updates``, ``optimizer`` or ``bias``.
        name: Name of the pair of twins.
        planted: Whether it is expected to fail.
        plan: A preset's name.
        job: The workload.
        steps: Number of steps of each run.
        clean: Computes the error against the targets without noise, for ``bias``.
    """

    kind: str
    name: str
    planted: bool
    plan: str
    job: Workload
    steps: int = 600
    clean: Callable[[nn.Module], float] | None = None


class Offset(nn.Module):
    """A module that adds a number and subtracts it again; bf16 keeps only eight bits of the sum."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, rounded to the last place of the offset."""
        return (x + self.offset) - self.offset


def mlp() -> nn.Module:
    """Return a model that maps 16 numbers to four."""
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def reader() -> nn.Module:
    """Return a model that maps 64 pixels to logits of ten classes."""
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def regression(offset: float) -> nn.Module:
    """Return a model that maps eight numbers to one, followed by the offset."""
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1), Offset(offset))


def truth(x: Tensor) -> Tensor:
    """Return the target without noise."""
    weights = torch.randn(8, 1, generator=torch.Generator().manual_seed(3))
    return torch.sin(x @ weights / 2.0)


def noisy(noise: float, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of 32 with noise on the targets."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(32, 8, generator=generator)
        yield x, truth(x) + noise * torch.randn(32, 1, generator=generator)


def clean_error(model: nn.Module) -> float:
    """Return the mean squared error against the target without noise, divided by the target's mean square."""
    x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        return float((model(x).float() - truth(x)).square().mean() / truth(x).square().mean())


def adam(lr: float, **options: Any) -> Make:
    """Return a function that makes Adam with a learning rate."""
    return lambda params: torch.optim.Adam(params, lr=lr, **options)


def grouped(slow: float, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam with a separate learning rate for the first layer."""
    first, bias, *rest = params
    return torch.optim.Adam([{"params": [first, bias], "lr": slow}, {"params": rest, "lr": 3e-3}])


def trainings() -> Iterator[Training]:
    """Yield all cases."""
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
    """Return the first loss, and the mean of the last losses or the clean error; return NaN if the run stops early."""
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
    """Train under the plan and fp32, and return whether the plan fails and by how much it is worse."""
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
    """Judge every case, run the gradient test on it, and write the result file."""
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
