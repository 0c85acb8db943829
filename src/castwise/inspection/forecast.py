"""``forecast``: what low formats would do to a model's numbers, seen in an fp32 run.

Weights, activations, gradients and updates are cast to each format and back, region by region: how many overflow, vanish
or lose digits, and for fp16 which loss scales hold the gradients. A device that computes in the formats is not needed.

Which of the numbers a plan keeps in fp32 is learned from one run under it: what autocasting leaves wide, and never casts
at its use, is listed as *kept* and does not count against a format.

Ranges are all that it judges. Whether a format's digits are enough for the gradients, :func:`castwise.parity` tests.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from castwise import _torch
from castwise.errors import PlanError, WorkloadError, check_count
from castwise.inspection.plan_casts import PlanCasts
from castwise.inspection.range_verdicts import answer, recommended, stored_troubles, troubles
from castwise.inspection.watch import Kind, Site, site_of
from castwise.measure.environment import Environment, environment
from castwise.numerics.batches import endless
from castwise.numerics.casts import Cast, Tally, Values
from castwise.numerics.gradient_range import Histogram, Magnitudes, ScaleRange, scale_range
from castwise.numerics.isolation import undisturbed, unspoilt
from castwise.numerics.parity import device_of
from castwise.numerics.probes import REFERENCE, Prober
from castwise.numerics.updates import one_update, stored_change
from castwise.plans.formats import FORMATS, LOW, Format, get_format
from castwise.plans.plan import Plan, as_plan
from castwise.process import find_device
from castwise.result import Result
from castwise.workload import users_code

if TYPE_CHECKING:
    from rich.console import RenderableType

FORECAST = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
"""The formats that a forecast can be made for."""
KINDS: tuple[Kind, ...] = ("weights", "activations", "gradients", "weight gradients", "updates")
MICROBATCHES = 4


@dataclass(frozen=True)
class TensorForecast:
    """What formats do to a region's tensors of one kind.

    Attributes:
        kind: ``weights``; ``activations``, each result of a function in forward; ``gradients``, of these; ``weight gradients``;
            ``updates``, those of them that are not zero.
        kept: Whether the plan keeps them in fp32.
        count: Values, of a complex one two.
        not_finite: Of these infinite or NaN in fp32 already, as in a mask; they count nowhere else.
        largest: Magnitude.
        histogram: Magnitudes by powers of two, of a sample where tensors are large.
        casts: Per format as it is, and where training would scale, scaled. Of ``updates`` in the formats that weights can be
            stored in: ``flush`` is the share that rounding drops.
    """

    kind: Kind
    kept: bool
    count: int
    not_finite: int
    largest: float
    histogram: Histogram
    casts: tuple[Cast, ...]

    def cast(self, format: str, scaled: bool = True) -> Cast | None:
        """What a format does: scaled as in training where that scales, or as it is; None where it was not asked."""
        found = [cast for cast in self.casts if cast.format == format]
        return next(
            (cast for cast in found if (cast.scale is not None) is scaled), found[0] if found else None
        )


@dataclass(frozen=True)
class RegionForecast:
    """What formats do to one module's own tensors, those of modules inside it not counted.

    Attributes:
        path: Of the module, empty for the model itself.
        module: Its class.
        tensors: By kind; what the plan keeps in fp32 apart.
        scales: Loss scales under which fp16 holds its gradients; None without any.
        troubles: By format why it does not hold them under the plan; formats that hold are absent.
        stored: The same where everything, parameters too, is stored in the format, without masters and loss scale.
    """

    path: str
    module: str
    tensors: tuple[TensorForecast, ...]
    scales: ScaleRange | None
    troubles: dict[str, str]
    stored: dict[str, str]

    def tensor(self, kind: Kind, kept: bool = False) -> TensorForecast | None:
        """The tensors of a kind, or None."""
        return next((t for t in self.tensors if t.kind == kind and t.kept is kept), None)


@dataclass(frozen=True)
class Forecast(Result):
    """What formats would do to a model's numbers.

    Attributes:
        plan: The plan whose casts are assumed.
        formats: Asked for.
        answer: In a few sentences.
        recommendation: The line of the plan whose format holds the most, with regions in fp32 where it does not; None where no
            format of ``bf16`` and ``fp16`` was asked for or holds the model itself.
        regions: In the model's order, those that compute something.
        scales: Loss scales under which fp16 holds all gradients; None without fp16 or gradients.
        loss_scale: With which gradients were cast to fp16; 1 without.
        microbatches: That were run.
        passes: Forward/backwards it took.
        notes: What else to know, a sentence each.
        environment: Where it was made.
    """

    kind: ClassVar[str] = "forecast"
    plan: Plan
    formats: tuple[str, ...]
    answer: str
    recommendation: str | None
    regions: tuple[RegionForecast, ...]
    scales: ScaleRange | None
    loss_scale: float
    microbatches: int
    passes: int
    notes: tuple[str, ...]
    environment: Environment

    def region(self, path: str) -> RegionForecast:
        """The region of a module path.

        Raises:
            PlanError: There is none.
        """
        for region in self.regions:
            if region.path == path:
                return region
        known = ", ".join(repr(region.path) for region in self.regions[:12])
        raise PlanError(
            f"Forecast.region({path!r}): no module of that path computed anything; there are {known}, ..."
        )

    def _fields(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        regions = [dataclasses.asdict(region) for region in self.regions]
        return {**fields, "plan": str(self.plan), "regions": regions, "scales": _asdict(self.scales),
                "environment": _asdict(self.environment), "workload": "", "description": "",
                "ranges": {name: _ends(FORMATS[name]) for name in self.formats}}  # fmt: skip

    def table(self) -> RenderableType:
        """The answer and the regions, the troubled first, for ``rich.print``."""
        return super().table()

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``forecast.json`` and the page ``forecast.html``.

        Args:
            folder: Where to; made if it does not exist.

        Returns:
            The path of the page; where Jinja is missing a warning says so, and it is that of the JSON file.
        """
        return self._save(Path(folder) / "forecast.html", Path(folder) / "forecast.json")[0]


