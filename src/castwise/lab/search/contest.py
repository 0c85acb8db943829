"""Plans raced against one another on real training steps, by successive halving.

All candidates take a few interleaved steps, those that are clearly behind leave, and the rest go on with more rounds;
fp32 stays to the end as what ratios are taken to. What could still be the fastest never leaves for lack of luck: a
candidate goes only if its best round is behind the leader's typical one. Who of those left is chosen is decided
elsewhere (:mod:`castwise.lab.search.final`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from castwise.core.heap import can_keep
from castwise.core.plans.plan import PRESETS, Plan
from castwise.core.plans.words import in_words
from castwise.core.session.process import Claim
from castwise.lab.search.axes import storage_of
from castwise.lab.search.fates import Fate
from castwise.lab.timing import stats
from castwise.lab.timing.failures import cannot_run, unfit
from castwise.lab.timing.ranks import BY_ITSELF, Lockstep
from castwise.lab.timing.runners import TrainingRun
from castwise.lab.timing.timing import WARMUP, Lap, paired, race, speedup
from castwise.lab.workloads.workload import Workload

BASELINE = PRESETS["fp32"]
BLOCK_S = 0.06
"""A block of steps lasts at least about this long, so that timers and the scheduler do not show."""
TOGETHER_BYTES = 4 << 30
"""Weights, gradients and optimizer state that may lie in memory at once."""
LEAVES, LEAVES_OTHER, LEAVES_EARLY = 1.04, 1.08, 1.2
"""A candidate whose best round is this many times the leader's median leaves; the second where the leader stores parameters in
another format: processes of their own, which have caches and heap for themselves, move two storages by up to 4 % against each
other (bench/results/race-cpu.json); the third before it had so many rounds:"""
EARLY = 6
HEATS = 2
"""Rounds of further heats tell hardly anybody apart: who is left differs by a few percent, and the final decides on that."""
LATE = Fate("late", "not tried: the time was spent", "race")


@dataclass
class Entry:
    """A plan in the contest.

    Attributes:
        plan: What it trains by.
        times_s: Seconds per step, per round; None in rounds without it.
        left: Why it left; None while it is in.
        losses: Of the steps it trained.
    """

    plan: Plan
    times_s: list[float | None] = field(default_factory=list)
    left: Fate | None = None
    losses: list[float] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Rounds it was timed in."""
        return len(self.lap.seconds)

    @property
    def lap(self) -> Lap:
        """Its times, to be paired with another's."""
        return Lap(self.times_s)


