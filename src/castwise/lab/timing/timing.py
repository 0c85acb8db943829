"""Time several candidates, such as a training step under several plans, in interleaved rounds.

Every candidate runs a block of steps in every round, so that a slow phase of the machine affects all candidates. Ratios are formed
within rounds (see :mod:`castwise.lab.timing.stats`). The order changes per round (:func:`turn`), since a block starts with the
caches that the previous block left. Candidates run in this process (:class:`Runner`) or each in its own process
(:class:`SeparateRunner`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

import torch

from castwise.lab.timing import stats
from castwise.lab.timing.ranks import BY_ITSELF, Lockstep

HOPELESS = 10.0
"""A candidate is stopped if its first steps take this many times the baseline's."""
PATIENCE_S = 30.0
"""A first step, which builds kernels, stops a candidate only if it takes longer than this."""
SURE_S = 1.0
"""A step that is shorter than this can look much too slow because of other processes, so two rounds must agree that it is."""
WARMUP = 2

Name = TypeVar("Name", bound=Hashable)


def turn(count: int, number: int) -> list[int]:
    """Return the order in which ``count`` candidates run in round ``number``.

    Over 2 * ``count`` rounds each candidate follows every other candidate equally often.

    Source: E. J. Williams, "Experimental designs balanced for the estimation of residual effects of treatments", 1949.
    """
    order = [
        ((position + 1) // 2 * (1 if position % 2 else -1) + number // 2) % count for position in range(count)
    ]
    return order if number % 2 == 0 else order[::-1]


class Runner(Protocol):
    """The interface of a candidate of :func:`race` that runs in this process.

    Only ``run`` is timed. ``before`` and ``after`` enclose each block of steps.
    """

    def before(self, steps: int) -> None:
        """Prepare a block of steps: fetch data and apply settings."""

    def run(self, steps: int) -> None:
        """Run a block of steps; work may remain in the device's queue."""

    def after(self) -> None:
        """Clean up after a block of steps, also if the block failed."""


@runtime_checkable
class SeparateRunner(Protocol):
    """The interface of a candidate of :func:`race` that runs in its own process and times its blocks of steps itself."""

    def wait(self) -> None:
        """Wait until this candidate can run steps; no candidate starts before all are ready."""

    def steps(self, count: int) -> float:
        """Run a block of steps; return seconds per step."""


@dataclass(frozen=True)
class Calls:
    """A candidate of :func:`race` that calls a function; a step is one call."""

    call: Callable[[], object]

    def before(self, steps: int) -> None:
        """Do nothing, since a function needs no preparation."""

    def run(self, steps: int) -> None:
        """Call the function ``steps`` times."""
        for _ in range(steps):
            self.call()

    def after(self) -> None:
        """Do nothing, since a function needs no cleanup."""


@dataclass
class Lap:
    """The times of one candidate in a :func:`race`.

    Attributes:
        times_s: Seconds per step in each round; None for a round that the candidate did not run.
        slowdown: Ratio of the candidate's time to the baseline's, if the candidate was stopped for being too slow.
        error: The exception that ended the candidate, if any.
    """

    times_s: list[float | None] = field(default_factory=list)
    slowdown: float | None = None
    error: Exception | None = None

    @property
    def seconds(self) -> list[float]:
        """The candidate's times, without rounds that it did not run."""
        return [t for t in self.times_s if t is not None]

    @property
    def done(self) -> bool:
        """Whether the candidate left the race early, because it was too slow or raised an exception."""
        return self.slowdown is not None or self.error is not None

    def checked(self) -> list[float]:
        """Return the candidate's times, without rounds that it did not run.

        Raises:
            Exception: The exception that ended this candidate's race.
        """
        if self.error is not None:
            raise self.error
        return self.seconds


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work; does nothing on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def block_s(
    runner: Runner, steps: int, device: torch.device, ranks: Lockstep = BY_ITSELF, rest_s: float = 0.0
) -> float:
    """Run a block of steps after ``rest_s`` seconds of rest; return seconds per step.

    Raises:
        Exception: The candidate's own exception, raised after the candidate's cleanup.
    """

    def get_ready() -> None:
        runner.before(steps)
        synchronize(device)
        if rest_s:  # even a sleep of 0 s yields the processor
            time.sleep(rest_s)

    def timed() -> list[float]:
        try:
            start = time.perf_counter()
            runner.run(steps)
            synchronize(device)
            return [(time.perf_counter() - start) / steps]
        finally:
            runner.after()

    try:
        ranks.at("the start of a block").each(get_ready)  # ranks that measure together start together
    except BaseException:
        runner.after()
        raise
    return ranks.at("a block").slowest(timed)[0]


def race(
    runners: Sequence[tuple[Name, Runner | SeparateRunner]],
    *,
    rounds: int,
    steps: int | Callable[[Mapping[Name, float]], Mapping[Name, int]],
    device: torch.device,
    warmup: int = WARMUP,
    hopeless: float = HOPELESS,
    sure_s: float = SURE_S,
    against_s: Sequence[float] = (),
    first: int = 0,
    on_block: Callable[[Name, int], None] | None = None,
    is_over: Callable[[int], bool] = lambda _done: False,
    ranks: Lockstep = BY_ITSELF,
) -> dict[Name, Lap]:
    """Time several candidates, such as a training step under several plans, in interleaved rounds.

    Args:
        runners: Names and candidates; the first candidate is the baseline, unless ``against_s`` is given.
        rounds: Number of rounds; in each, every candidate runs one block of steps.
        steps: Steps per block, or a function that gives them by name from the seconds of each candidate's last warm-up step.
        device: The device, which is synchronized at both ends of each block.
        warmup: Number of single steps before the first round, which are not counted.
        hopeless: A candidate that takes more than this many times the baseline's time is stopped. It is stopped after its first step
            if that step took longer than ``PATIENCE_S``, or after two steps if both took longer than ``sure_s``. Otherwise it is
            stopped once two rounds and the median of all rounds so far exceed this limit. Compile time in the first steps
            (``compile_s``, if a candidate has it) does not count.
        sure_s: Seconds of a step that is too long to be the machine's noise.
        against_s: Seconds of a baseline's steps, if the baseline ran before and is not among the runners.
        first: Number of earlier rounds of these candidates; the changing order continues from there.
        on_block: Called with a name and the number of steps after each block.
        is_over: Called with the number of completed rounds after each round; the race stops if it returns True.
        ranks: The ranks that run each block at once: times are the slowest rank's, and a candidate that fails on one fails on all.

    Returns:
        The measurements by name. An exception ends only the candidate that raised it, and is kept in ``error``.
    """
    laps = {name: Lap() for name, _ in runners}

    def taken_s(name: Name, runner: Runner | SeparateRunner, count: int) -> float | None:
        """Run a block and return seconds per step; None if an exception has ended this candidate, while the others continue."""
        found = None
        try:
            if isinstance(runner, SeparateRunner):
                found = ranks.at("a block").slowest(lambda: [runner.steps(count)])[0]
            else:
                found = block_s(runner, count, device, ranks)
        except Exception as error:
            laps[name].error = error
        return found

    for name, runner in runners:
        if isinstance(runner, SeparateRunner):
            try:
                ranks.at("the start of a process").each(runner.wait)
            except Exception as error:
                laps[name].error = error
    reference, last_s = list(against_s), {}
    for index, (name, runner) in enumerate(runners):
        taken: list[float] = []
        while len(taken) < warmup and not laps[name].done:
            compiled_s = getattr(runner, "compile_s", 0.0)
            step_s = taken_s(name, runner, 1)
            if step_s is None:
                break
            taken.append(step_s - getattr(runner, "compile_s", 0.0) + compiled_s)
            if on_block is not None:
                on_block(name, 1)
            if (index or against_s) and reference:
                laps[name].slowdown = _hopeless(taken, reference, hopeless, sure_s)
        if taken and not laps[name].done:
            last_s[name] = taken[-1]
            if index == 0 and not against_s:
                reference = taken
    blocks = dict.fromkeys(laps, steps) if isinstance(steps, int) else steps(last_s) if last_s else {}
    for number in range(rounds):
        for index in turn(len(runners), first + number):
            name, runner = runners[index]
            lap = laps[name]
            if lap.done:
                lap.times_s.append(None)
                continue
            lap.times_s.append(taken_s(name, runner, blocks[name]))
            if on_block is not None:
                on_block(name, blocks[name])
        for name, _ in runners[1:]:
            if not laps[name].done:
                laps[name].slowdown = _hopeless_rounds(laps[runners[0][0]], laps[name], hopeless)
        if is_over(number + 1):
            break
    return laps


def _hopeless_rounds(baseline: Lap, lap: Lap, factor: float) -> float | None:
    ratios = [after / before for before, after in zip(*paired(baseline, lap), strict=True)]
    if sum(ratio > factor for ratio in ratios) < 2:
        return None
    slowdown = statistics.median(ratios)
    return slowdown if slowdown > factor else None


def _hopeless(taken: list[float], reference: list[float], factor: float, sure_s: float) -> float | None:
    """Return the slowdown that stops a candidate after its first steps, or None if the candidate continues.

    ``taken`` and ``reference`` are the seconds of the candidate's and the baseline's first steps.
    """
    if len(taken) == 1:
        slowdown = taken[0] / reference[0]
        return slowdown if slowdown > factor and taken[0] > PATIENCE_S else None
    slowdown = min(taken) / min(reference)
    return slowdown if slowdown > factor and min(taken) > sure_s else None


def paired(baseline: Lap, candidate: Lap) -> tuple[list[float], list[float]]:
    """Return the seconds per step of both candidates in the rounds that both ran."""
    both = [
        (a, b)
        for a, b in zip(
            baseline.times_s, candidate.times_s, strict=False
        )  # in the middle of a round one candidate may have one more time
        if a is not None and b is not None
    ]
    return [a for a, _ in both], [b for _, b in both]


def speedup(baseline: Lap, candidate: Lap) -> stats.Ratio | None:
    """Return the ratio of the baseline's time to a candidate's, over the rounds that both ran; None without such rounds."""
    before, after = paired(baseline, candidate)
    return stats.paired_speedup(before, after) if before else None
