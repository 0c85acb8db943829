"""Run forward and backward passes of copies of one model under plans, with the same weights, batch and random draws.

Given functions observe or replace the tensors that enter or leave the model's module calls
(:mod:`castwise.lab.inspect.crossings`).
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from castwise.core import _torch, devices
from castwise.core.casting.trees import to_device
from castwise.core.model.arrival import widen_for
from castwise.core.model.resolve import Resolution, resolve
from castwise.core.plans.plan import Plan
from castwise.lab.inspect.compiled import CompiledCrossings
from castwise.lab.inspect.crossings import Backward, Crossings, Forward
from castwise.lab.parity.probes import RESCALE, RESCALES, as_real
from castwise.lab.passes.draws import Draws
from castwise.lab.passes.observers import Call, Observer
from castwise.lab.passes.passes import Original, at_scale, gradients_of, observed_under, run_backward, under
from castwise.lab.workloads.workload import users_code


@dataclass(frozen=True)
class Run:
    """The result of one forward and backward pass.

    Attributes:
        loss: Value of the loss.
        gradients: Gradient of each trained parameter that has one, by path, unscaled, in fp32 or wider.
        callers: All calls in the order in which they started, each with its caller; None for calls made by the loss.
        kinds: Class of each module, by path.
        scale: The loss scale, 1 without one.
        strayed: Number of random draws that could not be repeated.
        unseen: Paths of modules with tensors that could not be watched.
    """

    loss: float
    gradients: dict[str, Tensor]
    callers: dict[Call, Call | None]
    kinds: dict[str, str]
    scale: float
    strayed: int
    unseen: Counter[str]

    @property
    def finite(self) -> bool:
        """Whether all gradients are finite; reading this property waits for the device."""
        return all(bool(torch.isfinite(as_real(g)).all()) for g in self.gradients.values())


class Runs:
    """Runs forward and backward passes of one model, one loss and one batch.

    Args:
        model: The model. It is copied, and widened if it is stored in bf16 or fp16; each pass stores its copy in the
            original formats.
        loss: ``loss(model, batch)`` -> scalar.
        batch: The batch, on any device.
        device: The device to run on.
        seed: Seed of random draws.
        call: The caller, for errors.

    Attributes:
        trains: Whether any parameter requires a gradient; if none does, there is no backward.
        repeats_draws: Whether the first pass's random draws are repeated in the others; with compiled code this is impossible, and all
            passes draw from one seed.
        ran: Number of passes so far.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any, device: torch.device,
        *, seed: int, call: str, repeats_draws: bool = True,
    ) -> None:  # fmt: skip
        self._call, self._device, self._seed, self._loss = call, device, seed, loss
        self._batch = to_device(batch, device)
        self._original = Original(model, call, device)
        self._draws = (Draws(),) if repeats_draws else ()
        self._known: Crossings | None = None
        self.repeats_draws = repeats_draws
        self.trains = any(parameter.requires_grad for parameter in self._original.model.parameters())
        self.ran = 0

    def resolution(self, plan: Plan) -> Resolution:
        """Return how a plan applies to the model: the formats of every module."""
        model = self._original.copy()
        return resolve(plan, model, self._device.type, widen=widen_for(plan, model))

    def run(
        self,
        plan: Plan,
        forward: Forward = lambda *_: None,
        backward: Backward = lambda *_: None,
        *,
        change: Callable[[nn.Module], None] | None = None,
        scale: float | None = None,
        whole: bool = False,
        observer: Observer | None = None,
    ) -> Run:
        """Run one forward and backward pass on a copy of the model.

        The first pass draws random numbers, and later passes repeat them. The first pass must not be compiled.

        Args:
            plan: The plan to run under; the model is compiled if the plan compiles.
            forward: Gets each tensor that enters or leaves a module call in forward, and may replace the tensor.
            backward: Gets the gradient of each such tensor, still multiplied by the loss scale, and may replace the gradient.
            change: Called with the prepared model before it runs.
            scale: Loss scale to use instead of the plan's.
            whole: If the pass is compiled, observe nothing, so that the compiler can fuse across module calls.
            observer: Observes the pass too.

        Raises:
            CastwiseError: The plan does not fit the model or the device, or the loss fails.
        """
        plan = at_scale(plan, scale)
        model, compiled = self._original.copy(), plan.compile != "as_given"
        self.ran += 1
        with contextlib.ExitStack() as stack:
            if compiled:
                stack.enter_context(_torch.dynamo.eager_random_numbers())
            amp = stack.enter_context(under(plan, model, self._device))
            if change is not None:
                change(model)
            watching: Crossings | CompiledCrossings | None = None
            if not compiled:
                watching = Crossings(forward, backward)
                self._known = self._known or watching
            elif not whole:
                assert self._known is not None
                watching = CompiledCrossings(forward, backward, frozenset(self._known.writes))
            observers = filter(None, (watching, *self._draws, observer))
            stack.enter_context(observed_under(plan, model, self._device, *observers))
            stack.enter_context(users_code(f"{self._call}: the model or its loss failed"))
            stack.enter_context(torch.set_grad_enabled(self.trains))
            value = float(run_backward(amp, model, self._loss, self._batch, self._call, self._seed))
            used = amp.get_scale()
            gradients = gradients_of(model, used)
        kinds = {path: type(module).__name__ for path, module in model.named_modules()}
        strayed = sum(draws.strayed for draws in self._draws)
        calls = watching if isinstance(watching, Crossings) else self._known
        unseen = watching.unseen if watching is not None else Counter()
        return Run(value, gradients, {} if calls is None else calls.callers, kinds, used, strayed, unseen)

    def run_finite(
        self,
        plan: Plan,
        begin: Callable[[float | None], tuple[Forward, Backward]],
        whole: bool = False,
        observer: Observer | None = None,
    ) -> Run:
        """Run one forward and backward pass at a loss scale at which gradients do not overflow, as training would find it.

        If gradients overflow at every scale that is tried, the last pass is returned.

        Args:
            plan: The plan to run under.
            begin: Called with the loss scale before each attempt; returns ``forward`` and ``backward`` for :meth:`run`.
            whole: As for :meth:`run`.
            observer: As for :meth:`run`.
        """
        scale = plan.loss_scale.init if plan.loss_scale is not None else None
        for attempt in range(RESCALES + 1):
            forward, backward = begin(scale)
            passed = self.run(plan, forward, backward, scale=scale, whole=whole, observer=observer)
            if scale is None or attempt == RESCALES or passed.finite:
                break
            scale *= RESCALE
        return passed


