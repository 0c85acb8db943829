"""Hold the data that all stages of a search share: the job, the settings, and the journal."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from castwise.core.plans.plan import Plan
from castwise.errors import PlanError, check_count
from castwise.lab.search.axes import check_formats, numerics_of
from castwise.lab.search.evidence import Stage
from castwise.lab.search.fates import Fate
from castwise.lab.timing.apart import Kind
from castwise.lab.timing.processes import Home, NotThereError, delivered
from castwise.lab.timing.ranks import BY_ITSELF, Lockstep
from castwise.lab.timing.runners import InferenceRun, TrainingRun
from castwise.lab.workloads.workload import Workload

GOALS = ("time", "memory", "numerics", "inference")
COMPILE = ("never", "auto", "always")

PATIENCE_S, SLOWER = 60.0, 3.0
"""A process counts as hung only if it is silent for ``PATIENCE_S`` seconds, for the whole budget, and for ``SLOWER`` times as
long as the first stage took in this process."""

Say = Callable[[str, str, int, int], None]
"""A callback with four arguments: the stage, the current subject, the amount done and the total."""


@dataclass(frozen=True)
class Settings:
    """The user's settings: the arguments of :func:`castwise.tune`, with formats as ``axes.check_formats`` returns them.

    Raises:
        PlanError: A setting is out of its range.
    """

    formats: Sequence[str] = ("fp32", "bf16", "fp16")
    goal: str = "time"
    accumulate: int = 1
    world_size: int = 1
    compile: str | bool = "never"
    warmup_steps: int | None = None
    verify_steps: int = 0
    verify_seeds: int = 8
    budget_s: float = 170.0
    memory: bool = True
    seed: int = 0
    batch_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise PlanError(f"tune(goal={self.goal!r}) is not allowed. Allowed: {', '.join(GOALS)}.")
        object.__setattr__(self, "formats", check_formats(self.formats, self.goal))
        if isinstance(self.compile, bool):
            object.__setattr__(self, "compile", "always" if self.compile else "never")
        if self.compile not in COMPILE:
            raise PlanError(f"tune(compile={self.compile!r}) is not allowed. Allowed: {', '.join(COMPILE)}.")
        if self.compile != "never" and self.goal not in ("time", "inference"):
            raise PlanError(
                f"tune(compile={self.compile!r}, goal={self.goal!r}): whether to compile is decided by time alone; leave "
                "compile out, or use goal='time' or goal='inference'"
            )
        for name, usual in (("accumulate", (1,)), ("warmup_steps", (None, 0)), ("verify_steps", (0,))):
            if self.goal == "inference" and getattr(self, name) not in usual:
                raise PlanError(
                    f"tune({name}={getattr(self, name)!r}, goal='inference'): {name} is for training; leave it out"
                )
        if self.batch_sizes and self.goal != "inference":
            raise PlanError(
                f"tune(batch_sizes={list(self.batch_sizes)!r}, goal={self.goal!r}): latencies are measured only with "
                "goal='inference'"
            )
        for size in self.batch_sizes:
            check_count("tune", "batch_sizes", size, 1)
        for name, least in (
            ("accumulate", 1), ("world_size", 1), ("verify_steps", 0), ("verify_seeds", 2), ("seed", 0),
        ):  # fmt: skip
            check_count("tune", name, getattr(self, name), least)
        if self.warmup_steps is not None:
            check_count("tune", "warmup_steps", self.warmup_steps, 0)
        if 0 < self.verify_steps < 5:
            raise PlanError(f"tune(verify_steps={self.verify_steps}): needs 0 or at least 5 steps")
        if not self.budget_s > 0:
            raise PlanError(f"tune(budget_s={self.budget_s!r}): needs a positive number of seconds")


@dataclass
class Journal:
    """The log and the clock of a search.

    Attributes:
        ranks: The ranks that search together; rank 0 has the clock.
        say: Called with the progress of the search.
        count: Returns the numbers of forward/backward passes for gradient tests and of steps in the race so far.
        stages: The completed stages.
        notes: Notes for the reader of the results.
        undecided: Open questions, each with what would settle it: a longer budget, a quieter machine.
        fates: Why plans were dropped, unless the race or the final comparison has recorded it.
        unsound: Why plans cannot be chosen because of their gradients, updates or training. The key is the numerics of such
            plans (:func:`~castwise.lab.search.axes.numerics_of`).
        now: The current stage.
        start: Clock time at which the search began.
    """

    ranks: Lockstep = BY_ITSELF
    say: Say = lambda _stage, _subject, _done, _total: None
    count: Callable[[], tuple[int, int]] = lambda: (0, 0)
    stages: list[Stage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    fates: dict[Plan, Fate] = field(default_factory=dict)
    unsound: dict[Plan, Fate] = field(default_factory=dict)
    now: str = ""
    start: float = field(init=False)

    def __post_init__(self) -> None:
        """Start the clock."""
        self.start = self.ranks.now()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record the work in the ``with`` block as a stage of the search, with its time and its numbers of passes and steps."""
        start, (passes, steps), ended = self.ranks.now(), self.count(), False
        around, self.now = self.now, name
        self.tell("")
        try:
            yield
            ended = True
        finally:
            end = (
                self.ranks.now() if ended else time.monotonic()
            )  # a rank that fails must not wait for the clock of rank 0
            passes_then, steps_then = self.count()
            self.stages.append(Stage(name, end - start, passes_then - passes, steps_then - steps))
            self.tell("", 1)
            self.now = around

    def tell(self, subject: str, done: int = 0, total: int = 1) -> None:
        """Report the work that begins. If the time is out, the search stops in the next such report."""
        self.say(self.now, subject, done, total)

    def decide(self, plan: Plan, fate: Fate) -> None:
        """Record why a plan was dropped.

        If the recorded reason is that the plan cannot be chosen at any speed, only another such reason replaces it.
        """
        if fate.refused or not self.refusal(plan):
            self.fates[plan] = fate if fate.stage else dataclasses.replace(fate, stage=self.now)

    def refuse(self, plan: Plan, why: str) -> None:
        """Record that a plan cannot be chosen because its gradients, updates or training fail.

        The same is recorded for all plans that compute the same gradients.
        """
        self.decide(plan, Fate("unsound", why))
        self.unsound[numerics_of(plan)] = self.fates[plan]

    def clear(self, numerics: Plan) -> None:
        """Allow again all plans that compute the same gradients as the plan ``numerics``."""
        del self.unsound[numerics]
        for plan, fate in list(self.fates.items()):
            if fate.kind == "unsound" and numerics_of(plan) == numerics:
                del self.fates[plan]

    def fate(self, plan: Plan) -> Fate | None:
        """Return why a plan was dropped; None if it was not.

        If there are several reasons, "cannot run" comes first, then failed gradients, updates or training, then any other.
        """
        own = self.fates.get(plan)
        return own if own is not None and own.kind == "failed" else self.unsound.get(numerics_of(plan), own)

    def refusal(self, plan: Plan) -> str:
        """Return why a plan cannot be chosen at any speed; empty if it can be chosen."""
        fate = self.fate(plan)
        return fate.reason if fate is not None and fate.refused else ""


