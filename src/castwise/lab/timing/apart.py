"""Trainings, or inference, raced in processes of their own, of which one runs while the others wait.

A plan that is timed beside others in one process shares their allocator, caches and threads, and a process is lucky or
unlucky for its whole life: where its memory lies can move the time of a step by more than many rounds can tell. So what
decides is measured as it will be run: each plan trains in a process that holds nothing else and is started anew several
times, and the spread between starts is part of the interval (:func:`castwise.lab.timing.stats.restarts`).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch

from castwise.core.plans.plan import Plan
from castwise.lab.timing.processes import Home, received
from castwise.lab.timing.ranks import BY_ITSELF, Lockstep
from castwise.lab.timing.runners import InferenceRun, TrainingRun
from castwise.lab.timing.served import belong_to, libraries, page_faults
from castwise.lab.timing.timing import WARMUP, block_s, race

BLOCK_S = 0.12
"""A block of steps lasts at least about this long, so that timers and the scheduler do not show."""
LEAST_ROUNDS = 3
REST_S = 0.01
"""Pause before a block: threads of the one before spin on for some milliseconds (bench/results/rest-cpu.json)."""
COMPILING = 2
"""First steps beside the usual ones, of all, where a plan compiles: the first may be followed by another compilation."""

Kind = type[TrainingRun] | type[InferenceRun]


class SeparateRun:
    """A :class:`TrainingRun`, or inference, in a process of its own, which waits while it is not told to run.

    Args:
        home: Where it starts.
        workload: As :func:`castwise.lab.timing.processes.portable` returns it.
        plan: What training runs by.
        device: Device that it runs on.
        seed: Of the weights and of the data.
        kind: What is run.

    Attributes:
        losses: Of the steps it has taken, once it is closed; none of inference.
        compile_s: Seconds of them that compiling took, once it is closed.
        faults: Page faults per step after the first steps, once it is closed.
    """

    def __init__(
        self,
        home: Home,
        workload: bytes,
        plan: Plan,
        device: torch.device,
        seed: int,
        kind: Kind = TrainingRun,
    ) -> None:
        self.losses: list[float] = []
        self.compile_s = self.faults = 0.0
        self._home, self._device, self._built = home, device, False
        self._process = home.start(_run, workload, plan.to_json(), str(device), seed, kind)

    def warm_up(self, steps: int = WARMUP) -> float:
        """Wait until the model is built, and take the first steps, which build kernels and optimizer state, and compile.

        Returns:
            Seconds of the last of them.

        Raises:
            Exception: What was raised there; CastwiseError where the process died or hangs.
        """
        self.wait()
        return [self.steps(1) for _ in range(steps)][-1]

    def wait(self) -> None:
        """Wait until the model is built.

        Raises:
            Exception: What was raised there; CastwiseError where the process died or hangs.
        """
        if not self._built:
            self._process.answer()
            self._built = True

    def steps(self, count: int) -> float:
        """Run some steps; seconds per step, by its own clock, waiting for the device included.

        Raises:
            Exception: What a step raised there; CastwiseError where the process died or hangs.
        """
        self._process.send(count)
        return float(self._process.answer())

    def close(self) -> None:
        """End the process, at once where it is at work: where it hangs, or an interrupt found it so."""
        if not self._process.at_work:
            with contextlib.suppress(Exception):  # one that failed has no losses to tell
                self._process.send(0)
                self.losses, self.compile_s, self.faults, imported = self._process.answer()
                if self._device.type == "cpu":  # what only asks for an accelerator makes it unusable in forks
                    self._home.import_once(imported)
        self._process.close()


def _run(
    pipe: Connection, workload: bytes, plan: str, device: str, seed: int, kind: Kind = TrainingRun
) -> tuple[list[float], float, float, list[str]]:
    before = set(sys.modules)
    where = torch.device(device)
    made = Plan.from_json(plan)
    belong_to(made)
    run = kind(received(workload), made, where, seed)
    pipe.send((False, None))
    taken = first = since = 0
    while count := pipe.recv():
        pipe.send((False, block_s(run, count, where, rest_s=REST_S)))
        taken += count
        if taken <= WARMUP:
            first, since = taken, page_faults()
    return (
        run.losses,
        run.compile_s,
        (page_faults() - since) / max(1, taken - first),
        libraries(name for name in list(sys.modules) if name not in before),
    )


@dataclass
class Timed:
    """What one start of one plan gave.

    Attributes:
        times_s: Seconds per step, by round.
        losses: Of its steps, of which each plan of a start has as many as any other, but for one that failed.
        compile_s: Seconds that compiling took, before the first round and in none.
        faults: Page faults per step: how often memory was given back and asked for anew.
        error: What ended it, if something did.
    """

    times_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    compile_s: float = 0.0
    faults: float = 0.0
    error: Exception | None = None


def race_apart(
    home: Home,
    workload: bytes,
    plans: Sequence[Plan],
    device: torch.device,
    *,
    rounds: int,
    first: int = 0,
    steps: int | None = None,
    seed: int = 0,
    until: float = math.inf,
    kind: Kind = TrainingRun,
    on_round: Callable[[int], None] = lambda _done: None,
    ranks: Lockstep = BY_ITSELF,
) -> list[Timed]:
    """Start a training of each plan, or its inference, in a process of its own, and time them in turns.

    Args:
        home: Where they start.
        workload: As :func:`castwise.lab.timing.processes.portable` returns it.
        plans: What they train by; the same plan may come more than once.
        device: Device that all run on.
        rounds: In each of which every one runs a block of steps of some 0.12 s, in an order of the round's own.
        first: Rounds that there were before, in earlier starts; the order goes on from there.
        steps: At most so many, the same number for all, if one a round is not more: a workload may have no further batches.
        seed: Of weights and data.
        until: Clock time (``ranks.now()``) after which no further round begins, once there are three.
        kind: What is run.
        on_round: Called with the number of rounds that are done.
        ranks: Who do so together: times are the slowest rank's, and a plan that fails on one fails on all.

    Returns:
        By plan what it gave.
    """
    warmup = WARMUP + COMPILING * any(plan.compile != "as_given" for plan in plans)

    def blocks(step_s: Mapping[int, float]) -> dict[int, int]:
        found = {index: max(1, min(64, round(BLOCK_S / took_s))) for index, took_s in step_s.items()}
        if steps is None:
            return found
        return dict.fromkeys(found, min(max(1, (steps - warmup) // rounds), *found.values()))

    def is_over(done: int) -> bool:
        on_round(done)
        return done >= LEAST_ROUNDS and ranks.now() > until

    with contextlib.ExitStack() as stack:
        runs = [SeparateRun(home, workload, plan, device, seed, kind) for plan in plans]
        for run in runs:
            stack.callback(run.close)
        laps = race(
            list(enumerate(runs)), rounds=rounds, steps=blocks, device=device, warmup=warmup, hopeless=math.inf, first=first,
            is_over=is_over, ranks=ranks,
        )  # fmt: skip
    out = [Timed(lap.seconds, error=lap.error) for lap in laps.values()]
    told = (run.losses for run, timed in zip(runs, out, strict=True) if timed.error is None)
    common = min((len(losses) for losses in told if losses), default=0)
    for run, timed in zip(runs, out, strict=True):
        timed.losses, timed.compile_s, timed.faults = run.losses[:common], run.compile_s, run.faults
    return out


def start_apart(
    home: Home,
    workload: bytes,
    plans: Sequence[Plan],
    device: torch.device,
    *,
    starts: int,
    rounds: int,
    steps: int | None = None,
    seed: int = 0,
    kind: Kind = TrainingRun,
    on_round: Callable[[int], None] = lambda _done: None,
) -> list[list[Timed]]:
    """Race plans several times, each time started anew; one that has failed is not started again.

    Args:
        home: Where they start.
        workload: As :func:`castwise.lab.timing.processes.portable` returns it.
        plans: What they train by.
        device: Device that all run on.
        starts: How often.
        rounds: In each start.
        steps: As of :func:`race_apart`, in each start.
        seed: Of weights and data.
        kind: What is run.
        on_round: Called with the number of rounds that are done, of all starts.

    Returns:
        By plan what each start gave, of which the last may have failed.
    """
    out: list[list[Timed]] = [[] for _ in plans]
    for start in range(starts):
        racing = [index for index, found in enumerate(out) if not found or found[-1].error is None]

        def tell(done: int, before: int = start * rounds) -> None:
            on_round(before + done)

        timed = race_apart(
            home, workload, [plans[index] for index in racing], device, rounds=rounds, first=start * rounds, steps=steps, seed=seed,
            kind=kind, on_round=tell,
        )  # fmt: skip
        for index, one in zip(racing, timed, strict=True):
            out[index].append(one)
    return out
