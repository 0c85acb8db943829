"""``parity``: are a plan's gradients as good as fp32's?

The plan's gradients are compared with fp32's at the same dithered weights, data and random draws, over several
microbatches. The error that the plan adds to one update is divided by the update's own expected square, which includes the noise
of the data (:mod:`castwise.lab.parity.damage`). Below ``PASS`` it does not show in training; above ``FAIL`` it does.

If the optimizer is of Adam's kind, the test is repeated in units of its steps, in which parameters with small
gradients count as much as others. Parameters whose fp32 gradient is only rounding error (the bias of a convolution
before BatchNorm, the key bias of attention) are excluded there: an optimizer's step from them is meaningless in fp32
too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from castwise.core.casting import default_device_type
from castwise.core.plans.formats import LOW
from castwise.core.plans.plan import Plan, as_plan
from castwise.core.plans.words import in_words
from castwise.core.session.process import find_device
from castwise.errors import WorkloadError, check_count
from castwise.lab.parity.batches import endless, period
from castwise.lab.parity.damage import (
    ADAM_PASS,
    FAIL,
    PASS,
    Estimate,
    Grams,
    estimate,
    quick_estimate,
    severity,
    share,
)
from castwise.lab.parity.gradient_range import GradientRange
from castwise.lab.parity.probes import REFERENCE, Probe, Prober
from castwise.lab.parity.states import Optimizer, StateTest
from castwise.lab.parity.updates import Training, UpdateLoss, is_needed, update_loss
from castwise.lab.parity.verdicts import LEAST, Verdict, compare, goes_on, lasts, needed, passes
from castwise.lab.passes.choices import Choice
from castwise.lab.passes.isolation import undisturbed, unmoved, unspoilt
from castwise.lab.workloads.workload import users_code

if TYPE_CHECKING:
    from rich.console import RenderableType

MICROBATCHES = 8
FLOOR = 4
MOST = 4
"""Maximum number of microbatches, as a multiple of the initial number."""
DEAD = 1e-4
"""A parameter has no gradient if its fp32 gradient differs between fp32 runs by more than this share of its square."""
BROKEN = Estimate(math.inf, math.inf, math.inf, *[math.nan] * 6)
"""The estimate of a probe that stopped at its first microbatch because a gradient was not finite."""
COMPARABLE = 0.3
"""Maximum difference between fp32 runs, as a share of the plan's difference, at which the plan can be judged."""


@dataclass(frozen=True)
class RegionParity:
    """The contribution of one module's own parameters to the damage.

    Attributes:
        path: Path of the module.
        bias: Its share of the total damage that is the same in every batch.
        noise: Its share that averages out over batches.
        data_noise: The variance of its gradient over batches, in the same unit.
        adam: Bias plus noise in units of Adam's steps; None if not computed or if the gradient
            is only rounding error.
    """

    path: str
    bias: float
    noise: float
    data_noise: float
    adam: float | None = None