def _asdict(value: Any) -> dict[str, Any] | None:
    return None if value is None else dataclasses.asdict(value)


def _ends(format: Format) -> list[float]:
    return [format.smallest_subnormal, format.smallest_normal, format.max]


class _Ledger:
    """What is summed up of a region's tensors of one kind."""

    def __init__(self) -> None:
        self.count = self.not_finite = 0
        self.magnitudes = Magnitudes()
        self.tallies: dict[tuple[str, float | str | None], Tally] = {}

    def add(self, tensor: Tensor, formats: Sequence[tuple[Format, float | str | None]]) -> None:
        """Cast a tensor's values to formats, each with its scale."""
        values = Values.of(tensor)
        numbers = tensor.numel() * (2 if tensor.is_complex() else 1)
        self.count += numbers
        self.not_finite += numbers - values.count
        values.count_into(self.magnitudes)
        for format, scale in formats:
            factor = values.own_scale(format) if isinstance(scale, str) else scale or 1.0
            self.put(format.name, scale, values.tally(format, factor))

    def put(self, format: str, scale: float | str | None, found: Tally) -> None:
        key = format, scale
        self.tallies[key] = self.tallies.get(key, Tally()) + found

    def forecast(self, path: str, kind: Kind, kept: bool) -> TensorForecast:
        casts = tuple(found.cast(*key) for key, found in self.tallies.items())
        seen = self.magnitudes
        return TensorForecast(
            kind, kept, self.count, self.not_finite, seen.largest, seen.histogram(path), casts
        )


