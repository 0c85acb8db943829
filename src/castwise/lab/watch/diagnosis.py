"""Find out why a step diverged: because of its batch, of the format, or of damaged weights.

The step is run again on a copy of the model, from good weights: under the plan, and in fp32.

- If fp32 diverges too, the batch is the cause.
- If only the plan diverges, the format is the cause, and :func:`castwise.first_nonfinite` names the module.
- If the plan does not diverge, the cause was transient: the weights were damaged, and are good again.
- If the previous step's batch, whose loss was normal, now diverges too, the previous step's update has damaged the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core.casting.trees import to_device
from castwise.core.model.arrival import widen_
from castwise.core.parallel.whole import gathered, is_cut
from castwise.core.plans.plan import Plan, Region
from castwise.core.ranks import ALONE, Ranks
from castwise.core.session import Amp
from castwise.errors import CastwiseError, sentence
from castwise.lab.inspect.nonfinite import first_nonfinite
from castwise.lab.parity.probes import REFERENCE
from castwise.lab.passes.isolation import copied, undisturbed, unspoilt
from castwise.lab.watch.moments import Moment, set_generators
from castwise.lab.watch.passes import Loss, Ran, run_step, total
from castwise.lab.workloads.workload import non_finite_parts


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a divergence, with its evidence.

    Attributes:
        cause: ``batch``, ``update``, ``format``, ``loss scale`` or ``transient``.
        evidence: The runs that were made and their results, in clauses.
        plan: For ``format`` and ``loss scale``, a plan under which the step did not diverge.
    """

    cause: str
    evidence: str
    plan: Plan | None = None


def diagnose(
    amp: Amp,
    model: nn.Module,
    loss: Loss,
    moments: Sequence[Moment],
    before: Sequence[Moment],
    limit: float,
    ranks: Ranks,
) -> list[Diagnosis]:
    """Find out whether a step diverges from the given good weights, and why. The training state is unchanged.

    All ranks must call this together. Each rank tries its own microbatches, on a whole copy of the model.

    Args:
        amp: The session.
        model: The module that the session prepared, with good weights.
        loss: ``loss(model, batch)``.
        moments: The microbatches of the step.
        before: The microbatches of the last earlier step that was made with a normal loss; empty if there is none.
        limit: The largest normal loss of a step in this training; see :func:`castwise.lab.watch.passes.mean_loss`.
        ranks: The ranks that train together.

    Returns:
        The diagnosis of each rank.
    """
    if found := in_data(moments, before, ranks):
        return found
    with unspoilt(model, "Recovery"), undisturbed():
        weights = {
            name: gathered(value) if isinstance(value, Tensor) else value
            for name, value in amp.model_state_dict(model).items()
        }
        twin = copied(model, "Recovery") if is_cut(model) else model
        return ranks.every(lambda: _Reruns(amp, twin, weights, loss, moments, before, limit).diagnosis())


def in_data(moments: Sequence[Moment], before: Sequence[Moment], ranks: Ranks) -> list[Diagnosis]:
    """Return the diagnosis of each rank if the data of any rank has non-finite values; else an empty list.

    If the data of the previous step, which did not diverge, had such values too, they do not count. All ranks must call this
    together.
    """
    parts = [part for number, moment in enumerate(moments) for part in _parts(moment, number, len(moments))]
    if any(_parts(moment, 0, 1) for moment in before):
        parts = []
    holders = ranks.gather(parts[:3])
    return [
        Diagnosis("batch" if found else "transient", f"non-finite values in the data: {'; '.join(found)}")
        for found in holders
        if any(holders)
    ]


def _parts(moment: Moment, number: int, of: int) -> list[str]:
    return non_finite_parts(moment.batch, "batch" if of == 1 else f"microbatch {number}")


def agreed(diagnoses: Sequence[Diagnosis]) -> Diagnosis:
    """Combine the diagnoses of all ranks into one. If the batch of any rank is bad, all ranks skip theirs."""
    for cause in ("update", "batch", "format", "loss scale"):
        found = [(rank, one) for rank, one in enumerate(diagnoses) if one.cause == cause]
        if found:
            rank, one = found[0]
            where = f"on rank {rank}: " if len(diagnoses) > 1 else ""
            return dataclasses.replace(
                one, evidence=f"{where}{one.evidence}", plan=_joined([v for _, v in found])
            )
    return diagnoses[0]


def _joined(diagnoses: Sequence[Diagnosis]) -> Plan | None:
    """Combine the plans of all diagnoses: one plan with the regions of all and the smallest loss scale."""
    plans = [found.plan for found in diagnoses if found.plan is not None]
    if not plans:
        return None
    first, *others = plans
    for other in others:
        more = tuple(region for region in other.regions if region not in first.regions)
        rules = tuple(rule for rule in other.ops if rule not in first.ops)
        first = dataclasses.replace(first, regions=(*first.regions, *more), ops=(*first.ops, *rules))
        if (
            first.loss_scale is not None
            and other.loss_scale is not None
            and other.loss_scale.init < first.loss_scale.init
        ):
            first = dataclasses.replace(first, loss_scale=other.loss_scale)
    return first


