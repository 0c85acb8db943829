"""Compare the remaining plans of a search: restart them repeatedly, each in its own process, until one can be chosen.

fp32 and one-line autocast run in the same starts, so that every reported speed comes from the same starts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.lab.search.axes import FP32, complexity, run_with
from castwise.lab.search.decision import LEAST, MARGIN, MOST, ROUNDS, SURE, Decision, among, decide
from castwise.lab.search.fates import Fate
from castwise.lab.timing import stats

Refused = Callable[[Plan], object]
"""A function that returns whether a plan must not be chosen."""


def nobody(_plan: Plan) -> bool:
    """Return False for every plan: none is refused."""
    return False


@dataclass
class Final:
    """The last comparison between plans, in which each plan is started several times, if possible in its own process.

    Attributes:
        plans: The plans that are timed.
        times_s: For each plan, seconds per step by start and round.
        losses: Losses of each plan's steps in the first start, all on the same batches.
        failed: Plans that did not finish.
        choice: Plans that may be chosen; if empty, all may.
        decision: The decision between the plans that may be chosen.
        apart: Whether each plan had a process of its own.
        saves: If fp32 is timed only for comparison, the share of a step that another optimizer kernel or kept memory saves in
            fp32, measured separately.
        complexity: How complicated a plan is.
        behind: For each pair (slower, faster) of uncompiled plans, how many times as fast the faster plan was in the race. Only
            pairs with a certain difference are there.
        go_on: Starts the given plans again, and those shown for comparison, until the choice is decided or the time runs out.
            Its second argument tells whether a plan is refused.
    """

    plans: Sequence[Plan]
    times_s: list[list[Sequence[float]]] = field(default_factory=list)
    losses: dict[Plan, list[float]] = field(default_factory=dict)
    failed: set[Plan] = field(default_factory=set)
    choice: Collection[Plan] = ()
    decision: Decision | None = None
    apart: bool = True
    saves: float = 0.0
    complexity: Callable[[Plan], float] = complexity
    behind: Mapping[tuple[Plan, Plan], float] = field(default_factory=dict)
    go_on: Callable[[Collection[Plan], Refused], None] = lambda _left, _refused: None

    def __post_init__(self) -> None:
        """Initialise the cached ratios: no plan has been timed yet."""
        self._ratios: Mapping[tuple[int, int], stats.Ratio] = {}
        self._known: tuple[int, Decision | None] = 0, None

    @property
    def starts(self) -> int:
        """The number of starts of the plans that finished."""
        return max(map(len, self.times_s), default=0)

    def seconds(self, plan: Plan) -> list[float]:
        """Return all times of a plan, in seconds per step."""
        if plan not in self.plans or not self.times_s:
            return []
        return [time for start in self._times(plan) for time in start]

    def ratio(self, plan: Plan, over: Plan) -> stats.Ratio | None:
        """Return the speed of a plan relative to another plan; None if either was not timed."""
        if plan == over or not self.seconds(plan) or not self.seconds(over):
            return None
        if self._known != (self.starts, self.decision):
            self._ratios, self._known = self._all_ratios(), (self.starts, self.decision)
        return self._ratios[self.plans.index(over), self.plans.index(plan)]

    def _all_ratios(self) -> Mapping[tuple[int, int], stats.Ratio]:
        """Return the speed ratios of all pairs of plans.

        The variance between starts is estimated from all plans. For two plans that can still be chosen, it is estimated only
        from such plans, as in the decision.
        """
        shown = any(plan not in self.choice for plan in self.plans) and bool(self.choice)
        out = stats.restarts(
            self.times_s, expected=shown
        )  # plans that are only shown do not affect the decision
        if self.decision is None:
            return out
        left = [
            one
            for one, plan in enumerate(self.plans)
            if one not in self.decision.out
            and plan not in self.failed
            and (not self.choice or plan in self.choice)
        ]
        near = stats.restarts([self.times_s[one] for one in left])
        return {**out, **{(left[i], left[j]): ratio for (i, j), ratio in near.items()}}

    def in_turn(self, plans: Sequence[Plan], refused: Refused = nobody) -> Iterator[Plan]:
        """Yield the plan to choose. If the caller refuses it and asks again, yield the best of the others.

        At first, plans that left because they were slower are not considered. Once a plan is refused they are started again
        with the others, because only the refused plan may have beaten them. This goes on until the choice is decided or the
        time runs out.

        Args:
            plans: Plans to choose from.
            refused: Returns whether a plan cannot be chosen any more. Its answer may change while the caller works.
        """
        left = [plan for plan in dict.fromkeys(plans) if self.seconds(plan) and plan not in self.failed]
        running = [plan for plan in left if len(self._times(plan)) == self.starts] or left
        while left:
            weights, times_s = (
                [self.complexity(plan) for plan in running],
                [self._times(plan) for plan in running],
            )
            plan = running[decide(weights, times_s, among(self.behind, running)).chosen]
            yield plan
            left = [one for one in left if one != plan and not refused(one)]
            if len(left) > 1:
                self.go_on(left, refused)
            left = running = [plan for plan in left if plan not in self.failed]

    def _times(self, plan: Plan) -> list[Sequence[float]]:
        return self.times_s[self.plans.index(plan)]

    def fate(self, plan: Plan, chosen: Plan) -> Fate | None:
        """Return why a plan that finished was not chosen; None for a plan that did not finish."""
        ratio = self.ratio(chosen, plan)
        if ratio is None or plan in self.failed:
            return None
        twin = self._twin(plan) if self.choice and plan not in self.choice else None
        if twin is not None and round(ratio.low, 2) <= 1.0:  # as printed
            alone = f"only for comparison: the part in which it differs from {in_words(twin)} was timed alone"
            return Fate("spared", alone, "final") if plan == FP32 else ran_as(twin)
        return Fate("worse", self._no_better(plan, chosen, ratio), "final")

    def _no_better(self, plan: Plan, chosen: Plan, ratio: stats.Ratio) -> str:
        if round(ratio.low, 2) > 1.0:  # as printed
            return f"not faster: takes {_interval(ratio)} times as long"
        if self.complexity(plan) < self.complexity(chosen) and (ahead := self._ahead(plan, chosen)):
            return f"not faster: {ahead}"
        simpler = self.complexity(chosen) < self.complexity(plan)
        if ratio.value < 1.0 and simpler:
            sure = "at most 3 % faster" if ratio.low > 1.0 / MARGIN else "not known to be faster"
            if round(ratio.high, 2) < 1.0 and ratio.low <= 1.0 / MARGIN:  # as printed
                sure = f"faster, but not with the {SURE:.0%} certainty that a choice needs,"
            return f"{sure} than the chosen plan, which is simpler"
        same = "as fast as" if ratio.high < MARGIN else "not known to be slower than"
        return f"{same} the chosen plan{', which is simpler' * simpler}"

    @property
    def to_choose(self) -> str:
        """The words " that can be chosen" if fp32 is timed only for comparison, else the empty string."""
        return " that can be chosen" if self.choice and FP32 not in self.choice else ""

    def _twin(self, plan: Plan) -> Plan | None:
        """Return the plan that may be chosen and differs from this plan only in optimizer kernel or host memory."""
        return next((one for one in self.choice if run_with(one, plan) == plan), None)

    def _ahead(self, plan: Plan, chosen: Plan) -> str:
        """Say which plan is known to be faster than this one, and by how much; empty if there is none."""
        for other in self.plans:
            ratio = self.ratio(other, plan)
            if ratio is not None and round(ratio.low, 2) > 1.0:
                return f"{in_words(other)} is {_interval(ratio)} times as fast"
        ahead = self._ahead_in_race(plan)
        best = chosen if chosen in ahead else next(iter(ahead), None)
        return f"{in_words(best)} was {ahead[best]:.2f} times as fast in the race" if best is not None else ""

    def _ahead_in_race(self, plan: Plan) -> dict[Plan, float]:
        """Return the plans that were faster in the race, with their ratios, unless the final comparison contradicts it."""
        return {
            two: ahead
            for (one, two), ahead in self.behind.items()
            if one == plan
            and two not in self.failed
            and (now := self.ratio(two, plan)) is not None
            and now.value > MARGIN
        }

    def doubt(self, chosen: Plan, refused: Refused = nobody) -> str:
        """Say what is undecided if another plan that may be chosen may be faster; empty if the choice is decided."""
        if self.decision is None or self.decision.decided:
            return ""
        could = [one for one in self.choice or self.plans if one not in self.failed and not refused(one)]
        ratios = {plan: ratio.high for plan in could if (ratio := self.ratio(plan, chosen)) is not None}
        plan = max(ratios, key=ratios.__getitem__, default=chosen)
        if ratios.get(plan, 1.0) < MARGIN:
            return ""
        more = 100.0 * (ratios[plan] - 1.0)
        faster = f"may be {f'up to {more:.0f} % ' if more < _TOLD else ''}faster"
        idle = "an idle machine"
        late = self.starts <= LEAST if self.apart else min(map(len, self._times(chosen))) < 2 * ROUNDS
        helps = late or (self.apart and self.starts < MOST)
        longer = f"A longer --budget, and {idle}," if helps else idle.capitalize()
        why = "the time was too short" if late else "the machine is too noisy"
        after = f"{self.starts} start{'s' * (self.starts != 1)}"
        return f"Undecided after {after}, because {why}: {in_words(plan)} {faster} than the chosen plan. {longer} would decide it."


_TOLD = 20.0
"""The largest difference, in per cent, that the text quotes for an undecided pair. A larger number would tell nothing."""


def ran_as(plan: Plan) -> Fate:
    """Return why a plan was dropped that was timed in the final comparison with another optimizer kernel or host memory."""
    return Fate("spared", f"timed in the final with other settings, as {in_words(plan)}", "final")


def _interval(ratio: stats.Ratio) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
