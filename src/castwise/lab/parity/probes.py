"""Run forward and backward in fp32 and under a plan, at the same weights, data and random draws, and compare the gradients.

The weights are dithered for every microbatch: each weight is perturbed by up to half a unit in the last place of the coarsest
format tested, equally in every run. While weights are fixed, their rounding error is the same in every batch. In training this
error averages out, since weights change. Dither makes it average out in the test too; otherwise it would look like a bias.

The given model is copied and never changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.casting.trees import to_device
from castwise.core.devices import in_fp64
from castwise.core.plans.formats import FORMATS
from castwise.core.plans.plan import Plan
from castwise.core.session import Amp
from castwise.errors import NonFiniteError, WorkloadError
from castwise.lab.parity.damage import Grams, Matrix
from castwise.lab.parity.positions import Positions, PositionWatch
from castwise.lab.passes.choices import Changes, Choice, Choices, changed_choices, lowest_format
from castwise.lab.passes.draws import Draws
from castwise.lab.passes.observers import Observer
from castwise.lab.passes.passes import Original, at_scale, observed_under, run_backward, under
from castwise.lab.workloads.workload import about_data, users_code

REFERENCE = Plan(compute="fp32", fp32_matmul="ieee", fp32_conv="ieee")
"""The reference for gradients: fp32 throughout, without TF32."""
MOST_ELEMENTS = 1 << 21
"""A larger parameter is represented by this many of its elements, drawn at random."""
MOST_IN_ALL = 1 << 24
"""Maximum number of elements that represent all parameters together: 64 MiB per microbatch. Above it, large parameters are
represented by fewer elements."""
LEAST_ELEMENTS = 1 << 15
"""Minimum number of elements per sampled parameter."""
RESCALE = 2.0**-6
"""Factor of the next loss scale tried when gradients overflow."""
RESCALES = 3
CHOOSING = 2
"""Number of microbatches whose discrete choices are compared."""
_CHUNKS = {"cpu": 1 << 14}
"""Number of elements of each vector that are multiplied at once: few enough for a CPU's caches, enough to occupy a GPU."""
_EXPONENTS = {torch.float32: (torch.int32, 0xFF << 23), torch.float64: (torch.int64, 0x7FF << 52)}
"""Exponent bits of a number: the integer type that it is viewed as, and the mask."""
_NO_MORE = object()


@dataclass
class Micro:
    """A microbatch, with what the fp32 reference computed on it.

    Attributes:
        batch: The batch, on the device.
        seed: Seed of dither and random draws.
        draws: The random draws of the forward and backward pass.
        choices: The discrete choices of the forward pass; recorded only in the first ``CHOOSING`` microbatches.
        gradients: The fp32 gradients, one vector per parameter; complex gradients as real and imaginary parts.
        loss: The loss.
    """

    batch: Any
    seed: int
    draws: Draws = field(default_factory=Draws)
    choices: Choices = field(default_factory=Choices)
    gradients: list[Tensor] = field(default_factory=list)
    loss: float = float("nan")


@dataclass
class Probe:
    """A plan's gradients on some microbatches, stored as differences from the fp32 gradients.

    Attributes:
        plan: The plan.
        scale: Loss scale of the gradients, None without one.
        indices: Positions of the microbatches in :attr:`Prober.micros`.
        errors: For each microbatch and parameter, the plan's gradient minus the fp32 gradient, in fp32.
        finite: Whether all gradients are finite.
        blame: Names of parameters with non-finite gradients.
        strayed: Number of random draws that could not be repeated.
    """

    plan: Plan
    scale: float | None = None
    indices: list[int] = field(default_factory=list)
    errors: list[list[Tensor]] = field(default_factory=list)
    finite: bool = True
    blame: tuple[str, ...] = ()
    strayed: int = 0