class _Reruns:
    def __init__(
        self,
        amp: Amp,
        model: nn.Module,
        weights: Mapping[str, Any],
        loss: Loss,
        moments: Sequence[Moment],
        before: Sequence[Moment],
        limit: float,
    ) -> None:
        self._plan = dataclasses.replace(amp.plan, compile="as_given")
        self._model, self._loss, self._limit = model, loss, limit
        self._moments, self._before = moments, before
        self._device = next((p.device for p in model.parameters()), torch.device(amp.device_type))
        self._weights = weights
        scale = self._plan.loss_scale
        # a dynamic scale adapts by skipping steps, so the question is whether any scale works
        self._scale = None if scale is None else 1.0 if scale.dynamic else scale.init

    def diagnosis(self) -> Diagnosis:
        ran, said = self._try(self._plan, self._moments)
        if self._is_sound(ran):
            return Diagnosis(
                "transient",
                f"from the last good state the same batch gives sound gradients under {self._plan}: {said}",
            )
        reference, also = self._try(REFERENCE, self._moments)
        if not self._is_sound(reference):
            if self._before:
                earlier, then = self._try(self._plan, self._before)
                if not self._is_sound(earlier):
                    return Diagnosis(
                        "update",
                        f"the batch of the step before, whose loss was normal, now has {then}: that step's update damaged the weights",
                    )
            return Diagnosis("batch", f"in fp32 the result is no better: {also} (under {self._plan}: {said})")
        told = f"{said} under {self._plan}, {also} in fp32"
        for cause, what, plan in self._cures():
            cured, how = self._try(plan, self._moments)
            if self._is_sound(cured):
                return Diagnosis(cause, f"{told}; {what}; tried under {plan}: {how}", plan)
        return Diagnosis("batch", f"{told}; no other plan that was tried gives sound gradients")

    def _cures(self) -> Iterator[tuple[str, str, Plan]]:
        """Yield plans that may prevent the divergence, the smallest change first, each with its cause and the evidence."""
        scale = self._plan.loss_scale
        for moment in self._moments:
            set_generators(moment.random)
            try:
                found = first_nonfinite(
                    _fp32_of(self._model, self._weights), lambda m, b: total(self._loss(m, b)), to_device(moment.batch, self._device), self._plan,
                    device=self._device, loss_scale=None if scale is None else self._scale, group=ALONE,
                )  # fmt: skip
            except CastwiseError:
                continue
            for cure in found.trials:
                if not cure.finite:
                    continue
                where = found.module or "the model"
                lower = cure.plan.loss_scale is not None and cure.plan.regions == self._plan.regions
                cause = "loss scale" if lower and cure.plan.ops == self._plan.ops else "format"
                if cause == "format" and cure.what not in ("fp32", "fp64"):
                    plan = dataclasses.replace(cure.plan, loss_scale=scale)
                    yield (
                        cause,
                        f"{found.operator} in {where} returns the first non-finite value ({found.why})",
                        plan,
                    )
                elif cause == "loss scale" and not (scale is not None and scale.dynamic):
                    yield cause, f"the backward of {where} overflows", cure.plan
        whole = dataclasses.replace(self._plan, regions=(*self._plan.regions, Region("**", compute="fp32")))
        yield "format", "no single region could be identified", whole

    def _try(self, plan: Plan, step: Sequence[Moment]) -> tuple[Ran | None, str]:
        """Run a step under a plan, and return the run (None if it failed) and its result as a clause."""
        scales = (
            {} if self._scale is None or plan.loss_scale != self._plan.loss_scale else {"loss": self._scale}
        )
        moments = [(moment.batch, moment.random) for moment in step]
        try:
            ran = run_step(
                "Recovery", copied(self._model, "Recovery"), self._loss, plan, self._device, moments,
                lambda model: _load(model, self._weights), scales=scales, keep=False,
            )  # fmt: skip
        except CastwiseError as error:
            return None, sentence(error)
        gradients = f", gradients of {ran.nonfinite[0]} not finite" if ran.nonfinite else ""
        return ran, f"loss {ran.loss:.4g}{gradients}"

    def _is_sound(self, ran: Ran | None) -> bool:
        return ran is not None and ran.finite and ran.loss <= self._limit


def _fp32_of(model: nn.Module, weights: Mapping[str, Any]) -> nn.Module:
    """Return an fp32 copy of a prepared model."""
    copy = copied(model, "Recovery")
    widen_(copy)
    _load(copy, weights)
    return copy


def _load(model: nn.Module, weights: Mapping[str, Any]) -> None:
    model.load_state_dict(dict(weights))
