"""State that stops moving: counters, averages and running statistics that a model keeps beside its trained weights.

Gradients cannot see it. A counter in bf16 stops at 256, since 257 rounds back to it; an average that moves by a thousandth of
the way never moves at all. So a copy of the model is trained for a few steps in fp32 and under the plan, from one start, on
one set of batches and random draws, and what moved in fp32 has to have moved alike: by the component of the plan's movement
along fp32's, which noise on top does not change. Rounding at every step has stopped it where that is far from 1.

What can do this is a plan that stores the state low, and a forward that computes the new value from low activations by
itself. BatchNorm's statistics are fp32 in both, and stay out unless a region stores them low; so do the vectors of
spectral_norm, which are computed anew from the weight in every step.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn

from castwise.numerics.draws import Recorder, Replayer, Tape
from castwise.numerics.emulation import EmulatedProducts
from castwise.numerics.isolation import seed_all
from castwise.numerics.probes import REFERENCE, Prober, as_real, dithered, state_of
from castwise.plans.formats import FORMATS, LOW
from castwise.plans.plan import Plan
from castwise.ranks import ALONE
from castwise.session import Amp
from castwise.workload import check_loss

STEPS = 8
"""Steps that are compared."""
ALIKE = 0.5
"""A plan's movement may be so far from fp32's, as a share of it."""
STEADY = 0.9
"""A number that the second half of the steps moves by this share of the first half, or more, goes on like that: a counter."""
AHEAD = 1250
"""Counters are looked at again, so many times four steps ahead: fp16 too has stopped there."""

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class _Path:
    """Where one tensor was at the start, halfway and at the end."""

    start: Tensor
    middle: Tensor
    end: Tensor

    def stands(self) -> bool:
        """Whether it has come to stand after the first steps."""
        return torch.equal(self.middle.double(), self.end.double())

    def is_steady(self) -> bool:
        """Whether it is one number that goes on as it began: a counter."""
        if self.end.numel() != 1:
            return False
        start, middle, end = (float(t) for t in (self.start, self.middle, self.end))
        return middle != start and (end - middle) / (middle - start) >= STEADY

    def ahead(self) -> Tensor:
        """Where it would be many steps later."""
        return self.start.double() + (self.middle.double() - self.start.double()) * AHEAD


@dataclass
class StateTest:
    """Compares a model's state after a few steps under plans with fp32's.

    Attributes:
        prober: Has the model, and batches of which as many are used.
        optimizer: Of the model; without one its weights stand still.
    """

    prober: Prober
    optimizer: Optimizer | None = None
    _fp32: dict[str, _Path] | None = None
    _again: dict[str, _Path] | None = None
    _tapes: list[Tape] = field(default_factory=list)

    def stopped(self, plan: Plan) -> dict[str, str]:
        """Names of the state that does not move under a plan as it does in fp32, each with what it does, in a clause.

        Raises:
            CastwiseError: The plan does not fit the model or the device.
        """
        names = [name for name in self.prober.moving if self._may_stop(name, plan)]
        if not names or not any(name in LOW for name in plan.formats):
            return {}
        if self._fp32 is None:
            self._fp32 = self._train(REFERENCE)
        fp32, ours = self._fp32, self._train(plan)
        both = [name for name in names if name in fp32 and name in ours]
        out = {
            name: what for name in both if (what := _differs(fp32[name], ours[name])) and self._repeats(name)
        }
        counters = {name: fp32[name].ahead() for name in both if name not in out and fp32[name].is_steady()}
        if counters:
            with contextlib.suppress(Exception):  # code may not take what it counts to be anything
                fp32, ours = self._train(REFERENCE, start=counters), self._train(plan, start=counters)
                out |= {
                    name: f"does not move any more at {float(fp32[name].start):g}, and in fp32 it does"
                    for name in counters
                    if not fp32[name].stands()
                    and ours[name].stands()  # at the first step it may be rounded itself
                }
        return out

    def _may_stop(self, name: str, plan: Plan) -> bool:
        owner = self.prober.model.get_submodule(name.rpartition(".")[0])
        if "parametrizations" in name.split(".") or hasattr(owner, "weight_orig"):
            return False
        low = any(region.params in LOW for region in plan.regions)
        return low or not hasattr(owner, "track_running_stats")  # torch's norms

    def _repeats(self, name: str) -> bool:
        """Whether fp32, rounding differently, moves it as fp32 does; else its movement is rounding alone."""
        assert self._fp32 is not None
        if self._again is None:
            self._again = self._train(REFERENCE, jitter=2 * FORMATS["fp32"].eps)
        return name in self._again and not _differs(self._fp32[name], self._again[name])

    def _train(
        self, plan: Plan, jitter: float = 0.0, start: Mapping[str, Tensor] = MappingProxyType({})
    ) -> dict[str, _Path]:
        prober = self.prober
        model = copy.deepcopy(prober.model)
        for name, tensor in state_of(model):
            if name in start:
                as_real(tensor.data).copy_(start[name])
        if jitter:
            generator = torch.Generator(prober.device).manual_seed(1)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data.copy_(dithered(parameter.data, jitter, generator))
        optimizer = None if self.optimizer is None else self.optimizer(model.parameters())
        if optimizer is None or isinstance(optimizer, torch.optim.LBFGS):  # whose step takes a closure
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        emulate = prober.device.type == "cpu" and "fp16" in plan.formats
        micros = prober.micros[:STEPS]
        seen = []
        with Amp(plan, device=prober.device, group=ALONE) as amp:
            amp.prepare(model, optimizer)
            seen.append(self._now(model))
            for at, micro in enumerate(micros):
                optimizer.zero_grad()
                seed_all(micro.seed % 2**32)
                prober.passes += 1
                if at == len(self._tapes):
                    self._tapes.append(Tape())
                    draws: Recorder | Replayer = Recorder(self._tapes[at])
                else:
                    draws = Replayer(self._tapes[at])
                with draws, EmulatedProducts() if emulate else contextlib.nullcontext():
                    amp.backward(check_loss(prober.loss(model, micro.batch), prober.call))
                amp.step(optimizer)
                if at + 1 in (len(micros) // 2, len(micros)):
                    seen.append(self._now(model))
        begin, middle, end = seen
        return {
            name: _Path(tensor, middle[name], end[name])
            for name, tensor in begin.items()
            if name in middle and name in end and tensor.shape == middle[name].shape == end[name].shape
        }

    def _now(self, model: nn.Module) -> dict[str, Tensor]:
        moving = set(self.prober.moving)
        return {name: as_real(t.detach()).clone() for name, t in state_of(model) if name in moving}


def _differs(fp32: _Path, ours: _Path) -> str:
    """How state moves otherwise than in fp32, in a clause; empty where it moves alike."""
    moved, ours_moved = (path.end.double() - path.start.double() for path in (fp32, ours))
    square = float(moved.square().sum())
    if (
        not bool(torch.isfinite(fp32.end).all())
        or square == 0.0
        or torch.equal(fp32.end.double(), ours.end.double())
    ):
        return ""
    if not bool(torch.isfinite(ours.end).all()):
        return "is not finite after a few steps, and in fp32 it is"
    if not ours_moved.any():
        return "does not move in a few steps, and in fp32 it does"
    share = float((ours_moved * moved).sum()) / square
    if abs(share - 1.0) <= ALIKE:
        return ""
    return f"moves {max(share, 0.0):.2g} times as far in a few steps as it does in fp32"