class Prober:
    """Runs one model and one loss on microbatches, in fp32 as the reference and under plans, and compares the gradients.

    Args:
        model: The model in fp32; it is copied.
        loss: ``loss(model, batch)`` -> scalar.
        batches: The batches, on any device.
        device: The device to run on.
        seed: Seed of dither and random draws.
        call: The caller, for errors.
        dither: The coarsest format tested.
        arrived: For a model that was widened to fp32, the original low dtypes of its tensors, by path; by default read from
            the model.
        first: Number of microbatches that lower ranks run. Microbatches are numbered after these, so that all ranks together use
            the same seeds as one process would.

    Attributes:
        passes: Number of forward/backward passes so far.
        micros: The reference's microbatches.
        names: Names of the trained parameters, in gradient order.
        sparse: Whether a gradient was sparse.
        positions: Which sequence positions the first forward pass used.
        moving: Names of buffers and untrained parameters that a forward and backward of the reference changed.
        original: The model copied for each pass.
        model: The fp32 model, for inspection.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        batches: Iterator[Any],
        device: torch.device,
        *,
        seed: int = 0,
        call: str = "parity",
        dither: str = "bf16",
        arrived: Mapping[str, torch.dtype] = MappingProxyType({}),
        first: int = 0,
    ) -> None:
        self.call = call
        self._first = first
        self.device = device
        self.passes = 0
        self.micros: list[Micro] = []
        self.sparse = False
        self.positions = Positions()
        self.moving: tuple[str, ...] = ()
        self.loss = loss
        self._batches = batches
        self._seed = seed
        self._eps = FORMATS[dither].eps
        self.original = Original(model, call, device, arrived)
        self.model = self.original.model
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.names = list(trained)
        if not self.names:
            raise WorkloadError(
                f"{call}: no parameter of {type(model).__name__} requires a gradient; give a model that is trained"
            )
        if not any(p.dtype in (torch.float32, torch.complex64) for p in trained.values()):
            name = next(iter(trained))
            kind = str(trained[name].dtype).removeprefix("torch.")
            raise WorkloadError(
                f"{call}: the model is the fp32 reference, but none of its trained parameters is fp32 ({name} is {kind}), and no "
                "plan casts other dtypes; give the model in fp32: model.float()"
            )
        self._weights = {
            name: p.detach().clone()
            for name, p in self.model.named_parameters()
            if p.is_floating_point() or p.is_complex()
        }
        self._buffers = {name: b.detach().clone() for name, b in self.model.named_buffers()}
        self._sizes = {name: as_real(p.detach()).numel() for name, p in trained.items()}
        most = MOST_ELEMENTS
        while most > LEAST_ELEMENTS and sum(min(size, most) for size in self._sizes.values()) > MOST_IN_ALL:
            most //= 2
        self._picks = {
            name: self._pick(index, self._sizes[name], most)
            for index, (name, p) in enumerate(self.model.named_parameters())
            if p.requires_grad
        }
        self._scales: dict[Plan, float] = {}

    def _pick(self, index: int, numel: int, most: int) -> Tensor | None:
        if numel <= most:
            return None
        generator = torch.Generator().manual_seed(self._seed + index)
        return torch.randint(numel, (most,), generator=generator, device="cpu").sort().values.to(self.device)

    def picked(self, name: str, values: Tensor) -> Tensor:
        """Return the elements that represent a trained parameter, in fp32 and flat.

        Args:
            name: Name of the parameter.
            values: A tensor of the parameter's shape, such as optimizer state.
        """
        flat, pick = as_real(values.detach()).reshape(-1), self._picks[name]
        return (flat if pick is None else flat[pick]).to(self.device, torch.float32)

    # --- passes -------------------------------------------------------------------------------------------

    def extend(self, count: int, *observers: Observer) -> None:
        """Run the fp32 reference on ``count`` more microbatches, with observers.

        Raises:
            WorkloadError: A loss that is not differentiable, or batches that end.
            NonFiniteError: The loss or a gradient is not finite in fp32.
        """
        needed = len(self.micros) + count
        with self._under(REFERENCE) as (model, amp):
            for _ in range(count):
                with users_code(f"{self.call}: batches failed"):
                    batch = next(self._batches, _NO_MORE)
                if batch is _NO_MORE:
                    raise WorkloadError(
                        f"{self.call}: batches ended after {len(self.micros)}; the test needs {needed}. "
                        "Give more batches, or an endless iterator"
                    )
                batch = to_device(batch, self.device)
                micro = Micro(batch, self._seed * 1_000_003 + self._first + len(self.micros) + 1)
                self._set(model, micro)
                state = {name: t.detach().clone() for name, t in state_of(model)}
                first = () if self.micros else (PositionWatch(self.positions, model, batch),)
                choices = (micro.choices,) if len(self.micros) < CHOOSING else ()
                with observed_under(REFERENCE, model, self.device, micro.draws, *observers, *first, *choices):
                    micro.loss = self._backward(model, amp, micro)
                self.moving += tuple(
                    n
                    for n, t in state_of(model)
                    if n in state
                    and n not in self.moving
                    and not (t.dtype is state[n].dtype and torch.equal(t, state[n]))
                )
                micro.gradients = self._gradients(model, 1.0)
                self._check_reference(model, micro)
                self.micros.append(micro)

    def _not_finite(self, gradients: list[Tensor]) -> list[str]:
        return [n for n, g in zip(self.names, gradients, strict=True) if not bool(torch.isfinite(g).all())]

    def _check_reference(self, model: nn.Module, micro: Micro) -> None:
        number = len(self.micros)
        if not any(p.grad is not None for p in model.parameters()):
            raise WorkloadError(
                f"{self.call}: after loss(model, batch) and backward no parameter of the model has a gradient; the loss must "
                "call the model that it is given, since experiments run on copies"
            )
        bad = self._not_finite(micro.gradients)
        if bad or not math.isfinite(micro.loss):
            sound = math.isfinite(micro.loss)
            what = f"the gradient of {', '.join(bad[:3])}" if sound else f"the loss ({micro.loss})"
            raise NonFiniteError(
                f"{self.call}: {what} of batch {number} is not finite in fp32 already, so no plan can be compared: "
                f"{about_data(micro.batch)}"
            )

    def floor(self, indices: Sequence[int]) -> Probe:
        """Compare fp32 with fp32 under different rounding, by perturbing the weights by up to one unit in fp32's last place.

        An identical repetition on a CPU is bit-identical and shows nothing about rounding. A permuted batch would show it,
        but not every loss allows a permutation. A perturbation of 2**-23 of the weights changes every later rounding.
        """
        return self.probe(
            REFERENCE, indices, jitter=2 * FORMATS["fp32"].eps
        )  # a smaller jitter would be rounded away

    def repeat(self, index: int = 0) -> Probe:
        """Compare fp32 with an identical repetition, which differs only if the loss is not deterministic."""
        return self.probe(REFERENCE, [index])

    def probe(
        self, plan: Plan, indices: Sequence[int], jitter: float = 0.0, onto: Probe | None = None
    ) -> Probe:
        """Run a plan on microbatches of the fp32 reference, and return the differences of the gradients.

        Args:
            plan: The plan to run under. Its loss scale is lowered if gradients overflow, as in training.
            indices: Positions of the microbatches in ``micros``.
            jitter: Relative size of a further perturbation of the weights in this run only.
            onto: The result of the same plan on other microbatches, which is extended.

        Raises:
            CastwiseError: The plan does not fit the model or the device.
        """
        probe = onto if onto is not None else Probe(plan)
        scale = self._scales.get(plan) or (plan.loss_scale.init if plan.loss_scale is not None else None)
        rest = list(indices)
        for attempt in range(RESCALES + 1):
            last = attempt == RESCALES or scale is None
            rest = self._run(at_scale(plan, scale), rest, jitter, probe, last)
            if not rest or last:
                break
            assert scale is not None
            scale *= RESCALE
        probe.scale = scale
        if scale is not None:
            self._scales[plan] = scale
        return probe

    def _run(self, plan: Plan, indices: list[int], jitter: float, probe: Probe, last: bool) -> list[int]:
        """Run a plan on microbatches until gradients overflow; return the indices of the microbatches that remain.

        With ``last``, no smaller loss scale follows, so an overflow is recorded in ``probe`` and nothing remains.
        """
        with self._under(plan) as (model, amp):
            for at, index in enumerate(indices):
                micro = self.micros[index]
                self._set(model, micro, jitter)
                self._replay(model, amp, micro)
                gradients = self._gradients(model, amp.get_scale())
                blame = self._not_finite(gradients)
                if blame and not last:
                    return indices[at:]
                probe.indices.append(index)
                probe.errors.append([h.sub_(g) for h, g in zip(gradients, micro.gradients, strict=True)])
                probe.strayed += micro.draws.strayed
                if blame:
                    probe.finite, probe.blame = False, tuple(blame)
                    return []
        return []

    def observe(self, plan: Plan, indices: Sequence[int], *observers: Observer) -> None:
        """Run a plan on microbatches of the fp32 reference for observers only; gradients are not collected.

        Raises:
            CastwiseError: The plan does not fit the model or the device.
        """
        with self._under(plan) as (model, amp):
            for index in indices:
                self._set(model, self.micros[index])
                self._replay(model, amp, self.micros[index], *observers)

    def changed_choices(self, plan: Plan) -> tuple[Choice, ...]:
        """Return the discrete choices (indices, masks) that differ under a plan from those in fp32.

        Nothing runs if the model makes no choices.

        Raises:
            CastwiseError: The plan does not fit the model or the device.
        """
        changes: list[Changes] = []
        format = lowest_format(plan)
        for index, micro in enumerate(self.micros[:CHOOSING]):
            if format is not None and micro.choices.chose:
                changes.append(Changes(micro.choices.tape, format))
                self.observe(plan, [index], changes[-1])
        return changed_choices(changes)

    def _replay(self, model: nn.Module, amp: Amp, micro: Micro, *observers: Observer) -> None:
        """Run forward and backward with the reference's random draws; on a CPU, fp16 products are emulated as on a GPU."""
        with observed_under(amp.plan, model, self.device, *observers, micro.draws):
            self._backward(model, amp, micro)

    @contextlib.contextmanager
    def _under(self, plan: Plan) -> Iterator[tuple[nn.Module, Amp]]:
        """Yield a copy of the model under a plan, and the session; master weights exist as in training, so gradients are fp32.

        The copy is not compiled, since repeating random draws and emulating fp16 products need eager mode.
        """
        model = self.original.copy()
        with under(dataclasses.replace(plan, compile="as_given"), model, self.device) as amp:
            yield model, amp

    def _backward(self, model: nn.Module, amp: Amp, micro: Micro) -> float:
        model.zero_grad(set_to_none=True)
        self.passes += 1
        return float(run_backward(amp, model, self.loss, micro.batch, self.call, micro.seed))

    def _set(self, model: nn.Module, micro: Micro, jitter: float = 0.0) -> None:
        """Load the dithered weights and the initial buffers into a copy of the model."""
        generator = torch.Generator(self.device).manual_seed(micro.seed)
        second = torch.Generator(self.device).manual_seed(micro.seed + 1_000_000_007)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                weight = self._weights.get(name)
                if weight is None:
                    continue
                # a frozen parameter that was given in bf16 or fp16 is exact in that format: no dither
                still = name in self.original.arrived and not parameter.requires_grad
                moved = weight if still else dithered(weight, self._eps, generator)
                if jitter:
                    moved = dithered(moved, jitter, second)
                parameter.data.copy_(moved)
            for name, buffer in model.named_buffers():
                if name in self._buffers and buffer.shape == self._buffers[name].shape:
                    buffer.copy_(self._buffers[name])

    def _gradients(self, model: nn.Module, scale: float) -> list[Tensor]:
        out = []
        for name, parameter in model.named_parameters():
            if name not in self._picks:
                continue
            pick = self._picks[name]
            gradient = parameter.grad
            if gradient is None:
                size = self._sizes[name] if pick is None else pick.numel()
                out.append(torch.zeros(size, device=parameter.device))
                continue
            flat = as_real(_torch.tensors.to_dense(gradient).detach()).reshape(-1)
            flat = flat if pick is None else flat[pick]
            flat = flat.float().mul(1.0 / scale) if scale != 1.0 else flat.float()
            self.sparse |= not _torch.tensors.is_dense(gradient)
            own = not _torch.tensors.is_dense(gradient) or flat.data_ptr() != gradient.data_ptr()
            out.append(flat if own else flat.clone())
        return out

    # --- inner products -----------------------------------------------------------------------------------

    def grams(self, probe: Probe, weighting: Sequence[Tensor] | None = None) -> dict[str, Grams]:
        """Return, for each parameter by name, the inner products of the fp32 gradients and of a plan's gradient errors.

        If only a sample of a parameter's elements is known, the inner products are scaled up to the parameter's full size.
        ``weighting`` has a factor for each element of each parameter, such as those of :meth:`preconditioner`.
        """
        out = {}
        for at, name in enumerate(self.names):
            factors = None if weighting is None else weighting[at]
            signal = _gram([self.micros[i].gradients[at] for i in probe.indices], factors)
            error = _gram([errors[at] for errors in probe.errors], factors)
            pick = self._picks[name]
            stretch = 1.0 if pick is None else self._sizes[name] / pick.numel()
            out[name] = Grams(signal * stretch, error * stretch)
        return out

    def preconditioner(self) -> list[Tensor]:
        """Return the factors that turn gradients into Adam's steps: 1 / (sqrt(mean over microbatches of g**2) + eps).

        There is one factor per element of each parameter. A hundredth of the gradient's root mean square is added to Adam's eps,
        so that an element whose gradient happens to be zero in these batches does not dominate.
        """
        out = []
        for at in range(len(self.names)):
            square = torch.zeros_like(self.micros[0].gradients[at])
            for micro in self.micros:
                square.addcmul_(micro.gradients[at], micro.gradients[at], value=1.0 / len(self.micros))
            floor = 1e-8 + (1e-2 * float(square.mean().sqrt()) if square.numel() else 0.0)
            out.append(1.0 / (square.sqrt() + floor))
        return out


