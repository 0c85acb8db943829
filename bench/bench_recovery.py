"""Compare training with ``castwise.Recovery`` to training with ``nonfinite="skip"`` alone, and measure its overhead.

Built-in workloads are trained for 120 steps under fp16-mixed, undisturbed and with several kinds of trouble (19 on
``sine``, 4 on a vision transformer). Each kind runs with a recovery that saves a good state every 40 steps, and with
``nonfinite="skip"`` alone, from three seeds. A loss is the mean over the last 30 steps, without the steps whose data
was corrupted. The loss of a run that ends in an error or becomes non-finite counts as infinite. ``at_least_as_good``:
with each seed, the loss with the recovery is at most 1.05 times the loss with skip alone. ``in_band``: the number of
runs whose loss is no more than three standard deviations above the mean of the undisturbed runs. Undisturbed runs
with a recovery (a good state every 100 steps) and without alternate and are timed. Trouble tied to a step happens
again whenever the step is repeated, except for kinds named "once".
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import castwise
from castwise.lab.passes.isolation import seed_all
from castwise.lab.workloads.workload import Workload, find_workload
from common import Results, arguments

STEPS, LAST, HIT, LATE, EVERY = 120, 30, 70, 85, 40
BAND, SEEDS = 4, 3
JOBS = {"sine?size=16&hidden=32": ("head", 1, "head"), "digits?model=vit&width=32": ("patches", 0, "head")}
"""By workload: the module that ``Loud`` wraps, the corrupted part of a batch, the module whose weights are corrupted."""
ALL = range(STEPS)
DATA: dict[str, tuple[range, str]] = {
    "one batch times 1e6": (range(HIT, HIT + 1), "times"),
    "one batch with NaN": (range(HIT, HIT + 1), "nan"),
    "one batch with infinity": (range(HIT, HIT + 1), "inf"),
    "NaN in the first batch": (range(1), "nan"),
    "NaN in five batches in a row": (range(HIT, HIT + 5), "nan"),
    "NaN in every 12th batch": (ALL[6::12], "nan"),
    "one batch mislabelled": (range(HIT, HIT + 1), "labels"),
    "twenty batches in a row mislabelled": (range(HIT, HIT + 20), "labels"),
    "every 12th batch mislabelled": (ALL[6::12], "labels"),
    "labels change for good": (range(LATE, STEPS), "labels"),
}
"""By kind of trouble: the steps whose batches are corrupted, and how."""
OTHERS = (
    "weights times 1e4, once", "weights NaN, once", "weights times 1e4 right before a good state, once",
    "optimizer state destroyed, once", "huge gradient, finite loss", "learning rate times 1000 for one step",
    "learning rate times 100 for good", "a module overflows fp16 for one step", "a module overflows fp16 for good",
)  # fmt: skip
KINDS = dict(zip(JOBS, ((*DATA, *OTHERS), (*list(DATA)[:2], OTHERS[0], OTHERS[-1])), strict=True))
"""The kinds of trouble by workload."""


class Loud(nn.Module):
    """A module that also multiplies and divides by ``gain``: the identity, unless the product overflows."""

    def __init__(self, inner: nn.Module, first: bool) -> None:
        super().__init__()
        self.inner, self.first = inner, first
        self.register_buffer("gain", torch.ones(()))

    def loud(self, x: Tensor) -> Tensor:
        """Return ``x * gain / gain``."""
        return x * self.gain / self.gain

    def forward(self, x: Tensor) -> Tensor:
        """Run the inner module, with the multiplication and division before it or after it."""
        out: Tensor = self.inner(self.loud(x)) if self.first else self.loud(self.inner(x))
        return out


class Run:
    """One training run."""

    def __init__(self, name: str, seed: int, kind: str, recovers: bool, every: int = EVERY) -> None:
        self.place, self.part, self.weights = JOBS[name]
        self.job: Workload = find_workload(name)
        seed_all(seed)
        self.model = self.job.model()
        setattr(self.model, self.place, Loud(getattr(self.model, self.place), self.place == "head"))
        self.optimizer = self.job.optimizer(self.model.parameters())
        self.rate = self.optimizer.param_groups[0]["lr"]
        self.amp = castwise.Amp("fp16-mixed", device="cpu")
        self.amp.prepare(self.model, self.optimizer)
        self.seed, self.kind, self.hits, self.ended = seed, kind, 0, ""
        self.spoilt, self.how = DATA.get(kind, (range(0), ""))
        self.folder = tempfile.TemporaryDirectory()
        self.recovery = (
            castwise.Recovery(
                self.amp, self.model, self.optimizer, self.job.loss, self.folder.name, every=every
            )
            if recovers
            else None
        )
        self.losses: dict[int, float] = {}
        self.step_s = math.nan

    def data(self) -> Iterator[Any]:
        """Yield the batches, some of them corrupted."""
        for number, batch in zip(range(STEPS), self.job.batches(self.seed), strict=False):
            parts = [part.clone() for part in batch]
            if number in self.spoilt:
                if self.how == "labels":
                    parts[1] = -parts[1] if parts[1].is_floating_point() else (parts[1] + 5) % 10
                elif self.how == "times":
                    parts[self.part] *= 1e6
                else:
                    parts[self.part].view(-1)[0] = float(self.how)
            yield tuple(parts)

    def train(self) -> None:
        """Run all steps."""
        begin = time.perf_counter()
        try:
            for number, batch in enumerate(
                self.data() if self.recovery is None else self.recovery.batches(self.data())
            ):
                step = number if self.recovery is None else self.recovery.step
                self.before(step)
                loss = self.job.loss(self.model, batch)
                self.losses[step] = float(loss.detach())
                self.amp.backward(loss)
                if self.kind == "huge gradient, finite loss" and step == HIT:
                    self.amp.unscale_(self.optimizer)
                    for parameter in self.model.parameters():
                        parameter.grad.mul_(1e6)
                self.amp.step(self.optimizer)
                self.optimizer.zero_grad()
                self.after(step)
        except castwise.CastwiseError as error:
            self.ended = type(error).__name__
        self.step_s = (time.perf_counter() - begin) / STEPS

    def before(self, step: int) -> None:
        """Cause the trouble that a step has each time it runs."""
        if self.kind == "learning rate times 1000 for one step":
            self.optimizer.param_groups[0]["lr"] = self.rate * (1000 if step == HIT else 1)
        elif self.kind == "learning rate times 100 for good":
            self.optimizer.param_groups[0]["lr"] = self.rate * (100 if step >= LATE else 1)

    def after(self, step: int) -> None:
        """Corrupt weights or optimizer state after a step, and set the gain that makes a module overflow in the next one."""
        if self.kind.startswith("a module overflows"):
            loud = step + 1 == HIT if self.kind.endswith("one step") else step + 1 >= LATE
            getattr(self.model, self.place).gain.fill_(1e6 if loud else 1.0)
        if (
            not self.kind.endswith("once")
            or step != (2 * EVERY - 1 if "good state" in self.kind else HIT)
            or self.hits
        ):
            return
        self.hits += 1
        inner = getattr(self.model, self.weights)
        weight = (inner.inner if isinstance(inner, Loud) else inner).weight
        with torch.no_grad():
            if self.kind.startswith("optimizer"):
                for state in self.optimizer.state.values():
                    state["exp_avg"].mul_(1e4)
                    state["exp_avg_sq"].zero_()
            else:
                weight.mul_(math.nan if "NaN" in self.kind else 1e4)

    @property
    def last(self) -> float:
        """Return the mean loss of the last steps, without corrupted ones, unless the corruption is permanent."""
        steps = range(STEPS - LAST, STEPS)
        spoilt = () if len(self.spoilt) > LAST else self.spoilt
        values = [self.losses.get(step, math.inf) for step in steps if step not in spoilt]
        mean = statistics.fmean(values)
        return math.inf if self.ended or not math.isfinite(mean) else mean


def ran(name: str, seed: int, kind: str, recovers: bool, every: int = EVERY) -> Run:
    """Train to the end and return the run."""
    run = Run(name, seed, kind, recovers, every)
    run.train()
    run.folder.cleanup()
    run.amp.close()
    return run


def main() -> None:
    """Run every kind of trouble and write ``results/recovery-cpu.json``."""
    options = arguments(__doc__).parse_args()
    warnings.simplefilter("ignore", UserWarning)  # each return to a good state warns, and the rows count them
    torch.set_num_threads(1)
    with Results("recovery", torch.device("cpu"), __doc__, options.budget) as results:
        for name in JOBS:
            with results.part(name):
                calm = [
                    ran(name, seed, "none", recovers, 100)
                    for seed in range(BAND)
                    for recovers in (True, False)
                ]
                watched, plain = calm[::2], calm[1::2]
                assert all(a.losses == b.losses for a, b in zip(watched, plain, strict=True)), (
                    "the recovery changed an undisturbed run"
                )
                ends = [run.last for run in watched]
                assert all(run.recovery is not None and not run.recovery.returns for run in watched), (
                    "a false alarm"
                )
                results.add({
                    "workload": name, "kind": "undisturbed", "seeds": BAND, "returns": 0, "losses": ends,
                    "loss": statistics.fmean(ends), "stdev": statistics.stdev(ends),
                    "step_ms": 1e3 * statistics.median(run.step_s for run in plain),
                    "watched_over_plain": statistics.median(a.step_s / b.step_s for a, b in zip(watched, plain, strict=True)),
                })  # fmt: skip
                for kind in KINDS[name]:
                    results.add(_hit(name, kind, statistics.fmean(ends), statistics.stdev(ends)))
        rows = [row for row in results.rows if "at_least_as_good" in row]
        good = sum(row["at_least_as_good"] for row in rows)
        results.add({"kind": "all", "rows": len(rows), "at_least_as_good_in": good})


def _hit(name: str, kind: str, mean: float, spread: float) -> dict[str, Any]:
    pairs = [[ran(name, seed, kind, recovers) for recovers in (True, False)] for seed in range(SEEDS)]
    with_it, without = [one for one, _ in pairs], [other for _, other in pairs]
    records = [one for run in with_it if run.recovery is not None for one in run.recovery.returns]
    returns = [one for one in records if not one.needed_no_return]
    top = mean + 3 * spread
    return {
        "workload": name, "kind": kind, "seeds": SEEDS, "losses": [run.last for run in with_it],
        "skip_alone": [run.last for run in without], "at_least_as_good": all(a.last <= 1.05 * b.last for a, b in pairs),
        "in_band": sum(run.last <= top for run in with_it), "skip_alone_in_band": sum(run.last <= top for run in without),
        "returns": len(returns), "skipped_without_return": len(records) - len(returns),
        "stopped": sum(one.cause == "unknown" for one in returns), "causes": sorted({one.cause for one in records}),
        "ended": [run.ended for run in with_it if run.ended], "skip_alone_ended": [run.ended for run in without if run.ended],
        "time_ratio": statistics.median(a.step_s / b.step_s for a, b in pairs),
        "first": None if not records else records[0].to_dict(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
