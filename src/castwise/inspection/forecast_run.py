"""The passes of a forecast, and what is summed up of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from castwise import _torch
from castwise.errors import told
from castwise.inspection.forecast_result import Forecast, RegionForecast, Spread, TensorForecast
from castwise.inspection.plan_casts import PlanCasts
from castwise.inspection.range_verdicts import (
    answer,
    plan_answer,
    plan_trouble,
    recommended,
    spreading,
    stored_troubles,
    troubles,
)
from castwise.inspection.spread import overflowing, spread
from castwise.inspection.watch import Kind, Site, site_of
from castwise.measure.environment import Environment
from castwise.numerics.casts import Tally, Values, cast_of
from castwise.numerics.gradient_range import NEGLIGIBLE, Magnitudes, ScaleRange, scale_range
from castwise.numerics.probes import REFERENCE, Prober
from castwise.numerics.updates import stored_change
from castwise.plans.formats import LOW, LOW_DTYPES, Format
from castwise.plans.plan import Plan
from castwise.report import words

KINDS: tuple[Kind, ...] = ("weights", "activations", "gradients", "weight gradients", "updates")
VISIBLE = 0.1
"""Share of a region's gradients that vanish from which on a note says so, whatever they are beside others'."""
Key = tuple[str, Kind, bool]
"""A region, a kind of tensor, and whether the plan keeps it in fp32."""


class Ledger:
    """What is summed up of a region's tensors of one kind: magnitudes together, casts by site."""

    def __init__(self) -> None:
        self.count = self.not_finite = 0
        self.magnitudes = Magnitudes()
        self.tallies: dict[tuple[str, float | str | None], dict[Site, Tally]] = {}

    def add(self, site: Site, tensor: Tensor, formats: Iterable[tuple[Format, float | str | None]]) -> bool:
        """Cast a tensor's values to formats, each with its scale; whether all are finite."""
        values = Values.of(tensor)
        numbers = tensor.numel() * (2 if tensor.is_complex() else 1)
        self.count += numbers
        self.not_finite += numbers - values.count
        values.count_into(self.magnitudes)
        for format, scale in formats:
            factor = values.own_scale(format) if isinstance(scale, str) else scale or 1.0
            self.put(site, format.name, scale, values.tally(format, factor))
        return numbers == values.count

    def put(self, site: Site, format: str, scale: float | str | None, found: Tally) -> None:
        """Add what a format makes of a site's values."""
        sites = self.tallies.setdefault((format, scale), {})
        sites[site] = sites.get(site, Tally()) + found

    @property
    def square(self) -> float:
        """The largest sum of squares of any site."""
        return max((tally.square for sites in self.tallies.values() for tally in sites.values()), default=0.0)

    def forecast(self, path: str, kind: Kind, kept: bool, least: float) -> TensorForecast:
        """What was summed up; sites whose square is below ``least`` lose nothing that counts."""
        casts = tuple(cast_of([*sites.values()], *key, least) for key, sites in self.tallies.items())
        seen = self.magnitudes
        return TensorForecast(
            kind, kept, self.count, self.not_finite, seen.largest, seen.histogram(path), casts
        )


