"""What scripts written for Apex cost under the drop-in, against the loop that PyTorch's documentation writes.

O1 and O2 of ``castwise.compat.apex.amp`` race a hand-written torch.autocast and GradScaler loop in the same format, on a
dispatch-bound MLP (6 layers of width 32, batch 8, SGD), where every microsecond of Python shows, and on the 4-layer GPT
of the built-in workload. Blocks of steps are interleaved, and ratios are formed within rounds; the hand-written loop runs
twice, so that the noise of the method is in the table too. The casts of O1 hold for a whole process, so they begin and
end with each block, outside of what is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from castwise.compat.apex import amp
from castwise.measure.stats import paired_speedup
from castwise.measure.timing import paired, race
from castwise.workload import find_workload
from common import check_losses_agree, write

WIDTH, LAYERS, BATCH, RATE = 32, 6, 8, 0.01
Job = tuple[nn.Module, torch.optim.Optimizer, Callable[[nn.Module], torch.Tensor]]


def mlp(device: torch.device) -> Job:
    """The dispatch-bound job of bench_overhead: one batch, again and again."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).to(device)
    x, y = torch.randn(BATCH, WIDTH, device=device), torch.randn(BATCH, WIDTH, device=device)
    loss_fn = nn.MSELoss()
    return model, torch.optim.SGD(model.parameters(), RATE), lambda net: loss_fn(net(x), y)


def gpt(device: torch.device) -> Job:
    """The built-in 4-layer GPT."""
    torch.manual_seed(0)
    job = find_workload("gpt")
    model = job.model().to(device)
    optimizer = job.optimizer(model.parameters())
    batches: Iterator[Any] = iter(job.batches(0))

    def loss(net: nn.Module) -> torch.Tensor:
        batch = tuple(tensor.to(device) for tensor in next(batches))
        return job.loss(net, batch)

    return model, optimizer, loss


class ByHand:
    """torch.autocast around forward and loss, GradScaler for fp16."""

    def __init__(self, job: Job, device: torch.device, dtype: torch.dtype) -> None:
        self._model, self._optimizer, self._loss = job
        self._device, self._dtype = device, dtype
        self._scaler = torch.amp.GradScaler(device.type) if dtype is torch.float16 else None
        self.losses: list[float] = []

    def before(self, steps: int) -> None:
        """Nothing to prepare."""

    def run(self, steps: int) -> None:
        """Train for some steps."""
        optimizer, scaler = self._optimizer, self._scaler
        for _ in range(steps):
            with torch.autocast(self._device.type, dtype=self._dtype):
                loss = self._loss(self._model)
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        self.losses.append(float(loss.detach()))

    def after(self) -> None:
        """Nothing to clean up."""


class ByApex:
    """The loop of Apex's documentation under the drop-in."""

    def __init__(self, job: Job, level: str, dtype: torch.dtype) -> None:
        model, optimizer, self._loss = job
        low = "patch_torch_functions_type" if level == "O1" else "cast_model_type"
        scale = {} if dtype is torch.float16 else {"loss_scale": 1.0}
        self._model, self._optimizer = amp.initialize(
            model, optimizer, opt_level=level, verbosity=0, **{low: dtype}, **scale
        )
        self._state = dict(vars(amp._amp_state))
        self._casts = None if amp._amp_state.handle is None else amp._amp_state.handle._ambient
        self.after()
        amp._amp_state.handle = None
        self.losses: list[float] = []

    def before(self, steps: int) -> None:
        """Begin the casts of O1."""
        vars(amp._amp_state).update(self._state)
        if self._casts is not None:
            self._casts.enter()

    def run(self, steps: int) -> None:
        """Train for some steps."""
        optimizer = self._optimizer
        for _ in range(steps):
            loss = self._loss(self._model)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(float(loss.detach()))

    def after(self) -> None:
        """End the casts of O1."""
        if self._casts is not None:
            self._casts.leave()


def main() -> None:
    """Measure and write ``results/compat-<device>.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=54)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    formats = {"fp16": torch.float16, "bf16": torch.bfloat16}
    rows: list[dict[str, Any]] = []
    for job, build, rounds, steps, names in (
        ("MLP", mlp, options.rounds, options.steps, ("fp16", "bf16")),
        # A CPU without fp16 arithmetic takes ten times as long over it, which would hide everything.
        (
            "GPT",
            gpt,
            options.rounds // 2,
            2 if device.type == "cpu" else 20,
            ("bf16",) if device.type == "cpu" else ("fp16", "bf16"),
        ),
    ):
        for name in names:
            dtype = formats[name]
            loops: list[tuple[str, Any]] = [
                ("torch.amp by hand", ByHand(build(device), device, dtype)),
                ("torch.amp by hand, again", ByHand(build(device), device, dtype)),
                ("apex O1", ByApex(build(device), "O1", dtype)),
                ("apex O2", ByApex(build(device), "O2", dtype)),
            ]
            laps = race(loops, rounds=rounds, steps=steps, device=device)
            for label, lap in laps.items():
                if lap.error is not None:
                    raise SystemExit(f"{label}: {lap.error!r}") from lap.error
            check_losses_agree({label: loop.losses[-1] for label, loop in loops}, relative=0.02)
            base = laps[loops[0][0]]
            for label, _ in loops:
                speedup = paired_speedup(*paired(base, laps[label]))
                times = sorted(t for t in laps[label].times_s if t is not None)
                rows.append({
                    "job": job,
                    "format": name,
                    "loop": label,
                    "step_us": 1e6 * times[len(times) // 2],
                    "ratio": 1 / speedup.value,
                    "low": 1 / speedup.high,
                    "high": 1 / speedup.low,
                })
    write("compat", device, __doc__, rows)


if __name__ == "__main__":
    main()
