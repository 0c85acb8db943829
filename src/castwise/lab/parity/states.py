"""Test whether rounding stops model state that should change: counters, averages and running statistics.

Gradients do not show that such state stops. A counter in bf16 stops at 256, since 257 rounds to 256. An average that changes by a
thousandth of the difference never changes at all. So a copy of the model is trained for a few steps in fp32 and another under the
plan, from the same start, batches and random draws. State that changes in fp32 must change equally under the plan. The measure is
the component of the plan's change along fp32's change, as a share of fp32's change; added noise does not affect this measure. If it
is far from 1, rounding has stopped the state.

Then both copies are trained again from fp32's final state, with growing numbers moved far ahead. This second run detects state
that stops later, state that starts to change later, and state whose first change was so large that it hid the later changes.

State can only stop if the plan stores it in a low format, or if a forward computes it from low activations. BatchNorm's statistics
are fp32 in both cases and are excluded, unless a region stores them low. The vectors of spectral_norm are excluded too, since they
are recomputed from the weight in every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn

from castwise.core.devices import in_fp64
from castwise.core.plans.formats import FORMATS, LOW
from castwise.core.plans.plan import Plan
from castwise.lab.parity.probes import REFERENCE, Prober, as_real, dithered, state_of
from castwise.lab.passes.draws import Draws
from castwise.lab.passes.isolation import unmoved
from castwise.lab.passes.passes import observed_under, run_backward, still, under

STEPS = 8
"""Number of steps compared."""
ALIKE = 0.5
"""Maximum difference between a plan's change and fp32's, as a share of fp32's."""
STEADY = 0.5
"""A number grows steadily if the second half of the steps adds at least this share of what the first half adds."""
AHEAD = 1250
"""Steadily growing numbers are tested again with the values that they reach after this many times four steps, which is so far that
numbers in fp16 no longer change either."""

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class _Path:
    """The values of a tensor at the start of a short training, halfway and at the end."""

    start: Tensor
    middle: Tensor
    end: Tensor

    def moves(self) -> bool:
        return not (_same(self.start, self.middle) and _same(self.middle, self.end))

    def grows(self) -> Tensor:
        """Return a mask of the elements that grow steadily, like counters."""
        start, middle, end = map(in_fp64, (self.start, self.middle, self.end))
        first, second = middle - start, end - middle
        return (end.abs() > middle.abs()) & (second * first.sign() >= STEADY * first.abs()) & (first != 0)

    def later(self, far: bool) -> Tensor:
        """Return the values at the end; with ``far``, steadily growing elements are extrapolated to many steps later."""
        start, end = in_fp64(self.start), in_fp64(self.end)
        return torch.where(self.grows(), start + (in_fp64(self.middle) - start) * AHEAD, end) if far else end

    def of(self, which: Tensor) -> _Path:
        return _Path(self.start[which], self.middle[which], self.end[which])


@dataclass
class _Runs:
    """The results of short fp32 training runs that begin with the same state.

    Attributes:
        start: The values of the state at the start, if they are not the model's own.
        fp32: The values of each tensor during the fp32 run.
        again: The values during an fp32 run with different rounding, which is made only if needed.
    """

    start: Mapping[str, Tensor]
    fp32: dict[str, _Path]
    again: dict[str, _Path] | None = None


