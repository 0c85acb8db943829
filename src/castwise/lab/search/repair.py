"""The numerics side of a search: does a plan pass, and if not, which parts must stay in fp32?

Damage is additive over the parts that run low (measured: the sum is 0.99 to 1.03 of the joint damage), so bisection finds its
source: run one half of the parts low and the rest in fp32, then the other half, and continue in the worse one until the
unexplained rest is below the threshold. One bad part among n costs about 4 log2(n) passes at any depth, because blocks of equal
structure are one part.

If the parts do not add up to the measured damage, it arises between them: between two parts that are harmless alone, or between
two parts in fp32 whose outputs are cast to the low format at their borders. The smallest container that explains or cures it is
then kept whole.
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
from castwise.lab.search.axes import numerics_of
from castwise.lab.search.regions import Part, exempt, only, whole
from castwise.lab.timing.failures import cannot_run, unfit
from castwise.lab.timing.ranks import BY_ITSELF, Lockstep

T = TypeVar("T")

EXTRA_SHARE = 0.3
"""If more microbatches would probably decide, they may take this share of the time left."""
MOST_VALUES = 1 << 28
"""Gradient elements kept of all microbatches together: 1 GiB."""
MOST_PASSES = 120
"""Forward/backward passes that the numerics of one search may take, whatever the model's depth."""
QUICK = 2
"""Microbatches of a probe that searches for the source of damage."""
JOINT = 4
"""Microbatches on which a repaired plan is tried before it is verified."""
VERIFYING = 2 * (LEAST - JOINT)
"""Passes reserved for the chosen plan: fresh microbatches in fp32 and under the plan."""
SPENT = 0.7
"""Share of the threshold that the parts which stay low may use together; the rest allows for damage that does not add up."""
MISFIT = 3.0
"""Damage above this many times the sum over parts does not come from the parts: probes of few microbatches err by less."""


@dataclass(frozen=True)
class Blame:
    """Result of a probe of some parts alone.

    Attributes:
        patterns: The parts that ran low.
        severity: Damage over its threshold; above 1 it is too much.
        damage: Plain damage.
        reason: Why the damage is infinite, if it is.
        whole: Whether they form a container whose damage exceeds that of its parts, so that it is kept whole.
    """

    patterns: tuple[str, ...]
    severity: float
    damage: float
    reason: str = ""
    whole: bool = False


@dataclass
class Repair:
    """A repaired plan.

    Attributes:
        plan: The plan with its regions.
        kept: For each part that is kept in fp32, the reason; for a container kept whole, each of its parts, and itself if it is
            a part.
        result: Result on the search's microbatches, None if the passes ran out first.
    """

    plan: Plan
    kept: dict[str, str] = field(default_factory=dict)
    result: ParityResult | None = None


