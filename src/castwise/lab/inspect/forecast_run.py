"""Run a model for a forecast of low formats, and sum up what the forward and backward passes show."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import torch
from torch import Tensor

from castwise.core import _torch, amounts
from castwise.core.devices import in_fp64
from castwise.core.plans.formats import LOW, LOW_DTYPES, Format
from castwise.core.plans.plan import Plan
from castwise.errors import told
from castwise.lab.inspect.forecast_result import Forecast, RegionForecast, Spread, TensorForecast
from castwise.lab.inspect.plan_casts import PlanCasts
from castwise.lab.inspect.range_limits import (
    answer,
    plan_answer,
    plan_trouble,
    recommended,
    spreading,
    stored_troubles,
    troubles,
)
from castwise.lab.inspect.spread import overflowing, spread
from castwise.lab.inspect.watch import Kind, Site, site_of
from castwise.lab.parity.casts import Tally, Values, cast_of
from castwise.lab.parity.gradient_range import NEGLIGIBLE, Magnitudes, ScaleRange, scale_range, sum_of
from castwise.lab.parity.probes import REFERENCE, Prober
from castwise.lab.parity.together import Looking
from castwise.lab.parity.updates import stored_change
from castwise.lab.timing.environment import Environment

KINDS: tuple[Kind, ...] = ("weights", "activations", "gradients", "weight gradients", "updates")
VISIBLE = 0.1
"""If at least this share of a region's gradients becomes 0, a note says so, even if the gradients are small beside others."""
Key = tuple[str, Kind, bool]
"""A region, a kind of tensor, and whether the plan keeps it in fp32."""


class Ledger:
    """Sums over all tensors of one kind in one region.

    Magnitudes are counted over all tensors together. The effects of casts are summed per :class:`~castwise.lab.inspect.watch.Site`.
    """

    def __init__(self) -> None:
        self.count = self.not_finite = 0
        self.magnitudes = Magnitudes()
        self.tallies: dict[tuple[str, float | str | None], dict[Site, Tally]] = {}

    def add(self, site: Site, tensor: Tensor, formats: Iterable[tuple[Format, float | str | None]]) -> bool:
        """Cast a tensor's values to formats, each with its scale; return whether all values are finite."""
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
        """Add what happened when one tensor was cast to a format to the sums; ``site`` names the tensor."""
        sites = self.tallies.setdefault((format, scale), {})
        sites[site] = sites.get(site, Tally()) + found

    def join(self, other: Ledger) -> None:
        """Add the sums of another process to those of this process."""
        self.count += other.count
        self.not_finite += other.not_finite
        self.magnitudes += other.magnitudes
        for key, sites in other.tallies.items():
            for site, found in sites.items():
                self.put(site, *key, found)

    @property
    def square(self) -> float:
        """The largest sum of squared values of any of the tensors; 0 if nothing was cast."""
        return max((tally.square for sites in self.tallies.values() for tally in sites.values()), default=0.0)

    def forecast(self, path: str, kind: Kind, kept: bool, least: float) -> TensorForecast:
        """Return the forecast for the tensors that were added.

        Underflow does not count in tensors whose sum of squared values is below ``least``.
        """
        casts = tuple(cast_of([*sites.values()], *key, least) for key, sites in self.tallies.items())
        seen = self.magnitudes
        return TensorForecast(
            kind, kept, self.count, self.not_finite, seen.largest, seen.histogram(path), casts
        )