@dataclass(frozen=True)
class ParityResult:
    """The result of the gradient parity test.

    Attributes:
        plan: The plan tested.
        verdict: ``pass``, ``fail`` or ``undecided``.
        reason: Why, in a sentence.
        damage: The error added to one update over the update's expected square.
        adam: The damage in units of Adam's steps; None for other optimizers.
        regions: One entry for each module with direct parameters.
        floor: Damage of fp32 against fp32 with different rounding.
        repeat: Damage of fp32 against an identical second run: above 0 if the loss is not deterministic.
        lost_updates: For plans that store parameters low without masters, the share of an optimizer's update that rounding
            loses: the largest over the optimizer's groups and over steps early and late in a training.
        loss_scale: Loss scale of the gradients, None without one.
        microbatches: Number of microbatches.
        per_update: Microbatches averaged per update.
        passes: Number of forward/backward passes.
        strayed: Number of random draws that could not be repeated.
        more: Whether more microbatches may change the verdict.
        stopped: Buffers and untrained parameters that do not change under the plan as they do in fp32.
        choices: Operators whose integer or boolean results differ from fp32's, wrong ones first; not tested after a failure.
        note: A further remark, in a sentence: up to which sequence position the plan was tested.
    """

    plan: Plan
    verdict: Verdict
    reason: str
    damage: Estimate
    adam: Estimate | None
    regions: tuple[RegionParity, ...]
    floor: float
    repeat: float
    lost_updates: float | None = None
    loss_scale: float | None = None
    microbatches: int = MICROBATCHES
    per_update: int = 1
    passes: int = 0
    strayed: int = 0
    more: bool = False
    stopped: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()
    note: str = ""

    def __bool__(self) -> bool:
        """Whether the plan passed."""
        return self.verdict == "pass"

    @property
    def passed(self) -> bool:
        """Whether the verdict is ``pass``."""
        return self.verdict == "pass"

    @property
    def severity(self) -> float:
        """Damage divided by the threshold below which a plan passes; below 1, training shows no difference."""
        return severity(self.damage.value, None if self.adam is None else self.adam.value)

    @property
    def biased(self) -> bool:
        """Whether a bias is known that outlasts the noise of the data: no short training run can show its harm."""
        return not lasts(self.damage, self.adam)

    @property
    def needed(self) -> int | None:
        """About how many microbatches would decide, if more of them would let the plan pass; else None."""
        return needed(self.damage, self.adam, self.microbatches) if self.verdict == "undecided" else None

    @property
    def next_step(self) -> str:
        """What may decide an undecided result, in a sentence; empty for others."""
        if self.verdict != "undecided":
            return ""
        if self.needed is not None or self.more:
            first = math.ceil((self.needed or 2 * MOST * self.microbatches) / MOST)
            return f"Try: microbatches={first}, which tests up to {MOST * first} microbatches."
        where = next((region.path for region in self.worst(1)), "")
        fp32 = f"; a plan that keeps {where} in fp32" if where else ""
        return (
            "More microbatches would not decide. Try: the remedy in the reason; training runs (`castwise tune --verify-steps`)"
            f"{fp32}."
        )

    @property
    def lines(self) -> tuple[float, float | None]:
        """The thresholds for a pass: of the plain damage, and of the damage in Adam's units (None if not computed)."""
        return PASS, None if self.adam is None else ADAM_PASS

    @property
    def wrong_choices(self) -> tuple[Choice, ...]:
        """The choices that differ from fp32's by more than rounding explains."""
        return tuple(choice for choice in self.choices if choice.is_wrong)

    @property
    def owners(self) -> tuple[str, ...]:
        """Paths of the modules whose state or choices fail, the worst first."""
        state = [name.rpartition(".")[0] for name in self.stopped]
        return tuple(dict.fromkeys([*state, *(choice.path for choice in self.wrong_choices)]))

    def worst(self, count: int = 5) -> tuple[RegionParity, ...]:
        """The modules that contribute most to the damage, the worst first."""

        def weight(region: RegionParity) -> float:
            return (
                math.inf if math.isnan(region.bias) else max(region.bias + region.noise, region.adam or 0.0)
            )

        return tuple(sorted(self.regions, key=weight, reverse=True)[:count])

    def table(self) -> RenderableType:
        """The result and the worst modules, for ``rich.print``."""
        from castwise.report.show import table

        said = {
            "kind": "parity",
            "words": in_words(self.plan),
            "verdict": self.verdict,
            "reason": self.reason,
            "note": self.note,
            "next": self.next_step,
        }
        choices = [choice.as_dict() for choice in self.choices]
        return table(
            said | {"modules": [dataclasses.asdict(region) for region in self.worst()], "choices": choices}
        )


