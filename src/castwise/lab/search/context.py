"""What every stage of a search has: what is asked, where it is measured, and the journal of what has been found."""

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
from castwise.lab.timing.processes import Home, NotThereError, delivered
from castwise.lab.timing.ranks import BY_ITSELF, Lockstep
from castwise.lab.workloads.workload import Workload

GOALS = ("time", "memory", "numerics")
COMPILE = ("never", "auto", "always")

Say = Callable[[str, str, int, int], None]
"""Called with the stage, what is tried, and how much is done of how much."""


@dataclass(frozen=True)
class Settings:
    """What a user asks of a search: arguments of :func:`castwise.tune`, formats as ``axes.check_formats`` returns them.

    Raises:
        PlanError: One out of its range.
    """

    formats: Sequence[str] = ("fp32", "bf16", "fp16")
    goal: str = "time"
    accumulate: int = 1
    world_size: int = 1
    compile: str | bool = "never"
    warmup_steps: int = 0
    verify_steps: int = 0
    verify_seeds: int = 8
    budget_s: float = 170.0
    memory: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise PlanError(f"tune(goal={self.goal!r}) is not allowed. Allowed: {', '.join(GOALS)}.")
        object.__setattr__(self, "formats", check_formats(self.formats, self.goal))
        if isinstance(self.compile, bool):
            object.__setattr__(self, "compile", "always" if self.compile else "never")
        if self.compile not in COMPILE:
            raise PlanError(f"tune(compile={self.compile!r}) is not allowed. Allowed: {', '.join(COMPILE)}.")
        if self.compile != "never" and self.goal != "time":
            raise PlanError(
                f"tune(compile={self.compile!r}, goal={self.goal!r}): whether to compile is decided by time alone; leave "
                "compile out, or use goal='time'"
            )
        for name, least in (
            ("accumulate", 1), ("world_size", 1), ("warmup_steps", 0), ("verify_steps", 0), ("verify_seeds", 2), ("seed", 0),
        ):  # fmt: skip
            check_count("tune", name, getattr(self, name), least)
        if 0 < self.verify_steps < 5:
            raise PlanError(f"tune(verify_steps={self.verify_steps}): needs 0, or 5 steps at least")
        if not self.budget_s > 0:
            raise PlanError(f"tune(budget_s={self.budget_s!r}): needs a positive number of seconds")


@dataclass
class Journal:
    """What a search writes down as it goes, and the clock that it goes by.

    Attributes:
        ranks: Who search together: rank 0 has the clock.
        say: Told how far the search is.
        count: Passes of the numerics and steps of the race so far.
        stages: What was done.
        notes: What a reader should know.
        undecided: What was left open, and what would decide it: a longer budget, a quieter machine.
        fates: What became of plans, where the race or the final does not say.
        unsound: Why no plan of some numerics can be chosen: its gradients, its updates or its training.
        now: The stage that is running.
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
        """Note what is done inside as a stage of the search."""
        start, (passes, steps), ended = self.ranks.now(), self.count(), False
        around, self.now = self.now, name
        self.tell("")
        try:
            yield
            ended = True
        finally:
            end = self.ranks.now() if ended else time.monotonic()  # a rank that fails may be alone in it
            passes_then, steps_then = self.count()
            self.stages.append(Stage(name, end - start, passes_then - passes, steps_then - steps))
            self.tell("", 1)
            self.now = around

    def tell(self, subject: str, done: int = 0, total: int = 1) -> None:
        """Say what begins; a search that is out of time ends at the next of these."""
        self.say(self.now, subject, done, total)

    def decide(self, plan: Plan, fate: Fate) -> None:
        """Note what becomes of a plan; what speaks against one stays, unless it is said anew."""
        if fate.refused or not self.refusal(plan):
            self.fates[plan] = fate if fate.stage else dataclasses.replace(fate, stage=self.now)

    def refuse(self, plan: Plan, why: str) -> None:
        """Note that a plan is not sound, and with it every plan of the same numerics."""
        self.decide(plan, Fate("unsound", why))
        self.unsound[numerics_of(plan)] = self.fates[plan]

    def clear(self, numerics: Plan) -> None:
        """Take back what was noted against plans of some numerics."""
        del self.unsound[numerics]
        for plan, fate in list(self.fates.items()):
            if fate.kind == "unsound" and numerics_of(plan) == numerics:
                del self.fates[plan]

    def fate(self, plan: Plan) -> Fate | None:
        """What became of a plan: that it cannot run, or what speaks against all of its numerics, before anything else."""
        own = self.fates.get(plan)
        return own if own is not None and own.kind == "failed" else self.unsound.get(numerics_of(plan), own)

    def refusal(self, plan: Plan) -> str:
        """Why a plan cannot be chosen; empty where nothing speaks against it."""
        fate = self.fate(plan)
        return fate.reason if fate is not None and fate.refused else ""


@dataclass(frozen=True)
class Context:
    """What is tuned, by what, and where.

    Attributes:
        workload: What is tuned.
        device: Where its steps run.
        settings: What the user asks for.
        spec: How another process finds the workload, where it can.
        ranks: Who search together.
        elsewhere: Plans that were found for the same job on other devices or by other versions.
        home: Where the processes start that it measures in.
        journal: What has been found so far; of the same ranks.
    """

    workload: Workload
    device: torch.device
    settings: Settings
    spec: str | None = None
    ranks: Lockstep = BY_ITSELF
    elsewhere: Sequence[Plan] = ()
    home: Home = field(default_factory=Home)
    journal: Journal = field(default_factory=Journal)

    def left_s(self) -> float:
        """Seconds of the budget that are left, by rank 0's clock; collective."""
        return self.until(1.0) - self.ranks.now()

    def left_here_s(self) -> float:
        """The same by this process's clock: for progress, which rank 0 alone shows."""
        return self.until(1.0) - time.monotonic()

    def until(self, share: float) -> float:
        """Clock time at which a share of the budget is spent."""
        return self.journal.start + share * self.settings.budget_s

    def payload(self, then: Callable[[bytes], object] = lambda _sent: None) -> bytes:
        """The workload for a process of its own; ``then`` is called with it, and may say that it does not run there.

        Raises:
            NotThereError: It cannot leave this process, or not another rank's: all ranks raise it.
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
