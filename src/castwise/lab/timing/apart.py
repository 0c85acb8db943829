"""Time training or inference of several plans, each in its own process; one process runs while the others wait.

Plans timed in one process share the allocator, caches and threads. Moreover, a whole process can be consistently fast or slow: the
location of its memory can change the step time by more than many rounds can resolve. So decisive measurements run as in real use.
Each plan trains in its own process, which is started several times, and the spread between starts is part of the interval
(:func:`castwise.lab.timing.stats.restarts`).
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
"""Target duration of a block of steps, in which timer resolution and scheduling are negligible."""
LEAST_ROUNDS = 3
REST_S = 0.01
"""Pause before a block: threads of the previous block spin for some milliseconds (bench/results/rest-cpu.json)."""
COMPILING = 2
"""Number of additional warm-up steps if a plan compiles, since the first step may be followed by another compilation."""

Kind = Callable[..., TrainingRun | InferenceRun]
"""The class of a run, or a partial call of it."""


class SeparateRun:
    """Runs training (:class:`TrainingRun`) or inference under a plan in another process, which waits until it is told to run steps.

    Args:
        home: Starts the process.
        workload: The workload, pickled by :func:`castwise.lab.timing.processes.portable`.
        plan: The plan to run under.
        device: The device to run on.
        seed: Seed of the weights and of the data.
        kind: Training or inference.

    Attributes:
        losses: Losses of the training steps, available after :meth:`close`; none for inference.
        compile_s: Seconds spent compiling, available after :meth:`close`.
        faults: Page faults per step after the warm-up steps, available after :meth:`close`.
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
        """Wait until the model is built, and run warm-up steps, which compile and build kernels and optimizer state.

        Returns:
            Seconds of the last warm-up step.

        Raises:
            Exception: Raised in the process; CastwiseError if the process died or hangs.
        """
        self.wait()
        return [self.steps(1) for _ in range(steps)][-1]

    def wait(self) -> None:
        """Wait until the model is built.

        Raises:
            Exception: Raised in the process; CastwiseError if the process died or hangs.
        """
        if not self._built:
            self._process.answer()
            self._built = True

    def steps(self, count: int) -> float:
        """Run some steps; return seconds per step by the process's clock, including the wait for the device.

        Raises:
            Exception: Raised by a step in the process; CastwiseError if the process died or hangs.
        """
        self._process.send(count)
        return float(self._process.answer())

    def close(self) -> None:
        """End the process and read its results; if an answer is pending, as after a hang or an interrupt, kill the process."""
        if not self._process.at_work:
            with contextlib.suppress(Exception):  # a failed process returns no losses
                self._process.send(0)
                self.losses, self.compile_s, self.faults, imported = self._process.answer()
                if self._device.type == "cpu":  # even a query of an accelerator makes it unusable in forks
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
    """The measurements of one plan in one start of its process.

    Attributes:
        times_s: Seconds per step, by round.
        losses: Losses of the steps, as many for every plan that was timed at the same time.
        compile_s: Seconds spent compiling, before the first round and outside all rounds.
        faults: Page faults per step: how often memory was returned to the system and requested again.
        error: The error that ended the plan's process, if any.
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
    """Start training or inference of each plan in its own process, and time the plans in turns.

    Args:
        home: Starts the processes.
        workload: The workload, pickled by :func:`castwise.lab.timing.processes.portable`.
        plans: The plans to run under; a plan may appear more than once.
        device: The device for all.
        rounds: Number of rounds; in each, every plan runs a block of steps of about 0.12 s, in an order that changes per round.
        first: Number of rounds in earlier starts; the changing order of the plans continues from there.
        steps: Maximum number of steps, since a workload may have finitely many batches. It is equal for all plans, and each
            round has at least one step.
        seed: Seed of weights and data.
        until: Clock time (``ranks.now()``) after which no further round starts, once there are three rounds.
        kind: Training or inference.
        on_round: Called with the number of completed rounds.
        ranks: The ranks that measure together: times are the slowest rank's, and a plan that fails on one rank fails on all.

    Returns:
        The measurements of each plan, in the order of ``plans``.
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
    """Time plans several times, each time in new processes; a plan that failed is not started again.

    Args:
        home: Starts the processes.
        workload: The workload, pickled by :func:`castwise.lab.timing.processes.portable`.
        plans: The plans to run under.
        device: The device for all.
        starts: Number of starts.
        rounds: Number of rounds per start.
        steps: As for :func:`race_apart`, per start.
        seed: Seed of weights and data.
        kind: Training or inference.
        on_round: Called with the number of completed rounds of all starts.

    Returns:
        For each plan, the measurements of each start; the last start may have failed.
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
