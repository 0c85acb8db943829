"""What a search knows: what was asked, what has been found, and what every kind of search does with it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.errors import CastwiseError, PlanError, check_count
from castwise.lab.parity.parity import ParityResult, ParityTest, with_measured_scale
from castwise.lab.search.axes import FP32, check_formats, numerics_of
from castwise.lab.search.compile_trial import CompileTrial
from castwise.lab.search.contest import BASELINE, Contest
from castwise.lab.search.evidence import Stage, Verification
from castwise.lab.search.fates import Fate
from castwise.lab.search.final import Final
from castwise.lab.search.part_costs import Cost
from castwise.lab.search.regions import Part, exempt
from castwise.lab.search.repair import VERIFYING, NumericsSearch, Repair
from castwise.lab.timing.failures import cannot_run, unfit
from castwise.lab.timing.memory import measure_memory
from castwise.lab.timing.processes import Home, NotThereError, delivered
from castwise.lab.timing.ranks import BY_ITSELF, Lockstep
from castwise.lab.workloads.workload import Workload

GOALS = ("time", "memory", "numerics")
COMPILE = ("never", "auto", "always")
MICROBATCHES = 8
PEAKS_S = 10.0
"""With less time left than this peak memory is not measured at all."""
PEAK_S = 8.0
"""With less time left than this no further process is started that measures peak memory."""

Say = Callable[[str, str, int, int], None]


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


@dataclass(frozen=True)
class Reference:
    """What is tuned, and what fp32 does with it on a few batches.

    Attributes:
        model: As the workload makes it.
        optimizer: Class name of its optimizer.
        arrived: Whether some of the model is stored low before any plan.
        as_given: The plan under which a model that arrives low runs as it is; shown, and never chosen.
        test: The parity test, after its reference.
        parts: The model's regions.
        numerics: Tests plans against the reference and repairs them.
        used: ATen operators that a training step's forward runs.
        images: Whether a memory format means anything: the model convolves over images.
    """

    model: nn.Module
    optimizer: str
    arrived: bool
    as_given: Plan | None
    test: ParityTest
    parts: tuple[Part, ...]
    numerics: NumericsSearch
    used: frozenset[str]
    images: bool


@dataclass
class SearchState:
    """One search, with all that it has found so far.

    Attributes:
        workload: What is tuned.
        spec: How another process finds it, where it can.
        ranks: Who search together.
        elsewhere: Plans that were found for the same job on other devices or by other versions.
        home: Where the processes start that it measures in.
        say: Told the stage, what is tried, how much is done of how much.
        begun: What the first stage found; None before its end.
        lost_as_given: The share of updates that rounding drops in a model that arrives low, where parameters have no masters.
        costs: Of the parts, by pattern.
        contest: The race that leads to it; None for ``goal="numerics"``.
        final: The race that decides, once it has been run.
        trials: What became of plans that were compiled.
        findings: Parity per plan's numerics.
        fates: What became of plans, where the race or the final does not say.
        spared: Share of a step of the likeliest plan that its optimizer's kernel and kept memory save, each measured by itself.
        kept: Why the chosen plan keeps parts in fp32.
        peaks: Peak bytes per plan.
        stages: What was done.
        notes: What a reader should know.
        undecided: What was left open, and what would decide it: a longer budget, a quieter machine.
        chosen: The plan, once there is one that is known to be sound: fp32 at first.
        verified: Its gradients on fresh batches.
        verification: Its training runs against fp32.
        trained: Those of plans whose gradients left them in doubt, by numerics.
        complete: Whether the search came to its end.
        now: The stage that is running.
    """

    workload: Workload
    device: torch.device
    settings: Settings
    spec: str | None = None
    ranks: Lockstep = BY_ITSELF
    elsewhere: Sequence[Plan] = ()
    home: Home = field(default_factory=Home)
    say: Say = lambda _stage, _subject, _done, _total: None
    begun: Reference | None = None
    lost_as_given: float | None = None
    costs: dict[str, Cost] = field(default_factory=dict)
    contest: Contest | None = None
    final: Final | None = None
    trials: dict[Plan, CompileTrial] = field(default_factory=dict)
    findings: dict[Plan, ParityResult] = field(default_factory=dict)
    fates: dict[Plan, Fate] = field(default_factory=dict)
    spared: float = 0.0
    kept: dict[str, str] = field(default_factory=dict)
    peaks: dict[Plan, int] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    chosen: Plan = FP32
    verified: ParityResult | None = None
    verification: Verification | None = None
    trained: dict[Plan, Verification] = field(default_factory=dict)
    complete: bool = False
    now: str = ""

    def __post_init__(self) -> None:
        """Start the clock."""
        self.start = self.ranks.now()

    @property
    def reference(self) -> Reference:
        """What the first stage found."""
        assert self.begun is not None, "no reference before the first stage has ended"
        return self.begun

    @property
    def as_given(self) -> Plan | None:
        """The plan of a model that arrives low, where there is one."""
        return None if self.begun is None else self.begun.as_given

    def left_s(self) -> float:
        """Seconds of the budget that are left, by rank 0's clock; collective."""
        return self.settings.budget_s - (self.ranks.now() - self.start)

    def left_here_s(self) -> float:
        """The same by this process's clock: for progress, which rank 0 alone shows."""
        return self.settings.budget_s - (time.monotonic() - self.start)

    def known(self) -> str:
        """What is known so far, in a few words."""
        if self.contest is None:
            return ""
        entries = self.contest.entries
        rounds = len(entries[BASELINE].lap.times_s) if BASELINE in entries else 0
        # in the middle of a round some have one time more than others
        timed = [p for p, entry in entries.items() if entry.rounds and len(entry.lap.times_s) == rounds]
        if len(timed) < 2:
            return ""
        leader = self.contest.order(timed)[0]
        ratio = self.contest.ratio(leader)
        return f"fastest so far {in_words(leader)}, {ratio.value:.2f}x fp32" if ratio is not None else ""

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Note what is done inside as a stage of the search."""
        start, passes, ended = self.ranks.now(), self.passes(), False
        steps = self.contest.steps if self.contest is not None else 0
        around, self.now = self.now, name
        self.say(name, "", 0, 1)
        try:
            yield
            ended = True
        finally:
            after = self.contest.steps if self.contest is not None else 0
            end = self.ranks.now() if ended else time.monotonic()  # a rank that fails may be alone in it
            self.stages.append(Stage(name, end - start, self.passes() - passes, after - steps))
            self.say(name, "", 1, 1)
            self.now = around

    def passes(self) -> int:
        """Forward/backwards that the numerics have taken so far."""
        return self.begun.test.prober.passes if self.begun is not None else 0

    def tell(self, subject: str) -> None:
        """Say what begins; a search that is out of time ends at the next of these."""
        self.say(self.now, subject, 0, 1)

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

    def scaled(self, plan: Plan) -> Plan:
        """Start a plan's loss scale where the gradients that were seen want it."""
        return self.ranks.at("a loss scale").same(with_measured_scale(plan, self.reference.test.range))

    def decide(self, plan: Plan, fate: Fate) -> None:
        """Note what becomes of a plan; what speaks against one stays, unless it is said anew."""
        if fate.refused or not self.refusal(plan):
            self.fates[plan] = fate if fate.stage else dataclasses.replace(fate, stage=self.now)

    def refuse(self, plan: Plan, why: str) -> None:
        """Note that a plan is not sound."""
        self.decide(plan, Fate("unsound", why))

    def refusal(self, plan: Plan) -> str:
        """Why a plan cannot be chosen; empty where nothing speaks against it."""
        fate = self.fates.get(plan)
        return fate.reason if fate is not None and fate.refused else ""

    def find(self, plan: Plan) -> ParityResult | None:
        """Test a plan on the search's microbatches, once per numerics; None, and a reason, where it cannot run.

        Raises:
            Exception: What the plan raised, unless it says that the plan cannot run.
        """
        key = numerics_of(plan)
        if key not in self.findings:
            try:
                self.findings[key] = self.reference.numerics.find(key)
            except Exception as error:
                if not cannot_run(error):
                    raise
                self.decide(plan, Fate("failed", unfit(error)))
                return None
        return self.findings[key]

    def why(self, plan: Plan, found: ParityResult | None) -> str:
        """Say what a finding says against a plan."""
        if found is None:
            return self.refusal(plan) or "it cannot run"
        return found.reason

    def repaired(self, plan: Plan, found: ParityResult | None) -> Plan:
        """Keep as few parts in fp32 as make a plan pass that failed, or cannot run; ``kept`` says which and why.

        ``findings`` says whether the plan that is returned passes.
        """
        if found is not None and found.stopped:
            return self._with_state(plan, found)
        repair: Repair = self.reference.numerics.repair(plan, found, reserve=VERIFYING)
        self.kept = dict(repair.kept)
        if (result := repair.result) is not None:
            hangs = result.verdict == "undecided" and result.severity < 1.0  # on a few microbatches
            self.findings[repair.plan] = self.reference.numerics.find(repair.plan) if hangs else result
        return repair.plan

    def _with_state(self, plan: Plan, found: ParityResult) -> Plan:
        """Keep in fp32 the parts that own state which stops moving."""
        owners = {name.rpartition(".")[0] for name in found.stopped}
        self.kept = {
            part.pattern: "what it keeps beside its weights stops moving in a low format"
            for part in self.reference.parts
            if owners & set(part.paths)
        }
        kept = exempt(plan, self.reference.parts, self.kept)
        if self.kept:
            self.find(kept)
        return kept

    def measure_peaks(self, plans: Sequence[Plan]) -> Sequence[Plan]:
        """Measure peak memory of plans that have not been measured yet, each in a process of its own.

        Returns:
            Those for which there was no time.
        """

        def measure(plan: Plan) -> int | None:
            what, seed = self.spec or self.workload, self.settings.seed
            return measure_memory(
                what, plan, self.device, seed=seed, inference=False, home=self.home
            ).training_peak_bytes

        for number, plan in enumerate(plans):
            if plan in self.peaks:
                continue
            compiles_s = self.trials[plan].compile_s if plan in self.trials else 0.0
            if self.left_s() < PEAK_S + compiles_s:
                self.undecided.append(
                    f"Peak memory of {len(plans) - number} plans was not measured: the time was spent."
                )
                return plans[number:]
            self.say(self.now, in_words(plan), number, len(plans))
            try:
                here = self.ranks.at(f"the memory of {plan}")
                peak = here.worst(partial(measure, plan), lambda found: found or 0)
            except (CastwiseError, OSError) as error:
                self.notes.append(f"{in_words(plan)}: {error}")
                continue
            if peak is not None:
                self.peaks[plan] = peak
        return ()

    def settle(self, plan: Plan, result: ParityResult | None, kept: dict[str, str] | None = None) -> None:
        """Choose a plan, with its finding on fresh batches (fp32 needs none) and why it keeps parts in fp32."""
        self.chosen, self.verified, self.kept = plan, result, dict(kept or {})
