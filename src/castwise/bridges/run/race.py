"""``castwise try``: a script's first steps under several plans, in processes of their own, of which one runs at a time."""

from __future__ import annotations

import contextlib
import dataclasses
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

from castwise.bridges.run.copies import copied, into_copy, script_in_copy
from castwise.bridges.run.execute import check, end, last_words
from castwise.bridges.run.gate import ADDRESS, Block
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

PLANS = ("fp32", "bf16-mixed", "bf16-master", "fp16-mixed")
BLOCK_S, WARMUP = 0.12, 2
GRACE_S = 10


@dataclass(frozen=True)
class Tried:
    """What a script did under one plan.

    Attributes:
        plan: The plan's name or line.
        words: The plan as people read it.
        status: ``ok``, or ``failed``.
        step: Seconds per step, over rounds.
        speedup: Over the first plan, from paired rounds; None for itself.
        final_loss: After as many steps as every plan took.
        peak_bytes: The most memory.
        skipped: Steps that updated nothing.
        reason: Why it failed.
        notes: What castwise said of it.
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
    """A script under several plans.

    Attributes:
        script: As it was given.
        steps: That each plan took.
        rounds: That were timed.
        plans: A row per plan, in the order given.
        tuned: The plan that was found for the script, its line; None where none was looked for.
        answer: What the tuner says of it, in words.
        files: What the tuner wrote.
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
    """A script that runs under a plan, and waits."""

    name: str
    process: subprocess.Popen[bytes]
    pipe: Connection
    log: Path
    seconds: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    last: Block | None = None
    is_over: bool = False

    def wait(self) -> bool:
        """Take in the block that it runs; whether it came to its end."""
        try:
            while not self.pipe.poll(1):  # a process that it has left behind may hold the other end
                if self.process.poll() is not None and not self.pipe.poll():
                    raise EOFError
            self.last = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.is_over = True
            return False
        self.losses += self.last.losses
        return True

    @property
    def has_failed(self) -> bool:
        """Whether it is over, and not by itself."""
        return self.is_over and self.process.wait() != 0

    def run(self, steps: int) -> float | None:
        """Seconds per step of a block; None where the script ended in it."""
        with contextlib.suppress(OSError):
            self.pipe.send(steps)
        return self.last.seconds if self.wait() and self.last is not None else None

    def close(self, *interrupted: object) -> None:
        """Have it end, and whatever it has started; at once after an interrupt."""
        with contextlib.suppress(OSError):
            self.pipe.send(0)
        self.pipe.close()
        end(self.process, 0 if any(interrupted) else GRACE_S)

    @property
    def said(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()


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
    """Run a script's first steps under several plans, in turns.

    Each plan runs the whole script in a process, and in a copy of the working folder, of its own; all wait but one. After the
    last round the processes end.

    Args:
        script: Path of the script, or name of the module.
        arguments: The script's own.
        is_module: As ``python -m``.
        plans: What it is run under; the others are compared with the first.
        rounds: Interleaved rounds that are timed.
        in_place: Run in the working folder itself, where every process writes what the script writes.
        tune: First tune the model on the loss and the batches of the script's first steps, and try that plan too.
        budget_s: Seconds that tuning may take, about.
        out: Folder for the tuned plan, its evidence and its page; ``runs/try-SCRIPT`` by default.
        progress: As of :func:`castwise.bench`.

    Returns:
        The result: ``.table()``, ``.to_json()``.

    Raises:
        CastwiseError: No such script, a folder that is too large to be copied, no step under the first plan, or nothing to tune.
        PlanError: A plan that cannot be.
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
        steps = _race(children, rounds, tell)
        for child in children:
            child.close()
        _check_first(children[0], script, in_place)
        return TryResult(
            script, steps, min(len(child.seconds) for child in children if child.seconds), environment(default_device_type()),
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


def _race(children: Sequence[_Child], rounds: int, tell: Progress) -> int:
    """Time blocks of steps in turns; returns how many steps every script took that took any."""
    for child in children:
        child.wait()  # the first step: all start at once, since starting is not timed
        tell(Event("starting", child.name, 1, 1))
    step_s = {}
    for child in children:
        warm = [child.run(1) for _ in range(WARMUP) if not child.is_over]
        if warm and warm[-1] is not None:
            step_s[child.name] = warm[-1]
    racing = [child for child in children if child.name in step_s]
    if not racing:
        return 0
    block = max(1, round(BLOCK_S / min(step_s.values())))
    done = 0
    for number in range(rounds):
        order = [racing[(number + turn) % len(racing)] for turn in range(len(racing))]
        taken = {child.name: child.run(block) for child in (order if number % 2 == 0 else order[::-1])}
        for child in racing:
            if child.has_failed:
                child.seconds.clear()
        racing = [child for child in racing if not child.has_failed]
        if not racing or any(child.is_over for child in racing):
            break  # a script of so few steps
        for child in racing:
            child.seconds.append(taken[child.name] or 0.0)
            tell(Event("timing", child.name, number + 1, rounds))
        done += block
    return 1 + WARMUP + done


def _check_first(child: _Child, script: str, in_place: bool) -> None:
    if not child.seconds:
        took = (
            "no step of an optimizer was seen" if child.last is None else "it ended before it could be timed"
        )
        last = last_words(child.said)
        lacks = "" if in_place or "No such file" not in last else (
            ". It ran in a copy of the working folder: what lies beside that is named by its whole path, or is found with --in-place"
        )  # fmt: skip
        raise CastwiseError(
            f"castwise try {script!r}: under {child.name} {took}. Its last output: {last}{lacks}. Run it by castwise run --plan "
            f"{child.name} to see all that it says"
        )


def _tried(child: _Child, first: _Child, steps: int) -> Tried:
    said = child.said
    notes = tuple(line.removeprefix("castwise run: ") for line in said if line.startswith("castwise run: "))
    row = Tried(child.name, in_words(child.name), notes=notes)
    if not child.seconds:
        return dataclasses.replace(row, status="failed", reason=last_words(said))
    assert child.last is not None
    return dataclasses.replace(
        row, step=stats.summarise(child.seconds), final_loss=child.losses[steps - 1], peak_bytes=child.last.peak_bytes,
        speedup=None if child is first else stats.paired_speedup(first.seconds, child.seconds), skipped=child.last.skipped,
    )  # fmt: skip
