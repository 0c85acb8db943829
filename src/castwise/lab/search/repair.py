"""The numerics side of a search: does a plan pass, and if it does not, which parts have to be kept in fp32.

Damage adds up over the parts that run low (measured: 0.99 to 1.03 of the joint one), so a plan's damage is traced to
its source by halving: run one half of the parts low and the rest in fp32, then the other half, and go on inside the
worse one until what is left unexplained fits under the line. One bad part among n costs about 4 log2(n) passes,
whatever the depth, since blocks of one structure are one part.

Where parts do not add up to what is seen, it comes from what lies between them: between two that each lose nothing, or
between two that are kept in fp32, whose outputs are cast to the low format at their borders. The smallest container that
explains or cures it is then kept whole.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
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

MOST_PASSES = 120
"""Forward/backwards that the numerics of one search may take, whatever the depth of the model."""
QUICK = 2
"""Microbatches of a probe that looks for the source of damage."""
JOINT = 4
"""Microbatches on which a repaired plan is tried before it is verified."""
VERIFYING = 2 * (LEAST - JOINT)
"""Passes that are kept for the plan that is chosen: fresh microbatches in fp32 and under the plan."""
SPENT = 0.7
"""Share of the line that parts which are not kept may use up together; the rest is for what does not add up."""
MISFIT = 3.0
"""Damage above this many times the sum of the parts' does not come from them: probes of few microbatches err by less."""


@dataclass(frozen=True)
class Blame:
    """What a probe of some parts alone said.

    Attributes:
        patterns: The parts that ran low.
        severity: Damage over the line it must stay below; above 1 it is too much.
        damage: Plain damage.
        reason: Why it is infinite, where it is.
        whole: They are a container, whose damage is not that of its parts: it is kept whole.
    """

    patterns: tuple[str, ...]
    severity: float
    damage: float
    reason: str = ""
    whole: bool = False


@dataclass
class Repair:
    """A plan made sound.

    Attributes:
        plan: With its regions.
        kept: Per part that is kept in fp32, why; of a container that is kept whole each part, and itself if that is one.
        result: Finding on the microbatches of the search, None where the passes ran out before.
    """

    plan: Plan
    kept: dict[str, str] = field(default_factory=dict)
    result: ParityResult | None = None


class NumericsSearch:
    """Judges plans against one reference, and repairs them.

    The test's reference has run; ``on_progress`` is called with what is being tried; the ranks go by the worst that one finds.

    Attributes:
        alone: What is known of single parts that ran low alone, by pattern.
    """

    def __init__(
        self,
        test: ParityTest,
        parts: Sequence[Part],
        on_progress: Callable[[str], None] = lambda _what: None,
        ranks: Lockstep = BY_ITSELF,
    ) -> None:
        self._test = test
        self._parts = list(parts)
        self._names = {part.pattern for part in parts}
        self._say = on_progress
        self._ranks = ranks
        self._first = len(test.prober.micros)
        self._followed: set[Plan] = set()  # by numerics, what state follows as in fp32
        self._below: dict[Plan, int] = {}  # by numerics, how many microbatches said that a plan passes
        self._probes: dict[tuple[Plan, tuple[str, ...]], Blame] = {}
        self._joints: dict[Plan, ParityResult | None] = {}
        self.alone: dict[str, Blame] = {}

    def left(self) -> int:
        """Forward/backwards that it may still take."""
        return MOST_PASSES - self._test.prober.passes

    def find(self, plan: Plan) -> ParityResult:
        """Test a plan on the microbatches of the search, and on fresh ones while its interval alone is not below the line.

        What so few microbatches cannot show :meth:`verify` looks for.

        Raises:
            Exception: What the plan raised, where it cannot run.
        """
        self._say(f"gradients under {plan}")

        def hangs(found: ParityResult) -> bool:
            return found.severity < 1.0 and self.left() >= VERIFYING + 2 * self._first

        return self._with_state(self._judged(plan, 0, self._first, hangs))

    def verify(self, plan: Plan) -> ParityResult:
        """Test a plan on fresh microbatches, which had no part in choosing it, on as many as it takes to pass.

        Where these leave it open, on more while there are passes left.
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
        """Judge a plan on microbatches from ``start`` on, and on more while they may decide and its verdict hangs on it."""
        test, prober, probe, end = self._test, self._test.prober, Probe(plan), start
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
            if not hangs(found) or not goes_on(found.verdict, found.more, end - start, count, MOST * count):
                return found

    def _with_state(self, found: ParityResult) -> ParityResult:
        """A finding that passes, after a look at what the model keeps beside its weights; made once per numerics."""
        key = numerics_of(found.plan)
        if found.verdict != "pass" or key in self._followed:
            return found
        looked = self._worst(f"state under {key}", lambda: self._test.with_state(found), self._badness)
        if looked.verdict == "pass":
            self._followed.add(key)
        return looked

    def _worst(self, what: str, work: Callable[[], T], weight: Callable[[T], Any]) -> T:
        """The worst that ranks in lockstep find; the passes it took are counted alike on all."""
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
        """Keep as few parts in fp32 as make a plan pass that failed, or, without a finding, could not run.

        The ``result`` of the repair says whether it passes. So many passes as ``reserve`` are left for what comes after.

        Raises:
            Exception: What a part raised in a low format, unless it says that the part cannot run there.
        """
        patterns = tuple(part.pattern for part in self._parts)
        kept: dict[str, str] = {}
        together: dict[
            frozenset[str], float
        ] = {}  # what is given back as one or not at all, with its severity
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
            # what is left does not add up to what is seen: keep the worst of it too
            for pattern in heapq.heappop(queue)[-1].patterns:
                kept.setdefault(pattern, "the rest of the model does not pass without it")
        return Repair(exempt(plan, self._parts, kept), kept, result)

    def _traced(self, plan: Plan, group: Blame, reserve: int) -> list[Blame]:
        """What each half of a group does, and, where they do not add up to the group, a container that does."""
        middle = len(group.patterns) // 2
        halves = [self._probe(plan, half) for half in (group.patterns[:middle], group.patterns[middle:])]
        if group.severity <= MISFIT * sum(half.severity for half in halves):
            return halves
        cut = [  # containers that ran whole with neither half
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
        """What chooses every container."""
        containers = dict.fromkeys(container for part in self._parts for container in part.around)
        return [whole(self._parts, container) for container in containers]

    def _widened(
        self, plan: Plan, kept: dict[str, str], reserve: int
    ) -> tuple[dict[str, str], ParityResult | None, list[frozenset[str]]]:
        """Keep the containers around what is kept, ever wider ones, until that passes or would be all of the model.

        Returns:
            What is kept then, the finding on it, and what was added by container, the last first.
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
                        added, "its neighbours alone were no cure: what lies between counts"
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
        """Give back what need not be kept, the least suspicious first; nothing of a container that fails in each part."""
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
                self._joints[plan] = None  # more has to be kept
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
        return "its neighbourhood fails, and the passes ran out before it was tried alone"
    if blame.reason:
        return blame.reason
    if blame.whole:
        return f"with its neighbours in the low format the damage is {blame.damage:.2g}, far more than theirs apart"
    return f"alone in the low format its damage, the relative error of the update, is {blame.damage:.2g}"