class Contest:
    """Races plans of one workload; a context manager that lets go of all models at its end.

    Args:
        workload: What is trained.
        device: Device that every entry trains on.
        seed: Of weights and data.
        deadline: Clock time (``ranks.now``) after which no further round starts.
        ranks: Who race together.
        on_progress: Called with what is being done, how much of it is done and how much there is.

    Attributes:
        entries: By plan, in the order they came.
        steps: Training steps taken so far.
    """

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        *,
        seed: int = 0,
        deadline: float = math.inf,
        on_progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
        ranks: Lockstep = BY_ITSELF,
    ) -> None:
        self._workload = workload
        self._device = device
        self._seed = seed
        self._deadline = deadline
        self._say = on_progress
        self._ranks = ranks
        self._runs: dict[Plan, TrainingRun] = {}
        self._memory = Claim(dataclasses.replace(BASELINE, host_memory="keep"), device.type)
        self._initial: Mapping[str, torch.Tensor] | None = None
        self._block = 0
        self._base_s: list[float] = []
        self.entries: dict[Plan, Entry] = {BASELINE: Entry(BASELINE)}
        self.steps = 0

    def __enter__(self) -> Self:
        """Keep the memory of a CPU meanwhile: in one that all plans share, whom its page faults hit is luck."""
        if self._device.type == "cpu" and can_keep():
            self._memory.take()
        return self

    def __exit__(self, *exception: object) -> None:
        """Close every run."""
        self.close()

    def close(self) -> None:
        """Let go of all models, and of memory; times stay, and a plan that is run again is built again."""
        try:
            self.make_room()
        finally:
            self._memory.close()

    def make_room(self, but: Collection[Plan] = ()) -> None:
        """Let go of the models of all plans but some: other work needs the memory."""
        for plan in [plan for plan in self._runs if plan not in but]:
            self._close(plan)

    # --- racing -------------------------------------------------------------------------------------------

    def halve(self, plans: Sequence[Plan], keep: int = 6, rounds: int = 3, heats: int = HEATS) -> list[Plan]:
        """Race plans in heats, fp32 with them, and let go of those that are clearly behind.

        There are so many heats at most, none after no more than ``keep`` plans are left; the first has so many interleaved
        ``rounds``, each later one two more.

        Returns:
            Those left, the fastest first, fp32 among them if it is.

        Raises:
            Exception: As :meth:`run`.
        """
        field_ = [BASELINE, *(p for p in plans if p != BASELINE)]
        for heat in range(heats):
            for together in self._heats(field_):
                self.run(together, rounds + 2 * heat, admit_late=False)
            field_ = [BASELINE, *(p for p in field_ if p != BASELINE and self.entries[p].left is None)]
            field_ = self._survivors(field_)
            if len(field_) <= keep or self._ranks.now() > self._deadline:
                break
            for plan in list(self._runs):
                if plan not in field_ and plan != BASELINE:
                    self._close(plan)
        return self.order(field_)

    def _survivors(self, plans: Sequence[Plan]) -> list[Plan]:
        order = self.order(plans)
        left = []
        for plan in plans:
            own = next(other for other in order if storage_of(other) == storage_of(plan))
            early = self.entries[plan].rounds < EARLY
            rivals = {order[0]: LEAVES_EARLY} if early else {order[0]: LEAVES_OTHER, own: LEAVES}
            behind = [rival for rival, by in rivals.items() if self._best(plan, rival) * by <= 1.0]
            if plan == BASELINE or not behind:
                left.append(plan)
            else:
                self.entries[plan].left = self._not_faster(plan, behind[0])
        return left

    def _best(self, plan: Plan, leader: Plan) -> float:
        """The plan's best round against the leader; by way of fp32 where the two ran in different heats."""
        together = self._ratios(plan, leader)
        if together:
            return max(together)
        own, ahead = self._ratios(plan), self._ratios(leader)
        return max(own, default=math.inf) / statistics.median(ahead) if ahead else math.inf

    def _not_faster(self, plan: Plan, leader: Plan) -> Fate:
        ratio = self.ratio(plan, leader)
        said = f"takes {1 / ratio.value:.2f} times as long as" if ratio else "not timed beside"
        return Fate("worse", f"not faster: {said} {in_words(leader)} in the race", "race")

    def run(
        self, plans: Sequence[Plan], rounds: int, *, admit_late: bool = True, until: float | None = None
    ) -> None:
        """Run interleaved rounds, in each of which every plan, and fp32, runs one block of steps.

        With ``admit_late`` plans that have not run yet may still join after the deadline. No round but the first begins after
        ``until``, which is the deadline if it is not given.

        Raises:
            Exception: What fp32 raised, without which there is nothing to compare with; what another plan raised, unless it
                says that the plan cannot run.
        """
        field_ = [BASELINE, *(p for p in plans if p != BASELINE)]
        for plan in field_:
            self.entries.setdefault(plan, Entry(plan, [None] * len(self.entries[BASELINE].times_s)))
        new = [plan for plan in field_ if plan not in self._runs and self.entries[plan].left is None]
        for number, plan in enumerate(new):
            if self._too_late(plan, admit_late):
                continue
            self._say(f"building {plan}", number, len(new))
            self._open(plan)
        self._warm([plan for plan in new if plan in self._runs], admit_late)
        racing = [plan for plan in field_ if plan in self._runs]
        block = self._block
        for number in range(rounds):
            if number and self._ranks.now() > (self._deadline if until is None else until):
                break
            self._say(f"{len(racing)} plans, {block} steps each", number, rounds)
            laps = race(
                [(str(i), self._runs[plan]) for i, plan in enumerate(racing)],
                rounds=1, first=len(self.entries[BASELINE].times_s), steps=block, device=self._device, warmup=0,
                hopeless=math.inf, ranks=self._ranks,
            )  # fmt: skip
            self._book({plan: laps[str(i)] for i, plan in enumerate(racing)})
            self.steps += block * len(racing)
            racing = [plan for plan in racing if self.entries[plan].left is None]
        self._say(f"{len(racing)} plans", rounds, rounds)

    def updates(
        self,
        one: Plan,
        other: Plan,
        rounds: int,
        least: int,
        until: float,
        last: float,
        enough: Callable[[Lap, Lap], bool] = lambda _one, _other: False,
    ) -> tuple[Lap, Lap]:
        """Interleaved rounds of two plans in which the optimizer's part of each step is timed for itself.

        On an accelerator whole steps are: what an optimizer makes the host wait for is lost where it is waited for anyway.

        Args:
            one: A plan.
            other: Another.
            rounds: How many rounds there are at most.
            least: How many of them there are though ``until`` is over.
            until: Clock time after which no further one begins.
            last: Clock time after which none of the least begins either, but the first.
            enough: Asked after each round, of what both took, whether no other is needed; on ranks all say the same.

        Returns:
            Of each the median seconds of those parts, by round; none where one of the two cannot run.

        Raises:
            Exception: As :meth:`run`.
        """
        self.make_room([BASELINE, one, other])
        self.run([one, other], 0)
        if one not in self._runs or other not in self._runs:
            self._close(other)
            return Lap(), Lap()
        runs = {"0": self._runs[one], "1": self._runs[other]}
        laps = Lap(), Lap()
        for number in range(rounds):
            if number and self._ranks.now() > (until if number >= least else last):
                break
            self._say("the optimizer's part of a step", number, rounds)
            found = race(
                list(runs.items()), rounds=1, first=number, steps=self._block, device=self._device, warmup=0,
                hopeless=math.inf, ranks=self._ranks,
            )  # fmt: skip
            self.steps += 2 * self._block
            for name, plan, lap in zip(runs, (one, other), laps, strict=True):
                if (error := found[name].error) is not None:
                    self._lost(plan, error)
                    self._close(other)
                    return Lap(), Lap()
                parts = runs[name].updates_s[-self._block :]
                lap.times_s += (
                    [statistics.median(parts)] if self._device.type == "cpu" else found[name].times_s
                )
            if enough(*laps):
                break
        self._close(other)
        return laps

    def _too_late(self, plan: Plan, admit_late: bool) -> bool:
        """Whether a plan stays out for want of time; fp32 never does, nor one that was timed before."""
        entry = self.entries[plan]
        late = not admit_late and plan != BASELINE and not entry.rounds and self._ranks.now() > self._deadline
        if late:
            entry.left = LATE
            self._close(plan)
        return late

    def _book(self, laps: Mapping[Plan, Lap]) -> None:
        failed = laps[BASELINE].error
        if failed is not None:
            raise failed
        for plan, entry in self.entries.items():
            lap = laps.get(plan)
            entry.times_s.append(lap.times_s[0] if lap is not None else None)
        for plan, lap in laps.items():
            if lap.error is not None:
                self._lost(plan, lap.error)

    def _warm(self, plans: Sequence[Plan], admit_late: bool) -> None:
        """First steps, which build kernels and optimizer state; hopeless candidates end here."""
        for number, plan in enumerate(plans):
            if self._too_late(plan, admit_late):
                continue
            self._say(f"first steps of {plan}", number, len(plans))
            laps = race(
                [("", self._runs[plan])], rounds=2 * (plan == BASELINE), steps=1, device=self._device,
                against_s=() if plan == BASELINE else self._base_s, ranks=self._ranks,
            )  # fmt: skip
            lap = laps[""]
            self.steps += WARMUP + len(lap.times_s)
            if lap.error is not None:
                self._lost(plan, lap.error)
            elif lap.slowdown is not None:
                slow = f"not faster: its first steps took {lap.slowdown:.0f} times as long as fp32's"
                self.entries[plan].left = Fate("worse", slow, "race")
                self._close(plan)
            if plan == BASELINE:
                if lap.error is not None:
                    raise lap.error
                self._base_s = lap.seconds
                self._block = max(1, min(16, round(BLOCK_S / min(lap.seconds))))

    def _open(self, plan: Plan) -> None:
        def build() -> None:  # a run that another rank could not build is closed with the others
            run = TrainingRun(self._workload, plan, self._device, self._seed, self._initial)
            self._runs[plan] = run
            self._initial = self._initial or run.weights()

        try:
            self._ranks.at(f"building {plan}").each(build)
        except Exception as error:
            if plan == BASELINE:
                raise
            self._lost(plan, error)

    def _lost(self, plan: Plan, error: Exception) -> None:
        if not cannot_run(error):
            raise error
        self.entries[plan].left = Fate("failed", unfit(error), "race")
        if plan != BASELINE:
            self._close(plan)
            self.entries[plan].losses = []  # cut short, and not at the same step on every rank

    def _close(self, plan: Plan) -> None:
        run = self._runs.pop(plan, None)
        if run is not None:
            self.entries[plan].losses = run.losses
            with contextlib.suppress(Exception):  # a run that failed half way may not close
                run.close()

    def _heats(self, plans: Sequence[Plan]) -> Iterator[list[Plan]]:
        """The field in parts that fit into memory together; all of them where it does."""
        self.run([], 0)
        model = self._runs[BASELINE].model
        each = 24 * sum(p.numel() for p in model.parameters()) + (32 << 20)
        size = max(2, min(40, TOGETHER_BYTES // each))
        others = [
            p for p in plans if p != BASELINE and (p not in self.entries or self.entries[p].left is None)
        ]
        for start in range(0, max(1, len(others)), size):
            if len(others) > size:
                for plan in list(self._runs):
                    if plan != BASELINE and plan not in others[start : start + size]:
                        self._close(plan)
            yield others[start : start + size]

    # --- comparing ----------------------------------------------------------------------------------------

    def _ratios(self, plan: Plan, over: Plan = BASELINE) -> list[float]:
        """How many times as fast as another a plan was, in each round that both ran."""
        both = paired(self.entries[over].lap, self.entries[plan].lap)
        return [before / after for before, after in zip(*both, strict=True)]

    def ratio(self, plan: Plan, over: Plan = BASELINE) -> stats.Ratio | None:
        """How many times as fast as another a plan is, by the rounds that both ran; None without any."""
        if plan not in self.entries or over not in self.entries:
            return None
        return speedup(self.entries[over].lap, self.entries[plan].lap)

    def times_as_fast(self, plan: Plan, over: Plan) -> float:
        """The same as a number, by way of fp32 where no round had both; NaN where one was not timed."""
        if (together := self.ratio(plan, over)) is not None:
            return together.value
        own, other = (self.ratio(one) for one in (plan, over))
        return own.value / other.value if own is not None and other is not None else math.nan

    def order(self, plans: Sequence[Plan]) -> list[Plan]:
        """Plans by speed over fp32, the fastest first."""

        def speed(plan: Plan) -> float:
            return 1.0 if plan == BASELINE else statistics.median(self._ratios(plan) or [0.0])

        return sorted(plans, key=speed, reverse=True)
