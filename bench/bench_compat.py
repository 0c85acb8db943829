"""Measure the overhead of scripts written for Apex under the drop-in, against the loop of PyTorch's documentation.

O1 and O2 of ``castwise.compat.apex.amp`` run against a hand-written loop with torch.autocast and GradScaler in the
same format. The models are a dispatch-bound MLP (6 layers of width 32, batch 8, SGD), on which every microsecond of
Python shows, and the 4-layer GPT of the built-in workload. Blocks of steps are interleaved, and ratios are formed
within rounds. The hand-written loop runs twice, so that the table also shows the noise of the method. The casts of O1
apply to the whole process, so they are turned on before each block and off after it, outside the timed region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from castwise.bridges.compat.apex import amp
from castwise.lab.workloads.workload import find_workload
from common import Results, arguments, compare

WIDTH, LAYERS, BATCH, RATE = 32, 6, 8, 0.01
Job = tuple[nn.Module, torch.optim.Optimizer, Callable[[nn.Module], torch.Tensor]]


def mlp(device: torch.device) -> Job:
    """Return the dispatch-bound job of bench_overhead, which always trains on the same batch."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).to(device)
    x, y = torch.randn(BATCH, WIDTH, device=device), torch.randn(BATCH, WIDTH, device=device)
    loss_fn = nn.MSELoss()
    return model, torch.optim.SGD(model.parameters(), RATE), lambda net: loss_fn(net(x), y)


def gpt(device: torch.device) -> Job:
    """Return the job of the built-in 4-layer GPT."""
    torch.manual_seed(0)
    job = find_workload("gpt?lr=1e-4")
    model = job.model().to(device)
    optimizer = job.optimizer(model.parameters())
    batches: Iterator[Any] = iter(job.batches(0))

    def loss(net: nn.Module) -> torch.Tensor:
        batch = tuple(tensor.to(device) for tensor in next(batches))
        return job.loss(net, batch)

    return model, optimizer, loss


class ByHand:
    """A loop with torch.autocast around forward and loss, and GradScaler for fp16."""

    def __init__(self, job: Job, device: torch.device, dtype: torch.dtype) -> None:
        self._model, self._optimizer, self._loss = job
        self._device, self._dtype = device, dtype
        self._scaler = torch.amp.GradScaler(device.type) if dtype is torch.float16 else None
        self.losses: list[float] = []

    def before(self, steps: int) -> None:
        """Do nothing: this loop needs no preparation."""

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
        """Do nothing: this loop has nothing to clean up."""


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
        """Turn on the casts of O1."""
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
        """Turn off the casts of O1."""
        if self._casts is not None:
            self._casts.leave()


def main() -> None:
    """Measure and write ``results/compat-<device>.json``."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=54)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    formats = {"fp16": torch.float16, "bf16": torch.bfloat16}
    cpu = device.type == "cpu"
    groups = [
        ("MLP", "fp16", mlp, options.rounds, options.steps),
        ("MLP", "bf16", mlp, options.rounds, options.steps),
        # A CPU without fp16 arithmetic takes ten times as long for fp16, which would hide the overhead.
        *([] if cpu else [("GPT", "fp16", gpt, options.rounds // 2, 5)]),
        ("GPT", "bf16", gpt, options.rounds // 2, 2 if cpu else 5),
    ]
    with Results("compat", device, __doc__, options.budget) as results:
        for number, (job, name, build, rounds, steps) in enumerate(groups):
            dtype = formats[name]
            hand = partial(of_job, ByHand, build, device, device, dtype)
            loops: list[tuple[str, Callable[[], Any]]] = [
                ("torch.amp by hand", hand),
                ("torch.amp by hand, again", hand),
                ("apex O1", partial(of_job, ByApex, build, device, "O1", dtype)),
                ("apex O2", partial(of_job, ByApex, build, device, "O2", dtype)),
            ]
            with results.part(f"{job}, {name}"):
                rows = compare(
                    loops,
                    rounds=rounds,
                    steps=steps,
                    device=device,
                    unit="us",
                    seconds=results.share(len(groups) - number),
                    relative=0.02,
                )
                results.add(*({"job": job, "format": name} | row for row in rows))


def of_job(
    loop: Callable[..., Any], build: Callable[[torch.device], Job], device: torch.device, *how: Any
) -> Any:
    """Build a job and return a loop around it."""
    return loop(build(device), *how)


if __name__ == "__main__":
    main()
