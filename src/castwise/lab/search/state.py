"""Hold the results of a search so far, with the operations that every kind of search uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.lab.parity.parity import ParityResult, with_measured_scale
from castwise.lab.parity.updates import UpdateLoss
from castwise.lab.passes.regions import exempt
from castwise.lab.search.axes import FP32, numerics_of
from castwise.lab.search.compile_trial import CompileTrial
from castwise.lab.search.contest import BASELINE, Contest
from castwise.lab.search.context import Context, Journal
from castwise.lab.search.evidence import Latency, Verification
from castwise.lab.search.fates import Fate
from castwise.lab.search.final import Final
from castwise.lab.search.part_costs import Cost
from castwise.lab.search.reference import Reference, Served
from castwise.lab.search.repair import VERIFYING, Repair
from castwise.lab.serve.result import OutputParity
from castwise.lab.timing.failures import cannot_run, unfit


@dataclass(frozen=True)
class Choice:
    """The plan that a search has chosen. Its gradients passed the test, or it trains like fp32.

    Attributes:
        plan: Initially fp32.
        verified: The result of its gradient test on fresh batches; None for fp32, which needs none.
        kept: By pattern, the reason why each part stays in fp32.
        verification: The training runs of the plan against fp32.
    """

    plan: Plan = FP32
    verified: ParityResult | None = None
    kept: Mapping[str, str] = field(default_factory=dict)
    verification: Verification | None = None


@dataclass
class Search:
    """A search with its results so far.

    Attributes:
        context: The job to tune, and how and where to measure it.
        begun: Result of the first stage of a search for training; None before its end.
        costs: The time of each part in each format, by pattern.
        race: The race that selects the plans of the final comparison; None before it and for ``goal="numerics"``.
        parity: Results of the gradient test. The key is the numerics of a plan (:func:`~castwise.lab.search.axes.numerics_of`).
        training: Training runs of plans whose gradients nearly passed the test, by the numerics of the plan.
        trials: Results of compiling plans.
        final: The repeated starts that decide, once they have run.
        peaks: Peak memory in bytes, by plan.
        updates_as_given: For a model that was given in a low format, the comparison of its updates with fp32's.
        choice: The plan chosen so far.
        warmed: Number of fp32 steps before the second test of gradients; 0 without one.
        outputs: For ``goal="inference"``, results of the test of outputs. The key is the numerics of a plan.
        kept: For each plan with outputs that were repaired (by its numerics), the reason for each part in fp32, by pattern.
        served: For ``goal="inference"``, the result of the first stage; None before its end.
        verified: For ``goal="inference"``, the chosen plan's test on fresh batches; None for fp32, which needs none.
        latencies: For ``goal="inference"``, the times of single calls.
        complete: Whether the search finished.
    """

    context: Context
    begun: Reference | None = None
    costs: dict[str, Cost] = field(default_factory=dict)
    race: Contest | None = None
    parity: dict[Plan, ParityResult] = field(default_factory=dict)
    training: dict[Plan, Verification] = field(default_factory=dict)
    trials: dict[Plan, CompileTrial] = field(default_factory=dict)
    final: Final | None = None
    peaks: dict[Plan, int] = field(default_factory=dict)
    updates_as_given: UpdateLoss | None = None
    choice: Choice = Choice()
    warmed: int = 0
    outputs: dict[Plan, OutputParity] = field(default_factory=dict)
    kept: dict[Plan, Mapping[str, str]] = field(default_factory=dict)
    served: Served | None = None
    verified: OutputParity | None = None
    latencies: tuple[Latency, ...] = ()
    complete: bool = False

    def __post_init__(self) -> None:
        """Let the journal count the passes and steps of this search."""
        self.journal.count = self._count

    def _count(self) -> tuple[int, int]:
        passes = self.begun.test.prober.passes if self.begun is not None else 0
        return passes, self.race.steps if self.race is not None else 0

    @property
    def journal(self) -> Journal:
        """The log of the search."""
        return self.context.journal

    @property
    def reference(self) -> Reference:
        """The result of the first stage, which must have ended."""
        assert self.begun is not None, "no reference before the first stage has ended"
        return self.begun

    @property
    def contest(self) -> Contest:
        """The race, which must have begun."""
        assert self.race is not None, "no race before the costs of parts are known"
        return self.race

    @property
    def first(self) -> Reference | Served | None:
        """The result of the first stage; None before its end."""
        return self.begun or self.served

    @property
    def serves(self) -> bool:
        """Whether the search is for inference."""
        return self.context.settings.goal == "inference"

    @property
    def arrived(self) -> bool:
        """Whether the user's model already stores some tensors in a low format."""
        return self.first is not None and self.first.arrived

    @property
    def as_given(self) -> Plan | None:
        """The plan that runs a model with bf16 or fp16 parameters unchanged; None for other models."""
        return None if self.first is None else self.first.as_given

    def known(self) -> str:
        """Say in a few words which plan is the fastest so far; empty before two plans were timed."""
        if self.race is None:
            return ""
        entries = self.race.entries
        rounds = len(entries[BASELINE].lap.times_s) if BASELINE in entries else 0
        # in the middle of a round some plans have one more time than others
        timed = [p for p, entry in entries.items() if entry.rounds and len(entry.lap.times_s) == rounds]
        if len(timed) < 2:
            return ""
        leader = self.race.order(timed)[0]
        ratio = self.race.ratio(leader)
        return f"fastest so far {in_words(leader)}, {ratio.value:.2f}x fp32" if ratio is not None else ""

    def scaled(self, plan: Plan) -> Plan:
        """Return the plan with its initial loss scale set from the gradients seen so far, if it needs a scale."""
        return self.context.ranks.at("a loss scale").same(
            with_measured_scale(plan, self.reference.test.range)
        )

    def find(self, plan: Plan) -> ParityResult | None:
        """Test a plan's gradients on the search's microbatches, once for all plans that compute the same gradients.

        If the plan cannot run, None is returned and the reason is recorded in the journal.

        Raises:
            Exception: An error under the plan, unless it means that the plan cannot run.
        """
        key = numerics_of(plan)
        if key not in self.parity:
            try:
                self.parity[key] = self.reference.numerics.find(key)
            except Exception as error:
                if not cannot_run(error):
                    raise
                self.journal.decide(plan, Fate("failed", unfit(error)))
                return None
        return self.parity[key]

    def why(self, plan: Plan, found: ParityResult | None) -> str:
        """Return the reason that a test result gives against a plan, as a clause."""
        if found is None:
            return self.journal.refusal(plan) or "it cannot run"
        return found.reason

    def repaired(self, plan: Plan, found: ParityResult | None) -> Repair:
        """Repair a failed plan by keeping as few parts of the model in fp32 as possible; store the new result in ``parity``."""
        if found is not None and found.owners:
            return self._with_owners(plan, found)
        repair = self.reference.numerics.repair(plan, found, reserve=VERIFYING)
        if (result := repair.result) is not None:
            hangs = result.verdict == "undecided" and result.severity < 1.0  # more microbatches may decide
            self.parity[numerics_of(repair.plan)] = (
                self.reference.numerics.find(repair.plan) if hangs else result
            )
        return repair

    def _with_owners(self, plan: Plan, found: ParityResult) -> Repair:
        """Keep parts of the model in fp32 whose buffers stop changing in a low format, or whose integers or masks are wrong."""
        why = (
            "its buffers or untrained parameters stop changing in a low format"
            if found.stopped
            else "its integers or masks are wrong in a low format"
        )
        kept = {part.pattern: why for part in self.reference.parts if set(found.owners) & set(part.paths)}
        repair = Repair(exempt(plan, self.reference.parts, kept), kept)
        if kept:
            self.find(repair.plan)
        return repair