def forecast(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Any,
    formats: Sequence[str] = FORECAST,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    plan: Plan | str = "bf16-mixed",
    microbatches: int = MICROBATCHES,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> Forecast:
    """Say what low formats would do to a model's numbers, from a run in fp32.

    Everything runs on copies: the model, random numbers and process-wide settings are as before when it returns or
    fails. Compiled models run uncompiled. Among ranks each makes a forecast of its own data.

    Args:
        model: In any state of training: its modes are kept. What of it is stored in bf16 or fp16 is widened.
        loss: ``loss(model, batch)`` -> scalar tensor, fp32.
        batches: A sequence, an iterable that can be gone through again, or ``batches(seed)`` -> iterator.
        formats: Of ``fp16``, ``bf16``, ``fp8_e4m3`` and ``fp8_e5m2``. Tensors in fp8 are scaled each by itself, gradients in fp16
            by one loss scale.
        optimizer: ``optimizer(params)`` -> Optimizer, for the updates: on a copy it makes a few steps.
        plan: Whose casts are assumed, whatever its format: one that computes low. ``bf16-mixed+rules=cuda`` tells on a CPU what
            autocasting casts on a GPU; ``bf16-true`` keeps nothing in fp32.
        microbatches: How many to run.
        device: By default the device of the model's parameters.
        seed: Of random draws and, where batches are a function, of these.

    Returns:
        The forecast: ``.answer``, ``.recommendation``, ``.scales``, ``.regions``, ``.table()``, ``.save(folder)``.

    Raises:
        WorkloadError: A loss that is not differentiable, batches that cannot be used, or a model not in fp32.
        NonFiniteError: fp32 itself gives a loss or gradients that are not finite.
        PlanError: A format that cannot be forecast, a plan that computes in fp32, or numbers out of their range.
        DeviceError: The device cannot run the plan.
    """
    chosen, names = as_plan(plan), _format_names(formats)
    if chosen.formats.isdisjoint(LOW):
        raise PlanError(
            f"forecast(plan={str(chosen)!r}): it casts nothing to a low format; give a plan that computes in bf16 or fp16, such as "
            "'bf16-mixed'"
        )
    check_count("forecast", "microbatches", microbatches, 1)
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"forecast: model is {type(model).__name__}; give the torch.nn.Module itself")
    where = find_device("forecast", device, str(device_of(model)))
    make = endless(batches, "forecast")
    failed = "forecast: the model, its loss or its optimizer failed"
    with users_code(failed), undisturbed(), unspoilt(model, "forecast"):
        prober = Prober(model, loss, make(seed), where, seed=seed, call="forecast", dither="fp32")
        run = _Run(prober, chosen, [FORMATS[name] for name in names], microbatches)
        if optimizer is not None:
            run.see_updates(one_update(model, loss, make(seed), optimizer, where, seed))
    return run.forecast(environment(where))


def _format_names(formats: Sequence[str]) -> tuple[str, ...]:
    given = [formats] if isinstance(formats, str) else list(formats)
    names = tuple(dict.fromkeys(get_format(name).name for name in given))
    if not names or set(names) - set(FORECAST):
        raise PlanError(f"forecast(formats={formats!r}): needs one or more of {', '.join(FORECAST)}")
    return names


