"""Implements ``castwise try``: runs a script's first steps under several plans, each in its own process, one at a time.

``castwise try`` shows speedups with their confidence intervals but chooses no plan. To choose,
:mod:`castwise.lab.search.decision` needs at least two processes per plan, and here each plan has only one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch

from castwise.bridges.run.copies import copied, into_copy, script_in_copy
from castwise.bridges.run.execute import check, end, last_words
from castwise.bridges.run.gate import ADDRESS, Block, Missing, Note
from castwise.bridges.run.record import tune_script
from castwise.commands.jobs import Event, Progress, heard
from castwise.commands.jobs.tune_result import TuneResult
from castwise.core.casting import default_device_type
from castwise.core.plans.plan import Plan, as_plan
from castwise.core.plans.words import in_words
from castwise.errors import CastwiseError
from castwise.lab.result import Result
from castwise.lab.search.axes import name_of
from castwise.lab.timing import stats
from castwise.lab.timing.environment import Environment, environment
from castwise.lab.timing.timing import Lap, race, speedup

PLANS = ("fp32", "bf16-mixed", "bf16-master", "fp16-mixed")
BLOCK_S = 0.12
GRACE_S = 10


@dataclass(frozen=True)
class Tried:
    """What ``castwise try`` measured when the script ran under one of the plans.

    Attributes:
        plan: The plan, as a preset's name or as the line that describes the plan.
        words: A readable description of the plan.
        status: ``ok`` or ``failed``.
        step: The seconds per step, summarised over the timing rounds.
        speedup: The speedup over the first plan, from the times of the same rounds. None for the first plan.
        final_loss: The loss at the last step that all plans reached.
        peak_bytes: The peak memory, in bytes.
        skipped: Number of steps skipped because gradients were not finite.
        reason: Why the script failed.
        notes: castwise's messages about the script.
    """

    plan: str
    words: str = ""
    status: str = "ok"
    step: stats.Summary | None = None
    speedup: stats.Ratio | None = None
    final_loss: float | None = None
    peak_bytes: int | None = None
    skipped: int = 0
    reason: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TryResult(Result):
    """The result of ``castwise try``: what was measured when a script ran under several plans.

    Attributes:
        script: The script's path or module name, as given.
        steps: Number of steps that each plan took.
        rounds: Number of timed rounds.
        plans: One row per plan, in the order given.
        tuned: The plan that :func:`castwise.tune` found for the script, as a line. None without tuning.
        answer: The answer of :func:`castwise.tune`, in words.
        files: The files that :func:`castwise.tune` wrote.
    """

    kind: ClassVar[str] = "try"
    script: str
    steps: int
    rounds: int
    environment: Environment
    plans: tuple[Tried, ...]
    tuned: str | None = None
    answer: str = ""
    files: tuple[str, ...] = ()


@dataclass
class _Child:
    """A script that runs under a plan in a child process and waits for commands."""

    name: str
    process: subprocess.Popen[bytes]
    pipe: Connection
    log: Path
    lap: Lap = field(default_factory=Lap)
    losses: list[float | None] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    last: Block | None = None
    lacks_file: bool = False
    is_over: bool = False

    def wait(self) -> None:
        """Wait for the end of the first step.

        Raises:
            EOFError: The script ended before the end of its first step. ConnectionError may be raised instead.
        """
        if self.last is None:
            self._take_in()

    def steps(self, count: int) -> float:
        """Let the script make ``count`` steps, and return the seconds per step. Errors are those of :meth:`wait`."""
        with contextlib.suppress(OSError):
            self.pipe.send(count)
        return self._take_in().seconds

    def _take_in(self) -> Block:
        told: Block | Note | Missing | None = None
        try:
            while not isinstance(told, Block):
                while not self.pipe.poll(1):  # a leftover child of the script may keep the pipe open
                    if self.process.poll() is not None and not self.pipe.poll():
                        raise EOFError
                told = self.pipe.recv()
                if isinstance(told, Note):
                    self.notes.append(told.text)
                self.lacks_file |= isinstance(told, Missing)
        except (EOFError, ConnectionError):
            self.is_over = True
            raise
        self.last = told
        self.losses += told.losses
        return told

    @property
    def has_failed(self) -> bool:
        """Whether the process ended with an error."""
        return self.is_over and self.process.wait() != 0

    @property
    def is_timed(self) -> bool:
        """Whether the process was timed and has not failed."""
        return bool(self.lap.seconds) and not self.has_failed

    def close(self, *interrupted: object) -> None:
        """End the script and its child processes. After an exception, they get no time to end by themselves."""
        with contextlib.suppress(OSError):
            self.pipe.send(0)
        self.pipe.close()
        end(self.process, 0 if any(interrupted) else GRACE_S)

    @property
    def last_words(self) -> str:
        """The last line that the script printed, or castwise's last note about it."""
        return last_words([*self.notes, *self.log.read_text(errors="replace").splitlines()])