class Run:
    """The passes of a forecast, and what is summed up of them."""

    def __init__(self, prober: Prober, plan: Plan, formats: list[Format], microbatches: int) -> None:
        self.prober, self.plan, self.formats, self.microbatches = prober, plan, formats, microbatches
        self.ledgers: dict[tuple[str, Kind, bool], Ledger] = {}
        self.casts = PlanCasts()
        self.low: set[str] = set()
        self.not_finite: set[Site] = set()
        self._unspread: dict[str, str] = {}
        self.poles: dict[str, dict[str, dict[str, Tally]]] = {}
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
        prober.observe(REFERENCE, range(microbatches), self.casts.watch(self.look, self._poles).observing)

    def _range(self, kind: Kind, site: Site, tensor: Tensor) -> None:
        if kind in ("gradients", "weight gradients") and not self.casts.keeps(kind, site):
            Values.of(tensor).count_into(self._ranges.setdefault(site.path, Magnitudes()))

    def look(self, kind: Kind, site: Site, tensor: Tensor) -> None:
        """Cast a tensor to every format."""
        if kind == "activations" and tensor.dtype in LOW_DTYPES:
            self.low.add(site.path)
        if not self._ledger(kind, site).add(site, tensor, self._scaled(kind)):
            self.not_finite.add(site)

    def _poles(self, inputs: list[tuple[Site, Tensor]], _results: list[Tensor]) -> None:
        """Count what must not become 0 and does."""
        for site, tensor in inputs:
            if site in self.casts.poles:
                values = Values.of(tensor)
                for format in self.formats:
                    if format.name in LOW:
                        poles = self.poles.setdefault(site.path, {}).setdefault(format.name, {})
                        name = site.name.rpartition(" ")[2].strip("_")
                        poles[name] = poles.get(name, Tally()) + values.tally(format)

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

    def _ledger(self, kind: Kind, site: Site) -> Ledger:
        return self.ledgers.setdefault((site.path, kind, self.casts.keeps(kind, site)), Ledger())

    def see_updates(self, updates: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """Take in what an optimizer's step does to weights that are stored low."""
        for name, old, update in updates:
            if not old.is_floating_point() or old.dtype is torch.float64 or not bool(update.any()):
                continue
            ledger = self._ledger("updates", site_of(name))
            moved = update != 0
            changes, weights = update[moved], old[moved]
            ledger.add(site_of(name), changes, ())
            for format in self.formats:
                if format.name in LOW:
                    left = stored_change(weights, changes, format.dtype)
                    held = torch.isfinite(left)
                    ledger.put(site_of(name), format.name, None, Tally(
                        float(changes.numel()), float((~held).sum()), 0.0, float((left == 0).sum()),
                        float((left - changes)[held].double().square().sum()), float(changes[held].double().square().sum()),
                    ))  # fmt: skip

    def forecast(self, where: Environment) -> Forecast:
        """What was seen, with what follows from it."""
        names = tuple(format.name for format in self.formats)
        least = NEGLIGIBLE * max(
            (ledger.square for key, ledger in self.ledgers.items() if _is_low_gradient(key)), default=0.0
        )
        regions = []
        for path, module in self.prober.model.named_modules():
            tensors = tuple(
                self.ledgers[path, kind, kept].forecast(path, kind, kept, least if "gradients" in kind else 0.0)
                for kind in KINDS for kept in (False, True) if (path, kind, kept) in self.ledgers
            )  # fmt: skip
            if not tensors:
                continue
            seen = self._ranges.get(path)
            scales = None if seen is None else scale_range([seen.histogram(path)], seen.largest)
            region = RegionForecast(
                path, type(module).__name__, tensors, scales, self._worst_poles(path), {}, {}
            )
            region = dataclasses.replace(
                region,
                troubles=troubles(region, names),
                stored=stored_troubles(region, names),
                computed=tuple(sorted(self.casts.formats.get(path, ()))),
            )
            regions.append(dataclasses.replace(region, trouble=plan_trouble(region, self.plan, names)))
        plan, spreads = recommended(regions, names, self.loss_scale), self._spreads(regions)
        said = [
            answer(regions, names, self.loss_scale, self.scales),
            *(spreading(*one) for one in spreads.items()),
        ]
        return Forecast(
            model=type(self.prober.model).__name__,
            plan=self.plan, formats=names, answer=" ".join(said), plan_answer=plan_answer(regions, self.plan, names),
            recommendation=None if plan is None else str(plan), regions=tuple(regions), scales=self.scales,
            loss_scale=self.loss_scale, microbatches=self.microbatches, passes=self.prober.passes, spreads=spreads,
            notes=self._notes(regions), environment=where,
        )  # fmt: skip

    def _spreads(self, regions: Sequence[RegionForecast]) -> dict[str, Spread]:
        """By format in which something overflows what becomes of it, where the device can run it."""
        out = {}
        for name in (format.name for format in self.formats if format.name in LOW):
            if sources := overflowing(regions, name):
                try:
                    out[name] = spread(
                        self.prober, self.plan, name, sources, self.loss_scale, self.not_finite
                    )
                except Exception as error:  # as of an operator that this device does not have in the format
                    self._unspread[name] = told(error, whole=False)
        return out

    def _worst_poles(self, path: str) -> dict[str, tuple[str, float]]:
        """By format the function whose values become 0 most, and their share."""
        out = {}
        for format, functions in self.poles.get(path, {}).items():
            name, share = max(
                ((name, t.flush / (t.count or 1.0)) for name, t in functions.items()), key=lambda one: one[1]
            )
            if share:
                out[format] = name, share
        return out

    def _notes(self, regions: Sequence[RegionForecast]) -> tuple[str, ...]:
        compiled = [path for path, module in self.prober.model.named_modules() if _torch.is_compiled(module)]
        notes = []
        if compiled:
            notes.append(
                f"Compiled code ran as it is written ({_some(compiled)}): what a compiler fuses keeps more in fp32."
            )
        if self.low:
            what = _some(sorted(self.low))
            notes.append(
                f"The model casts to a low format by itself ({what}), so that its rounding is in what was seen."
            )
        small = [
            region.path for region in regions if "fp16" not in region.troubles and _loses_gradients(region)
        ]
        if small:
            notes.append(
                f"At a loss scale of {words.number(self.loss_scale)} fp16 loses a tenth of the gradients or more where they are too small "
                f"beside others to count ({_some(small)}); to Adam's steps they count, so ask castwise.parity."
            )
        notes += [
            f"How an overflow spreads in {name} is not known, since the model could not be run in it here: {why}"
            for name, why in self._unspread.items()
        ]
        return tuple(notes)


def _loses_gradients(region: RegionForecast) -> bool:
    casts = (t.cast("fp16") for t in region.tensors if "gradients" in t.kind and not t.kept)
    return any(cast is not None and cast.flush >= VISIBLE for cast in casts)


def _some(paths: Sequence[str]) -> str:
    return ", ".join(path or "the model" for path in paths[:3]) + (", ..." if len(paths) > 3 else "")


def _is_low_gradient(key: Key) -> bool:
    return "gradients" in key[1] and not key[2]