@dataclasses.dataclass
class Seen:
    """What one process has observed in the forward and backward passes of a forecast.

    Attributes:
        ledgers: The sums by region, kind of tensor, and whether the plan keeps the tensor in fp32.
        low: Paths of modules whose own code returns bf16 or fp16 without a plan.
        poles: By path, format and function, the casts of values that must not become 0, such as denominators.
        ranges: By path, the magnitudes of the gradients that would be in a low format under the plan.
        microbatches: Number of microbatches that were run.
        passes: Number of forward/backward passes.
    """

    ledgers: dict[Key, Ledger] = dataclasses.field(default_factory=dict)
    low: set[str] = dataclasses.field(default_factory=set)
    poles: dict[str, dict[str, dict[str, Tally]]] = dataclasses.field(default_factory=dict)
    ranges: dict[str, Magnitudes] = dataclasses.field(default_factory=dict)
    microbatches: int = 0
    passes: int = 0

    def ledger(self, path: str, kind: Kind, kept: bool) -> Ledger:
        """Return the :class:`Ledger` of a region for one kind of tensor; create it if needed.

        ``kept`` says whether the plan keeps these tensors in fp32.
        """
        return self.ledgers.setdefault((path, kind, kept), Ledger())

    def add_pole(self, path: str, format: str, function: str, found: Tally) -> None:
        """Count what a cast to a format does to inputs of a function that must not become zero, such as denominators."""
        poles = self.poles.setdefault(path, {}).setdefault(format, {})
        poles[function] = poles.get(function, Tally()) + found

    def __iadd__(self, other: Seen) -> Self:
        for key, ledger in other.ledgers.items():
            self.ledger(*key).join(ledger)
        self.low |= other.low
        for path, formats in other.poles.items():
            for format, functions in formats.items():
                for function, found in functions.items():
                    self.add_pole(path, format, function, found)
        self.microbatches += other.microbatches
        self.passes += other.passes
        return self


