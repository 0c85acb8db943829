"""Race plans against each other on real training steps or inference calls, by successive halving.

All plans first run a few interleaved steps, then the clearly slower ones leave, and the rest run more rounds. fp32 stays to the
end because all speeds are given relative to fp32. Bad luck alone cannot remove a plan: it leaves only if its best round is
slower than the leader's median by a margin. The :class:`~castwise.lab.search.final.Final` chooses among the remaining plans.
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
from castwise.lab.search.axes import complexity, storage_of
from castwise.lab.search.fates import Fate
from castwise.lab.timing import stats
from castwise.lab.timing.apart import Kind
from castwise.lab.timing.failures import cannot_run, unfit
from castwise.lab.timing.ranks import BY_ITSELF, Lockstep
from castwise.lab.timing.runners import InferenceRun, TrainingRun
from castwise.lab.timing.timing import WARMUP, Lap, paired, race, speedup
from castwise.lab.workloads.workload import Workload

BASELINE = PRESETS["fp32"]
BLOCK_S = 0.06
"""Seconds that a block of steps takes at least, approximately. In a shorter block timer and scheduler would matter."""
TOGETHER_BYTES = 4 << 30
"""Bytes of weights, gradients and optimizer state that may be in memory at once."""
LEAVES, LEAVES_OTHER, LEAVES_EARLY = 1.04, 1.08, 1.2
"""A plan leaves the race if its best round takes this many times as long as the leader's median. The second value applies if
the leader stores parameters in another format: the ratio of two storages shifts by up to 4 % when each plan has its own
process, with its own caches and heap (bench/results/race-cpu.json). The third value applies until the plan has run ``EARLY``
rounds."""
EARLY = 6
HEATS = 2
"""Number of groups of rounds after which the race ends. More would separate few plans: the rest differ by a few percent, which
the :class:`~castwise.lab.search.final.Final` resolves."""
LATE = Fate("late", "the time ran out", "race")


@dataclass
class Entry:
    """The times and losses of one plan in the race.

    Attributes:
        plan: The plan.
        times_s: Seconds per step, by round; None for each round that the plan did not run.
        left: Why the plan left the race; None while it takes part.
        losses: Losses of the plan's training steps.
    """

    plan: Plan
    times_s: list[float | None] = field(default_factory=list)
    left: Fate | None = None
    losses: list[float] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """The number of rounds in which the plan was timed."""
        return len(self.lap.seconds)

    @property
    def lap(self) -> Lap:
        """The plan's times, in the form in which they are compared with another plan's."""
        return Lap(self.times_s)


class Contest:
    """A race of several plans on one workload. As a context manager, it releases all models at its end.

    Args:
        workload: The workload to run.
        device: Device on which every plan runs.
        kind: Training or inference.
        stored: For inference, the format in which the model is given.
        seed: Seed of weights and data.
        deadline: Clock time (``ranks.now``) after which no further round starts.
        ranks: The ranks that race together.
        on_progress: Called with the current activity, the number of items done and the total.

    Attributes:
        entries: The times of each plan, in the order in which the plans joined.
        kind: Training or inference.
        steps: Number of steps taken so far; for inference, the number of calls.
    """

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        *,
        kind: Kind = TrainingRun,
        stored: str = "fp32",
        seed: int = 0,
        deadline: float = math.inf,
        on_progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
        ranks: Lockstep = BY_ITSELF,
    ) -> None:
        self._workload = workload
        self._device = device
        self.kind = kind
        self._served = stored if kind is InferenceRun else ""
        self._seed = seed
        self._deadline = deadline
        self._say = on_progress
        self._ranks = ranks
        self._runs: dict[Plan, TrainingRun | InferenceRun] = {}
        self._memory = Claim(dataclasses.replace(BASELINE, host_memory="keep"), device.type)
        self._initial: Mapping[str, torch.Tensor] | None = None
        self._block = 0
        self._base_s: list[float] = []
        self.entries: dict[Plan, Entry] = {BASELINE: Entry(BASELINE)}
        self.steps = 0

    def __enter__(self) -> Self:
        """Keep freed CPU memory during the race: all plans share one heap, and page faults would slow them down at random."""
        if self._device.type == "cpu" and can_keep():
            self._memory.take()
        return self

    def __exit__(self, *exception: object) -> None:
        """Release all models."""
        self.close()

    def close(self) -> None:
        """Release all models and the kept memory. The times stay, and a plan that is run again is built again."""
        try:
            self.make_room()
        finally:
            self._memory.close()

    def make_room(self, but: Collection[Plan] = ()) -> None:
        """Release the models of all plans except those in ``but``, so that other work has memory."""
        for plan in [plan for plan in self._runs if plan not in but]:
            self._close(plan)

    # --- racing -------------------------------------------------------------------------------------------

    def complexity(self, plan: Plan) -> float:
        """Return how complicated a plan is for what is raced: :func:`~castwise.lab.search.axes.complexity`."""
        return complexity(plan, self._served)

    def halve(self, plans: Sequence[Plan], keep: int = 6, rounds: int = 3, heats: int = HEATS) -> list[Plan]:
        """Race plans and fp32 in several heats, and remove the clearly slower plans after each heat.

        In a heat, every plan runs interleaved rounds: ``rounds`` in the first heat, and two more in each later heat. The race
        ends after ``heats`` heats, or as soon as at most ``keep`` plans are left.

        Returns:
            The remaining plans, fastest first, including fp32.

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
        """Return how fast a plan was relative to the leader in its best round.

        If no round had both plans, both are compared with fp32.
        """
        together = self._ratios(plan, leader)
        if together:
            return max(together)
        own, ahead = self._ratios(plan), self._ratios(leader)
        return max(own, default=math.inf) / statistics.median(ahead) if ahead else math.inf

    def _not_faster(self, plan: Plan, leader: Plan) -> Fate:
        ratio = self.ratio(plan, leader)
        said = (
            f"takes {1 / ratio.value:.2f} times as long as {in_words(leader)} in the race"
            if ratio
            else f"in the race it gained less over fp32 than {in_words(leader)}"
        )
        return Fate("worse", f"not faster: {said}", "race")

    def run(
        self, plans: Sequence[Plan], rounds: int, *, admit_late: bool = True, until: float | None = None
    ) -> None:
        """Run interleaved rounds: in each round, fp32 and every plan run one block of steps.

        With ``admit_late``, plans that have not run yet may join after the deadline. The first round always runs. No later
        round begins after ``until``, which defaults to the deadline.

        Raises:
            Exception: An error under fp32, because every plan is compared with fp32. An error under another plan is raised too,
                unless the error means that the plan cannot run.
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
        """Run interleaved rounds of two plans, and time only the optimizer's part of each step.

        On an accelerator whole steps are timed: the optimizer's time on the host costs nothing if the host would otherwise wait
        for the device.

        Args:
            one: A plan.
            other: Another plan.
            rounds: The largest number of rounds.
            least: Number of rounds that run even after ``until``.
            until: Clock time after which only the first ``least`` rounds may begin.
            last: Clock time after which no round begins at all, except the first.
            enough: Called after each round with the times of both plans; returns whether to stop. All ranks must return the
                same.

        Returns:
            For each plan the median seconds of the optimizer's part, by round. Both are empty if one of the plans cannot run.

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
        """Whether a plan is left out because the time ran out; never true of fp32 or of a plan that was timed before."""
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
        """Run the first steps of plans, which build kernels and optimizer state; plans that are far too slow leave the race."""
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
        def build() -> None:  # a run that another rank could not build is closed on all ranks
            run = self.kind(self._workload, plan, self._device, self._seed, self._initial)
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
            self.entries[plan].losses = []  # cut short, possibly at different steps on different ranks

    def _close(self, plan: Plan) -> None:
        run = self._runs.pop(plan, None)
        if run is not None:
            self.entries[plan].losses = run.losses
            with contextlib.suppress(Exception):  # closing a run that failed half way may fail too
                run.close()

    def _heats(self, plans: Sequence[Plan]) -> Iterator[list[Plan]]:
        """Yield the plans in groups that fit into memory together; in one group if all fit."""
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
        """Return how many times as fast as ``over`` a plan was, for each round that both ran."""
        both = paired(self.entries[over].lap, self.entries[plan].lap)
        return [before / after for before, after in zip(*both, strict=True)]

    def ratio(self, plan: Plan, over: Plan = BASELINE) -> stats.Ratio | None:
        """Return the speed of a plan relative to another plan, over the rounds that both ran; None if there are none."""
        if plan not in self.entries or over not in self.entries:
            return None
        return speedup(self.entries[over].lap, self.entries[plan].lap)

    def times_as_fast(self, plan: Plan, over: Plan) -> float:
        """Return the speed of a plan relative to another plan as a number; NaN if either was not timed.

        If no round had both plans, the ratio of their speeds relative to fp32 is returned.
        """
        if (together := self.ratio(plan, over)) is not None:
            return together.value
        own, other = (self.ratio(one) for one in (plan, over))
        return own.value / other.value if own is not None and other is not None else math.nan

    def order(self, plans: Sequence[Plan]) -> list[Plan]:
        """Return the plans sorted by their speed relative to fp32, fastest first."""

        def speed(plan: Plan) -> float:
            return 1.0 if plan == BASELINE else statistics.median(self._ratios(plan) or [0.0])

        return sorted(plans, key=speed, reverse=True)
