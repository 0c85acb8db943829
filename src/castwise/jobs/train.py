"""``train``: train a workload under one plan, and keep a record that outlives whatever goes wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

import torch

from castwise.casting.context import default_device_type
from castwise.errors import CastwiseError, NonFiniteError, PlanError, WorkloadError
from castwise.jobs import Event, Progress
from castwise.measure.environment import Environment, environment
from castwise.measure.steps import build_model, to_device
from castwise.plan import Plan, as_plan
from castwise.scaler import StepResult
from castwise.session import Amp
from castwise.workload import Workload, check_loss, find_workload, non_finite_parts

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TrainEvent", "TrainResult", "train"]

_PENDING = 16
"""Steps whose figures may wait on the device, so that reading them does not hold it up; their batches wait too."""
_PATIENCE_S = 0.1
"""Seconds after which they are read though they be fewer."""


@dataclass(frozen=True)
class TrainEvent(Event):
    """How far a training has come.

    Attributes:
        loss: Of the last step that was read.
        loss_scale: That step's; None under a plan without one.
        skipped_steps: Steps not taken so far, since gradients were not finite.
        steps_per_s: Since the start.
    """

    loss: float = math.nan
    loss_scale: float | None = None
    skipped_steps: int = 0
    steps_per_s: float = 0.0


@dataclass(frozen=True)
class TrainResult:
    """What became of a training.

    Attributes:
        workload: Its name.
        description: What it is.
        plan: On one line, as ``Plan.parse`` reads it.
        digest: Of the plan.
        status: ``ok``, ``failed`` or ``interrupted``.
        reason: Why it is not ``ok``, in a sentence; else empty.
        steps: Steps asked for.
        steps_done: Steps made, skipped ones too.
        skipped_steps: Steps not taken, since gradients were not finite.
        final_loss: Of the last step, None where it is not finite.
        loss_scale: In the last step; None under a plan without one.
        metrics: What ``workload.evaluate`` says of the trained model.
        seed: Of weights and data.
        time_s: Of the training itself, without preparation and evaluation.
        steps_per_s: Steps made, over that time.
        environment: What it ran on.
        files: Names of what was written beside ``result.json``, in its folder.
    """

    workload: str
    description: str
    plan: str
    digest: str
    status: str
    reason: str
    steps: int
    steps_done: int
    skipped_steps: int
    final_loss: float | None
    loss_scale: float | None
    metrics: Mapping[str, float]
    seed: int
    time_s: float
    steps_per_s: float
    environment: Environment
    files: tuple[str, ...]

    def to_json(self) -> str:
        """The record as JSON text; numbers that JSON does not have are null."""
        record = {"kind": "train", "version": 1, **dataclasses.asdict(self)}
        record["metrics"] = {key: _finite(value) for key, value in self.metrics.items()}
        return json.dumps(record, indent=1, allow_nan=False)

    def summary(self) -> str:
        """The outcome in a sentence."""
        loss = "not finite" if self.final_loss is None else f"{self.final_loss:.4g}"
        said = f"{self.workload} under {self.plan}: loss {loss} after {self.steps_done} steps"
        said += f" ({self.steps_per_s:.3g} steps/s"
        said += f", {self.skipped_steps} skipped)" if self.skipped_steps else ")"
        return "; ".join([said, *(f"{key} {value:.4g}" for key, value in self.metrics.items())])


def train(
    workload: Workload | str,
    plan: Plan | str | os.PathLike[str] | torch.dtype,
    *,
    steps: int,
    out: str | os.PathLike[str],
    device: torch.device | str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> TrainResult:
    """Train a workload under a plan.

    Into the folder go ``metrics.jsonl`` (a line per step, written as training goes), TensorBoard's events, and at the
    end ``curves.png``, ``model.pt`` (fp32 weights under the model's own keys, whatever the plan) and ``result.json``.
    A training that fails or is interrupted leaves what it had, with a ``result.json`` that says why.

    Args:
        workload: A workload, or how to find one: ``sine``, ``file.py:attribute``.
        plan: As :func:`castwise.plan.as_plan` takes it.
        steps: How many, at least 1.
        out: Folder for the results; made where there is none, and files of an earlier training in it are replaced.
        device: By default the accelerator at hand, else the CPU.
        seed: Of weights and data.
        progress: Called with a :class:`TrainEvent` when losses have been read.

    Returns:
        The result, as written.

    Raises:
        PlanError: A plan that cannot be, or ``steps`` below 1.
        DeviceError: The device is not there or lacks a format of the plan.
        WorkloadError: A workload that cannot be found or fails, or whose loss is not a scalar.
        NonFiniteError: Data with NaN or infinite values, or such a loss under a plan that has no loss scale to cure it.
        LossScaleError: The loss scale is at its floor and gradients still are not finite.
    """
    if steps < 1:
        raise PlanError(f"train(steps={steps}): needs steps >= 1")
    found = find_workload(workload) if isinstance(workload, str) else workload
    where = torch.device(device if device is not None else default_device_type())
    run = _Run(found, as_plan(plan), where, seed, steps, Path(out), progress or (lambda _event: None))
    outer = torch.get_rng_state()
    try:
        return run.go()
    finally:
        torch.set_rng_state(outer)


@dataclass
class _Step:
    """A step whose figures may still be on the device."""

    number: int
    loss: torch.Tensor
    scale: torch.Tensor | None
    result: StepResult
    elapsed_s: float
    batch: Any
    """On the CPU: to name what is wrong with it."""


@dataclass
class _Run:
    workload: Workload
    plan: Plan
    device: torch.device
    seed: int
    steps: int
    out: Path
    progress: Progress
    pending: list[_Step] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    skipped_steps: int = 0
    time_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def go(self) -> TrainResult:
        with Amp(self.plan, device=self.device) as amp:
            with _calls(self.workload, "model()"):
                model = build_model(self.workload, self.device, self.seed)
            with _calls(self.workload, "optimizer(params)"):
                optimizer = self.workload.optimizer(model.parameters())
            amp.prepare(model, optimizer)
            self.out.mkdir(parents=True, exist_ok=True)
            try:
                with _Journal(self.out) as journal:
                    self.files += journal.files
                    try:
                        self._train(amp, model, optimizer, journal)
                    finally:
                        with contextlib.suppress(Exception):  # a broken device must not hide why it broke
                            self._read(journal, judge=False)
                    self._evaluate(model)
                    journal.metrics(self.metrics, len(self.history))
                torch.save(amp.model_state_dict(model), self.out / "model.pt")
                self.files.append("model.pt")
            except BaseException as error:
                stopped = not isinstance(error, Exception)
                with contextlib.suppress(Exception):  # nor may a full disk
                    self._finish("interrupted" if stopped else "failed", _sentence(error))
                    error.add_note(f"What there was to record is in {self.out}")
                raise
        return self._finish("ok", "")

    def _train(
        self, amp: Amp, model: torch.nn.Module, optimizer: torch.optim.Optimizer, journal: _Journal
    ) -> None:
        torch.manual_seed(self.seed)  # dropout's, whatever building the model drew
        with _calls(self.workload, "batches(seed)"):
            batches = iter(self.workload.batches(self.seed))
        start = read = time.perf_counter()
        for number in range(1, self.steps + 1):
            batch = self._next(batches, number)
            with _calls(self.workload, "loss(model, batch)"):
                loss = self.workload.loss(model, to_device(batch, self.device))
            loss = check_loss(loss, self.workload)
            amp.backward(loss)
            # The step's own scale, copied where it lies: asking for it as a number would wait for the device.
            scale = amp.scaler.scale_tensor().detach().clone() if amp.scaler is not None else None
            result = amp.step(optimizer)
            optimizer.zero_grad()
            self.time_s = time.perf_counter() - start
            self.pending.append(_Step(number, loss.detach(), scale, result, self.time_s, batch))
            due = start + self.time_s - read >= _PATIENCE_S or len(self.pending) >= _PENDING
            if due or number in (1, self.steps):
                self._read(journal)
                read = time.perf_counter()
                self.time_s = read - start

    def _next(self, batches: Iterator[Any], number: int) -> Any:
        with _calls(self.workload, "batches(seed)"):
            for batch in batches:
                return batch
        raise WorkloadError(
            f"workload {self.workload.name!r}: batches(seed) ended after {number - 1} batches; make it an endless "
            "iterator, or ask for fewer steps"
        )

    def _read(self, journal: _Journal, judge: bool = True) -> None:
        """Write down the steps that wait, and judge their losses."""
        pending, self.pending = self.pending, []
        bad: _Step | None = None
        for step in pending:
            loss, skipped = float(step.loss), step.result.skipped
            scale = None if step.scale is None else float(step.scale)
            self.skipped_steps += skipped
            row = {
                "step": step.number, "loss": _finite(loss), "loss_scale": scale, "skipped": skipped,
                "elapsed_s": round(step.elapsed_s, 6),
            }  # fmt: skip
            self.history.append(row)
            journal.step(row, loss)
            if bad is None and not math.isfinite(loss):
                bad = step
        if not pending:
            return
        journal.flush()
        self.progress(
            TrainEvent(
                "training", str(self.plan), len(self.history), self.steps, "", loss, scale, self.skipped_steps,
                len(self.history) / self.time_s if self.time_s else 0.0,
            )
        )  # fmt: skip
        if judge and bad is not None:
            self._judge(bad)

    def _judge(self, step: _Step) -> None:
        """Refuse a loss that is not finite, unless a loss scale can see to it."""
        if non_finite_parts(step.batch):
            check_loss(step.loss.requires_grad_(), self.workload, step.batch, step.number)
        if self.plan.loss_scale is None:
            raise NonFiniteError(
                f"workload {self.workload.name!r}: the loss of step {step.number} is {float(step.loss)} under the plan "
                f"{self.plan}, from data that is finite, and the plan has no loss scale that could skip the step; "
                f"{_remedy(self.plan)}"
            )

    def _evaluate(self, model: torch.nn.Module) -> None:
        if self.workload.evaluate is None:
            return
        self.progress(Event("evaluating", "", 0, 1))
        model.eval()
        with torch.no_grad(), _calls(self.workload, "evaluate(model)"):
            self.metrics = {key: float(value) for key, value in self.workload.evaluate(model).items()}
        model.train()
        self.progress(Event("evaluating", "", 1, 1))

    def _finish(self, status: str, reason: str) -> TrainResult:
        if self.history:
            from castwise.report.plots import plot_curves

            self.files.append(plot_curves(self.history, self.out / "curves.png").name)
        last = self.history[-1] if self.history else {}
        done = len(self.history)
        result = TrainResult(
            workload=self.workload.name,
            description=self.workload.description,
            plan=str(self.plan),
            digest=self.plan.digest,
            status=status,
            reason=reason,
            steps=self.steps,
            steps_done=done,
            skipped_steps=self.skipped_steps,
            final_loss=last.get("loss"),
            loss_scale=last.get("loss_scale"),
            metrics=self.metrics,
            seed=self.seed,
            time_s=self.time_s,
            steps_per_s=done / self.time_s if self.time_s else 0.0,
            environment=environment(self.device),
            files=tuple(self.files),
        )
        (self.out / "result.json").write_text(result.to_json() + "\n", encoding="utf-8")
        return result


class _Journal:
    """What is written while training goes on: JSON lines and TensorBoard's events."""

    def __init__(self, out: Path) -> None:
        self._events = out / "tensorboard"
        self._lines_path = out / "metrics.jsonl"
        self.files = [self._lines_path.name, self._events.name]

    def __enter__(self) -> Self:
        from torch.utils.tensorboard import SummaryWriter

        for name in ("model.pt", "result.json", "curves.png"):
            (self._lines_path.parent / name).unlink(missing_ok=True)
        for old in self._events.glob("events.out.tfevents.*"):
            old.unlink()  # TensorBoard would draw an earlier training into the same curve
        self._lines: TextIO = self._lines_path.open("w", encoding="utf-8")
        self._board: SummaryWriter = SummaryWriter(str(self._events))
        return self

    def step(self, row: Mapping[str, Any], loss: float) -> None:
        self._lines.write(json.dumps(row, allow_nan=False) + "\n")
        self._board.add_scalar("loss", loss, row["step"])
        if row["loss_scale"] is not None:
            self._board.add_scalar("loss_scale", row["loss_scale"], row["step"])
            self._board.add_scalar("skipped", float(row["skipped"]), row["step"])

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for key, value in metrics.items():
            self._board.add_scalar(f"final/{key}", value, step)

    def flush(self) -> None:
        self._lines.flush()  # to the system, so that a process that is killed loses nothing

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()
        self._board.close()


@contextlib.contextmanager
def _calls(workload: Workload, what: str) -> Iterator[None]:
    """Say which of the workload's functions failed, where one does."""
    try:
        yield
    except CastwiseError:
        raise
    except Exception as error:
        raise WorkloadError(f"workload {workload.name!r}: {what} failed: {_sentence(error)}") from error


def _sentence(error: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(error).split())
    if isinstance(error, CastwiseError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _remedy(plan: Plan) -> str:
    if plan.compute == "fp16":
        return "use one that has, such as fp16-mixed, or bf16-mixed, which needs none"
    if plan.compute == "bf16":
        return "see whether it stays finite under fp32; if it does not, lower the learning rate"
    return "lower the learning rate, or look for a division by zero or a logarithm of zero in the loss"