class _Run:
    """The passes of a forecast, and what is summed up of them."""

    def __init__(self, prober: Prober, plan: Plan, formats: list[Format], microbatches: int) -> None:
        self.prober, self.plan, self.formats, self.microbatches = prober, plan, formats, microbatches
        self.ledgers: dict[tuple[str, Kind, bool], _Ledger] = {}
        self.casts = PlanCasts()
        self._ranges: dict[str, Magnitudes] = {}
        prober.extend(1)
        prober.observe(plan, [0], self.casts.observing)
        self.scales: ScaleRange | None = None
        if any(format.name == "fp16" for format in formats):
            look = self.casts.watch(self._range).observing
            prober.observe(REFERENCE, [0], look)
            prober.extend(microbatches - 1, look)
            self.scales = scale_range(
                [seen.histogram(path) for path, seen in self._ranges.items()],
                max((seen.largest for seen in self._ranges.values()), default=0.0),
            )
        else:
            prober.extend(microbatches - 1)
        self.loss_scale = self.scales.init if self.scales is not None else 1.0
        for name, parameter in prober.model.named_parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                self.look("weights", site_of(name), parameter.detach())
        prober.observe(REFERENCE, range(microbatches), self.casts.watch(self.look).observing)

    def _range(self, kind: Kind, site: Site, tensor: Tensor) -> None:
        if kind in ("gradients", "weight gradients") and not self.casts.keeps(kind, site):
            Values.of(tensor).count_into(self._ranges.setdefault(site.path, Magnitudes()))

    def look(self, kind: Kind, site: Site, tensor: Tensor) -> None:
        """Cast a tensor to every format."""
        self._ledger(kind, site).add(tensor, [*self._scaled(kind)])

    def _scaled(self, kind: Kind) -> Iterable[tuple[Format, float | str | None]]:
        """Each format as it is, and scaled where training would."""
        for format in self.formats:
            is_fp8 = format.name.startswith("fp8")
            if is_fp8 and kind == "weight gradients":  # results of products, which no recipe stores in fp8
                continue
            yield format, None
            if is_fp8:
                yield format, "tensor"
            elif format.name == "fp16" and "gradients" in kind:
                yield format, self.loss_scale

    def _ledger(self, kind: Kind, site: Site) -> _Ledger:
        return self.ledgers.setdefault((site.path, kind, self.casts.keeps(kind, site)), _Ledger())

    def see_updates(self, updates: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """Take in what an optimizer's step does to weights that are stored low."""
        for name, old, update in updates:
            if not old.is_floating_point() or old.dtype is torch.float64 or not bool(update.any()):
                continue
            ledger = self._ledger("updates", site_of(name))
            moved = update != 0
            changes, weights = update[moved], old[moved]
            ledger.add(changes, ())
            for format in self.formats:
                if format.name in LOW:
                    left = stored_change(weights, changes, format.dtype)
                    held = torch.isfinite(left)
                    ledger.put(format.name, None, Tally(
                        float(changes.numel()), float((~held).sum()), 0.0, float((left == 0).sum()),
                        float((left - changes)[held].double().square().sum()), float(changes[held].double().square().sum()),
                    ))  # fmt: skip

    def forecast(self, where: Environment) -> Forecast:
        """What was seen, with what follows from it."""
        names = tuple(format.name for format in self.formats)
        gradients = [seen.histogram("").energy for seen in self._ranges.values()]
        regions = []
        for path, module in self.prober.model.named_modules():
            tensors = tuple(
                self.ledgers[path, kind, kept].forecast(path, kind, kept)
                for kind in KINDS for kept in (False, True) if (path, kind, kept) in self.ledgers
            )  # fmt: skip
            if not tensors:
                continue
            seen = self._ranges.get(path)
            scales = None if seen is None else scale_range([seen.histogram(path)], seen.largest)
            region = RegionForecast(path, type(module).__name__, tensors, scales, {}, {})
            regions.append(dataclasses.replace(
                region,
                troubles=troubles(region, names, max(gradients, default=0.0)),
                stored=stored_troubles(region, names),
            ))  # fmt: skip
        plan = recommended(regions, names, self.loss_scale)
        return Forecast(
            plan=self.plan, formats=names, answer=answer(regions, names, self.loss_scale, self.scales),
            recommendation=None if plan is None else str(plan), regions=tuple(regions), scales=self.scales,
            loss_scale=self.loss_scale, microbatches=self.microbatches, passes=self.prober.passes, notes=self._notes(),
            environment=where,
        )  # fmt: skip

    def _notes(self) -> tuple[str, ...]:
        compiled = [path for path, module in self.prober.model.named_modules() if _torch.is_compiled(module)]
        if not compiled:
            return ()
        what = ", ".join(path or "the model" for path in compiled[:3]) + (
            ", ..." if len(compiled) > 3 else ""
        )
        return (f"Compiled code ran as it is written ({what}): what a compiler fuses keeps more in fp32.",)
