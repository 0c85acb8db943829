"""``parity``: test whether a plan's gradients are as good as fp32's.

The plan's gradients are compared with fp32's at the same dithered weights, data and random draws, over several
microbatches. The squared error that the plan adds to one update is divided by the expected square of the update, which includes
the noise of the data (:mod:`castwise.lab.parity.damage`). This quotient is called *damage*. Damage below ``PASS`` does not show in
training; damage above ``FAIL`` does.

If the optimizer is of Adam's kind, the test is repeated in units of Adam's steps, in which parameters with small gradients count as
much as others. Parameters whose fp32 gradient is only rounding error (the bias of a convolution before BatchNorm, the key bias of
attention) are excluded from this repetition: an optimizer's step from such a gradient is meaningless in fp32 too.
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
"""A gradient is only rounding error if two fp32 runs with different rounding differ by more than this share of its square."""
BROKEN = Estimate(math.inf, math.inf, math.inf, *[math.nan] * 6)
"""The damage of a plan whose gradient was not finite in the first microbatch, so that the run stopped there."""
COMPARABLE = 0.3
"""A plan can be judged if fp32 runs differ from each other by at most this share of the plan's difference from fp32."""


@dataclass(frozen=True)
class RegionParity:
    """The contribution of one module's own parameters to the damage that a plan does to an update.

    The damage is the squared relative error that a plan's rounding adds to one optimizer update.

    Attributes:
        path: The path of the module.
        bias: The module's part of the damage that is the same in every batch.
        noise: The module's part of the damage that averages out over batches.
        data_noise: The variance of the module's gradient over batches, in the same unit.
        adam: Bias plus noise in units of Adam's steps. None if it was not computed, or if the module's gradient is
            only rounding error.
    """

    path: str
    bias: float
    noise: float
    data_noise: float
    adam: float | None = None


