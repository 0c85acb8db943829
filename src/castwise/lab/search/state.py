"""The findings of a search so far, and the operations that every kind of search shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.lab.parity.parity import ParityResult, with_measured_scale
from castwise.lab.parity.updates import UpdateLoss
from castwise.lab.search.axes import FP32, numerics_of
from castwise.lab.search.compile_trial import CompileTrial
from castwise.lab.search.contest import BASELINE, Contest
from castwise.lab.search.context import Context, Journal
from castwise.lab.search.evidence import Verification
from castwise.lab.search.fates import Fate
from castwise.lab.search.final import Final
from castwise.lab.search.part_costs import Cost
from castwise.lab.search.reference import Reference
from castwise.lab.search.regions import exempt
from castwise.lab.search.repair import VERIFYING, Repair
from castwise.lab.timing.failures import cannot_run, unfit


@dataclass(frozen=True)
class Choice:
    """A plan that is known to be sound.

    Attributes:
        plan: Initially fp32.
        verified: Its result on fresh batches; None for fp32, which needs none.
        kept: By pattern, why it keeps parts in fp32.
        verification: Its training runs against fp32.
    """

    plan: Plan = FP32
    verified: ParityResult | None = None
    kept: Mapping[str, str] = field(default_factory=dict)
    verification: Verification | None = None


@dataclass
class Search:
    """One search with its findings so far.

    Attributes:
        context: The job to tune, and how and where to measure it.
        begun: Result of the first stage; None before its end.
        costs: Costs of the parts, by pattern.
        race: The race that selects finalists; None before it and for ``goal="numerics"``.
        parity: Parity result by numerics.
        training: By numerics, the training runs of plans whose gradients left them in doubt.
        trials: Results of compiling plans.
        final: The deciding race, once it has run.
        peaks: Peak bytes per plan.
        updates_as_given: The comparison of updates with fp32's for a model that arrives low.
        choice: The plan chosen so far.
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
    complete: bool = False

    def __post_init__(self) -> None:
        """Connect the journal's counter to this search."""
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
        """The result of the first stage."""
        assert self.begun is not None, "no reference before the first stage has ended"
        return self.begun

    @property
    def contest(self) -> Contest:
        """The race."""
        assert self.race is not None, "no race before the costs of parts are known"
        return self.race

    @property
    def as_given(self) -> Plan | None:
        """The plan of a model with low parameters; None for other models."""
        return None if self.begun is None else self.begun.as_given

    def known(self) -> str:
        """The findings so far, in a few words."""
        if self.race is None:
            return ""
        entries = self.race.entries
        rounds = len(entries[BASELINE].lap.times_s) if BASELINE in entries else 0
        # in the middle of a round some plans have one time more than others
        timed = [p for p, entry in entries.items() if entry.rounds and len(entry.lap.times_s) == rounds]
        if len(timed) < 2:
            return ""
        leader = self.race.order(timed)[0]
        ratio = self.race.ratio(leader)
        return f"fastest so far {in_words(leader)}, {ratio.value:.2f}x fp32" if ratio is not None else ""

    def scaled(self, plan: Plan) -> Plan:
        """Set a plan's initial loss scale from the gradients seen so far, if needed."""
        return self.context.ranks.at("a loss scale").same(
            with_measured_scale(plan, self.reference.test.range)
        )

    def find(self, plan: Plan) -> ParityResult | None:
        """Test a plan on the search's microbatches, once per numerics; None and a reason if it cannot run.

        Raises:
            Exception: Raised by the plan, unless it says that the plan cannot run.
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
        """The reason that a result gives against a plan, as a clause."""
        if found is None:
            return self.journal.refusal(plan) or "it cannot run"
        return found.reason

    def repaired(self, plan: Plan, found: ParityResult | None) -> Repair:
        """Repair a failed plan by keeping as few parts in fp32 as possible; ``parity`` then has its new result."""
        if found is not None and found.owners:
            return self._with_owners(plan, found)
        repair = self.reference.numerics.repair(plan, found, reserve=VERIFYING)
        if (result := repair.result) is not None:
            hangs = result.verdict == "undecided" and result.severity < 1.0  # on a few microbatches
            self.parity[numerics_of(repair.plan)] = (
                self.reference.numerics.find(repair.plan) if hangs else result
            )
        return repair

    def _with_owners(self, plan: Plan, found: ParityResult) -> Repair:
        """Keep parts in fp32 whose state stops changing in the low format, or whose choices it changes."""
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
