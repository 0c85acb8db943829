"""Does a training that is hit end where the undisturbed one does, and what does the watch over it cost?

Two built-in workloads are trained for 320 steps under fp16-mixed. Undisturbed runs of several seeds give the band: mean and
standard deviation of the loss over the last 40 steps. Then runs are hit at step 150 (targets or images of one batch times 1e6; a NaN
in the data; the last layer's weights times 1e4) or from step 200 on (a module multiplies by 1e6 and divides again, which fp16
does not hold), with ``castwise.Recovery`` and without it. ``in_band``: the last loss is no more than three standard deviations above the
mean. Undisturbed steps with and without the recovery are timed in turns, good states every 100 steps included.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import castwise
from castwise.lab.passes.isolation import seed_all
from castwise.lab.workloads.workload import Workload, find_workload
from common import Results, arguments

STEPS, LAST, HIT, LATE = 320, 40, 150, 200
BAND, SEEDS = 6, 3
JOBS = {"sine?size=32&hidden=32": ("head", 1, "head"), "digits?model=vit&width=32": ("patches", 0, "head")}
"""By workload: before or behind which module the loud one is put, which part of a batch is hit, whose weights are."""
KINDS = ("data spike", "data NaN", "weight spike", "region overflows")


class Loud(nn.Module):
    """Multiplies and divides again: the identity, but where the format does not hold what is between."""

    def __init__(self, inner: nn.Module, first: bool) -> None:
        super().__init__()
        self.inner, self.first = inner, first
        self.register_buffer("gain", torch.ones(()))

    def loud(self, x: Tensor) -> Tensor:
        """``x * gain / gain``."""
        return x * self.gain / self.gain

    def forward(self, x: Tensor) -> Tensor:
        """The inner module, with it before or behind."""
        out: Tensor = self.inner(self.loud(x)) if self.first else self.loud(self.inner(x))
        return out


class Run:
    """One training."""

    def __init__(self, name: str, seed: int, kind: str, recovers: bool) -> None:
        self.place, self.part, self.weights = JOBS[name]
        self.job: Workload = find_workload(name)
        seed_all(seed)
        self.model = self.job.model()
        setattr(self.model, self.place, Loud(getattr(self.model, self.place), self.place == "head"))
        self.optimizer = self.job.optimizer(self.model.parameters())
        self.amp = castwise.Amp("fp16-mixed", device="cpu")
        self.amp.prepare(self.model, self.optimizer)
        self.seed, self.kind, self.hits = seed, kind, 0
        self.folder = tempfile.TemporaryDirectory()
        self.recovery = (
            castwise.Recovery(self.amp, self.model, self.optimizer, self.job.loss, self.folder.name)
            if recovers
            else None
        )
        self.losses: dict[int, float] = {}
        self.step_s = math.nan

    def data(self) -> Iterator[Any]:
        """The batches, one of them hit."""
        for number, batch in zip(range(STEPS), self.job.batches(self.seed), strict=False):
            parts = [part.clone() for part in batch]
            if number == HIT and self.kind == "data spike":
                parts[self.part] *= 1e6
            elif number == HIT and self.kind == "data NaN":
                parts[self.part].view(-1)[0] = math.nan
            yield tuple(parts)

    def train(self) -> None:
        """All steps."""
        batches = self.data() if self.recovery is None else self.recovery.batches(self.data())
        begin = time.perf_counter()
        for number, batch in enumerate(batches):
            step = number if self.recovery is None else self.recovery.step
            loss = self.job.loss(self.model, batch)
            self.amp.backward(loss)
            try:
                self.amp.step(self.optimizer)
            except castwise.CastwiseError:
                self.losses[STEPS - 1] = math.nan
                break
            self.optimizer.zero_grad()
            self.losses[step] = float(loss.detach())
            self.hit(step)
        self.step_s = (time.perf_counter() - begin) / STEPS

    def hit(self, step: int) -> None:
        """What happens to the model behind a step: once to its weights, or at every visit to a module."""
        if self.kind == "weight spike" and step == HIT and not self.hits:
            self.hits += 1
            inner = getattr(self.model, self.weights)
            with torch.no_grad():
                (inner.inner if isinstance(inner, Loud) else inner).weight.mul_(1e4)
        if self.kind == "region overflows":
            getattr(self.model, self.place).gain.fill_(1e6 if step >= LATE else 1.0)

    @property
    def last(self) -> float:
        """The mean loss of the last steps."""
        return statistics.fmean(value for step, value in self.losses.items() if step >= STEPS - LAST)


def ran(name: str, seed: int, kind: str, recovers: bool) -> Run:
    """A training that has been made."""
    run = Run(name, seed, kind, recovers)
    run.train()
    run.folder.cleanup()
    run.amp.close()
    return run


def main() -> None:
    """Run it."""
    options = arguments(__doc__).parse_args()
    warnings.simplefilter("ignore", UserWarning)  # one for each return, which the rows have
    torch.set_num_threads(1)
    with Results("recovery", torch.device("cpu"), __doc__, options.budget) as results:
        for name in JOBS:
            with results.part(name):
                calm = [
                    ran(name, seed, "none", recovers) for seed in range(BAND) for recovers in (True, False)
                ]
                watched, plain = calm[::2], calm[1::2]
                assert all(a.losses == b.losses for a, b in zip(watched, plain, strict=True)), (
                    "the run noticed"
                )
                ends = [run.last for run in watched]
                mean, spread = statistics.fmean(ends), statistics.stdev(ends)
                assert all(run.recovery is not None and not run.recovery.returns for run in watched), (
                    "a false alarm"
                )
                results.add({
                    "workload": name, "kind": "undisturbed", "seeds": BAND, "returns": 0, "loss": mean, "stdev": spread,
                    "step_ms": 1e3 * statistics.median(run.step_s for run in plain),
                    "watched_over_plain": statistics.median(a.step_s / b.step_s for a, b in zip(watched, plain, strict=True)),
                })  # fmt: skip
                for kind in KINDS:
                    results.add(_hit(name, kind, mean + 3 * spread))


def _hit(name: str, kind: str, top: float, make: Callable[..., Run] = ran) -> dict[str, Any]:
    with_it = [make(name, seed, kind, True) for seed in range(SEEDS)]
    without = [make(name, seed, kind, False) for seed in range(SEEDS)]
    returns = [one for run in with_it if run.recovery is not None for one in run.recovery.returns]
    first = returns[0] if returns else None
    return {
        "workload": name, "kind": kind, "seeds": SEEDS, "returns": len(returns), "loss": max(run.last for run in with_it),
        "in_band": sum(run.last <= top for run in with_it), "without": [run.last for run in without],
        "without_in_band": sum(run.last <= top for run in without), "causes": sorted({one.cause for one in returns}),
        "first": None if first is None else first.to_dict(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