class Run:
    """Runs a model forward and backward for a forecast of low formats, and computes the forecast.

    Args:
        prober: Runs the passes; each rank has its own.
        plan: The plan whose casts are assumed.
        formats: The requested formats.
        ranks: The processes that make the forecast together. The first rank finds out for all which tensors the plan casts.
    """

    def __init__(self, prober: Prober, plan: Plan, formats: list[Format], ranks: Looking) -> None:
        self.prober, self.plan, self.formats = prober, plan, formats
        self.seen = Seen()
        self.casts = PlanCasts()
        self.not_finite: set[Site] = set()
        self._unspread: dict[str, str] = {}
        self.scales: ScaleRange | None = None
        self.loss_scale = 1.0
        self._ranks = ranks

    def run(self, microbatches: int, updates: Callable[[], Iterable[tuple[str, Tensor, Tensor]]]) -> None:
        """Run all forward and backward passes that the forecast needs; a failure on one rank is raised on all.

        Args:
            microbatches: Number of microbatches that this process runs.
            updates: Gives the name, the weights and the update of each parameter in a step of the optimizer.
        """
        self._ranks.each(self._learn)
        self.casts = self._ranks.first(lambda: self.casts)
        self._ranks.each(lambda: self._extend(microbatches))
        if any(format.name == "fp16" for format in self.formats):
            ranges = self._ranks.merge(self.seen.ranges, _join_ranges)
            self.seen.ranges = ranges
            self.scales = scale_range(
                [seen.histogram(path) for path, seen in ranges.items()],
                max((seen.largest for seen in ranges.values()), default=0.0),
            )
            self.loss_scale = self.scales.init if self.scales is not None else 1.0
        self._ranks.each(lambda: self._look_at_all(updates))

    def _learn(self) -> None:
        self.prober.extend(1)
        self.prober.observe(self.plan, [0], self.casts.learning())

    def _extend(self, microbatches: int) -> None:
        if any(format.name == "fp16" for format in self.formats):
            watch = self.casts.watch(self._range)
            self.prober.observe(REFERENCE, [0], watch)
            self.prober.extend(microbatches - 1, watch)
        else:
            self.prober.extend(microbatches - 1)

    def _look_at_all(self, updates: Callable[[], Iterable[tuple[str, Tensor, Tensor]]]) -> None:
        if self._ranks.rank == 0:  # updates are the same on all ranks
            for name, parameter in self.prober.model.named_parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    self._look("weights", site_of(name), parameter.detach())
        every = range(len(self.prober.micros))
        self.prober.observe(REFERENCE, every, self.casts.watch(self._look, self._poles))
        self._see_updates(updates())
        self.seen.microbatches, self.seen.passes = len(every), self.prober.passes

    def _range(self, kind: Kind, site: Site, tensor: Tensor) -> None:
        if kind in ("gradients", "weight gradients") and not self.casts.keeps(kind, site):
            Values.of(tensor).count_into(self.seen.ranges.setdefault(site.path, Magnitudes()))

    def _look(self, kind: Kind, site: Site, tensor: Tensor) -> None:
        """Cast a tensor to every requested format, and add the effects to the sums."""
        if kind == "activations" and tensor.dtype in LOW_DTYPES:
            self.seen.low.add(site.path)
        if not self._ledger(kind, site).add(site, tensor, self._scaled(kind)):
            self.not_finite.add(site)

    def _poles(self, inputs: list[tuple[Site, Tensor]], _results: list[Tensor]) -> None:
        """Count how many inputs of divisions, roots and logarithms become 0 in a low format, which such a function must not get."""
        for site, tensor in inputs:
            if site in self.casts.poles:
                values = Values.of(tensor)
                for format in self.formats:
                    if format.name in LOW:
                        function = site.name.rpartition(" ")[2].strip("_")
                        self.seen.add_pole(site.path, format.name, function, values.tally(format))

    def _scaled(self, kind: Kind) -> Iterable[tuple[Format, float | str | None]]:
        """Yield each format with scale None, and again with the scale that training would use for a kind of tensor, if any."""
        for format in self.formats:
            is_fp8 = format.name.startswith("fp8")
            if is_fp8 and kind == "weight gradients":  # no recipe stores these products in fp8
                continue
            yield format, None
            if is_fp8:
                yield format, "tensor"
            elif format.name == "fp16" and "gradients" in kind:
                yield format, self.loss_scale

    def _ledger(self, kind: Kind, site: Site) -> Ledger:
        return self.seen.ledger(site.path, kind, self.casts.keeps(kind, site))

    def _see_updates(self, updates: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """Record which part of the optimizer's updates rounding would lose if weights were stored in each low format."""
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
                    squares, errors = in_fp64(changes).square(), in_fp64(left - changes).square()
                    held, gone = (mask.to(squares.device) for mask in (torch.isfinite(left), left == 0))
                    ledger.put(site_of(name), format.name, None, Tally(  # squares: shares of the update, not of the element count
                        float(squares.sum()), float(squares[~held].sum()), 0.0, float(squares[gone].sum()),
                        float(errors[held].sum()), float(squares[held].sum()),
                    ))  # fmt: skip

    def forecast(self, where: Environment) -> Forecast:
        """Combine the observations of all ranks, and return the forecast."""
        seen = self._ranks.to_first(self.seen)
        regions = self._ranks.first(lambda: self._regions(seen))
        spreads = self._spreads(regions)
        return self._ranks.first(lambda: self._forecast(regions, spreads, where))

    def _regions(self, every: Sequence[Seen]) -> list[RegionForecast]:
        for other in every[1:]:
            self.seen += other
        ledgers, ranges = self.seen.ledgers, self.seen.ranges
        names = tuple(format.name for format in self.formats)
        least = NEGLIGIBLE * max(
            (ledger.square for key, ledger in ledgers.items() if _is_low_gradient(key)), default=0.0
        )
        regions = []
        for path, module in self.prober.model.named_modules():
            tensors = tuple(
                ledgers[path, kind, kept].forecast(path, kind, kept, least if "gradients" in kind else 0.0)
                for kind in KINDS for kept in (False, True) if (path, kind, kept) in ledgers
            )  # fmt: skip
            if not tensors:
                continue
            gradients = ranges.get(path)
            scales = (
                None if gradients is None else scale_range([gradients.histogram(path)], gradients.largest)
            )
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
        return regions

    def _forecast(
        self, regions: Sequence[RegionForecast], spreads: dict[str, Spread], where: Environment
    ) -> Forecast:
        names = tuple(format.name for format in self.formats)
        plan = recommended(regions, names, self.loss_scale)
        said = [
            answer(regions, names, self.loss_scale, self.scales),
            *(spreading(*one) for one in spreads.items()),
        ]
        return Forecast(
            model=type(self.prober.model).__name__,
            plan=self.plan, formats=names, answer=" ".join(said), plan_answer=plan_answer(regions, self.plan, names),
            recommendation=None if plan is None else str(plan), regions=tuple(regions), scales=self.scales,
            loss_scale=self.loss_scale, microbatches=self.seen.microbatches, passes=self.seen.passes, spreads=spreads,
            notes=self._notes(regions), environment=where, ranks=self._ranks.size,
        )  # fmt: skip

    def _spreads(self, regions: Sequence[RegionForecast]) -> dict[str, Spread]:
        """Return, for each format in which activations overflow, where the overflows spread on all ranks together.

        A format that the device of some rank cannot run is absent.
        """
        out = {}
        for name in (format.name for format in self.formats if format.name in LOW):
            if sources := overflowing(regions, name):
                found = self._ranks.every(functools.partial(self._spread, name, sources))
                seen = [one for one in found if isinstance(one, Spread)]
                if len(seen) == len(found):
                    out[name] = functools.reduce(Spread.__or__, seen)
                else:
                    self._unspread[name] = next(one for one in found if isinstance(one, str))
        return out

    def _spread(self, name: str, sources: Sequence[str]) -> Spread | str:
        """Return where overflows spread in this rank's microbatches, or the reason why the device cannot run the format."""
        try:
            return spread(self.prober, self.plan, name, sources, self.loss_scale, self.not_finite)
        except Exception as error:  # such as an operator without a kernel for the format on this device
            return told(error, whole=False)

    def _worst_poles(self, path: str) -> dict[str, tuple[str, float]]:
        """Return, for each format, the function of which the largest share of inputs becomes 0, and that share.

        Only inputs that must not become 0, such as denominators, are counted.
        """
        out = {}
        for format, functions in self.seen.poles.get(path, {}).items():
            name, share = max(
                ((name, t.flush / (t.count or 1.0)) for name, t in functions.items()), key=lambda one: one[1]
            )
            if share:
                out[format] = name, share
        return out

    def _notes(self, regions: Sequence[RegionForecast]) -> tuple[str, ...]:
        compiled = [
            path for path, module in self.prober.model.named_modules() if _torch.dynamo.is_compiled(module)
        ]
        notes = []
        if self._ranks.compiled:
            compiled = compiled or [""]
            notes.append(
                f"Compiled modules ran in eager mode ({_some(compiled)}); fused by a compiler, they keep more values in fp32."
            )
        if self.seen.low:
            what = _some(sorted(self.seen.low))
            notes.append(
                f"The model's own code casts to a low format ({what}), so the measurements include this rounding."
            )
        small = [
            region.path for region in regions if "fp16" not in region.troubles and _loses_gradients(region)
        ]
        if small:
            notes.append(
                f"At a loss scale of {amounts.number(self.loss_scale)}, 10 % or more of the gradients of {_some(small)} "
                f"underflow in fp16. They are small compared with other gradients, but Adam scales small gradients up, so test "
                f"the plan with castwise.parity."
            )
        notes += [
            f"Where an overflow in {name} spreads is unknown, because the model could not be run in {name}: {why}"
            for name, why in self._unspread.items()
        ]
        return tuple(notes)


def _join_ranges(every: Sequence[dict[str, Magnitudes]]) -> dict[str, Magnitudes]:
    paths = dict.fromkeys(path for ranges in every for path in ranges)
    return {path: sum_of(ranges[path] for ranges in every if path in ranges) for path in paths}


def _loses_gradients(region: RegionForecast) -> bool:
    casts = (t.cast("fp16") for t in region.tensors if "gradients" in t.kind and not t.kept)
    return any(cast is not None and cast.flush >= VISIBLE for cast in casts)


def _some(paths: Sequence[str]) -> str:
    return ", ".join(path or "the model" for path in paths[:3]) + (", ..." if len(paths) > 3 else "")


def _is_low_gradient(key: Key) -> bool:
    return "gradients" in key[1] and not key[2]
