"""``train``, which trains a workload under a plan on one or more processes, with a log that survives crashes."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from castwise.commands.jobs import Event, Progress, heard
from castwise.commands.jobs.faults import calls, remedy
from castwise.commands.jobs.journal import Journal
from castwise.commands.jobs.layout import SCHEDULES, Layout, check_microbatches, slice_batch
from castwise.commands.jobs.layouts import Parts, Whole, build_whole, check_workload, evaluate, evaluate_whole
from castwise.commands.jobs.processes import TrainingRanks, first_fault, join, started
from castwise.commands.jobs.saves import Saves
from castwise.commands.jobs.train_result import TrainEvent, TrainResult
from castwise.core.casting import default_device_type
from castwise.core.casting.trees import to_device
from castwise.core.devices import widest_dtype
from castwise.core.extras import left_out
from castwise.core.plans.plan import Plan, as_plan
from castwise.core.scaler import StepResult
from castwise.core.session import Amp
from castwise.core.session.process import find_device, interrupts_wait
from castwise.errors import NonFiniteError, PlanError, check_count, sentence
from castwise.lab.result import finite
from castwise.lab.timing.environment import environment
from castwise.lab.workloads.workload import Workload, check_loss, find_workload, next_batch, non_finite_parts

__all__ = ["TrainEvent", "TrainResult", "train"]

_PENDING = 16
"""The largest number of steps whose losses are left on the device, so that reading them does not stall the device."""
_PATIENCE_S = 0.1
"""The approximate time in seconds after which losses are read from the device."""


def train(
    workload: Workload | str,
    plan: Plan | str | os.PathLike[str] | torch.dtype,
    *,
    steps: int,
    out: str | os.PathLike[str],
    device: torch.device | str | None = None,
    seed: int = 0,
    layout: Layout | str | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    save_every: int = 0,
    resume: bool = False,
    progress: Progress | bool | None = None,
) -> TrainResult:
    """Train a workload under a plan, on the processes that torchrun started or on this process alone.

    During training, ``metrics.jsonl`` gets a line for each step, and TensorBoard events are written. At the end,
    ``curves.png``, ``model.pt`` and ``result.json`` are written. ``model.pt`` holds fp32 weights under the model's own keys,
    whatever the plan and layout. A training that fails or is interrupted keeps its files so far, and ``result.json`` gives
    the reason. If TensorBoard or matplotlib is not installed, its files are left out with a warning. With several
    processes, rank 0 writes the files and evaluates the model.

    Checkpoints go into the folder ``checkpoints`` inside the output folder. A training that is restarted with ``resume``
    continues from the newest complete checkpoint, also under another plan or layout.

    Args:
        workload: A :class:`castwise.Workload`, or the name of a workload, such as ``sine`` or ``file.py:attribute``.
        plan: A plan, in any form that :func:`castwise.core.plans.plan.as_plan` accepts.
        steps: The number of steps, at least 1.
        out: The output folder, which is created if it does not exist. Files of an earlier training in this folder are
            replaced.
        device: By default the available accelerator, else the CPU.
        seed: The seed of weights and data.
        layout: The parallel layout, such as ``dp2xtp2``. By default all processes are data-parallel.
        microbatches: The number of microbatches per step of a pipeline; by default two per stage.
        schedule: The schedule of a pipeline: ``gpipe``, ``1f1b`` (the default) or ``interleaved``. ``interleaved`` runs two
            stages on each process.
        save_every: The number of steps between checkpoints. A checkpoint is also saved after the last step. 0 saves none.
        resume: Continue from the newest complete checkpoint in the folder, or start from the beginning if there is
            none. Damaged checkpoints are named in a warning and skipped.
        progress: True shows the command line's progress on standard error. A function is called on rank 0 with a
            :class:`TrainEvent` whenever losses were read from the device.

    Returns:
        The result, as in ``result.json``. On ranks other than 0, files and metrics are missing.

    Raises:
        PlanError: The plan or layout is invalid, ``steps`` is below 1, or ``save_every`` is below 0.
        CheckpointError: The folder holds checkpoints but ``resume`` is not set, or the checkpoints are of another training.
        DeviceError: The device does not exist or lacks a format of the plan.
        WorkloadError: The workload cannot be found or fails, its loss is not a scalar, or it does not define how the
            layout divides it.
        NonFiniteError: The data has NaN or infinite values, or the loss is NaN or infinite under a plan without a loss
            scale.
        LossScaleError: The loss scale has its smallest allowed value, and gradients still are not finite.
    """
    check_count("train", "steps", steps, 1)
    check_count("train", "save_every", save_every, 0)
    found = find_workload(workload) if isinstance(workload, str) else workload
    chosen = as_plan(plan)
    where = find_device("train", device, default_device_type())
    outer = torch.get_rng_state()
    try:
        with join(layout, where) as ranks, heard(progress if ranks.leads else None) as tell:
            check_workload(found, ranks.layout)
            pipeline = _pipeline_options(ranks.layout, microbatches, schedule)
            saves = Saves(Path(out) / "checkpoints", found.name, seed, save_every, resume)
            return _Run(found, chosen, ranks, seed, steps, Path(out), tell, *pipeline, saves).go()
    finally:
        torch.set_rng_state(outer)


def _pipeline_options(layout: Layout, microbatches: int | None, schedule: str | None) -> tuple[int, str]:
    if layout.pp == 1:
        for name, value in (("microbatches", microbatches), ("schedule", schedule)):
            if value is not None:
                raise PlanError(
                    f"train({name}={value!r}): only for pipelines, and layout {layout} has none; leave {name} out, or use e.g. --layout pp2"
                )
        return 1, ""
    schedule = "1f1b" if schedule is None else schedule
    if schedule not in SCHEDULES:
        raise PlanError(f"train(schedule={schedule!r}) is not allowed. Allowed: {', '.join(SCHEDULES)}.")
    stages = layout.pp * (2 if schedule == "interleaved" else 1)
    microbatches = 2 * stages if microbatches is None else microbatches
    check_microbatches(microbatches, schedule, layout)
    return microbatches, schedule


@dataclass
class _Step:
    """A finished step whose loss and loss scale have not been read from the device yet."""

    number: int
    loss: torch.Tensor | None
    scale: torch.Tensor | None
    result: StepResult
    elapsed_s: float
    batch: Any
    """The whole batch, on the CPU, which is kept so that an error message can describe bad data in the batch."""


@dataclass
class _Run:
    workload: Workload
    plan: Plan
    ranks: TrainingRanks
    seed: int
    steps: int
    out: Path
    progress: Progress
    microbatches: int
    schedule: str
    saves: Saves
    steps_before: int = 0
    """The number of steps before the checkpoint that this training continues. The batches of these steps are skipped."""
    earlier: list[dict[str, Any]] = field(default_factory=list)
    """The log lines of the steps before the checkpoint that this training continues."""
    pending: list[_Step] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    skipped_steps: int = 0
    restored: Counter[str] = field(default_factory=Counter)
    time_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def go(self) -> TrainResult:
        with contextlib.ExitStack() as stack:
            parts = self._build(stack)
            self.steps_before = self.saves.find()
            try:
                with (
                    Journal(self.out, self.steps_before)
                    if self.ranks.leads
                    else contextlib.nullcontext() as journal
                ):
                    self.files += journal.files if journal else []
                    self.earlier = journal.earlier if journal else []
                    try:
                        self._train(parts, journal)
                    finally:
                        with contextlib.suppress(
                            Exception
                        ):  # a broken device must not hide the original error
                            self._read(journal, judge=False)
                    weights = parts.weights()
                    if journal is not None and weights is not None:
                        self._evaluate(parts, weights)
                        journal.metrics(self.metrics, self.steps_before + len(self.history))
                if weights is not None:
                    torch.save(weights, self.out / "model.pt")
                    self.files.append("model.pt")
            except BaseException as error:
                stopped = not isinstance(error, Exception)
                reason = first_fault(sentence(error))
                if self.ranks.leads:
                    with contextlib.suppress(
                        Exception
                    ):  # a full disk must not hide the original error either
                        self._ignore_sigterm()
                        self._finish("interrupted" if stopped else "failed", reason)
                        error.add_note(f"The records so far are in {self.out}")
                raise
        return self._finish("ok", "")

    def _build(self, stack: contextlib.ExitStack) -> Parts:
        amp = stack.enter_context(Amp(self.plan, device=self.ranks.device))
        model = build_whole(self.workload, self.ranks, self.seed)
        parts: Parts
        if self.ranks.layout.pp > 1:
            from castwise.commands.jobs.stages import Stages

            parts = Stages(self.workload, amp, model, self.ranks, self.microbatches, self.schedule)
        else:
            parts = Whole(self.workload, amp, model, self.ranks)
        if self.ranks.leads:
            self.out.mkdir(parents=True, exist_ok=True)
        return parts

    def _train(self, parts: Parts, journal: Journal | None) -> None:
        layout, amp = self.ranks.layout, parts.amp
        share = layout.slice_of(self.ranks.rank)
        # Seed dropout independently of random draws while the model was built. Ranks with the same data get the same seed.
        torch.manual_seed(self.seed + share)
        if self.steps_before:
            self.skipped_steps = self.saves.load(parts)
        start = read = time.perf_counter()
        until = 1
        for number, batch in self._batches():
            mine = slice_batch(batch, share, layout.data_ranks, layout)
            loss = parts.backward(to_device(mine, self.ranks.device))
            # The scale of this step, copied on the device: reading it as a number would wait for the device.
            scale = amp.scaler.scale_tensor().detach().clone() if amp.scaler.is_enabled() else None
            try:
                result = amp.step(*parts.optimizers)
            except NonFiniteError:
                self._read(journal)  # a non-finite loss is reported instead, since it says more
                raise
            for optimizer in parts.optimizers:
                optimizer.zero_grad()
            self.time_s = time.perf_counter() - start
            self.pending.append(_Step(number, loss, scale, result, self.time_s, batch))
            if len(self.pending) >= until or number == self.steps:
                per_step_s = (start + self.time_s - read) / len(self.pending)
                until = self._read(journal, int(_PATIENCE_S / per_step_s) if per_step_s else _PENDING)
                read = time.perf_counter()
                self.time_s = read - start
            if self.saves.due(number, self.steps):
                self._read(
                    journal
                )  # the log lines of a checkpoint's steps must be on disk before the checkpoint
                self.saves.save(parts, number, self.skipped_steps)
        self.saves.wait()

    def _batches(self) -> Iterator[tuple[int, Any]]:
        """Yield the number and the batch of each remaining step."""
        with calls(self.workload, "batches(seed)"):
            batches = iter(self.workload.batches(self.seed))
        for number in range(1, self.steps + 1):
            with calls(self.workload, "batches(seed)"):
                batch = next_batch(self.workload, batches, number - 1)
            if number > self.steps_before:
                yield number, batch

    def _read(self, journal: Journal | None, wish: int = 1, judge: bool = True) -> int:
        """Read the losses of pending steps from the device, log the steps and check the losses.

        Args:
            journal: The log to write to; None on ranks that do not write.
            wish: The number of steps until the next read that this rank proposes. The proposal of rank 0 counts.
            judge: Whether a non-finite loss is an error. False is given after an error, when other ranks may be gone. Ranks
                then do not communicate.

        Returns:
            The number of steps until the next read, equal on all ranks.
        """
        pending = self.pending
        if not pending or (not judge and self.ranks.mesh is not None):
            return 1
        losses, until = self._losses(pending, wish)
        bad: _Step | None = None
        with interrupts_wait():
            self.pending = []
            for step, loss in zip(pending, losses, strict=True):
                skipped = step.result.skipped
                scale = None if step.scale is None else float(step.scale)
                self.skipped_steps += skipped
                self.restored.update(step.result.restored)
                row = {
                    "step": step.number, "loss": finite(loss), "loss_scale": scale, "skipped": skipped,
                    "elapsed_s": round(step.elapsed_s, 6),
                }  # fmt: skip
                self.history.append(row)
                if journal is not None:
                    journal.step(row, loss)
                if bad is None and not math.isfinite(loss):
                    bad = step
                    bad.loss = torch.tensor(loss, device="cpu")
            if journal is not None:
                journal.flush()
        self.progress(
            TrainEvent(
                "training", str(self.plan), self.steps_before + len(self.history), self.steps, "", loss, scale, self.skipped_steps,
                len(self.history) / self.time_s if self.time_s else 0.0,
            )
        )  # fmt: skip
        if judge and bad is not None:
            self._judge(bad)
        return until

    def _losses(self, pending: list[_Step], wish: int) -> tuple[list[float], int]:
        """Return the losses, averaged over data-parallel ranks, and rank 0's proposal for the next read.

        A single all-reduce communicates both.
        """
        wish = min(max(wish, 1), _PENDING)
        if self.ranks.mesh is None:
            return [float(step.loss) for step in pending if step.loss is not None], wish
        figures = torch.zeros(
            len(pending) + 1, dtype=widest_dtype(self.ranks.device), device=self.ranks.device
        )
        known = [step.loss.to(figures.dtype) for step in pending if step.loss is not None]
        if known:
            figures[:-1] = torch.stack(known) / self.ranks.layout.data_ranks
        if self.ranks.leads:
            figures[-1] = wish
        *losses, wished = self.ranks.add_up(figures).tolist()
        return losses, int(wished)

    def _judge(self, step: _Step) -> None:
        """Raise an error for a step whose loss is not finite, unless a smaller loss scale can make the loss finite."""
        assert step.loss is not None
        if non_finite_parts(step.batch):
            check_loss(step.loss.requires_grad_(), self.workload, step.batch, step.number)
        if self.plan.loss_scale is None:
            raise NonFiniteError(
                f"workload {self.workload.name!r}: the loss of step {step.number} is {float(step.loss)} under the plan "
                f"{self.plan}, although the data is finite, and the plan has no loss scale that could be lowered; "
                f"{remedy(self.plan)}"
            )

    def _evaluate(self, parts: Parts, weights: dict[str, Any]) -> None:
        """Evaluate the trained model. If this rank does not hold the whole model, evaluate a copy with the same weights."""
        if self.workload.evaluate is None:
            return
        self.progress(Event("evaluating", "", 0, 1))
        if parts.whole is not None:
            self.metrics = evaluate(self.workload, parts.whole)
        else:
            self.metrics = evaluate_whole(self.workload, self.plan, self.ranks.device, weights, self.seed)
        self.progress(Event("evaluating", "", 1, 1))

    def _ignore_sigterm(self) -> None:
        """Ignore SIGTERM, which torchrun sends after a rank has failed, so that the log can still be written."""
        if started()[1] > 1:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _finish(self, status: str, reason: str) -> TrainResult:
        leads = self.ranks.leads
        if self.history and leads:
            from castwise.report.train import plot_curves

            with left_out("curves.png"):
                self.files.append(plot_curves([*self.earlier, *self.history], self.out / "curves.png").name)
        last = [{}, *self.earlier, *self.history][-1]
        done = len(self.history)
        if leads and self.saves.every:
            self.files.append(self.saves.folder.name)
        result = TrainResult(
            workload=self.workload.name,
            description=self.workload.description,
            plan=str(self.plan),
            digest=self.plan.digest,
            status=status,
            reason=reason,
            steps=self.steps,
            steps_done=self.steps_before + done,
            steps_before=self.steps_before,
            skipped_steps=self.skipped_steps,
            restored_buffers=dict(self.restored),
            final_loss=last.get("loss"),
            loss_scale=last.get("loss_scale"),
            metrics=self.metrics,
            seed=self.seed,
            layout=str(self.ranks.layout),
            world_size=self.ranks.layout.world_size,
            time_s=self.time_s,
            steps_per_s=done / self.time_s if self.time_s else 0.0,
            environment=environment(self.ranks.device),
            files=tuple(self.files),
        )
        if leads:
            (self.out / "result.json").write_text(result.to_json() + "\n", encoding="utf-8")
        return result
