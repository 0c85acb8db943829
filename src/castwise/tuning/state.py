"""The search: what is fast is raced, what is fast is tested, and the fastest sound plan is tested again on fresh data.

1. *Checks.* fp32 gradients of a few microbatches: a loss that is not differentiable, data with NaN and a loss that is
   not deterministic are found here.
2. *Costs.* Every unique module is timed alone in each format, casts included. A format that is faster nowhere is
   dropped; units that lose by the low format become regions of further candidates.
3. *Race.* Every combination of the whole-step axes, and of the regions, on real steps by successive halving.
4. *Parity.* The finalists' gradients; what fails is traced to its source and repaired with regions in fp32.
5. *Final.* Sound plans once more, for longer; a tie goes to the simpler one.
6. *Verification.* The winner's gradients on fresh batches; where it fails there, the next one.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from castwise.casting.trees import map_tensors
from castwise.errors import CastwiseError, StateError
from castwise.formats import LOW
from castwise.measure.memory import measure_memory
from castwise.measure.steps import build_model, to_device
from castwise.numerics.batches import same_batch
from castwise.numerics.isolation import seed_all, undisturbed
from castwise.numerics.parity import FLOOR, ParityResult, ParityTest, is_adam, with_measured_scale
from castwise.numerics.probes import Prober, unfit
from castwise.numerics.updates import LOST, lost_updates
from castwise.plan import PRESETS, Plan
from castwise.tuning.axes import (
    FORMATS,
    name_of,
    numerics_of,
    simplicity,
    whole_step_plans,
    with_operators_as_is,
)
from castwise.tuning.contest import Contest
from castwise.tuning.evidence import Stage, Verification
from castwise.tuning.exempt import NumericsSearch, Repair
from castwise.tuning.trials import training_trials
from castwise.tuning.unit_costs import Cost, losing_units, measure_costs
from castwise.tuning.units import Unit, exempt, find_units, operators_used
from castwise.workload import Workload

__all__ = ["Search", "Settings"]

FP32 = PRESETS["fp32"]
AUTOCAST = PRESETS["bf16-mixed"]
FINALISTS = 5
FINAL_ROUNDS = 20
MICROBATCHES = 8
SLOWER = 1.15
"""A format is dropped before the race if its regions' times add up to this many times fp32's: what happens between regions
can still make up for less."""
WEIGHING_S = 8.0
"""With less time left than this no further process is started to measure memory."""
LEAST_S = 5.0
"""A search that has less time than this cannot say anything."""

Say = Callable[[str, str, int, int], None]


@dataclass(frozen=True)
class Settings:
    """What a user asks of a search.

    Attributes:
        formats: Allowed ones, as ``axes.check_formats`` returns them.
        goal: ``time``, ``memory`` or ``numerics``.
        accumulate: Microbatches accumulated per update.
        world_size: Data-parallel ranks.
        compile: Whether the model will be compiled.
        warmup_steps: fp32 steps before the second look at the numerics; 0 for none.
        verify_steps: Steps of the training runs at the end; 0 for none.
        verify_seeds: How many pairs of them.
        budget_s: Seconds it may take; what takes part in the race adapts to it.
        memory: Whether to measure peak memory, a process per plan.
        seed: Of everything.
    """

    formats: tuple[str, ...] = ("fp32", "bf16", "fp16")
    goal: str = "time"
    accumulate: int = 1
    world_size: int = 1
    compile: bool = False
    warmup_steps: int = 0
    verify_steps: int = 0
    verify_seeds: int = 8
    budget_s: float = 170.0
    memory: bool = True
    seed: int = 0


@dataclass
class Search:
    """One search, with all that it has found so far.

    Attributes:
        workload: What is tuned.
        spec: How another process finds it, where it can.
        device: Where.
        settings: What was asked for.
        say: Told the stage, what is tried, how much is done of how much.
        units: The model's regions.
        costs: Of them, by pattern.
        contest: The race; None for ``goal="numerics"``.
        findings: Parity per plan's numerics.
        reasons: Why a plan was rejected, where the race does not say.
        kept: Why the chosen plan keeps units in fp32.
        peaks: Peak bytes per plan.
        stages: What was done.
        notes: What a reader should know.
        chosen: The plan, once there is one that is known to be sound: fp32 at first.
    """

    workload: Workload
    device: torch.device
    settings: Settings
    spec: str | None = None
    say: Say = lambda _stage, _subject, _done, _total: None
    units: tuple[Unit, ...] = ()
    costs: dict[str, Cost] = field(default_factory=dict)
    contest: Contest | None = None
    test: ParityTest | None = None
    numerics: NumericsSearch | None = None
    findings: dict[Plan, ParityResult] = field(default_factory=dict)
    reasons: dict[Plan, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    peaks: dict[Plan, int] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    chosen: Plan = FP32
    verified: ParityResult | None = None
    verification: Verification | None = None
    complete: bool = False

    def __post_init__(self) -> None:
        self._start = time.monotonic()

    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.settings.budget_s - (time.monotonic() - self._start)

    def known(self) -> str:
        """What is known so far, in a few words."""
        if self.contest is None:
            return ""
        timed = [plan for plan, entry in self.contest.entries.items() if entry.rounds]
        if len(timed) < 2:
            return ""
        leader = self.contest.order(timed)[0]
        ratio = self.contest.ratio(leader)
        return f"fastest so far {name_of(leader)}, {ratio.value:.2f}x fp32" if ratio is not None else ""

    # --- the whole ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Search; on an exception, KeyboardInterrupt among them, what has been found so far stays.

        Raises:
            CastwiseError: The workload cannot be tuned: it fails in fp32, or there is no time.
        """
        if self.settings.budget_s < LEAST_S:
            raise StateError(
                f"tune(budget_s={self.settings.budget_s:g}): no time for anything; a search needs {LEAST_S:g} s at the very "
                "least, and a minute or two to be worth its answer"
            )
        with undisturbed():
            self._check()
            if self.settings.goal == "numerics":
                self._numerics_only()
            else:
                self._fastest()
            if self.settings.verify_steps and self.chosen != FP32:
                with self._stage("training runs"):
                    self._train()
        self.complete = self.left_s() > 0 or self.settings.goal == "numerics" or self.verified is not None

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start, passes = time.monotonic(), self._passes()
        steps = self.contest.steps if self.contest is not None else 0
        self._name = name
        self.say(name, "", 0, 1)
        try:
            yield
        finally:
            after = self.contest.steps if self.contest is not None else 0
            self.stages.append(Stage(name, time.monotonic() - start, self._passes() - passes, after - steps))
            self.say(name, "", 1, 1)

    def _passes(self) -> int:
        return self.test.prober.passes if self.test is not None else 0

    def _tell(self, subject: str) -> None:
        """A pass or probe begins; a search that is out of time ends at the next of these."""
        self.say(self._name, subject, 0, 1)

    # --- checks -------------------------------------------------------------------------------------------

    def _check(self) -> None:
        settings = self.settings
        with self._stage("reference"):
            model = build_model(self.workload, self.device, settings.seed)
            batches = iter(self.workload.batches(settings.seed))
            low = [name for name in settings.formats if name in LOW]
            call = f"tune({self.workload.name!r})"
            adam = is_adam(self.workload.optimizer(model.parameters()))
            prober = Prober(
                model, self.workload.loss, batches, self.device, seed=settings.seed, call=call,
                dither="fp16" if low == ["fp16"] else "bf16",
            )  # fmt: skip
            self._model = model
            self.test = ParityTest(prober, settings.accumulate * settings.world_size, adam)
            self._tell(f"fp32 gradients of {MICROBATCHES} batches, and fp32 against itself")
            self.test.reference(MICROBATCHES)
            micros = prober.micros
            if all(same_batch(micros[0].batch, micro.batch) for micro in micros[1:]):
                self.notes.append(
                    "Every batch is the same, so there is no noise of data: gradients are held against the signal alone, and "
                    "fresh batches confirm nothing new."
                )
            if self.test.repeat > 0.0:
                self.notes.append(
                    f"The loss is not deterministic: the same pass repeated in fp32 differs by {self.test.repeat:.2g} of an "
                    "update. Where a plan's own difference is comparable it is called undecided."
                )
            seed_all(settings.seed)
            self.units = find_units(prober.model, lambda: self.workload.loss(prober.model, micros[0].batch))
            self.numerics = NumericsSearch(self.test, self.units, self._tell)
            self._images = any(t.dim() == 4 for t in _floating(micros[0].batch)) or any(
                u.kind.startswith(("Conv2d", "ConvTranspose2d")) for u in self.units
            )

    # --- goal: numerics -----------------------------------------------------------------------------------

    def _numerics_only(self) -> None:
        (low,) = self.settings.formats
        plan = self._scaled(PRESETS[f"{low}-mixed"])
        with self._stage("all low"):
            found = self._find(plan)
        if found is not None and found.verdict == "pass":
            sound = plan
        else:
            self.reasons[plan] = self._why(plan, found)
            with self._stage("regions"):
                sound = self._repaired(plan, found)
        for attempt in range(3):
            with self._stage("verification"):
                assert self.numerics is not None
                result = self.numerics.verify(sound)
            self.findings[sound] = result
            if result.verdict == "pass":
                self.chosen, self.verified = sound, result
                return
            self.reasons[sound] = self._why(sound, result)
            if attempt == 2:
                break
            with self._stage("regions"):
                sound = self._widened(plan, sound, result)
        self.notes.append(f"No set of regions made {low} pass; the plan is fp32.")
        self.chosen, self.kept = FP32, {}

    def _repaired(self, plan: Plan, found: ParityResult | None) -> Plan:
        assert self.numerics is not None
        repair: Repair = self.numerics.repair(plan, found, reserve=2 * MICROBATCHES)
        self.kept = dict(repair.kept)
        if repair.result is not None:
            self.findings[repair.plan] = repair.result
        return repair.plan

    def _widened(self, base: Plan, plan: Plan, result: ParityResult) -> Plan:
        """Keep one more unit in fp32: the one whose parameters show the most damage, then half of all."""
        kept = set(self.kept)
        worst = [region.path for region in result.worst(len(result.regions))]
        for path in worst:
            unit = next((u for u in self.units if path in u.paths and u.pattern not in kept), None)
            if unit is not None:
                self.kept[unit.pattern] = "damage on fresh batches shows most in its parameters"
                break
        else:
            rest = [u.pattern for u in self.units if u.pattern not in kept]
            self.kept.update(dict.fromkeys(rest[: max(1, len(rest) // 2)], "the plan fails without it"))
        return exempt(base, self.units, self.kept)

    # --- goals: time and memory ---------------------------------------------------------------------------

    def _fastest(self) -> None:
        settings = self.settings
        optimizer = self.workload.optimizer(self._model.parameters())
        plans, dropped = whole_step_plans(
            settings.formats, self.device, self._model, optimizer, has_images=self._images, goal=settings.goal
        )
        for name, reason in dropped.items():
            if (
                name != "tf32" or settings.formats != FORMATS
            ):  # nobody who allows all formats asks for that one
                self.notes.append(f"{name}: {reason}")
        with self._stage("costs"):
            plans = self._by_costs(plans)
        deadline = self._start + (0.7 if settings.goal == "time" else 1.2) * settings.budget_s
        contest = Contest(
            self.workload, self.device, seed=settings.seed, compile=settings.compile, deadline=deadline,
            on_progress=lambda what, done, total: self.say(self._name, what, done, total),
        )  # fmt: skip
        with contest:
            self.contest = contest
            if settings.goal == "memory":
                with self._stage("memory"):
                    self._weigh(plans)
                left = sorted((p for p in plans if p in self.peaks), key=self._weight) or [FP32]
            else:
                with self._stage("race"):
                    left = contest.halve(plans, keep=FINALISTS)
                    left = self._with_operators(contest, left)
            with self._stage("parity"):
                sound = self._sound(left)
            if settings.goal == "time":
                sound = self._with_lossless(contest, sound)
                with self._stage("final"):
                    contest.final(sound, FINAL_ROUNDS, beside=(AUTOCAST,))
                order = [contest.winner(sound)] if sound else []
                order += [p for p in contest.order(sound) if p not in order]
            else:
                order = sorted(sound, key=self._weight)
            with self._stage("verification"):
                self._choose(order)
            if settings.goal == "memory":
                with self._stage("race"):
                    contest.run(list(dict.fromkeys([self.chosen, *order[:2]])), FINAL_ROUNDS // 2)
        if settings.warmup_steps and numerics_of(self.chosen) != FP32:
            with self._stage("second look"):
                self._second_look()
        if settings.memory and settings.goal == "time" and self.left_s() > 10.0:
            with self._stage("memory"):
                self._weigh(list(dict.fromkeys([FP32, AUTOCAST, self.chosen])))

    def _with_lossless(self, contest: Contest, sound: list[Plan]) -> list[Plan]:
        """The sound plans and the fastest that computes in fp32: what is repaired can be slower than that."""
        lossless = [p for p in contest.entries if numerics_of(p) == FP32 and contest.entries[p].rounds]
        fastest = contest.order(lossless)[0]
        if fastest in sound:
            return sound
        contest.entries[fastest].reason = ""
        return [*sound, fastest]

    def _with_operators(self, contest: Contest, left: list[Plan]) -> list[Plan]:
        """Race the leaders with norms, softmax and losses that follow their inputs."""
        assert self.test is not None
        model, batch = self.test.prober.model, self.test.prober.micros[0].batch
        seed_all(self.settings.seed)
        used = operators_used(lambda: self.workload.loss(model, batch))
        variants = [with_operators_as_is(plan, used, self.device.type) for plan in left[:2]]
        new = [plan for plan in variants if plan is not None]
        return contest.halve([*left, *new], keep=FINALISTS + 1, rounds=4) if new else left

    def _by_costs(self, plans: Sequence[Plan]) -> list[Plan]:
        """Drop formats that are faster nowhere, and add candidates with the losing units in fp32."""
        settings = self.settings
        assert self.test is not None
        # a batch may be 4-D, an attention mask for one, where no candidate is channels_last
        channels_last = any(plan.memory_format == "channels_last" for plan in plans)
        layouts = ("channels_last",) if channels_last else ("as_is",)
        low = [name for name in settings.formats if name in LOW]
        self.costs = measure_costs(
            self.test.prober.model, self.workload.loss, self.test.prober.micros[0].batch, self.units, low, self.device,
            channels_last=channels_last, budget_s=min(12.0, 0.1 * settings.budget_s), on_progress=self._tell,
        )  # fmt: skip
        out = list(plans)
        for name in low:
            reason = not_faster(name, low, self.costs) if settings.goal == "time" else ""
            hopeless = [pattern for pattern, cost in self.costs.items() if name in cost.reasons]
            if settings.goal == "memory" and hopeless:
                reason = f"{hopeless[0]} {self.costs[hopeless[0]].reasons[name]}"
            if reason:
                self.notes.append(f"{name} was dropped before the race: {reason}.")
                for plan in out:
                    if plan.compute == name and plan != AUTOCAST:
                        self.reasons[self._scaled(plan)] = f"not faster: {reason}"
                out = [plan for plan in out if plan.compute != name or plan == AUTOCAST]
                continue
            if settings.goal == "memory":
                continue
            losers = losing_units(name, self.costs)
            if hopeless:  # no whole step of it is ever run
                for plan in out:
                    if plan.compute == name:
                        why = f"{hopeless[0]} {self.costs[hopeless[0]].reasons[name]}"
                        self.reasons[self._scaled(plan)] = f"not faster: {why}"
                out = [plan for plan in out if plan.compute != name]
            sets = {tuple(losers), tuple(losers[: max(len(hopeless), len(losers) // 2)])} - {()}
            out += [
                exempt(plan, self.units, patterns)
                for patterns in sorted(sets)
                for plan in plans
                if plan.compute == name and plan.rules != "none" and plan.memory_format == layouts[0]
            ]
        if settings.goal == "memory" and any(plan.optimizer == "fused" for plan in out):
            # the fused kernel never holds more than the loop it replaces
            out = [plan for plan in out if plan.optimizer == "fused" or plan == FP32]
        return [self._scaled(plan) for plan in sorted(out, key=simplicity)]

    def _sound(self, plans: Sequence[Plan]) -> list[Plan]:
        """Those of the plans whose gradients pass, as they are or with more regions in fp32."""
        assert self.numerics is not None
        assert self.contest is not None
        sound: list[Plan] = []
        for plan in plans:
            if plan == FP32:
                sound.append(plan)
                continue
            if (
                self.numerics.passes + MICROBATCHES + 2 * MICROBATCHES > 80
                and numerics_of(plan) not in self.findings
            ):
                self.reasons[plan] = "not tested: the passes for numerics were spent on faster plans"
                continue
            found = self._find(plan)
            if found is not None and found.verdict == "pass":
                sound.append(plan)
                continue
            self.reasons[plan] = self._why(plan, found)
            if plan.params != "fp32" or self.numerics.passes + 2 * MICROBATCHES + FLOOR > 80 or sound:
                continue  # a sound plan that is faster is there already, or its like with fp32 parameters is repaired
            repaired = self._repaired(plan, found)
            if 2 * len(self.kept) > len(self.units):
                self.reasons[plan] += (
                    f"; {len(self.kept)} of {len(self.units)} regions would have to stay in fp32"
                )
                self.kept = {}
                continue
            if self.findings.get(repaired) is not None and self.findings[repaired].verdict == "pass":
                sound.append(repaired)
        return sound or [FP32]

    def _choose(self, order: Sequence[Plan]) -> None:
        assert self.numerics is not None
        for plan in order:
            if numerics_of(plan) == FP32:
                self.chosen, self.kept = plan, {}
                return
            result = self.numerics.verify(plan)
            lost = self._lost(plan)
            if result.verdict == "pass" and not (lost is not None and lost > LOST):
                self.chosen, self.verified = plan, result
                if not any(region.compute == "fp32" for region in plan.regions):
                    self.kept = {}
                return
            self.reasons[plan] = (
                f"rounding drops {lost:.0%} of its updates"
                if lost is not None and lost > LOST
                else f"on fresh batches: {self._why(plan, result)}"
            )
        self.chosen = FP32

    def _lost(self, plan: Plan) -> float | None:
        batches = iter(self.workload.batches(self.settings.seed))
        return lost_updates(
            self._model,
            self.workload.loss,
            batches,
            self.workload.optimizer,
            plan,
            self.device,
            self.settings.seed,
        )

    def _second_look(self) -> None:
        """The chosen plan's gradients once more after some fp32 steps: trained weights differ from fresh ones."""
        settings = self.settings
        assert self.test is not None
        seed_all(settings.seed)
        model = build_model(self.workload, self.device, settings.seed, self._model.state_dict())
        optimizer = self.workload.optimizer(model.parameters())
        batches = iter(self.workload.batches(settings.seed))
        for step in range(settings.warmup_steps):
            self.say(self._name, "fp32 steps", step, settings.warmup_steps)
            optimizer.zero_grad()
            self.workload.loss(model, to_device(next(batches), self.device)).backward()
            optimizer.step()
        optimizer.zero_grad()
        prober = Prober(
            model, self.workload.loss, batches, self.device, seed=settings.seed, call=self.test.prober.call
        )
        warm = ParityTest(prober, self.test.per_update, self.test.adam)
        warm.reference(MICROBATCHES)
        search = NumericsSearch(warm, self.units, self._tell)
        result = search.find(self.chosen)
        if result.verdict != "pass":
            before = self.chosen
            self.reasons[before] = f"after {settings.warmup_steps} steps: {self._why(before, result)}"
            repair = search.repair(before, result, reserve=2 * MICROBATCHES)
            result = search.verify(repair.plan)
            self.chosen, self.kept = (
                (repair.plan, dict(repair.kept)) if result.verdict == "pass" else (FP32, {})
            )
        self.findings[self.chosen] = result
        self.verified = result
        self.notes.append(
            f"A second look after {settings.warmup_steps} fp32 steps: {result.verdict}; {result.reason}."
        )

    # --- parts --------------------------------------------------------------------------------------------

    def _scaled(self, plan: Plan) -> Plan:
        assert self.test is not None
        return with_measured_scale(plan, self.test.range)

    def _find(self, plan: Plan) -> ParityResult | None:
        """The finding on the search's microbatches, once per numerics; None where the plan cannot run."""
        assert self.numerics is not None
        key = numerics_of(plan)
        if key not in self.findings:
            try:
                self.findings[key] = self.numerics.find(key)
            except Exception as error:
                self.reasons[plan] = unfit(error)
                return None
        return self.findings[key]

    def _why(self, plan: Plan, found: ParityResult | None) -> str:
        if found is None:
            return self.reasons.get(plan, "it cannot run")
        return found.reason

    def _weigh(self, plans: Sequence[Plan]) -> None:
        for number, plan in enumerate(plans):
            if plan in self.peaks:
                continue
            if self.left_s() < WEIGHING_S:
                self.notes.append(
                    f"Peak memory of {len(plans) - number} plans was not measured: the time was spent."
                )
                break
            self.say(self._name, name_of(plan), number, len(plans))
            try:
                memory = measure_memory(
                    self.spec or self.workload, plan, self.device, seed=self.settings.seed, inference=False
                )
            except (CastwiseError, OSError) as error:
                self.notes.append(f"{name_of(plan)}: {error}")
                continue
            if memory.training_peak_bytes is not None:
                self.peaks[plan] = memory.training_peak_bytes

    def _weight(self, plan: Plan) -> tuple[float, int]:
        """Peak memory to within a hundredth, then simplicity."""
        peak = self.peaks.get(plan)
        return (math.inf if peak is None else round(math.log(peak) * 100), simplicity(plan))

    def _train(self) -> None:
        self.verification = training_trials(
            self.workload, self.chosen, self.device, steps=self.settings.verify_steps,
            seeds=self.settings.verify_seeds, first_seed=self.settings.seed,
            on_progress=lambda done, total: self.say(self._name, "pairs of training runs", done, total),
        )  # fmt: skip
        if self.verification.verdict == "worse":
            self.reasons[self.chosen] = (
                f"its loss after {self.settings.verify_steps} steps is worse than fp32's by "
                f"{self.verification.difference:.2g}"
            )
            self.notes.append(
                f"{name_of(self.chosen)} passed the gradient test and failed in training; the plan is fp32."
            )
            self.chosen, self.kept, self.verified = FP32, {}, None


def _floating(batch: object) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            found.append(tensor)
        return tensor

    map_tensors(keep, batch)
    return found


def not_faster(name: str, formats: Sequence[str], costs: dict[str, Cost]) -> str:
    """Why a low format cannot be part of the fastest plan, by the costs of units alone.

    Args:
        name: The format.
        formats: All low formats in the running.
        costs: Of the units.

    Returns:
        A clause, empty where it may be.
    """
    timed = {pattern: cost for pattern, cost in costs.items() if name in cost.times_s or name in cost.reasons}
    if not timed:
        return ""

    def total(low: str) -> float:
        return sum(
            min(cost.times_s.get(low, math.inf), cost.bordered_s.get(low, cost.times_s["fp32"]))
            for cost in timed.values()
        )

    fp32 = sum(cost.times_s["fp32"] for cost in timed.values())
    pattern, cost = max(timed.items(), key=lambda item: item[1].times_s["fp32"])
    slow = (
        cost.reasons.get(name)
        or f"takes {cost.times_s[name] / cost.times_s['fp32']:.1f} times as long as fp32"
    )
    if total(name) > SLOWER * fp32:
        return f"it is no faster than fp32, by regions alone; {pattern} {slow}"
    better = [other for other in formats if other != name and total(other) < 0.9 * total(name)]
    if better and any(name in cost.reasons for cost in timed.values()):
        return f"{better[0]} is faster in every region that counts; in {name} {pattern} {slow}"
    return ""