@dataclass
class ParityTest:
    """The steps of the test, for callers that judge many plans against one reference.

    Attributes:
        per_update: Microbatches per update.
        adam: Whether to test in units of Adam's steps too.
        optimizer: The user's optimizer, for the few steps of the state test; without an optimizer, these steps change
            no weight.
        range: Observed range of the reference's gradients.
        floor: Damage of fp32 against fp32 with different rounding.
        repeat: Damage of fp32 against an identical repetition.
        dead: Parameters whose fp32 gradient is only rounding error.
    """

    prober: Prober
    per_update: int = 1
    adam: bool = False
    optimizer: Optimizer | None = None
    range: GradientRange = field(default_factory=GradientRange)
    floor: float = 0.0
    repeat: float = 0.0
    dead: frozenset[str] = frozenset()
    _weights: tuple[int, list[Tensor]] = (0, [])  # number of microbatches, and the weights computed from them
    _whole: tuple[int, tuple[Estimate, Estimate | None]] | None = None
    _count: int = 0

    @functools.cached_property
    def _states(self) -> StateTest:
        return StateTest(self.prober, self.optimizer)

    def reference(self, count: int = MICROBATCHES, observed: int = 2) -> None:
        """Run fp32 on ``count`` microbatches, observing every module on ``observed`` of them, then run it against itself.

        Raises:
            WorkloadError: All gradients are zero.
        """
        if observed:
            self.prober.extend(min(observed, count), self.range)
        self.prober.extend(count - min(observed, count))
        if not any(bool(g.any()) for micro in self.prober.micros for g in micro.gradients):
            raise WorkloadError(
                f"{self.prober.call}: in fp32 every gradient is 0 on all of {count} microbatches, so there is nothing to compare; "
                "the loss must depend on the parameters that are trained"
            )
        for micro in self.prober.micros:
            self.range.see_parameters(self.prober.names, micro.gradients)
        self._count = len(self.prober.micros)
        grams = self.prober.grams(self.prober.floor(range(min(FLOOR, count))))
        whole = Grams.total(grams.values())
        self.dead = frozenset(
            name
            for name, g in grams.items()
            if g.error.trace() > DEAD * g.signal.trace() or not g.signal.trace() > 0.0
        )
        self.floor = estimate(whole, self.per_update).value
        again = Grams.total(self.prober.grams(self.prober.repeat()).values())
        square = float(whole.signal.trace()) / whole.count
        self.repeat = float(again.error.trace()) / square if square else 0.0

    def quick(self, probe: Probe) -> tuple[float, float | None]:
        """The damage of a plan from at least two microbatches, relative to the reference's whole update.

        Plain, and in units of Adam's steps or None.
        """
        whole, adam_whole = self._wholes()
        plain = quick_estimate(Grams.total(self.prober.grams(probe).values()), whole, self.per_update)
        if adam_whole is None:
            return plain, None
        return plain, quick_estimate(Grams.total(self._in_steps(probe).values()), adam_whole, self.per_update)

    def _in_steps(self, probe: Probe) -> dict[str, Grams]:
        """Inner products in units of Adam's steps, without parameters that have no gradient; empty if not asked for."""
        if not self.adam:
            return {}
        drawn = len(self.prober.micros)
        if self._weights[0] != drawn:  # from few, elements that are 0 by chance would dominate
            self._weights = drawn, self.prober.preconditioner()
        grams = self.prober.grams(probe, self._weights[1])
        return {name: g for name, g in grams.items() if name not in self.dead}

    def _wholes(self) -> tuple[Estimate, Estimate | None]:
        """Estimates of the whole update, plain and in units of Adam's steps, from the first reference."""
        drawn = len(self.prober.micros)
        if self._whole is not None and self._whole[0] == drawn:
            return self._whole[1]
        count = range(self._count)
        everything = Probe(
            REFERENCE, indices=list(count), errors=[self.prober.micros[i].gradients for i in count]
        )
        plain = estimate(Grams.total(self.prober.grams(everything).values()), self.per_update)
        live = self._in_steps(everything).values()
        whole = plain, estimate(Grams.total(live), self.per_update) if live else None
        self._whole = drawn, whole
        return whole

    def least(self) -> int:
        """Minimum number of microbatches to pass; all of them, if the batches repeat sooner."""
        return min(LEAST, period([micro.batch for micro in self.prober.micros]) or LEAST)

    def judge(self, probe: Probe, before: int = 0, least: int | None = None) -> ParityResult:
        """Judge a plan by the microbatches it has run on; ``undecided`` if more may decide.

        Args:
            probe: Probe of the plan.
            before: Number of other microbatches on which its damage was below the lines.
            least: Minimum total of both numbers to pass; by default :meth:`least`.
        """
        grams = self.prober.grams(probe)
        whole = Grams.total(grams.values())
        damage = estimate(whole, self.per_update) if whole.count > 1 else BROKEN
        adam_grams = self._in_steps(probe) if probe.finite else {}
        adam = estimate(Grams.total(adam_grams.values()), self.per_update) if adam_grams else None
        regions = []
        for path, names in self._modules().items():
            part = Grams.total([grams[name] for name in names])
            live = [adam_grams[name] for name in names if name in adam_grams]
            in_steps = None
            if adam is not None and live:
                bias, noise, _ = share(Grams.total(live), adam, self.per_update)
                in_steps = bias + noise
            regions.append(RegionParity(path, *share(part, damage, self.per_update), in_steps))
        seen = len(probe.indices) + before
        verdict, reason, more = self._verdict(
            probe, damage, adam, regions, seen, self.least() if least is None else least
        )
        return ParityResult(
            plan=probe.plan, verdict=verdict, reason=reason, damage=damage, adam=adam, regions=tuple(regions),
            floor=self.floor, repeat=self.repeat, loss_scale=probe.scale, microbatches=len(probe.indices),
            per_update=self.per_update, passes=self.prober.passes, strayed=probe.strayed, more=more,
            note=self.prober.positions.note,
        )  # fmt: skip

    def decide(self, plan: Plan, first: int, most: int, least: int | None = None) -> ParityResult:
        """Judge a plan by ``first`` microbatches, and by more as long as they may change the verdict.

        Args:
            plan: The plan to judge.
            first: Microbatches at first, and per extension.
            most: Maximum number of microbatches.
            least: As for :meth:`judge`.
        """
        probe = self.prober.probe(plan, range(first))
        result = self.judge(probe, least=least)
        while goes_on(result.verdict, result.more, len(probe.indices), first, most):
            drawn = len(probe.indices)
            fresh = range(drawn, min(drawn + first, most))
            self.prober.extend(max(0, fresh.stop - len(self.prober.micros)))
            probe = self.prober.probe(plan, fresh, onto=probe)
            result = self.judge(probe, least=least)
        return result

    def with_state(self, result: ParityResult) -> ParityResult:
        """The result after the test of buffers and untrained parameters, unless it already failed."""
        if result.verdict == "fail":
            return result
        result = self._with_choices(result)
        if result.verdict == "fail":
            return result
        stopped = self._states.stopped(with_scale(result.plan, result.loss_scale))
        if not stopped:
            return result
        name, what = next(iter(stopped.items()))
        others = f"; so do {len(stopped) - 1} others" if len(stopped) > 1 else ""
        reason = f"gradients are sound, but the model's state differs from fp32's: {name} {what}{others}"
        if result.verdict == "undecided":
            reason = reason.replace("gradients are sound, but the", "the")
        return dataclasses.replace(
            result,
            verdict="fail",
            reason=reason,
            more=False,
            stopped=tuple(stopped),
            passes=self.prober.passes,
        )

    def _with_choices(self, result: ParityResult) -> ParityResult:
        """The result with the discrete choices that differ from fp32's; a failure, if rounding does not explain them."""
        found = self.prober.changed_choices(with_scale(result.plan, result.loss_scale))
        result = dataclasses.replace(result, choices=found, passes=self.prober.passes)
        if not (wrong := result.wrong_choices):
            return result
        others = f"; {len(wrong) - 1} other operators choose wrongly too" if len(wrong) > 1 else ""
        reason = f"{wrong[0].said(result.plan.compute)}{others}"
        return dataclasses.replace(result, verdict="fail", reason=reason, more=False)

    def _modules(self) -> dict[str, list[str]]:
        modules: dict[str, list[str]] = {}
        for name in self.prober.names:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
        return modules

    def _verdict(
        self,
        probe: Probe,
        damage: Estimate,
        adam: Estimate | None,
        regions: Sequence[RegionParity],
        seen: int,
        least: int,
    ) -> tuple[Verdict, str, bool]:
        if not probe.finite:
            where = ", ".join(probe.blame[:3])
            scale = " at any loss scale" if probe.plan.loss_scale is not None else ""
            return "fail", f"the gradient of {where} is not finite{scale}", False
        verdict, reason, more = compare(damage, adam, seen, least)
        if passes(damage, adam):
            return verdict, reason, more
        likely = (
            severity(damage.value, None if adam is None else adam.value) < 1.0
        )  # more microbatches may bring it below the lines
        if probe.strayed:
            return (
                "undecided",
                f"{probe.strayed} random draws of the model could not be replayed, so the plan ran with other random numbers than fp32; "
                f"{reason}",
                likely,
            )
        own = max(self.floor, self.repeat)
        if own > min(COMPARABLE * damage.value, FAIL):  # above FAIL fp32 is no reference at all
            what = (
                "the loss is not deterministic: computed twice from the same inputs, it differs"
                if self.repeat >= self.floor
                else "two fp32 runs with different rounding differ"
            )
            return (
                "undecided",
                f"{what} by {own:.2g} of an update, and the plan differs from fp32 by {damage.value:.2g}",
                likely,
            )
        if verdict == "fail":
            at = max(regions, key=lambda r: _weight(r, "Adam" in reason), default=None)
            reason += "" if at is None else f", most of it in {at.path or 'the model itself'}"
        return verdict, reason, more


