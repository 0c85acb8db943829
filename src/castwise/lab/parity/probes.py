"""Probes: forward and backward in fp32 and under a plan, at the same weights, data and random draws.

Every microbatch has dithered weights: each weight is moved by up to half a unit in the last place of the coarsest
format in question, the same way in every run. The rounding of the weights themselves, which is the same in every batch
while they stand still and washes out once they move, is so turned from a false bias into noise.

The model that is handed in is copied and never touched.
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
from castwise.core.plans.formats import FORMATS
from castwise.core.plans.plan import Plan
from castwise.core.session import Amp
from castwise.errors import NonFiniteError, WorkloadError
from castwise.lab.parity.damage import Grams, Matrix
from castwise.lab.parity.positions import Positions, PositionWatch
from castwise.lab.passes.draws import Draws
from castwise.lab.passes.observers import Observer
from castwise.lab.passes.passes import Original, at_scale, observed_under, run_backward, under
from castwise.lab.workloads.workload import about_data, users_code

REFERENCE = Plan(compute="fp32", fp32_matmul="ieee", fp32_conv="ieee")
"""What gradients are held against: fp32 through and through, TF32 ruled out."""
MOST_ELEMENTS = 1 << 21
"""This many elements of a larger parameter, drawn at random, represent it."""
MOST_IN_ALL = 1 << 24
"""Where all parameters together have more than this many elements, fewer of the large ones: 64 MiB a microbatch."""
LEAST_ELEMENTS = 1 << 15
"""And of each not fewer than these."""
RESCALE = 2.0**-6
"""Where a loss scale makes gradients overflow, the next one tried is this many times as large."""
RESCALES = 3
_CHUNKS = {"cpu": 1 << 14}
"""Elements of a vector that are multiplied at once: all vectors' together stay in a CPU's caches, and occupy a GPU."""
_EXPONENTS = {torch.float32: (torch.int32, 0xFF << 23), torch.float64: (torch.int64, 0x7FF << 52)}
"""Where a number keeps its exponent: the integers it can be read as, and the bits."""
_NO_MORE = object()


@dataclass
class Micro:
    """A microbatch of the reference.

    Attributes:
        batch: On the device.
        seed: Of its dither and its random draws.
        gradients: fp32, one vector per parameter; of a complex one the real and the imaginary parts.
    """

    batch: Any
    seed: int
    draws: Draws = field(default_factory=Draws)
    gradients: list[Tensor] = field(default_factory=list)
    loss: float = float("nan")


@dataclass
class Probe:
    """The gradients of a plan on some microbatches, as errors against the reference.

    Attributes:
        scale: The loss scale that gradients were taken with, None without one.
        indices: Positions of the microbatches in the prober's ``micros``.
        errors: Per microbatch and parameter d_k = h_k - g_k, fp32.
        blame: Names of parameters whose gradients were not finite.
        strayed: Random draws that could not be replayed.
    """

    plan: Plan
    scale: float | None = None
    indices: list[int] = field(default_factory=list)
    errors: list[list[Tensor]] = field(default_factory=list)
    finite: bool = True
    blame: tuple[str, ...] = ()
    strayed: int = 0


class Prober:
    """Runs probes of one model and one loss.

    Args:
        model: In fp32; it is copied.
        loss: From the model and a batch a scalar.
        batches: On any device.
        device: To run on.
        seed: Of dither and random draws.
        call: The caller, for errors.
        dither: The coarsest format in question.
        arrived: Path of a tensor -> low format that it arrived in, of a model that has been widened since; by default the
            model says so itself.
        first: How many microbatches other processes see before this one's, where one process would see all.

    Attributes:
        passes: Forward/backwards so far.
        micros: The reference's microbatches.
        names: Of the trained parameters, in the order of gradients.
        sparse: Whether a gradient came as a sparse tensor.
        positions: What the first forward did with positions.
        moving: Names of buffers and of parameters that are not trained which a forward and backward of the reference changed.
        original: What is copied for each pass.
        model: The fp32 model in it, to look at.
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
                f"{call}: the model is the fp32 reference, but nothing that it trains is fp32 ({name} is {kind}), and no plan "
                f"casts the other dtypes; give it in fp32: model.float()"
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
        """Of a trained parameter's values, such as an optimizer's state, those elements that stand for it, fp32 and flat."""
        flat, pick = as_real(values.detach()).reshape(-1), self._picks[name]
        return (flat if pick is None else flat[pick]).to(self.device, torch.float32)

    # --- passes -------------------------------------------------------------------------------------------

    def extend(self, count: int, *observers: Observer) -> None:
        """Run the reference on ``count`` more microbatches, with observers.

        Raises:
            WorkloadError: A loss that gradients cannot come from, or batches that run out.
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
                        "Give more, or an endless iterator"
                    )
                batch = to_device(batch, self.device)
                micro = Micro(batch, self._seed * 1_000_003 + self._first + len(self.micros) + 1)
                self._set(model, micro)
                state = {name: t.detach().clone() for name, t in state_of(model)}
                first = () if self.micros else (PositionWatch(self.positions, model, batch),)
                with observed_under(REFERENCE, model, self.device, micro.draws, *observers, *first):
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
        """fp32 against itself, rounding differently: the weights moved by up to one unit of fp32's last place.

        Repeating a pass on a CPU gives the same bits and says nothing about what rounding does; a permuted batch does,
        but not every loss may be permuted. A step of 2**-23 in the weights changes every rounding behind them.
        """
        return self.probe(REFERENCE, indices, jitter=2 * FORMATS["fp32"].eps)  # less would round away

    def repeat(self, index: int = 0) -> Probe:
        """fp32 against itself, repeated exactly: no error, but for a loss that is not deterministic."""
        return self.probe(REFERENCE, [index])

    def probe(
        self, plan: Plan, indices: Sequence[int], jitter: float = 0.0, onto: Probe | None = None
    ) -> Probe:
        """Run a plan on microbatches of the reference.

        Args:
            plan: What the model runs by. Its loss scale is lowered where gradients overflow, as training would.
            indices: Positions in ``micros``.
            jitter: Relative size of one more dither of this run's weights alone.
            onto: A probe of the same plan on other microbatches, to go on with.

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
        """Run until the first overflow that another loss scale might cure; return what is left."""
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
        """Run a plan on microbatches of the reference for what observers see; gradients are left to it.

        Raises:
            CastwiseError: The plan does not fit the model or the device.
        """
        with self._under(plan) as (model, amp):
            for index in indices:
                self._set(model, self.micros[index])
                self._replay(model, amp, self.micros[index], *observers)

    def _replay(self, model: nn.Module, amp: Amp, micro: Micro, *observers: Observer) -> None:
        """A forward and backward with the random draws of the reference; on a CPU products in fp16 as a GPU has them."""
        with observed_under(amp.plan, model, self.device, *observers, micro.draws):
            self._backward(model, amp, micro)

    @contextlib.contextmanager
    def _under(self, plan: Plan) -> Iterator[tuple[nn.Module, Amp]]:
        """A copy of the model, run by a plan; with masters as training has them, so that gradients are fp32.

        Not compiled: random draws are replayed, and fp16 products emulated, by means that only eager code allows.
        """
        model = self.original.copy()
        with under(dataclasses.replace(plan, compile="as_given"), model, self.device) as amp:
            yield model, amp

    def _backward(self, model: nn.Module, amp: Amp, micro: Micro) -> float:
        model.zero_grad(set_to_none=True)
        self.passes += 1
        return float(run_backward(amp, model, self.loss, micro.batch, self.call, micro.seed))

    def _set(self, model: nn.Module, micro: Micro, jitter: float = 0.0) -> None:
        """Put the dithered weights and the buffers of the start into a copy of the model."""
        generator = torch.Generator(self.device).manual_seed(micro.seed)
        second = torch.Generator(self.device).manual_seed(micro.seed + 1_000_000_007)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                weight = self._weights.get(name)
                if weight is None:
                    continue
                # a base that arrived low is what it is: no training moves it to where it would have to be rounded
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
        """Inner products per parameter, by name, of a probe's errors and of the reference's gradients.

        Those of a sampled parameter are scaled up to its whole size. ``weighting`` has factors per parameter and
        element, such as :meth:`preconditioner`'s.
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
        """Per element 1 / (sqrt(mean over microbatches of g**2) + eps), which turns gradients into Adam's steps.

        A hundredth of the tensor's own root mean square is added to Adam's eps, so that an element whose gradient happens
        to be zero in these batches does not outweigh all others.
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
    """What a model keeps beside its trained weights: dense buffers, and such parameters as are not trained."""
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        untrained = not (isinstance(tensor, nn.Parameter) and tensor.requires_grad)
        if untrained and tensor.layout is torch.strided:
            yield name, tensor


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts, in a last dimension of 2; others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def dithered(weight: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    """Move a weight uniformly by up to half a unit in the last place of a format with this eps; complex ones in both parts."""
    if weight.is_complex():
        return torch.view_as_complex(dithered(as_real(weight), eps, generator))
    wide = weight if weight.dtype in _EXPONENTS else weight.float()
    integers, bits = _EXPONENTS[wide.dtype]
    power = (wide.view(integers) & bits).view(wide.dtype)  # of two, at most the weight's size; 0 of 0
    power.masked_fill_(power.isinf(), 0.0)
    noise = torch.rand(weight.shape, generator=generator, device=weight.device, dtype=torch.float32).sub_(0.5)
    return torch.addcmul(wide, noise.to(wide.dtype), power, value=eps).to(weight.dtype)


def _gram(vectors: list[Tensor], factors: Tensor | None) -> Matrix:
    device = vectors[0].device
    chunk = _CHUNKS.get(device.type, 1 << 18)
    total = torch.zeros(len(vectors), len(vectors), dtype=torch.float64, device=device)
    for start in range(0, vectors[0].numel(), chunk):
        block = torch.stack([v[start : start + chunk] for v in vectors]).double()
        if factors is not None:
            block *= factors[start : start + chunk]
        total.addmm_(block, block.T)
    found: Matrix = total.cpu().numpy()
    return found