def try_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    is_module: bool = False,
    plans: Sequence[Plan | str | os.PathLike[str]] = PLANS,
    rounds: int = 8,
    in_place: bool = False,
    tune: bool = False,
    budget_s: float = 170.0,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | bool | None = None,
) -> TryResult:
    """Run a script's first steps under several plans, and compare their speed, memory and loss.

    Under each plan, the script runs in a process and a copy of the working folder of its own. The processes take turns, so
    that only one runs at a time. All end after the last timing round.

    Args:
        script: Path of the script, or name of the module.
        arguments: The script's arguments.
        is_module: Run ``script`` as a module, like ``python -m``.
        plans: The plans to run the script under. The first plan is the one that the others are compared with.
        rounds: Number of timing rounds. In each round, every process runs some steps.
        in_place: Run in the working folder itself, where all processes write the script's files.
        tune: First run :func:`castwise.tune` on the script's model, loss and first batches, and try the plan that it finds too.
        budget_s: Approximate time limit of tuning, in seconds.
        out: Folder for the files that tuning writes: the plan, its evidence and its page. ``runs/try-SCRIPT`` by default.
        progress: As in :func:`castwise.bench`.

    Returns:
        The result, which has the methods ``table()`` and ``to_json()``.

    Raises:
        CastwiseError: The script does not exist, the folder is too large to copy, the first plan took no step, or there
            is nothing to tune.
        PlanError: A plan is invalid.
    """
    check(script, is_module, "try")
    chosen = [as_plan(plan) for plan in plans]
    with heard(progress) as tell, contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="castwise-try-")))

        def placed(folder: Path) -> tuple[str, Sequence[str], Path]:
            if in_place:
                return script, arguments, Path.cwd()
            copied(folder, scratch)
            return script if is_module else script_in_copy(script), into_copy(arguments, folder), folder

        found = None
        if tune:
            into = Path(
                f"runs/try-{script if is_module else Path(script).stem}" if out is None else out
            ).resolve()
            stack.callback(_drop_if_empty, into)
            found = tune_script(
                *placed(scratch / "tune"), is_module=is_module, out=str(into), budget_s=budget_s,
            )  # fmt: skip
            chosen.append(found.plan)
        names = list(dict.fromkeys(map(name_of, chosen)))
        children = []
        for number, name in enumerate(names):
            children.append(
                _started(name, *placed(scratch / str(number)), is_module, scratch / f"{number}.log")
            )
            stack.push(children[-1].close)
        _race(children, rounds, tell)
        for child in children:
            child.close()
        _check_first(children[0], script, in_place)
        timed = [child for child in children if child.is_timed]
        steps = min(len(child.losses) for child in timed)
        return TryResult(
            script, steps, min(len(child.lap.seconds) for child in timed), environment(default_device_type()),
            tuple(_tried(child, children[0], steps) for child in children),
            **({} if found is None else _told(found)),
        )  # fmt: skip


def _drop_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _told(found: TuneResult) -> dict[str, Any]:
    return {"tuned": name_of(found.plan), "answer": found.answer, "files": tuple(map(str, found.files))}


def _started(
    name: str, script: str, arguments: Sequence[str], folder: Path, is_module: bool, log: Path
) -> _Child:
    here, there = Pipe()
    words = [*(["-m"] if is_module else []), script, *arguments]
    with open(log, "wb") as out, there:
        process = subprocess.Popen(
            [sys.executable, "-m", "castwise", "run", "--widen", "--plan", name, *words], cwd=folder, stdin=subprocess.DEVNULL, stdout=out,
            stderr=out, pass_fds=[there.fileno()], env={**os.environ, ADDRESS: str(there.fileno())},
            start_new_session=True,
        )  # fmt: skip
    return _Child(name, process, here, log)


def _race(children: Sequence[_Child], rounds: int, tell: Progress) -> None:
    def is_over(done: int) -> bool:
        for child in children:
            if not child.is_over:
                tell(Event("timing", child.name, done, rounds))
        return any(
            child.is_over and not child.has_failed for child in children
        )  # a script has ended normally, so it has no more steps

    for child in children:
        with contextlib.suppress(
            EOFError, ConnectionError
        ):  # _check_first and _tried report that this script ended
            child.wait()
        tell(Event("starting", child.name, 1, 1))
    laps = race(
        [(child.name, child) for child in children], rounds=rounds, device=torch.device(default_device_type()), hopeless=math.inf,
        steps=lambda step_s: dict.fromkeys(step_s, max(1, round(BLOCK_S / min(step_s.values())))), is_over=is_over,
    )  # fmt: skip
    for child in children:
        child.lap = laps[child.name]


def _check_first(child: _Child, script: str, in_place: bool) -> None:
    if not child.is_timed:
        took = (
            "the script made no optimizer step"
            if child.last is None
            else "the script ended before it could be timed"
        )
        lacks = "" if in_place or not child.lacks_file else (
            ". It ran in a copy of the working folder: name files outside of that folder by absolute paths, or use --in-place"
        )  # fmt: skip
        raise CastwiseError(
            f"castwise try {script!r}: under {child.name} {took}. Its last output: {child.last_words}{lacks}. Run castwise "
            f"run --plan {child.name} to see all of its output"
        )


def _tried(child: _Child, first: _Child, steps: int) -> Tried:
    row = Tried(child.name, in_words(child.name), notes=tuple(child.notes))
    if not child.is_timed:
        return dataclasses.replace(row, status="failed", reason=child.last_words)
    assert child.last is not None
    return dataclasses.replace(
        row, step=stats.summarise(child.lap.seconds), final_loss=child.losses[steps - 1], peak_bytes=child.last.peak_bytes,
        speedup=None if child is first else speedup(first.lap, child.lap), skipped=child.last.skipped,
    )  # fmt: skip