def _weight(region: RegionParity, adam: bool) -> float:
    return (region.adam or 0.0) if adam else region.bias + region.noise


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has ``betas`` and divides by the root of a running mean of squared gradients."""
    groups = optimizer.param_groups
    return bool(groups) and "betas" in groups[0] and "Lion" not in type(optimizer).__name__


def made(optimizer: Optimizer, model: nn.Module, call: str = "parity") -> torch.optim.Optimizer:
    """The optimizer that a user's function returns for a model's parameters.

    Raises:
        WorkloadError: ``optimizer`` is not a function, or returns something else.
    """
    such = "such as lambda params: torch.optim.AdamW(params, lr=1e-3)"
    if not callable(optimizer):
        raise WorkloadError(f"{call}: optimizer must be a function, {such}, got {type(optimizer).__name__}")
    with users_code(f"{call}: optimizer(params) failed"):
        made = optimizer(model.parameters())
    if not isinstance(made, torch.optim.Optimizer):
        raise WorkloadError(
            f"{call}: optimizer(params) returned {type(made).__name__}, not a torch.optim.Optimizer; return the optimizer, {such}"
        )
    return made


def parity(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Any,
    plan: Plan | str,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    accumulate: int = 1,
    world_size: int = 1,
    microbatches: int = MICROBATCHES,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> ParityResult:
    """Test whether a plan's gradients can be distinguished from fp32's, whatever the plan's speed.

    Everything runs on copies: the model, random numbers and process-wide settings are unchanged when it returns or
    fails. On a CPU, fp16 matrix products are computed in fp32 and rounded, so plans for a GPU can be tested there.

    Args:
        model: The model, in any training state: its modes (dropout, frozen BatchNorm) are kept. Tensors stored in
            bf16 or fp16 are widened to make the fp32 reference.
        loss: ``loss(model, batch)`` -> scalar tensor, fp32.
        batches: A sequence, a re-iterable, or ``batches(seed)`` -> iterator; each batch is
            one microbatch.
        plan: The plan to test.
        optimizer: ``optimizer(params)`` -> Optimizer. If it is of Adam's kind, the test is also made in units of its
            steps. Plans that store parameters low need an optimizer: steps of the plan's own optimizer are compared
            with fp32's, without masters during 259 steps of training.
        accumulate: Microbatches accumulated per update.
        world_size: Data-parallel ranks that average their gradients.
        microbatches: Initial number, at least 4. A pass needs 29 in total, or all batches if there are fewer;
            if those do not decide, up to four times the initial number are drawn.
        device: By default the device of the model's parameters.
        seed: Seed of dither, random draws and, if batches are a function, of the batches.

    Returns:
        The result: ``.verdict``, ``.reason``, ``.regions``, ``.table()``; true if it passed. A failure is confirmed
        on fresh batches before it is reported.

    Raises:
        WorkloadError: A loss that is not differentiable or whose gradients are all zero, batches that cannot be used, or a
            model not in fp32.
        NonFiniteError: Gradients are not finite in fp32 itself.
        PlanError: A plan that does not fit the model, or numbers out of range.
        DeviceError: The device cannot run the plan.

    Source: docs/numerics.md derives the test and shows how its lines were calibrated.
    """
    chosen = as_plan(plan)
    for name, value, least in (("accumulate", accumulate, 1), ("world_size", world_size, 1), ("microbatches", microbatches, 4)):  # fmt: skip
        check_count("parity", name, value, least)
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"parity: model is {type(model).__name__}; give the torch.nn.Module itself")
    where = find_device("parity", device, str(device_of(model)))
    make = endless(batches, "parity")
    failed = "parity: the model, its loss or its optimizer failed"
    with users_code(failed), undisturbed(), unspoilt(model, "parity"), contextlib.ExitStack() as stack:
        prober = Prober(
            model, loss, make(seed), where, seed=seed, call="parity", dither=coarsest(chosen.formats)
        )
        adam = False
        if optimizer is not None:
            own = made(optimizer, prober.model)
            stack.enter_context(unmoved(own, prober.model))
            adam = is_adam(own)
        test = ParityTest(prober, accumulate * world_size, adam, optimizer)
        test.reference(microbatches, observed=2 if chosen.loss_scale is not None else 0)
        chosen = with_measured_scale(chosen, test.range)
        with users_code(f"parity: the model runs in fp32, but fails under {in_words(chosen)}"):
            result = test.decide(chosen, microbatches, max(MOST * microbatches, LEAST))
        result, updates = test.with_state(result), None
        if optimizer is not None and result.verdict != "fail" and is_needed(chosen):
            training = Training(model, loss, make(seed), optimizer, where, seed)
            updates = update_loss(stack.enter_context(contextlib.closing(training)), chosen)
    return _with_updates(result, updates, prober.passes)


def _with_updates(result: ParityResult, updates: UpdateLoss | None, passes: int) -> ParityResult:
    plan, verdict, reason = result.plan, result.verdict, result.reason
    if updates is None and plan.lacks_masters and verdict == "pass":
        verdict = "undecided"
        reason += (
            "; but parameters are stored low without masters: give optimizer= to measure how much of its updates "
            "rounding loses"
        )
    elif updates is not None and updates.why:
        verdict, reason = "fail", updates.why
    elif updates is not None and updates.unknown and plan.lacks_masters and verdict == "pass":
        verdict = "undecided"
        reason += f"; but {updates.unknown}"
    lost = updates.lost if updates is not None and plan.lacks_masters else None
    return dataclasses.replace(result, verdict=verdict, reason=reason, lost_updates=lost, passes=passes)


def with_measured_scale(plan: Plan, seen: GradientRange) -> Plan:
    """The plan with its dynamic loss scale started inside the measured range; other plans unchanged."""
    scales = seen.scales()
    if plan.loss_scale is None or not plan.loss_scale.dynamic or scales is None:
        return plan
    return with_scale(plan, scales.init)


def with_scale(plan: Plan, init: float | None) -> Plan:
    """The plan with its loss scale started at a value, within its floor and ceiling; plans without a loss scale unchanged."""
    if plan.loss_scale is None or init is None:
        return plan
    scale = plan.loss_scale
    init = max(min(init, scale.ceiling or math.inf), scale.floor or 0.0)
    return dataclasses.replace(plan, loss_scale=dataclasses.replace(scale, init=init))


def coarsest(formats: Iterable[str]) -> str:
    """The format with the fewest digits, which determines the dither; bf16 if there is only fp32, since its dither does no harm."""
    return "fp16" if {name for name in formats if name in LOW} == {"fp16"} else "bf16"


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters; without any, the available accelerator, else the CPU."""
    for parameter in model.parameters():
        return parameter.device
    return torch.device(default_device_type())