@dataclass(frozen=True)
class ParityResult:
    """The result of :func:`castwise.parity`: whether a plan's gradients are as good as those of fp32.

    A plan decides the formats in which a model computes and stores its weights. The test measures the damage, that is
    the squared error that the plan adds to one optimizer update, divided by the expected square of the update. The
    result is true in an ``if`` statement when the plan passed.

    Attributes:
        plan: The plan that was tested.
        verdict: ``pass``, ``fail`` or ``undecided``.
        reason: The reason for the verdict, in a sentence.
        damage: The damage, as an :class:`~castwise.numerics.damage.Estimate` with a 95 % interval.
        adam: The damage in units of Adam's steps. None if no optimizer of Adam's kind was given.
        regions: The damage of each module that has parameters of its own.
        floor: The damage of fp32 compared with fp32 under different rounding.
        repeat: The damage of fp32 compared with an identical second run. It is above 0 if the loss is not
            deterministic.
        lost_updates: The share of an optimizer's update that rounding loses, for plans that store parameters in bf16
            or fp16 without fp32 master weights. It is the largest share over the optimizer's parameter groups, and
            over steps early and late in a training. None for other plans, or if it was not measured.
        loss_scale: The loss scale of the gradients. None under a plan without a loss scale.
        microbatches: The number of microbatches on which the plan was tested.
        per_update: The number of microbatches that are averaged for one update.
        passes: The number of forward and backward passes.
        strayed: The number of random draws, such as dropout masks, that could not be repeated.
        more: Whether more microbatches may change the verdict.
        stopped: Buffers and untrained parameters that do not change under the plan as they do in fp32.
        choices: Operators whose integer or boolean results differ from those in fp32. Differences that rounding does
            not explain come first. They are not tested if the plan has failed already.
        note: A further remark, in a sentence, which says up to which sequence position the plan was tested.
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
        """The damage (the plan's error in an update) divided by the threshold below which a plan passes.

        If it is below 1, training with the plan shows no difference from fp32. If the damage was also computed in
        units of Adam's steps, the larger of the two quotients counts.
        """
        return severity(self.damage.value, None if self.adam is None else self.adam.value)

    @property
    def biased(self) -> bool:
        """Whether the plan's rounding certainly has a bias, that is an error that all batches share.

        Such a bias remains when the noise of the data has averaged out in long training. A short training run cannot
        show its harm.
        """
        return not lasts(self.damage, self.adam)

    @property
    def needed(self) -> int | None:
        """The approximate number of microbatches with which an undecided plan would pass.

        None if the plan is not undecided, or if more microbatches would not let it pass.
        """
        return needed(self.damage, self.adam, self.microbatches) if self.verdict == "undecided" else None

    @property
    def next_step(self) -> str:
        """A sentence that says what you can try to decide an undecided result.

        It is empty if the result is ``pass`` or ``fail``.
        """
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
        """The two thresholds below which a plan passes, as a tuple.

        The first is the threshold for the damage. The second is the threshold for the damage in units of Adam's
        steps, or None if it was not computed in these units.
        """
        return PASS, None if self.adam is None else ADAM_PASS

    @property
    def wrong_choices(self) -> tuple[Choice, ...]:
        """The operators whose integer or boolean results differ from those in fp32 by more than rounding explains."""
        return tuple(choice for choice in self.choices if choice.is_wrong)

    @property
    def owners(self) -> tuple[str, ...]:
        """The paths of the modules whose buffers, untrained parameters or integer results make the plan fail, the worst first.

        Integer results include boolean results, such as masks.
        """
        state = [name.rpartition(".")[0] for name in self.stopped]
        return tuple(dict.fromkeys([*state, *(choice.path for choice in self.wrong_choices)]))

    def worst(self, count: int = 5) -> tuple[RegionParity, ...]:
        """Return the modules that contribute most to the damage, the worst first.

        Args:
            count: The largest number of modules to return.
        """

        def weight(region: RegionParity) -> float:
            return (
                math.inf if math.isnan(region.bias) else max(region.bias + region.noise, region.adam or 0.0)
            )

        return tuple(sorted(self.regions, key=weight, reverse=True)[:count])

    def table(self) -> RenderableType:
        """Return the verdict and the worst modules as text and tables that ``rich.print`` can show."""
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
    """The gradient parity test in single steps, for callers that judge many plans against one fp32 reference.

    Attributes:
        prober: Runs the model on microbatches in fp32 and under plans.
        per_update: Microbatches per update.
        adam: Whether to test in units of Adam's steps too.
        optimizer: Makes the user's optimizer, for the few training steps that test buffers and untrained parameters. Without an
            optimizer, these steps change no weight.
        range: Observed range of the fp32 gradients.
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
        """Run fp32 on ``count`` microbatches as the reference, then measure how much fp32 runs differ from each other.

        On the first ``observed`` microbatches the gradients of every module's outputs are observed.

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
        """Return the damage of a plan (its error in an update) from at least two microbatches, without an interval.

        There are two numbers: the plain damage, and the damage in units of Adam's steps, or None if that is not asked for. The
        expected square of the update, by which the error is divided, comes from all microbatches of the fp32 reference.
        """
        whole, adam_whole = self._wholes()
        plain = quick_estimate(Grams.total(self.prober.grams(probe).values()), whole, self.per_update)
        if adam_whole is None:
            return plain, None
        return plain, quick_estimate(Grams.total(self._in_steps(probe).values()), adam_whole, self.per_update)

    def _in_steps(self, probe: Probe) -> dict[str, Grams]:
        """Return the inner products of gradients in units of Adam's steps, by parameter; empty if these are not asked for.

        Parameters whose fp32 gradient is only rounding error are left out.
        """
        if not self.adam:
            return {}
        drawn = len(self.prober.micros)
        if self._weights[0] != drawn:  # from few microbatches, elements that are 0 by chance would dominate
            self._weights = drawn, self.prober.preconditioner()
        grams = self.prober.grams(probe, self._weights[1])
        return {name: g for name, g in grams.items() if name not in self.dead}

    def _wholes(self) -> tuple[Estimate, Estimate | None]:
        """Return estimates of the whole update's expected square, plain and in units of Adam's steps, from the fp32 reference."""
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
        """Return how many microbatches a plan must be tested on to pass; if the batches repeat sooner, all different ones."""
        return min(LEAST, period([micro.batch for micro in self.prober.micros]) or LEAST)

    def judge(self, probe: Probe, before: int = 0, least: int | None = None) -> ParityResult:
        """Judge a plan by the microbatches that it has run on.

        Args:
            probe: The plan's gradients on these microbatches.
            before: Number of other microbatches on which the plan's damage was below the thresholds.
            least: Minimum number of microbatches, with those of ``before``, on which a plan must be tested to pass; by default that
                of :meth:`least`.
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
            first: Number of microbatches at first, and of those added each time.
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
        """Test discrete choices, then buffers and untrained parameters, and return the result with what was found.

        A result that already failed is returned unchanged.
        """
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
        """Test the discrete choices (indices, masks) under the plan, and return the result with those that differ from fp32's.

        The result becomes a failure if rounding does not explain the differences.
        """
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
    """Whether an optimizer is of Adam's kind: it divides by the root of a running mean of squared gradients.

    Such optimizers are recognised by ``betas`` in their parameter groups; Lion has ``betas`` too and is excluded.
    """
    groups = optimizer.param_groups
    return bool(groups) and "betas" in groups[0] and "Lion" not in type(optimizer).__name__


def made(optimizer: Optimizer, model: nn.Module, call: str = "parity") -> torch.optim.Optimizer:
    """Return the optimizer that a user's function makes for a model's parameters.

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
    """Test whether a plan's gradients can be distinguished from those of fp32.

    Use this to find out whether a model can be trained under a plan, whatever the plan's speed. A plan decides the
    formats in which a model computes and stores its weights. The test compares gradients of several microbatches in
    fp32 and under the plan, at the same weights and random draws. The plan passes if its error is too small to matter
    beside the noise of the data.

    The function works on copies. The model, the random generators and process-wide settings are unchanged when it
    returns or fails. On a CPU, fp16 matrix products are computed in fp32 and rounded, so a plan for a GPU can be
    tested on a CPU.

    Args:
        model: The model, in any training state. Its modes (dropout, frozen BatchNorm) are kept. Tensors stored in
            bf16 or fp16 are converted to fp32 for the reference.
        loss: A function ``loss(model, batch)`` that returns a scalar tensor in fp32.
        batches: A sequence of batches, an iterable that can be iterated again, or a function ``batches(seed)`` that
            returns an iterator. Each batch is one microbatch.
        plan: The plan to test.
        optimizer: A function ``optimizer(params)`` that returns an optimizer. If it is Adam or similar, the test is
            also made in units of Adam's steps. Plans that store parameters in bf16 or fp16 need it, because steps of
            the plan's own optimizer are then compared with those of fp32. If such a plan keeps no fp32 master
            weights, this takes 259 steps of training.
        accumulate: The number of microbatches that are accumulated for one update.
        world_size: The number of data-parallel ranks that average their gradients.
        microbatches: The initial number of microbatches, at least 4. To pass, a plan needs 29 in total, or all
            batches if fewer exist. If these do not decide, up to four times the initial number are drawn.
        device: The device of the run. By default it is the device of the model's parameters.
        seed: The seed of random draws. It is also the seed of the small random changes that are made to the weights
            before each run. If ``batches`` is a function, it is called with this seed too.

    Returns:
        The result, which is true in an ``if`` statement when the plan passed. Its main parts are ``.verdict``,
        ``.reason``, ``.regions`` and ``.table()``. A failure is confirmed on fresh batches before it is reported.

    Raises:
        WorkloadError: The loss is not differentiable, all its gradients are zero, the batches cannot be used, or the
            model is not in fp32.
        NonFiniteError: Gradients are not finite in fp32 itself.
        PlanError: The plan does not fit the model, or a number is out of its range.
        DeviceError: The device cannot run the plan.

    Source: docs/numerics.md derives the test and shows how its thresholds were calibrated.
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
    """Return the plan with its dynamic loss scale started inside the range that was measured for the gradients.

    A plan without a dynamic loss scale is returned unchanged.
    """
    scales = seen.scales()
    if plan.loss_scale is None or not plan.loss_scale.dynamic or scales is None:
        return plan
    return with_scale(plan, scales.init)


def with_scale(plan: Plan, init: float | None) -> Plan:
    """Return the plan with its loss scale started at a value, limited to the plan's floor and ceiling.

    A plan without a loss scale is returned unchanged.
    """
    if plan.loss_scale is None or init is None:
        return plan
    scale = plan.loss_scale
    init = max(min(init, scale.ceiling or math.inf), scale.floor or 0.0)
    return dataclasses.replace(plan, loss_scale=dataclasses.replace(scale, init=init))


def coarsest(formats: Iterable[str]) -> str:
    """Return the low format with the fewest digits among some formats, which determines how much weights are dithered.

    If none of the formats is low, the result is bf16, since dither of this size does no harm.
    """
    return "fp16" if {name for name in formats if name in LOW} == {"fp16"} else "bf16"


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; for a model without parameters, the available accelerator, or else the CPU."""
    for parameter in model.parameters():
        return parameter.device
    return torch.device(default_device_type())