@dataclass(frozen=True)
class Context:
    """The job to tune, and how and where to measure it.

    Attributes:
        workload: The workload to tune.
        device: The device on which the workload trains.
        settings: The user's settings.
        spec: The name by which another process can load the workload, if there is one.
        ranks: The ranks that search together.
        elsewhere: Plans that earlier searches found for the same job on other devices or with other versions.
        home: Starts the processes in which the search measures.
        journal: The log of the search, for the same ranks.
    """

    workload: Workload
    device: torch.device
    settings: Settings
    spec: str | None = None
    ranks: Lockstep = BY_ITSELF
    elsewhere: Sequence[Plan] = ()
    home: Home = field(default_factory=Home)
    journal: Journal = field(default_factory=Journal)

    @property
    def kind(self) -> Kind:
        """Whether plans are timed in training or in inference."""
        return InferenceRun if self.settings.goal == "inference" else TrainingRun

    def left_s(self) -> float:
        """Return the seconds left of the budget, by rank 0's clock; all ranks must call this together."""
        return self.until(1.0) - self.ranks.now()

    def left_here_s(self) -> float:
        """Return the seconds left of the budget by this process's clock. Use it for progress, which only rank 0 shows."""
        return self.until(1.0) - time.monotonic()

    def set_patience(self) -> None:
        """Set how long the search waits for its other processes, once the first stage has ended."""
        first_s = self.journal.stages[-1].time_s
        self.home.patience_s = max(PATIENCE_S, self.settings.budget_s, SLOWER * first_s)

    def until(self, share: float) -> float:
        """Return the clock time at which this share of the budget is spent."""
        return self.journal.start + share * self.settings.budget_s

    def payload(self, then: Callable[[bytes], object] = lambda _sent: None) -> bytes:
        """Serialise the workload for another process.

        ``then`` is called with the bytes. It may raise NotThereError to report that the workload does not run in another
        process.

        Raises:
            NotThereError: The workload cannot be sent from this rank or another rank; all ranks raise it.
        """
        sent = b""

        def why_not() -> str:
            nonlocal sent
            try:
                sent = delivered(self.home, self.spec or self.workload)
                then(sent)
            except NotThereError as error:
                return str(error)
            return ""

        if reasons := list(filter(None, self.ranks.at("sending the workload").every(why_not))):
            raise NotThereError(reasons[0])
        return sent