@dataclass
class StateTest:
    """Compares a model's buffers and untrained parameters after a few training steps under a plan and in fp32.

    Attributes:
        prober: Provides the model and the batches.
        optimizer: Makes the model's optimizer; without an optimizer, weights are fixed.
    """

    prober: Prober
    optimizer: Optimizer | None = None
    _base: _Runs | None = None
    _late: _Runs | None = None
    _draws: list[Draws] = field(default_factory=lambda: [Draws() for _ in range(STEPS)])

    def stopped(self, plan: Plan) -> dict[str, str]:
        """Find buffers and untrained parameters that do not change under a plan as they do in fp32.

        Returns:
            Their names, each with a clause that says how the change differs.

        Raises:
            CastwiseError: The plan does not fit the model or the device.
        """
        if not any(name in LOW for name in plan.formats):
            return {}
        if not any(self._may_stop(name, plan) for name in self.prober.moving):
            return {}
        if self._base is None:
            self._base = _Runs({}, self._train(REFERENCE))
        out = self._differing(plan, self._base, self._train(plan))
        if self._late is None:
            self._late = self._later(self._base.fp32)
        if self._late is not None:
            with contextlib.suppress(Exception):
                out = self._differing(plan, self._late, self._train(plan, start=self._late.start)) | out
        return out

    def _later(self, base: dict[str, _Path]) -> _Runs | None:
        """Train in fp32 from the final state of an earlier run, with growing numbers moved far ahead if the model's code accepts it.

        None is returned if the model fails from any such start.
        """
        for far in (True, False):
            start = {
                name: path.later(far and not hasattr(self._owner(name), "track_running_stats"))
                for name, path in base.items()
            }
            with contextlib.suppress(Exception):
                return _Runs(start, self._train(REFERENCE, start=start))
        return None

    def _differing(self, plan: Plan, runs: _Runs, ours: dict[str, _Path]) -> dict[str, str]:
        """Return the names of buffers and untrained parameters that do not change under a plan as they do in fp32.

        Each name comes with a clause that says how the change differs. State whose change differs between fp32 runs too is left out.
        """
        out = {}
        for name, fp32 in runs.fp32.items():
            if name not in ours or ours[name].end.shape != fp32.end.shape or not self._may_stop(name, plan):
                continue
            what, which = "", None
            if runs is self._late and self._base is not None and name in self._base.fp32:
                grows = self._base.fp32[name].grows()
                what, which = _stands(fp32.of(grows), ours[name].of(grows)), ~grows
            if what or ((what := _differs(fp32, ours[name], which)) and self._repeats(name, runs, which)):
                out[name] = what
        return out

    def _owner(self, name: str) -> nn.Module:
        return self.prober.model.get_submodule(name.rpartition(".")[0])

    def _may_stop(self, name: str, plan: Plan) -> bool:
        owner = self._owner(name)
        if "parametrizations" in name.split(".") or hasattr(owner, "weight_orig"):
            return False
        low = any(region.params in LOW for region in plan.regions)
        return low or not hasattr(owner, "track_running_stats")  # torch's norm layers are left out

    def _repeats(self, name: str, runs: _Runs, which: Tensor | None) -> bool:
        """Whether a buffer or untrained parameter changes alike in an fp32 run with different rounding.

        Otherwise its change is only rounding error.
        """
        if runs.again is None:
            runs.again = self._train(REFERENCE, 2 * FORMATS["fp32"].eps, runs.start)
        return name in runs.again and not _differs(runs.fp32[name], runs.again[name], which)

    def _train(
        self, plan: Plan, jitter: float = 0.0, start: Mapping[str, Tensor] = MappingProxyType({})
    ) -> dict[str, _Path]:
        """Train a copy of the model for a few steps; return buffers and untrained parameters at the start, halfway and at the end.

        In fp32 (the plan is ``REFERENCE``), only those that change are returned.
        """
        prober = self.prober
        model = prober.original.copy()
        for name, tensor in state_of(model):
            if name in start:
                as_real(tensor.data).copy_(start[name])
        optimizer = None if self.optimizer is None else self.optimizer(model.parameters())
        if optimizer is None or isinstance(optimizer, torch.optim.LBFGS):  # its step needs a closure
            optimizer = still(model)
        micros = prober.micros[:STEPS]
        seen = []
        with unmoved(optimizer, model), under(plan, model, prober.device, optimizer) as amp:
            if jitter:
                generator = torch.Generator(prober.device).manual_seed(1)
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.data.copy_(dithered(parameter.data, jitter, generator))
            seen.append(_now(model))
            for at, micro in enumerate(micros):
                model.zero_grad(set_to_none=True)
                optimizer.zero_grad()
                prober.passes += 1
                with observed_under(plan, model, prober.device, self._draws[at]):
                    run_backward(amp, model, prober.loss, micro.batch, prober.call, micro.seed)
                amp.step(optimizer)
                if at + 1 in (len(micros) // 2, len(micros)):
                    seen.append(_now(model, seen[-1]))
        begin, middle, end = seen
        paths = {
            name: _Path(tensor, middle[name], end[name])
            for name, tensor in begin.items()
            if name in middle and name in end and tensor.shape == middle[name].shape == end[name].shape
        }
        moving = plan == REFERENCE
        return {name: path for name, path in paths.items() if path.moves() or not moving}


def _now(model: nn.Module, before: Mapping[str, Tensor] = MappingProxyType({})) -> dict[str, Tensor]:
    """Return copies of a model's present buffers and untrained parameters.

    A tensor that is unchanged since ``before`` is shared instead of copied.
    """
    out = {}
    for name, tensor in state_of(model):
        value = as_real(tensor.detach())
        out[name] = before[name] if name in before and _same(before[name], value) else value.clone()
    return out


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)


def _stands(fp32: _Path, ours: _Path) -> str:
    """Return a clause if most elements of a tensor that still change in fp32 have stopped under the plan; otherwise an empty text."""
    moves = fp32.middle != fp32.end
    stands = ours.middle == ours.end
    if 2 * int((moves & stands).sum()) <= int(moves.sum()):
        return ""
    return f"does not change any more at {float(fp32.start.abs().max()):g}, but in fp32 it does"


def _differs(fp32: _Path, ours: _Path, which: Tensor | None = None) -> str:
    """Return a clause that says how a tensor changes otherwise under a plan than in fp32; empty if it changes alike.

    In the second run, which starts far ahead, growing numbers are tested separately, and ``which`` is a mask of the other elements.
    There the second half of the steps is tested by itself too. Otherwise a large first change, such as that of an average which
    starts with the first batch, would dominate the rest.
    """
    if which is not None:
        fp32, ours = fp32.of(which), ours.of(which)
    if not bool(torch.isfinite(fp32.end).all()) or torch.equal(in_fp64(fp32.end), in_fp64(ours.end)):
        return ""
    if not bool(torch.isfinite(ours.end).all()):
        return "is not finite after a few steps, but in fp32 it is"
    for begin, ours_begin in ((fp32.start, ours.start), (fp32.middle, ours.middle))[
        : 1 if which is None else 2
    ]:
        moved, ours_moved = in_fp64(fp32.end) - in_fp64(begin), in_fp64(ours.end) - in_fp64(ours_begin)
        square = float(moved.square().sum())
        if square == 0.0:
            continue
        if not ours_moved.any():
            return "does not change in a few steps, but in fp32 it does"
        share = float((ours_moved * moved).sum()) / square
        if abs(share - 1.0) > ALIKE:
            return f"moves {max(share, 0.0):.2g} times as far in a few steps as in fp32"
    return ""
