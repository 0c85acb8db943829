"""Test whether the gradients under a plan pass, and if not, find the parts of the model that must stay in fp32.

*Damage* is the relative error that a plan adds to an update. *Parts* are groups of modules
(:class:`~castwise.lab.passes.regions.Part`). The damage of all parts that run in a low format is nearly the sum of the damages
that each causes alone (measured: the sum is 0.99 to 1.03 of the joint damage). Bisection therefore finds its source. One half
of the parts runs low and the rest in fp32, then the other half. This goes on with the worse half until the damage that is not
yet explained is below the threshold. One bad part among n costs about 4 log2(n) passes at any depth, because blocks of equal
structure are one part. The passes are on the microbatches that the plan damages most, because damage may be in few of them.

If the damages of the parts do not add up to the measured damage, it arises between parts. It may arise between two parts that
are harmless alone, or between two parts in fp32 whose outputs are cast to the low format. The smallest
:class:`~castwise.lab.passes.regions.Container` that explains or cures the damage is then kept in fp32 as a whole.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard, TypeVar

from castwise.core.plans.plan import Plan
from castwise.lab.parity.damage import severity
from castwise.lab.parity.parity import MOST, ParityResult, ParityTest
from castwise.lab.parity.probes import Probe
from castwise.lab.parity.verdicts import LEAST, goes_on, may_pass, passes
from castwise.lab.passes.regions import Part, exempt, only, whole
from castwise.lab.search.axes import numerics_of
from castwise.lab.timing.failures import cannot_run, unfit
from castwise.lab.timing.ranks import BY_ITSELF, Lockstep

T = TypeVar("T")

EXTRA_SHARE = 0.3
"""Share of the time left that further microbatches may take if they would probably decide the test."""
MOST_VALUES = 1 << 28
"""Largest number of gradient elements that are kept of all microbatches together: 1 GiB."""
MOST_PASSES = 120
"""Forward/backward passes that one search may spend on testing gradients, whatever the model's depth."""
QUICK = 2
"""Number of microbatches in each test that searches for the source of damage."""
JOINT = 4
"""Number of microbatches on which a repaired plan is tried before it is verified."""
VERIFYING = 2 * (LEAST - JOINT)
"""Passes that are reserved to verify the chosen plan on fresh microbatches, in fp32 and under the plan."""
SPENT = 0.7
"""Share of the threshold that the parts in the low format may use together. The rest allows for damage that does not add up."""
MISFIT = 3.0
"""Damage above this many times the sum over parts arises between parts: tests on few microbatches err by less."""


@dataclass(frozen=True)
class Blame:
    """The damage that was measured when only some parts of the model ran in a low format.

    Attributes:
        patterns: The patterns of the parts that ran in the low format.
        severity: Damage divided by its threshold; above 1 it is too much.
        damage: The damage itself.
        reason: Why the damage is infinite, if it is.
        whole: Whether the parts form a container with more damage than the sum over its parts, which must be kept in fp32 as a
            whole.
    """

    patterns: tuple[str, ...]
    severity: float
    damage: float
    reason: str = ""
    whole: bool = False


@dataclass
class Repair:
    """A plan that was changed to keep some parts of the model in fp32.

    Attributes:
        plan: The plan with its regions.
        kept: The reason for each part that is kept in fp32. A container that is kept as a whole is entered by each of its
            parts, and by itself if it is a part.
        result: Result of the test on the search's microbatches, None if the allowed passes ran out before.
    """

    plan: Plan
    kept: dict[str, str] = field(default_factory=dict)
    result: ParityResult | None = None

    def keeps_all(self, parts: Sequence[Part]) -> bool:
        """Whether every part of the model stays in fp32, so that nothing is left of the low format."""
        return {part.pattern for part in parts} <= self.kept.keys()


