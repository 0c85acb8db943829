"""Compare castwise with hand-written torch.amp, Accelerate, Lightning Fabric and the Hugging Face Trainer.

Each trains the same model from the same weights on the same batches, all in bf16 except for the last: hand-written
torch.autocast around forward and loss; each library as in its own documentation, with only its precision option set;
``castwise.Amp("bf16-mixed")``; and castwise with the plan that its tuner finds first, in whatever format. All are
compared with hand-written fp32 and torch.autocast. Each runs in its own process, one at a time, in blocks of steps
whose order changes from round to round. All are started several times. Ratios are those of
``castwise.lab.timing.stats.restarts``, with Student's t interval over starts. ``mlp`` is bound by Python, so it shows
the overhead of a library. ``loss`` is the mean loss of the last ten steps before the first timed step. ``peak_mib``
is the peak memory: of the process on a CPU, allocated by torch on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import castwise
from architectures import ARCHITECTURES
from castwise import Workload
from castwise.lab.timing import stats
from castwise.lab.timing.environment import environment
from castwise.lab.timing.timing import synchronize
from castwise.lab.workloads.workload import find_workload
from common import RESULTS, Results, arguments

LIBRARIES = ("accelerate", "lightning", "transformers")
IMPORTS = {"Accelerate": "accelerate", "Fabric": "lightning.fabric", "Trainer": "transformers.trainer"}
FIRST, LAST = 30, 10
"""Number of steps before the first timed step, and of the last of these whose mean loss is reported."""
BLOCK_S = 0.3


def mlp() -> Workload:
    """Return the dispatch-bound job of bench_overhead."""

    def model() -> nn.Module:
        layers = [layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(32, 32))

    def batches(seed: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(8, 32, generator=generator) for _ in range(2))
        while True:
            yield x, y

    return Workload(
        "mlp", model, lambda params: torch.optim.SGD(params, 0.01), batches,
        lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    )  # fmt: skip


def workload_of(name: str) -> Workload:
    """Return the workload of this name."""
    own: dict[str, Callable[[], Workload]] = {"mlp": mlp, **ARCHITECTURES}
    return own[name]() if name in own else find_workload(name)


class Enough(BaseException):
    """The signal that ends the training of a process."""


class Gate:
    """A step counter that sends the time of each block of steps to the parent process."""

    def __init__(self, pipe: Connection, device: torch.device) -> None:
        self._pipe, self._device = pipe, device
        self._losses: list[Tensor] = []
        self._left = self._count = FIRST
        self._since = time.perf_counter()

    def __call__(self, loss: Tensor) -> None:
        """Count a step with this loss; at the end of a block, send its time and wait for the size of the next."""
        if len(self._losses) < FIRST:
            self._losses.append(loss.detach())
        self._left -= 1
        if self._left:
            return
        synchronize(self._device)
        seconds = (time.perf_counter() - self._since) / self._count
        losses = [float(one) for one in self._losses[-LAST:]]
        self._pipe.send({"seconds": seconds, "loss": statistics.fmean(losses), "peak_mib": self._peak()})
        self._left = self._count = self._pipe.recv()
        if not self._left:
            raise Enough
        self._since = time.perf_counter()

    def _peak(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 2**20
        status = Path("/proc/self/status").read_text()  # ru_maxrss starts at the parent's memory
        return int(status.split("VmHWM:")[1].split()[0]) / 2**10


Way = Callable[[Workload, torch.device, Gate], None]


def _parts(job: Workload, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Any]]:
    torch.manual_seed(0)
    model = job.model().to(device)
    return model, job.optimizer(model.parameters()), iter(job.batches(0))


def _on(device: torch.device, batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: value.to(device) for name, value in batch.items()}
    return tuple(value.to(device) for value in batch)


def by_hand(dtype: torch.dtype | None) -> Way:
    """Return the loop of PyTorch's documentation."""

    def train(job: Workload, device: torch.device, gate: Gate) -> None:
        model, optimizer, batches = _parts(job, device)
        for batch in batches:
            with torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext():
                loss = job.loss(model, _on(device, batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            gate(loss)

    return train


def with_accelerate(job: Workload, device: torch.device, gate: Gate) -> None:
    """Train with Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
    model, optimizer, batches = _parts(job, device)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in batches:
        loss = job.loss(model, _on(device, batch))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        gate(loss)


def with_fabric(job: Workload, device: torch.device, gate: Gate) -> None:
    """Train with Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=device.type, devices=1, precision="bf16-mixed")
    fabric.launch()
    made, optimizer, batches = _parts(job, device)
    model, optimizer = fabric.setup(made, optimizer)
    for batch in batches:
        loss = job.loss(model, _on(device, batch))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        gate(loss)


def with_trainer(job: Workload, device: torch.device, gate: Gate) -> None:
    """Train with the Hugging Face Trainer."""
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Own(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
            self.last = job.loss(model, inputs)
            return self.last

        def get_train_dataloader(self) -> Any:
            return batches

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            gate(trainer.last)

    model, optimizer, batches = _parts(job, device)
    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            folder, max_steps=10**9, bf16=True, use_cpu=device.type == "cpu", max_grad_norm=0.0, logging_strategy="no", save_strategy="no",
            report_to=[], disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        trainer = Own(model, given, train_dataset=[0], optimizers=(optimizer, constant), callbacks=[Stop()])
        trainer.train()


def with_castwise(plan: str) -> Way:
    """Return a loop with castwise under a plan."""

    def train(job: Workload, device: torch.device, gate: Gate) -> None:
        model, optimizer, batches = _parts(job, device)
        amp = castwise.Amp(plan, device=device.type)
        amp.prepare(model, optimizer)
        for batch in batches:
            loss = job.loss(model, _on(device, batch))
            amp.backward(loss)
            amp.step(optimizer)
            optimizer.zero_grad()
            gate(loss)

    return train


def ways(tuned: str) -> dict[str, Way]:
    """Return the training loops by name."""
    return {
        "fp32": by_hand(None), "torch.amp": by_hand(torch.bfloat16), "Accelerate": with_accelerate, "Fabric": with_fabric,
        "Trainer": with_trainer, "castwise bf16-mixed": with_castwise("bf16-mixed"), "castwise tuned": with_castwise(tuned),
    }  # fmt: skip


def child(pipe: Connection, workload: str, way: str, tuned: str, device: str, threads: int) -> None:
    """Import the library, then train until the parent process ends the training."""
    torch.set_num_threads(threads)
    if way in IMPORTS:
        importlib.import_module(IMPORTS[way])
    pipe.send("ready")
    pipe.recv()
    where = torch.device(device)
    with contextlib.suppress(Enough):
        ways(tuned)[way](workload_of(workload), where, Gate(pipe, where))


class Started:
    """A process that trains, and its last message."""

    def __init__(self, *given: Any) -> None:
        self._pipe, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=child, args=(there, *given), daemon=True
        )
        self._process.start()
        there.close()
        self.last: dict[str, Any] = {}

    def wait(self) -> None:
        """Wait until the process has imported its library; all processes import at the same time."""
        self._pipe.recv()

    def begin(self) -> None:
        """Run the first steps, which would be slowed down by those of other processes."""
        self._pipe.send("go")
        self.last = self._pipe.recv()

    def run(self, steps: int) -> float:
        """Run a block of steps and return the seconds per step."""
        self._pipe.send(steps)
        self.last = self._pipe.recv()
        seconds: float = self.last["seconds"]
        return seconds

    def end(self) -> None:
        """End the process."""
        self._pipe.send(0)
        self._process.join(30)
        self._process.kill()


def measure(
    name: str, device: torch.device, starts: int, rounds: int, budget_s: float
) -> list[dict[str, Any]]:
    """Measure one workload and return its rows."""
    job = workload_of(name)
    found = castwise.tune(job, device=device, budget_s=budget_s, progress=True)
    tuned = str(found.plan)
    times: dict[str, list[list[float]]] = {way: [] for way in ways(tuned)}
    last: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for number in range(starts):
        running = {way: Started(name, way, tuned, device.type, torch.get_num_threads()) for way in times}
        for one in running.values():
            one.wait()
        for way, one in list(running.items()):
            try:
                one.begin()
            except EOFError:
                failed[way] = "its process failed"
                del running[way]
        steps = max(1, round(BLOCK_S / min(one.run(2) for one in running.values())))
        taken: dict[str, list[float]] = {way: [] for way in running}
        for turn in range(rounds):
            order = list(running)
            order = order[(turn + number) % len(order) :] + order[: (turn + number) % len(order)]
            for way in order if turn % 2 else reversed(order):
                taken[way].append(running[way].run(steps))
        for way, one in running.items():
            times[way].append(taken[way])
            last[way] = one.last
            one.end()
    names = [way for way in times if way not in failed]
    ratios = stats.restarts([times[way] for way in names])
    rows: list[dict[str, Any]] = [{"workload": name, "way": way, "error": why} for way, why in failed.items()]
    for index, way in enumerate(names):
        row: dict[str, Any] = {"workload": name, "way": way}
        if way == "castwise tuned":
            row["plan"] = tuned
        row["step_ms"] = 1e3 * statistics.median(t for start in times[way] for t in start)
        for other in ("fp32", "torch.amp"):
            if way != other and other in names:
                speed = ratios[names.index(other), index]
                row[f"over_{other}"] = [speed.value, speed.low, speed.high]
        row["commit"] = environment(device).commit
        rows.append({**row, "peak_mib": round(last[way]["peak_mib"]), "loss": last[way]["loss"]})
    return rows


def main() -> None:
    """Measure and write ``results/peers-<device>.json``; with ``--keep`` the file's rows of other workloads stay."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--workloads", default=",".join(["mlp", "gpt", "digits", "sine?size=128", *ARCHITECTURES])
    )
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tune-seconds", type=float, default=60.0)
    parser.add_argument("--keep", action="store_true", help="keep the file's rows of other workloads")
    given = parser.parse_args()
    device = torch.device(given.device)
    names = given.workloads.split(",")
    path = RESULTS / f"peers-{device.type}.json"
    had = json.loads(path.read_text(encoding="utf-8"))["rows"] if given.keep and path.exists() else []
    with Results("peers", device, __doc__, given.budget) as results:
        versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
        results.add({"libraries": json.dumps(versions)})
        results.rows += [row for row in had if "workload" in row and row["workload"] not in names]
        for name in names:
            with results.part(name):
                results.add(*measure(name, device, given.starts, given.rounds, given.tune_seconds))


if __name__ == "__main__":
    main()