class NumericsSearch:
    """Judge plans against one reference, and repair them.

    The test's reference must have run. ``on_progress`` is called with the current subject, ``left_s`` returns the seconds left
    of the search. All ranks use the worst result of any rank.

    Attributes:
        alone: Results of single parts that ran low alone, by pattern.
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
        self._followed: set[Plan] = set()  # by numerics: plans whose state evolves as in fp32
        self._below: dict[
            Plan, int
        ] = {}  # by numerics: number of microbatches on which the plan was shown to pass
        self._probes: dict[tuple[Plan, tuple[str, ...]], Blame] = {}
        self._joints: dict[Plan, ParityResult | None] = {}
        self._extra = (
            0  # passes of microbatches beyond the usual number, which time limits and not their count
        )
        self.alone: dict[str, Blame] = {}

    def left(self) -> int:
        """Forward/backward passes that are left."""
        return MOST_PASSES - (self._test.prober.passes - self._extra)

    def find(self, plan: Plan) -> ParityResult:
        """Test a plan on the search's microbatches, and on fresh ones while only the interval exceeds the threshold.

        :meth:`verify` looks for faults that so few microbatches cannot show.

        Raises:
            Exception: Raised by the plan, if it cannot run.
        """
        self._say(f"gradients under {plan}")

        def hangs(found: ParityResult) -> bool:
            return found.severity < 1.0 and self.left() >= VERIFYING + 2 * self._first

        return self._with_state(self._judged(plan, 0, self._first, hangs))

    def verify(self, plan: Plan) -> ParityResult:
        """Test a plan on fresh microbatches, which were not used to choose it, on as many as a pass requires.

        If the result is open, the test uses more while passes are left.
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
    ) -> ParityResult:
        """Judge a plan on microbatches from ``start`` on; add more while its verdict is open and more may settle it."""
        test, prober, probe, end = self._test, self._test.prober, Probe(plan), start
        began, most, extended, usual = time.monotonic(), MOST * count, False, 0
        while True:
            short = least - before - (end - start)
            new = range(end, end + (min(count, short) if short > 0 else count))
            end = new.stop
            if (missing := end - len(prober.micros)) > 0:
                self._ranks.at("fresh batches in fp32").each(partial(prober.extend, missing))

            def work(probe: Probe = probe, new: range = new) -> ParityResult:
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
                self._extra += prober.passes - usual if extended else 0
                return found
            extended, most, usual = True, found.needed or most, prober.passes

    def _affords(self, needed: int | None, drawn: int, took_s: float) -> bool:
        """Whether time and memory suffice for as many microbatches as would probably decide; collective."""
        if needed is None:
            return False
        values = sum(gradient.numel() for gradient in self._test.prober.micros[0].gradients)
        enough = (
            needed * values <= MOST_VALUES and took_s * (needed / drawn - 1.0) < EXTRA_SHARE * self._left_s()
        )
        return self._ranks.at("more microbatches").same(enough)

    def _with_state(self, found: ParityResult) -> ParityResult:
        """If a result passes, also test the state that the model keeps besides its weights; done once per numerics."""
        key = numerics_of(found.plan)
        if found.verdict != "pass" or key in self._followed:
            return found
        looked = self._worst(f"state under {key}", lambda: self._test.with_state(found), self._badness)
        if looked.verdict == "pass":
            self._followed.add(key)
        return looked

    def _worst(self, what: str, work: Callable[[], T], weight: Callable[[T], Any]) -> T:
        """The worst result over ranks in lockstep; all ranks then count the same number of passes."""
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
        """Repair a plan that failed or, without ``found``, could not run: keep as few parts in fp32 as possible.

        The ``result`` of the repair says whether it passes. ``reserve`` passes are left for later work.

        Raises:
            Exception: Raised by a part in a low format, unless it says that the part cannot run there.
        """
        patterns = tuple(part.pattern for part in self._parts)
        kept: dict[str, str] = {}
        together: dict[
            frozenset[str], float
        ] = {}  # groups that can return to the low format only as one, with their severity
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
            # the rest does not add up to the measured damage: keep its worst part too
            for pattern in heapq.heappop(queue)[-1].patterns:
                kept.setdefault(pattern, "the rest of the model fails unless this is in fp32 too")
        return Repair(exempt(plan, self._parts, kept), kept, result)

    def _traced(self, plan: Plan, group: Blame, reserve: int) -> list[Blame]:
        """Probe each half of a group; if the halves do not add up to the group, also find a container that does."""
        middle = len(group.patterns) // 2
        halves = [self._probe(plan, half) for half in (group.patterns[:middle], group.patterns[middle:])]
        if group.severity <= MISFIT * sum(half.severity for half in halves):
            return halves
        cut = [  # containers that neither half ran whole
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
        """The patterns that select each container."""
        containers = dict.fromkeys(container for part in self._parts for container in part.around)
        return [whole(self._parts, container) for container in containers]

    def _widened(
        self, plan: Plan, kept: dict[str, str], reserve: int
    ) -> tuple[dict[str, str], ParityResult | None, list[frozenset[str]]]:
        """Keep ever wider containers around the kept parts, until the plan passes or would be fp32 everywhere.

        Returns:
            The kept parts, the result with them, and the parts added at each step, last first.
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
        """Return parts to the low format while the plan passes, least suspicious first; skip containers that fail in each part."""
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
                self._joints[plan] = self._judged(plan, 0, min(JOINT, self._first))
            except Exception as error:
                if not cannot_run(error):
                    raise
                self._joints[plan] = None  # more must be kept
        return self._joints[plan]

    def _probe(self, plan: Plan, patterns: tuple[str, ...]) -> Blame:
        """Run some parts low and the rest in fp32."""
        key = (plan, patterns)
        if key in self._probes:
            return self._probes[key]
        self._say(f"{', '.join(patterns)} alone in {plan.compute}" if len(patterns) < 3 else
                  f"{len(patterns)} regions alone in {plan.compute}")  # fmt: skip
        try:
            alone = only(plan, self._parts, patterns)
            blame = self._worst(
                f"gradients under {alone}",
                lambda: self._blame(patterns, self._test.prober.probe(alone, range(QUICK))),
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
