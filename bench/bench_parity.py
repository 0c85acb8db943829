"""Count the errors of the gradient parity test: false alarms on healthy plans and misses on planted failures.

Healthy trials are bf16-mixed and fp16-mixed on models that train well in them, with microbatches of one sample and of
many. The models are new, or late in training, when little but the noise of the data is left. A false alarm is the
verdict ``fail``. Planted failures are those of ``bench/planted``, in the formats in which training shows them; a miss
is the verdict ``pass``. Two cases cannot be decided and must be ``undecided`` with every seed: a loss that is not
deterministic, and a model whose fp32 gradient is only rounding error. Two more are counted. The same model with a
factor at which fp32 resolves the gradient and bf16 does not must ``fail``. A chaotic map has no right answer: only
part of its fp32 gradient is repeatable, so its fp32 error is close to the threshold, and the verdict depends on the
seed.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

import castwise
from castwise import Plan, Workload
from castwise.lab.workloads.workload import find_workload
from common import write
from planted.cases import CASES

SEEDS = 10
"""Number of seeds for each case that cannot be decided."""


def _adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=2e-3)


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def _points(
    size: int, shape: tuple[int, ...], noise: float
) -> Callable[[int], Iterator[tuple[Tensor, Tensor]]]:
    """Return batches of ten classes around prototypes; a share ``noise`` of the labels is random, so that noise remains."""
    prototypes = torch.randn(10, *shape, generator=torch.Generator().manual_seed(5))

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            label = torch.randint(10, (size,), generator=generator)
            x = prototypes[label] + torch.randn(size, *shape, generator=generator)
            wrong = torch.rand(size, generator=generator) < noise
            yield x, torch.where(wrong, torch.randint(10, (size,), generator=generator), label)

    return batches


class Recurrent(nn.Module):
    """An LSTM and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[batch, 10]``."""
        return self.head(self.lstm(x)[0][:, -1])


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
    )


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(16 * 3 * 3, 10),
    )  # fmt: skip


def healthy(size: int) -> list[Workload]:
    """Return sound workloads with microbatches of ``size`` samples."""
    made = [
        Workload("mlp", _mlp, _adam, _points(size, (32,), 0.2), _classify),
        Workload("conv", _conv, _adam, _points(size, (3, 8, 8), 0.2), _classify),
        Workload("lstm", Recurrent, _adam, _points(size, (12, 16), 0.2), _classify),
        find_workload(f"gpt?layers=2&width=64&context=32&batch={size}"),
    ]
    return made if size == 1 else [*made, find_workload("digits")]


def trained(workload: Workload, seed: int, steps: int) -> nn.Module:
    """Return the model after some fp32 steps."""
    torch.manual_seed(seed)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    for batch in itertools.islice(workload.batches(seed + 100), steps):
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


def false_alarms(seeds: int) -> list[dict[str, object]]:
    """Return the verdicts on healthy trials."""
    rows = []
    for size, steps in itertools.product((1, 32), (0, 400)):
        for workload in healthy(size):
            models = [trained(workload, seed, steps) for seed in range(seeds)]
            for low in ("bf16", "fp16"):
                verdicts: Counter[str] = Counter()
                worst = worst_adam = 0.0
                for seed, model in enumerate(models):
                    found = castwise.parity(
                        model, workload.loss, workload.batches, f"{low}-mixed", optimizer=workload.optimizer, seed=seed
                    )  # fmt: skip
                    verdicts[found.verdict] += 1
                    worst = max(worst, found.damage.value)
                    worst_adam = max(worst_adam, found.adam.value if found.adam else 0.0)
                rows.append({
                    "what": "healthy", "model": workload.name, "format": low, "microbatch": size, "fp32_steps": steps,
                    "trials": seeds, "pass": verdicts["pass"], "undecided": verdicts["undecided"],
                    "fail": verdicts["fail"], "worst_damage": worst, "worst_adam": worst_adam,
                })  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def misses() -> list[dict[str, object]]:
    """Return the verdicts on planted failures and on their sound twins."""
    rows = []
    for case, sound, low in itertools.product(CASES, (False, True), ("bf16", "fp16")):
        if not sound and low not in case.formats:
            continue
        workload = case.workload(sound)
        model = trained(workload, 0, 0)
        found = castwise.parity(
            model, workload.loss, workload.batches, f"{low}-mixed", optimizer=workload.optimizer
        )
        finite = found.damage.value < float("inf")
        rows.append({
            "what": "twin" if sound else "planted", "model": case.name, "format": low, "verdict": found.verdict,
            "damage": found.damage.value if finite else None, "adam": found.adam.value if found.adam else None,
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


class Phase(nn.Module):
    """The sine of an output times a large ``factor``, which also multiplies the output's rounding error.

    With a factor of 1e8, one unit in the last place changes the angle by several radians even in fp32. With 1e6, fp32
    resolves the angle and bf16 does not.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.body = _mlp()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[batch, 10]``."""
        return torch.sin(self.factor * self.body(x).float())


class Chaotic(nn.Module):
    """Forty steps of a chaotic map. In fp32 only part of its gradient is repeatable; in bf16 orbits get stuck at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _mlp()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[batch, 10]``."""
        y = torch.sigmoid(self.body(x))
        for _ in range(40):
            y = 3.99 * y * (1.0 - y)
        return y


def undecidable() -> list[dict[str, object]]:
    """Return the verdicts on cases that no test can decide, and on two similar cases."""
    count = itertools.count()

    def restless(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return _classify(model, batch) * (1.0 + 0.5 * (next(count) % 3))

    batches = _points(32, (32,), 0.2)
    cases: list[tuple[str, str, Callable[[], nn.Module], Callable[..., Tensor]]] = [
        ("undecidable", "not deterministic", _mlp, restless),
        ("undecidable", "fp32 is rounding", lambda: Phase(1e8), _classify),
        ("decidable", "fp32 resolves it", lambda: Phase(1e6), _classify),
        ("borderline", "chaotic map", Chaotic, _classify),
    ]
    rows: list[dict[str, object]] = []
    for what, name, make, loss in cases:
        verdicts: Counter[str] = Counter()
        floors, damages = [], []
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            plan = Plan.preset("bf16-mixed")
            found = castwise.parity(make(), loss, batches, plan, optimizer=_adam, seed=seed)
            verdicts[found.verdict] += 1
            floors.append(max(found.floor, found.repeat))
            damages.append(found.damage.value)
        rows.append({
            "what": what, "model": name, "format": "bf16", "trials": SEEDS, "pass": verdicts["pass"],
            "undecided": verdicts["undecided"], "fail": verdicts["fail"],
            "least_floor": min(floors), "largest_floor": max(floors),
            "least_damage": min(damages), "largest_damage": max(damages),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Run all three parts and write ``results/parity-cpu.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seeds", type=int, default=12)
    options = parser.parse_args()
    if options.device != "cpu":
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alarms, planted, open_ = false_alarms(options.seeds), misses(), undecidable()
    torch.set_num_threads(threads)
    trials = sum(int(str(row["trials"])) for row in alarms)
    fragile = [row for row in planted if row["what"] == "planted"]
    summary = {
        "what": "all",
        "healthy_trials": trials,
        "false_alarms": sum(int(str(row["fail"])) for row in alarms),
        "healthy_undecided": sum(int(str(row["undecided"])) for row in alarms),
        "planted": len(fragile),
        "misses": sum(row["verdict"] == "pass" for row in fragile),
        "twins_failed": sum(row["verdict"] == "fail" for row in planted if row["what"] == "twin"),
        "undecidable_trials": sum(int(str(row["trials"])) for row in open_ if row["what"] == "undecidable"),
        "undecidable_undecided": sum(
            int(str(row["undecided"])) for row in open_ if row["what"] == "undecidable"
        ),
    }
    write("parity", torch.device("cpu"), __doc__, [*alarms, *planted, *open_, summary])


if __name__ == "__main__":
    main()
