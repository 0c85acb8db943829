"""Audit a training: compare the plan's gradients with fp32's at the present weights.

Usually two microbatches are enough, because they show that the damage is far below the line at which plans fail. In other
cases, at the first audit, and after an audit that did not pass, the gradient parity test of :mod:`castwise.lab.parity.parity` runs on more microbatches. All
passes run on copies of the model.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.core import masters
from castwise.core.model.arrival import widen_
from castwise.core.model.borders import strip
from castwise.core.parallel.whole import gathered, held
from castwise.core.plans.plan import Plan
from castwise.core.session.process import claims_aside
from castwise.errors import PlanError, sentence
from castwise.lab.parity.batches import endless
from castwise.lab.parity.damage import ADAM_FAIL, FAIL, Grams, estimate
from castwise.lab.parity.parity import ParityTest, coarsest, device_of, is_adam, with_scale
from castwise.lab.parity.probes import Prober
from castwise.lab.parity.together import together
from castwise.lab.parity.verdicts import LEAST
from castwise.lab.passes.isolation import copied
from castwise.lab.watch.records import Audit

SCREEN = 2
"""Number of microbatches with which an audit begins: fewer cannot separate bias from noise."""
SUSPECT = 0.3
"""The parity test runs if the damage reaches this share of the line at which plans fail."""
WHOLE = 8
"""Initial number of microbatches of the parity test."""
MOST = 96
"""Largest number of microbatches of the parity test. Damage that few microbatches have is decided by many only."""
_CALL = "Monitor.audit"


class Auditor:
    """Compares the gradients of one model with fp32's, several times during a training.

    Args:
        loss: As for :func:`castwise.parity`.
        batches: As for :func:`castwise.parity`.
        accumulate: Microbatches that one update averages.
    """

    def __init__(self, loss: Callable[[nn.Module, Any], Tensor], batches: Any, accumulate: int) -> None:
        if not callable(loss):
            raise PlanError(
                f"Monitor(loss={loss!r}): needs a function loss(model, batch) that returns a scalar tensor"
            )
        self._loss = loss
        self._make = endless(batches, "Monitor")
        self._accumulate = accumulate
        self._batches: Iterator[Any] | None = None
        self._dead: frozenset[str] | None = None
        self._made = 0
        self._is_open = False
        self._wholes: dict[str, deque[float]] = {"plain": deque(maxlen=WHOLE), "adam": deque(maxlen=WHOLE)}

    def audit(
        self, plan: Plan, scale: float, model: nn.Module, arrived: Any, optimizer: Optimizer | None
    ) -> Audit:
        """Compare a plan's gradients with fp32's at a model's weights. The host waits for the device.

        Args:
            plan: The plan that the model runs under.
            scale: The current loss scale.
            model: The prepared model; it is copied.
            arrived: Tensors of the model that were given in a low format, with their dtypes.
            optimizer: The model's optimizer; if it is of Adam's kind, its second moments weight the gradients.

        Raises:
            CastwiseError: The model, the loss or the batches cannot be used.
        """
        begun = time.perf_counter()
        running = with_scale(dataclasses.replace(plan, compile="as_given"), scale)
        adam = optimizer if optimizer is not None and is_adam(optimizer) else None
        with claims_aside(), together(model, _CALL) as ranks:
            whole, low = _widened(model, ranks.model, arrived)
            prober = ranks.each(functools.partial(self._prober, whole, low, plan))
            ranks.model = whole = prober.model  # frees the other copy
            steps = None if adam is None else _steps(prober, model, adam)
            found = ranks.each(lambda: self._judged(prober, running, adam is not None, steps))
        return dataclasses.replace(found, time_s=time.perf_counter() - begun)

    def _prober(self, whole: nn.Module, low: dict[str, torch.dtype], plan: Plan) -> Prober:
        if self._batches is None:
            self._batches = self._make(0)
        return Prober(
            whole, self._loss, self._batches, device_of(whole), seed=self._made + 1, call=_CALL,
            dither=coarsest(plan.formats), arrived=low,
        )  # fmt: skip

    def _judged(self, prober: Prober, running: Plan, adam: bool, steps: list[Tensor] | None) -> Audit:
        self._made += 1
        test = ParityTest(prober, self._accumulate, adam)
        if self._dead is not None and not self._is_open:
            test.dead = self._dead
            found = self._screen(test, running, steps)
            if found is not None:
                return found
        test.reference(WHOLE, observed=0)
        self._dead = test.dead
        result = test.decide(running, WHOLE, MOST, least=LEAST if self._is_open else WHOLE)
        self._is_open = result.verdict != "pass"
        worst = tuple((region.path, region.bias + region.noise) for region in result.worst(3))
        return Audit(
            0, result.verdict, result.reason, result.damage.value, None if result.adam is None else result.adam.value,
            result.microbatches, 0.0, worst,
        )  # fmt: skip

    def _screen(self, test: ParityTest, plan: Plan, weights: list[Tensor] | None) -> Audit | None:
        """Return the audit from few microbatches, or None if they do not decide."""
        prober = test.prober
        prober.extend(SCREEN)
        probe = prober.probe(plan, range(SCREEN))
        if not probe.finite:
            return None
        grams = prober.grams(probe)
        damage = self._damage("plain", grams.values())
        adam: float | None = None
        if weights is not None:
            live = [g for name, g in prober.grams(probe, weights).items() if name not in test.dead]
            adam = self._damage("adam", live) if live else None
        if not max(damage / FAIL, 0.0 if adam is None else adam / ADAM_FAIL) < SUSPECT:  # or NaN
            return None
        sums = {name.rpartition(".")[0]: 0.0 for name in grams}
        for name, g in grams.items():
            sums[name.rpartition(".")[0]] += float(g.error.trace()) / SCREEN
        total = sum(sums.values()) or 1.0
        worst = sorted(((path, value / total * damage) for path, value in sums.items()), key=lambda r: -r[1])
        return Audit(
            0, "sound", f"damage {damage:.2g} on {SCREEN} microbatches, far below the {FAIL:g} at which plans fail",
            damage, adam, SCREEN, 0.0, tuple(worst[:3]),
        )  # fmt: skip

    def _damage(self, units: str, grams: Iterable[Grams]) -> float:
        """Return the damage on few microbatches: the relative squared error of an update.

        It is relative to the expected square of an update, which is averaged over the last audits.
        """
        found = estimate(Grams.total(grams), self._accumulate)
        wholes = self._wholes[units]
        wholes.append(found.denominator)
        whole = sum(wholes) / len(wholes)
        return found.value * found.denominator / whole if whole > 0 else found.value


def _widened(model: nn.Module, whole: nn.Module, arrived: Any) -> tuple[nn.Module, dict[str, torch.dtype]]:
    """Return an fp32 copy of a prepared model without its plan, and the dtypes of its tensors that were given in a low format.

    If the model is sharded, ``whole`` is its whole copy, which is widened in place. Then all ranks must call this together.
    """
    copy = copied(model, _CALL) if whole is model else whole
    strip(copy, lambda _: None)
    low = {}
    before = widen_(copy)
    mine = dict((*copy.named_parameters(), *copy.named_buffers()))
    for name, tensor in held(model).items():
        if name in before:
            master = masters.master_of(tensor)
            values = masters.original_of(tensor) if master is None else master
            if values is not None:
                mine[name].data.copy_(gathered(values))
            elif tensor in arrived:
                low[name] = before[name]
    return copy, low


def _steps(prober: Prober, model: nn.Module, optimizer: Optimizer) -> list[Tensor] | None:
    """Return factors that turn gradients into steps of Adam, computed from its second moments; None before there are any.

    If the second moments are sharded, all ranks must call this together.
    """
    named = held(model)
    factors = []
    for name in prober.names:
        parameter = named[name]
        master = masters.master_of(parameter)
        state = optimizer.state.get(parameter if master is None else master, {})
        square = state.get("exp_avg_sq")
        if not isinstance(square, Tensor) or square.shape != parameter.shape:
            return None
        root = prober.picked(name, gathered(square)).clamp(min=0).sqrt()
        factors.append(1.0 / (root + 1e-8 + 1e-2 * root.square().mean().sqrt()))
    return factors


def failed(error: Exception) -> Audit:
    """Return the audit to report if an audit raised an error."""
    return Audit(0, "undecided", f"the audit failed with an error: {sentence(error)}")


def badness(audit: Audit) -> tuple[int, float]:
    """Return the sort key of audits, by which the worst audit comes last."""
    return ("sound", "pass", "undecided", "fail").index(audit.verdict), audit.damage or 0.0
