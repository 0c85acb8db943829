"""``bench``, which compares the time, the memory and the loss of precision plans."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from castwise.commands.jobs import Event, Progress, heard
from castwise.commands.jobs.bench_result import BenchResult, PlanResult, Timing
from castwise.commands.jobs.bench_rows import BASELINE, Row, in_turns, rows_of, started
from castwise.core import devices
from castwise.core.casting import default_device_type
from castwise.core.plans.plan import Plan
from castwise.core.session.process import find_device
from castwise.errors import (
    CastwiseError,
    DeviceError,
    NonFiniteError,
    PlanError,
    WorkloadError,
    sentence,
    told,
)
from castwise.lab.timing.apart import Kind, start_apart
from castwise.lab.timing.environment import environment
from castwise.lab.timing.memory import measure_memory
from castwise.lab.timing.processes import Home, NotThereError, delivered, not_there
from castwise.lab.timing.runners import InferenceRun, TrainingRun
from castwise.lab.timing.timing import HOPELESS, WARMUP, Lap, Runner, race
from castwise.lab.workloads.workload import Workload, about_data, find_workload, lacks, users_code

__all__ = ["BenchResult", "PlanResult", "Timing", "bench"]

PATIENCE_S, SLOWER = 60.0, 3.0
"""A process counts as hung after ``PATIENCE_S`` seconds without a message, or after ``SLOWER`` times the training time of all
plans if that is longer."""
PICTURE_SIDE = 128
"""The largest number of rows and columns of a picture in the result. From larger pictures, rows and columns are left out."""


def bench(
    workload: Workload | str,
    plans: Iterable[Plan | str | os.PathLike[str] | torch.dtype] = ("fp32", "bf16-mixed"),
    *,
    device: torch.device | str | None = None,
    steps: int = 50,
    rounds: int = 15,
    starts: int = 5,
    seed: int = 0,
    training: bool | None = None,
    inference: bool = True,
    memory: bool = True,
    hopeless: float = HOPELESS,
    progress: Progress | bool | None = None,
) -> BenchResult:
    """Run a workload under several plans, and measure the time, memory and loss of each plan.

    Use it to see what a precision plan gains. A workload is a training job with its model, data and optimizer. A plan
    decides the formats in which a model computes and stores its weights.

    First, each plan trains its own copy of the model, from the same weights on the same batches, to compare losses.
    Then the plans are timed. Each plan is started several times, in a new process each time. In a timing round, each
    plan runs a block of steps while the others wait. Fetching batches is not timed. Inference is timed in the same
    way. Memory is measured in a separate process for each plan.

    Without training, only inference is timed, and the model's outputs are not compared:
    :func:`castwise.output_parity` and ``tune(goal="inference")`` do that.

    If the device cannot run a plan, or a plan fails or is far too slow, its entry in the result has the reason. The
    other plans are not affected.

    Args:
        workload: A :class:`castwise.Workload`, or the name of a workload, such as ``sine`` or ``file.py:attribute``.
        plans: The plans: names of presets, plans or plan files. ``fp32``, with which the others are compared, is
            added if it is missing.
        device: The device of the run. By default it is the available accelerator, otherwise the CPU.
        steps: The number of training steps of each plan, at least 3. Without training, the number of inference calls.
        rounds: The number of timing rounds, over all starts.
        starts: The number of processes in which each plan is timed, since times vary between processes. With 0, the
            training steps in this process are timed instead. This is also done for a workload that cannot be sent to
            another process.
        seed: The seed of weights and data.
        training: Whether to train. By default, every workload that has an optimizer and a loss is trained.
        inference: Whether to measure inference.
        memory: Whether to measure memory too.
        hopeless: A plan is stopped if its first steps take this many times as long as those of ``fp32``.
        progress: True shows the command line's progress on standard error. A function is called with
            ``castwise.commands.jobs.Event`` records.

    Returns:
        The result, with ``.plans``, ``.table()`` and ``.save(folder)``.

    Raises:
        PlanError: A plan is invalid, or ``steps``, ``rounds``, ``starts`` or ``hopeless`` is out of range, or neither
            training nor inference is to be measured.
        DeviceError: The device does not exist.
        WorkloadError: The workload cannot be found, or fails in fp32 at its first steps, or is to be trained and has no
            optimizer or no loss.
        NonFiniteError: The loss of the first step is not finite in fp32.
    """
    if steps < WARMUP + 1 or rounds < 1 or starts < 0 or not hopeless > 1:
        raise PlanError(
            f"bench(steps={steps}, rounds={rounds}, starts={starts}, hopeless={hopeless}): needs steps >= {WARMUP + 1}, "
            "rounds >= 1, starts >= 0 and hopeless > 1"
        )
    if training is False and not inference:
        raise PlanError(
            "bench(training=False, inference=False): nothing is left to measure; allow one of the two"
        )
    where = find_device("bench", device, default_device_type())
    rows = rows_of(plans)
    spec = workload if isinstance(workload, str) else None
    found = find_workload(workload) if isinstance(workload, str) else workload
    missing = " and no ".join(lacks(found))
    trains = training if training is not None else not missing
    if not trains and not inference:
        raise PlanError(
            f"bench(inference=False): workload {found.name!r} has no {missing}, so only inference can be measured"
        )
    rounds = min(rounds, steps - WARMUP)
    per_round = (steps - WARMUP) // rounds
    outer = torch.get_rng_state()
    with heard(progress) as tell:
        work = _Work(found, spec, where, seed, steps, rounds, per_round, hopeless, tell, rows, trains)
        if missing and not trains and training is None:
            work.notes = (f"The workload has no {missing}, so only inference was measured.",)
        try:
            with users_code(f"workload {found.name!r} failed"), work.home:
                (work.train if trains else work.serve)()
                if starts:
                    work.time_apart(starts, inference)
                if inference and not work.starts:
                    work.infer()
                if memory:
                    work.measure_memory()
        finally:
            work.close()
            torch.set_rng_state(outer)
    return work.result()


@dataclass
class _Work:
    workload: Workload
    spec: str | None
    device: torch.device
    seed: int
    steps: int
    rounds: int
    per_round: int
    hopeless: float
    progress: Progress
    rows: list[Row]
    trains: bool
    home: Home = field(default_factory=Home)
    begin: float = field(default_factory=time.monotonic)
    starts: int = 0
    notes: tuple[str, ...] = ()

    # --- training -----------------------------------------------------------------------------------------

    def train(self) -> None:
        initial: dict[str, torch.Tensor] | None = None
        for row in self.rows:
            try:
                row.run = TrainingRun(self.workload, row.plan, self.device, self.seed, initial)
            except Exception as error:
                self._lost(row, error)
                self.progress(Event("training", row.name, self.steps, self.steps, row.result.reason))
                continue
            initial = initial or row.run.weights()
        laps = self._race(
            "training", [(row.name, row.run) for row in self.rows if row.run is not None], self.steps
        )
        for row in self.rows:
            if row.run is None:
                continue
            row.training = lap = laps[row.name]
            if lap.error is not None:
                self._lost(row, lap.error, first=not any(lap.times_s))
            elif lap.slowdown is not None:
                row.found(status="stopped", reason=_stopped(lap.slowdown))
            rest = self.steps - WARMUP - self.rounds * self.per_round
            if row.is_ok:
                try:
                    if rest:
                        row.run.block(rest)
                    with row.run.evaluating() as model:
                        self._look(row, model)
                except Exception as error:
                    self._lost(row, error)
            row.found(losses=tuple(row.run.losses), skipped_steps=row.run.skipped_steps)
            if row.run.compile_s:
                row.note(f"compiling took {row.run.compile_s:.2g} s")
            row.run.close()
            row.run = None
            self.progress(Event("training", row.name, self.steps, self.steps, row.result.reason))

    def _race(self, stage: str, runs: list[tuple[str, Runner]], total: int) -> dict[str, Lap]:
        """Time the runs in turns, and report how many of their steps are done.

        A run is stopped if it is far slower than the first run, provided that the first run is the baseline.
        """
        counts = dict.fromkeys((name for name, _ in runs), 0)
        base = self.rows[0].name

        def on_block(name: str, taken: int) -> None:
            counts[name] += taken
            if stage == "training" and name == base and counts[name] == WARMUP:
                self._check_baseline()
            self.progress(Event(stage, name, counts[name], total))

        return race(
            runs, rounds=self.rounds, steps=self.per_round, device=self.device, warmup=WARMUP, on_block=on_block,
            # without a baseline to compare with, no run is stopped
            hopeless=self.hopeless if runs[0][0] == base else math.inf,
        )  # fmt: skip

    def _check_baseline(self) -> None:
        run = self.rows[0].run
        assert run is not None
        if not math.isfinite(run.losses[0]):
            raise NonFiniteError(
                f"workload {self.workload.name!r}: the loss of the first step is {run.losses[0]} in fp32, so no plan "
                f"can be compared: {about_data(next(iter(self.workload.batches(self.seed))))}"
            )

    def _look(self, row: Row, model: nn.Module) -> None:
        """Evaluate the model of a plan, and keep its metrics and pictures."""
        if self.workload.evaluate is not None:
            metrics = self.workload.evaluate(model)
            row.found(metrics={key: float(value) for key, value in metrics.items()})
        picture = getattr(self.workload, "picture", None)
        if picture is not None:
            row.images = {key: _thin(value) for key, value in picture(model).items()}

    # --- times in separate processes ----------------------------------------------------------------------

    def time_apart(self, starts: int, inference: bool) -> None:
        """Time training and inference in separate processes. If that is not possible, the times of this process are kept."""
        self.home.patience_s = max(PATIENCE_S, SLOWER * (time.monotonic() - self.begin))
        try:
            payload = delivered(self.home, self.spec or self.workload)
            if self.trains:
                self._start(starts, payload, TrainingRun, "timing")
        except NotThereError as error:
            self.notes = (f"All plans were timed once, in one process: {error}.",)
            return
        self.starts, self.rounds = starts, starts * -(-self.rounds // starts)
        if inference:
            self._start(starts, payload, InferenceRun, "inference")

    def _start(self, starts: int, payload: bytes, kind: Kind, stage: str) -> None:
        rows, rounds = [row for row in self.rows if row.is_ok], -(-self.rounds // starts)

        def tell(done: int) -> None:
            for row in rows:
                self.progress(Event(stage, row.name, done, starts * rounds))

        found = start_apart(
            self.home, payload, [row.plan for row in rows], self.device, starts=starts, rounds=rounds, steps=self.steps,
            seed=self.seed, kind=kind, on_round=tell,
        )  # fmt: skip
        for row, timed in zip(rows, found, strict=True):
            error = timed[-1].error
            if error is None:
                row.starts_s[kind] = [one.times_s for one in timed]
            elif kind is InferenceRun and self.trains:
                row.note(f"inference: {told(error, whole=False)}")
            elif row is self.rows[0]:  # fp32 has run in this process, so the workload itself is not at fault
                raise not_there(self.spec or self.workload, error) from error
            else:
                self._lost(row, error, first=False)

    # --- inference and memory -----------------------------------------------------------------------------

    def serve(self) -> None:
        """Call the model of each plan once, without training, and evaluate it."""
        for row in self.rows:
            try:
                with contextlib.closing(InferenceRun(self.workload, row.plan, self.device, self.seed)) as run:
                    run.block(1)
                    with run.evaluating() as model:
                        self._look(row, model)
            except Exception as error:
                self._lost(row, error)

    def infer(self) -> None:
        runs: list[tuple[Row, InferenceRun]] = []
        for row in self.rows:
            if not row.is_ok:
                continue
            try:
                runs.append((row, InferenceRun(self.workload, row.plan, self.device, self.seed)))
            except Exception as error:
                row.note(f"inference: {told(error, whole=False)}")
        if not runs:
            return
        total = WARMUP + self.rounds * self.per_round
        try:
            laps = self._race("inference", [(row.name, run) for row, run in runs], total)
        finally:
            for _, run in runs:
                run.close()
        for row, _ in runs:
            row.inference = laps[row.name]
            if row.inference.slowdown is not None:
                row.note(f"inference {_stopped(row.inference.slowdown)}")
            elif row.inference.error is not None:
                row.note(f"inference: {told(row.inference.error, whole=False)}")
            self.progress(Event("inference", row.name, total, total))

    def measure_memory(self) -> None:
        if self.device.type != "cpu":
            gc.collect()
            devices.empty_cache(self.device)  # frees device memory for the processes that measure
        for row in self.rows:
            if not row.is_ok:
                continue
            self.progress(Event("memory", row.name, 0, 1))
            try:
                what = self.spec or self.workload
                held = measure_memory(
                    what, row.plan, self.device, seed=self.seed, training=self.trains, home=self.home
                )
                row.found(memory=held)
            except CastwiseError as error:
                row.note(sentence(error, whole=False))
            self.progress(Event("memory", row.name, 1, 1))

    # --- results ------------------------------------------------------------------------------------------

    def _lost(self, row: Row, error: Exception, first: bool = True) -> None:
        """Record the exception that ended a plan. If ``first`` and the plan is the baseline, raise the exception instead."""
        if row is self.rows[0] and first:
            if isinstance(error, CastwiseError):
                raise error
            raise WorkloadError(
                f"workload {self.workload.name!r} fails in fp32: {told(error, whole=False)}"
            ) from error
        status = "unsupported" if isinstance(error, (DeviceError, PlanError)) else "failed"
        row.found(status=status, reason=told(error, whole=False))

    def close(self) -> None:
        for row in self.rows:
            if row.run is not None:
                row.run.close()
                row.run = None

    def result(self) -> BenchResult:
        base = self.rows[0]
        images = {"target": base.images["target"]} if "target" in base.images else {}
        for row in self.rows:
            for key, picture in row.images.items():
                if key != "target":
                    images[row.name if len(row.images) <= 2 else f"{row.name}: {key}"] = picture
        return BenchResult(
            workload=self.workload.name,
            description=self.workload.description,
            baseline=base.name,
            trains=self.trains,
            steps=self.steps,
            rounds=self.rounds,
            starts=self.starts,
            seed=self.seed,
            environment=environment(self.device),
            plans=self._plan_results(),
            images=images,
            notes=self.notes,
        )

    def _plan_results(self) -> tuple[PlanResult, ...]:
        base = self.rows[0]
        if self.starts:
            training, inference = (started(self.rows, kind) for kind in (TrainingRun, InferenceRun))
        else:
            training = [in_turns(row.training, base.training, row is base) for row in self.rows]
            inference = [in_turns(row.inference, base.inference, row is base) for row in self.rows]
        for row, times, infers in zip(self.rows, training, inference, strict=True):
            losses, others = row.result.losses, base.result.losses
            final = losses[-1] if losses and row.is_ok else None
            row.found(
                training=times,
                inference=infers,
                final_loss=final,
                final_loss_difference=None
                if final is None or len(others) != len(losses)
                else final - others[-1],
            )
        return tuple(row.result for row in self.rows)


def _stopped(slowdown: float) -> str:
    return f"stopped: {slowdown:.0f}x slower than {BASELINE}"


def _thin(picture: torch.Tensor) -> list[list[float]]:
    """Return a picture ``[height, width]`` as rows of numbers with four decimals, at most ``PICTURE_SIDE`` each way.

    If the picture is larger, only every n-th row and column is kept.
    """
    picture = picture.detach().float().cpu()
    if picture.dim() != 2:
        raise WorkloadError(
            f"workload: picture() returned a tensor of shape {list(picture.shape)}; needed: [height, width]"
        )
    step = [max(1, math.ceil(side / PICTURE_SIDE)) for side in picture.shape]
    return [[round(x, 4) for x in line] for line in picture[:: step[0], :: step[1]].tolist()]