class NumericsSearch:
    """Test the gradients of plans against fp32's, and repair plans that fail.

    The fp32 gradients of ``test`` must have been computed. ``on_progress`` is called with the plan or parts that are tested
    next, and ``left_s`` returns the seconds that are left for the search. All ranks use the worst result of any rank.

    Attributes:
        alone: By pattern, the result for each part that ran in a low format while the rest of the model ran in fp32.
    """

    def __init__(
        self,
        test: ParityTest,
        parts: Sequence[Part],
        on_progress: Callable[[str], None] = lambda _what: None,
        ranks: Lockstep = BY_ITSELF,
        left_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._test = test
        self._parts = list(parts)
        self._names = {part.pattern for part in parts}
        self._say = on_progress
        self._ranks = ranks
        self._left_s = left_s
        self._first = len(test.prober.micros)
        self._followed: set[Plan] = (
            set()
        )  # numerics of plans under which the model's state changes as in fp32
        self._below: dict[
            Plan, int
        ] = {}  # by numerics of a plan: number of microbatches on which the plan was shown to pass
        # by numerics of a plan that did not pass: its microbatches, worst first; then those of the plan that is being repaired
        self._hardest: dict[Plan, list[int]] = {}
        self._hard: list[int] = []
        self._probes: dict[tuple[Plan, tuple[str, ...]], Blame] = {}
        self._joints: dict[Plan, ParityResult | None] = {}
        self._extra = (
            0  # passes of microbatches beyond the usual number: they are limited by time, not by MOST_PASSES
        )
        self.alone: dict[str, Blame] = {}

    def left(self) -> int:
        """Return how many forward/backward passes are still allowed."""
        return MOST_PASSES - (self._test.prober.passes - self._extra)

    def renew(self) -> None:
        """Allow as many passes as at the beginning."""
        self._extra = self._test.prober.passes

    def find(self, plan: Plan) -> ParityResult:
        """Test a plan's gradients on the search's microbatches.

        Fresh microbatches are added while the damage is below its threshold and only its confidence interval reaches above.
        Faults that so few microbatches cannot show are left to :meth:`verify`.

        Raises:
            Exception: The plan cannot run.
        """
        self._say(f"gradients under {plan}")

        def hangs(found: ParityResult) -> bool:
            return found.severity < 1.0 and self.left() >= VERIFYING + 2 * self._first

        return self._with_state(self._judged(plan, 0, self._first, hangs))

    def verify(self, plan: Plan) -> ParityResult:
        """Test a plan's gradients on fresh microbatches, which were not used to choose the plan.

        The number of microbatches is the number that a pass requires. If the result is undecided, more are tested while passes
        are left.
        """
        self._say("fresh batches")
        before, least = self._below.get(numerics_of(plan), 0), self._test.least()

        def hangs(found: ParityResult) -> bool:
            short = before + found.microbatches < least
            return may_pass(found.damage, found.adam) and (short or self.left() >= 2 * self._first)

        found = self._judged(plan, max(before, self._first), self._first, hangs, before, least)
        return self._with_state(found)

    def _judged(
        self,
        plan: Plan,
        start: int,
        count: int,
        hangs: Callable[[ParityResult], bool] = lambda _found: False,
        before: int = 0,
        least: int = 0,
        first: Sequence[int] = (),
    ) -> ParityResult:
        """Test a plan's gradients on microbatches from ``start`` on. Add more as long as they may settle an open verdict.

        If ``first`` has indices, as many of these as there would be at first take the place of the first microbatches.
        """
        test, prober, probe, end = self._test, self._test.prober, Probe(plan), start
        began, most, extended, usual = time.monotonic(), MOST * count, False, 0
        while True:
            short = least - before - (end - start)
            new: Sequence[int] = range(end, end + (min(count, short) if short > 0 else count))
            end += len(new)
            if (missing := end - len(prober.micros)) > 0:
                self._ranks.at("fresh batches in fp32").each(partial(prober.extend, missing))

            if first and not probe.indices:
                new = first[: len(new)]

            def work(probe: Probe = probe, new: Sequence[int] = new) -> ParityResult:
                return test.judge(prober.probe(plan, new, onto=probe), before, least)

            found = self._worst(f"gradients under {plan}", work, self._badness)
            if passes(found.damage, found.adam):
                self._below[numerics_of(plan)] = end
            drawn = end - start
            if extended and drawn < most and found.needed is not None:
                continue
            if hangs(found) and goes_on(found.verdict, found.more, drawn, count, most):
                continue
            if extended or not self._affords(found.needed, drawn, time.monotonic() - began):
                if found.verdict != "pass":
                    self._hardest[numerics_of(plan)] = _worst_first(probe)
                self._extra += prober.passes - usual if extended else 0
                return found
            extended, most, usual = True, found.needed or most, prober.passes

    def _affords(self, needed: int | None, drawn: int, took_s: float) -> bool:
        """Whether time and memory suffice for the microbatches that would probably decide; all ranks must call it together."""
        if needed is None:
            return False
        values = sum(gradient.numel() for gradient in self._test.prober.micros[0].gradients)
        enough = (
            needed * values <= MOST_VALUES and took_s * (needed / drawn - 1.0) < EXTRA_SHARE * self._left_s()
        )
        return self._ranks.at("more microbatches").same(enough)

    def _with_state(self, found: ParityResult) -> ParityResult:
        """If the gradients pass, also test the state that the model keeps besides its weights.

        This is done once for all plans that compute the same gradients.
        """
        key = numerics_of(found.plan)
        if found.verdict != "pass" or key in self._followed:
            return found
        looked = self._worst(f"state under {key}", lambda: self._test.with_state(found), self._badness)
        if looked.verdict == "pass":
            self._followed.add(key)
        return looked

    def _worst(self, what: str, work: Callable[[], T], weight: Callable[[T], Any]) -> T:
        """Call ``work`` on all ranks together, and return the worst result of any rank.

        All ranks then count the same number of passes.
        """
        prober = self._test.prober
        try:
            found = self._ranks.at(what).worst(work, weight)
        except Exception:
            prober.passes = self._ranks.at("passes").worst(lambda: prober.passes, int)
            raise
        prober.passes = self._ranks.at("passes").worst(lambda: prober.passes, int)
        return found

    def _badness(self, found: ParityResult) -> tuple[int, float]:
        size = found.severity
        return ("pass", "undecided", "fail").index(found.verdict), math.inf if math.isnan(size) else size

    def repair(self, plan: Plan, found: ParityResult | None = None, reserve: int = 0) -> Repair:
        """Repair a plan by keeping as few parts of the model in fp32 as possible.

        The ``result`` of the repair says whether the repaired plan passes.

        Args:
            plan: The plan that failed.
            found: The result of its test; None if the plan could not run.
            reserve: Number of passes that are left for later work.

        Raises:
            Exception: An error of a part in a low format, unless it means that the part cannot run there.
        """
        patterns = tuple(part.pattern for part in self._parts)
        worst = self._hardest.get(
            numerics_of(plan), []
        )  # a gradient that is not finite ends the test at its microbatch
        self._hard = [*worst, *(index for index in range(self._first) if index not in worst)]
        kept: dict[str, str] = {}
        together: dict[
            frozenset[str], float
        ] = {}  # groups of parts that can return to the low format only together, with their severity
        order = itertools.count()
        start = math.inf if found is None else found.severity
        queue = [(-start, next(order), Blame(patterns, start, math.nan))]
        result: ParityResult | None = None
        widened = False
        while queue:
            while queue and _left_over(queue) > SPENT:
                group = heapq.heappop(queue)[-1]
                if group.whole or len(group.patterns) == 1 or self.left() < reserve + JOINT + 2 * QUICK:
                    why = _because(group if group.whole else self.alone.get(group.patterns[0]))
                    kept |= {pattern: kept.get(pattern, why) for pattern in group.patterns}
                    together |= {frozenset(group.patterns): group.severity} if group.whole else {}
                    continue
                for blame in self._traced(plan, group, reserve):
                    heapq.heappush(queue, (-blame.severity, next(order), blame))
            if self.left() < reserve + JOINT and result is not None:
                break
            result = self._joint(exempt(plan, self._parts, kept))
            if _is_cured(result):
                return self._pruned(plan, kept, together, result, reserve)
            if not widened and (result is None or result.severity > MISFIT * max(_left_over(queue), SPENT)):
                widened = True
                wider, cured, added = self._widened(plan, kept, reserve)
                if _is_cured(cured):
                    return self._pruned(plan, wider, together | dict.fromkeys(added, 0.0), cured, reserve)
            if not queue:
                break
            # the parts in the low format do more damage together than alone: keep the worst of them in fp32 too
            for pattern in heapq.heappop(queue)[-1].patterns:
                kept.setdefault(pattern, "the rest of the model fails unless this is in fp32 too")
        return Repair(exempt(plan, self._parts, kept), kept, result)

    def _traced(self, plan: Plan, group: Blame, reserve: int) -> list[Blame]:
        """Test each half of a group of parts of the model.

        If the damages of the halves do not add up to the group's damage, also find a container that explains the difference.
        """
        middle = len(group.patterns) // 2
        halves = [self._probe(plan, half) for half in (group.patterns[:middle], group.patterns[middle:])]
        if group.severity <= MISFIT * sum(half.severity for half in halves):
            return halves
        cut = [  # containers that neither half of the group ran as a whole
            patterns
            for patterns in self._containers()
            if not any(
                {*patterns} <= {*half.patterns} or {*patterns}.isdisjoint(half.patterns) for half in halves
            )
            or (len(names := {*patterns} & self._names) == 1 and names <= {*group.patterns})
        ]
        for patterns in sorted(cut, key=len):
            if self.left() < reserve + JOINT + QUICK:
                break
            blame = self._probe(plan, patterns)
            if MISFIT * blame.severity >= group.severity:
                return [*halves, dataclasses.replace(blame, whole=True)]
        return halves

    def _containers(self) -> list[tuple[str, ...]]:
        """Return the patterns that select each :class:`~castwise.lab.passes.regions.Container` of the model."""
        containers = dict.fromkeys(container for part in self._parts for container in part.around)
        return [whole(self._parts, container) for container in containers]

    def _widened(
        self, plan: Plan, kept: dict[str, str], reserve: int
    ) -> tuple[dict[str, str], ParityResult | None, list[frozenset[str]]]:
        """Keep wider and wider modules around the kept parts in fp32, until the plan passes or all parts would be in fp32.

        Returns:
            The kept parts with their reasons, the result of the test with them, and the parts added at each step, last step
            first.
        """
        result: ParityResult | None = None
        steps: list[frozenset[str]] = []
        while self.left() >= reserve + JOINT and not _is_cured(result):
            wider = dict(kept)
            for pattern in kept:
                around = [c for c in self._containers() if pattern in c and not kept.keys() >= {*c}]
                if added := frozenset(p for p in min(around, key=len, default=()) if p not in wider):
                    steps.insert(0, added)
                    wider |= dict.fromkeys(
                        added,
                        "keeping only its neighbours in fp32 did not help; operators between them matter",
                    )
            if len(wider) == len(kept) or wider.keys() >= self._names:
                break
            kept, result = wider, self._joint(exempt(plan, self._parts, wider))
        return kept, result, steps

    def _pruned(
        self,
        plan: Plan,
        kept: dict[str, str],
        together: dict[frozenset[str], float],
        result: ParityResult,
        reserve: int,
    ) -> Repair:
        """Return parts of the model from fp32 to the low format one after another, as long as the plan passes.

        Those that did the least damage alone come first. The parts of a container that all fail alone return only together.
        """
        for container in self._containers():
            if all(p in kept and p in self.alone and self.alone[p].severity >= 1.0 for p in container):
                together = together | {frozenset(container): max(self.alone[p].severity for p in container)}
        bound = {pattern for patterns in together for pattern in patterns}
        weights = together | {
            frozenset({p}): self.alone[p].severity if p in self.alone else 0.0 for p in kept if p not in bound
        }
        for patterns in sorted(weights, key=weights.__getitem__):
            fewer = {p: why for p, why in kept.items() if p not in patterns}
            if self.left() < reserve + JOINT or not fewer:
                break
            tried = self._joint(exempt(plan, self._parts, fewer))
            if tried is not None and tried.severity < SPENT:
                kept, result = fewer, tried
        return Repair(exempt(plan, self._parts, kept), kept, result)

    def _joint(self, plan: Plan) -> ParityResult | None:
        if plan not in self._joints:
            self._say(f"gradients under {plan}")
            try:
                self._joints[plan] = self._judged(plan, 0, min(JOINT, self._first), first=self._hard)
            except Exception as error:
                if not cannot_run(error):
                    raise
                self._joints[plan] = None  # more parts must be kept in fp32
        return self._joints[plan]

    def _probe(self, plan: Plan, patterns: tuple[str, ...]) -> Blame:
        """Measure the damage when only these parts run in the low format and the rest of the model runs in fp32."""
        key = (plan, patterns)
        if key in self._probes:
            return self._probes[key]
        self._say(f"{', '.join(patterns)} alone in {plan.compute}" if len(patterns) < 3 else
                  f"{len(patterns)} regions alone in {plan.compute}")  # fmt: skip
        try:
            alone = only(plan, self._parts, patterns)
            blame = self._worst(
                f"gradients under {alone}",
                lambda: self._blame(patterns, self._test.prober.probe(alone, self._hard[:QUICK])),
                lambda found: math.inf if math.isnan(found.severity) else found.severity,
            )
        except Exception as error:
            if not cannot_run(error):
                raise
            blame = Blame(patterns, math.inf, math.inf, unfit(error))
        self._probes[key] = blame
        if len(patterns) == 1:
            self.alone[patterns[0]] = blame
        return blame

    def _blame(self, patterns: tuple[str, ...], probe: Probe) -> Blame:
        if not probe.finite:
            return Blame(patterns, math.inf, math.inf, "gradients are not finite")
        plain, adam = self._test.quick(probe)
        return Blame(patterns, severity(plain, adam), plain)


def _worst_first(probe: Probe) -> list[int]:
    """Return the indices of a plan's microbatches, those with the largest errors of the gradients first."""
    sizes = [math.fsum(float(error.square().sum()) for error in errors) for errors in probe.errors]
    order = sorted(
        zip(sizes, probe.indices, strict=True), key=lambda pair: -pair[0] if pair[0] == pair[0] else -math.inf
    )
    return [index for _, index in order]


def _is_cured(result: ParityResult | None) -> TypeGuard[ParityResult]:
    return result is not None and result.severity < 1.0


def _left_over(queue: Sequence[tuple[float, int, Blame]]) -> float:
    return sum(blame.severity for _, _, blame in queue)


def _because(blame: Blame | None) -> str:
    if blame is None:
        return "its neighbourhood fails, and the allowed passes ran out before it was tested alone"
    if blame.reason:
        return blame.reason
    if blame.whole:
        return f"with its neighbours in the low format the damage is {blame.damage:.2g}, far more than the sum of their own damages"
    return f"if only this region is in the low format, its damage, the relative error of the update, is {blame.damage:.2g}"