def state_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a model's state besides its trained weights: dense buffers and untrained parameters."""
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        untrained = not (isinstance(tensor, nn.Parameter) and tensor.requires_grad)
        if untrained and tensor.layout is torch.strided:
            yield name, tensor


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as real and imaginary parts in a last dimension of 2; other tensors are returned unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def dithered(weight: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    """Perturb a weight uniformly by up to half a unit in the last place of a format, which is given by its eps.

    Of a complex weight both parts are perturbed.
    """
    if weight.is_complex():
        return torch.view_as_complex(dithered(as_real(weight), eps, generator))
    wide = weight if weight.dtype in _EXPONENTS else weight.float()
    integers, bits = _EXPONENTS[wide.dtype]
    power = (wide.view(integers) & bits).view(
        wide.dtype
    )  # the largest power of two not above the weight; 0 for 0
    power.masked_fill_(power.isinf(), 0.0)
    noise = torch.rand(weight.shape, generator=generator, device=weight.device, dtype=torch.float32).sub_(0.5)
    return torch.addcmul(wide, noise.to(wide.dtype), power, value=eps).to(weight.dtype)


def _gram(vectors: list[Tensor], factors: Tensor | None) -> Matrix:
    device = vectors[0].device
    chunk = _CHUNKS.get(device.type, 1 << 18)
    total = in_fp64(torch.zeros(len(vectors), len(vectors), device=device))
    for start in range(0, vectors[0].numel(), chunk):
        block = in_fp64(torch.stack([v[start : start + chunk] for v in vectors]))
        if factors is not None:
            block *= factors[start : start + chunk].to(block.device)
        total.addmm_(block, block.T)
    found: Matrix = total.cpu().numpy()
    return found