def in_fp64(tensor: Tensor) -> Tensor:
    """Return a tensor in fp64, with complex values as two real parts; on the CPU if the tensor's device has no fp64."""
    return devices.in_fp64(as_real(tensor))


class Difference(NamedTuple):
    """The relative difference of two tensors: ||b - a|| / ||a||, and max |b - a| / max |a|."""

    norm: float
    most: float


def difference(ours: Tensor, reference: Tensor) -> Difference | None:
    """Return the relative difference of a tensor from the reference, computed in fp64.

    Elements at which the reference is not finite count as equal. The difference is infinite if ``ours`` is not finite where the
    reference is. None is returned if the shapes differ, the reference is not floating, or all its finite values are 0.
    """
    if ours.shape != reference.shape or not (reference.is_floating_point() or reference.is_complex()):
        return None
    a, b = in_fp64(reference), in_fp64(ours)
    sound = torch.isfinite(a)
    a = torch.where(sound, a, 0.0)
    gap = torch.where(sound, b - a, 0.0)
    if not a.numel() or not (size := float(a.norm())):
        return None
    norm, most = float(gap.norm()) / size, float(gap.abs().max() / a.abs().max())
    return Difference(norm, most) if math.isfinite(norm) else Difference(math.inf, math.inf)


def total_difference(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float | None:
    """Return the relative difference of all gradients together, or None if all reference gradients are zero.

    A gradient that is missing in ``ours`` counts as zero.
    """
    square = off = 0.0
    for name, gradient in reference.items():
        a = in_fp64(gradient)
        b = in_fp64(ours[name]) if name in ours else torch.zeros_like(a)
        square += float(a.square().sum())
        off += float((b - a).square().sum())
    if not square:
        return None
    return math.sqrt(off / square) if math.isfinite(off) else math.inf


def differences(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, Difference | None]:
    """Return :func:`difference` of each gradient, by parameter path; a gradient that is missing in ``ours`` counts as zero."""
    return {
        name: difference(ours.get(name, torch.zeros_like(gradient)), gradient)
        for name, gradient in reference.items()
    }
