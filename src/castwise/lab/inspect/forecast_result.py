"""Define the result of a forecast, as frozen data for a table, JSON and a page."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from castwise.core.plans.formats import FORMATS, Format
from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.errors import PlanError
from castwise.lab.inspect.watch import Kind
from castwise.lab.parity.casts import Cast
from castwise.lab.parity.gradient_range import Histogram, ScaleRange
from castwise.lab.result import Result
from castwise.lab.timing.environment import Environment


@dataclass(frozen=True)
class TensorForecast:
    """What formats would do to all tensors of one kind in one region.

    Attributes:
        kind: ``weights``; ``activations``: the results of functions in forward; ``gradients``: the gradients of these results;
            ``weight gradients``; ``updates``: the nonzero elements of the optimizer's updates.
        kept: Whether the plan keeps these tensors in fp32.
        count: Number of values; a complex value counts twice.
        not_finite: Number of values that are infinite or NaN already in fp32, as in a mask. They are excluded from all other
            figures.
        largest: Largest magnitude.
        histogram: Magnitudes by powers of two; of large tensors, of a sample.
        casts: Per format the unscaled cast, and the scaled cast if training would scale. For ``updates``, in formats that weights
            can be stored in: ``flush`` is the share of the update that rounding loses.
    """

    kind: Kind
    kept: bool
    count: int
    not_finite: int
    largest: float
    histogram: Histogram
    casts: tuple[Cast, ...]

    def cast(self, format: str, scaled: bool = True) -> Cast | None:
        """Return the effect of casting to a format; None if the format was not requested.

        With ``scaled``, it is the cast with a scale, if training would scale these tensors; otherwise the cast without one.
        """
        found = [cast for cast in self.casts if cast.format == format]
        return next(
            (cast for cast in found if (cast.scale is not None) is scaled), found[0] if found else None
        )


@dataclass(frozen=True)
class RegionForecast:
    """What formats would do to one module's own tensors, without those of its submodules.

    Attributes:
        path: Path of the module, empty for the model itself.
        module: The module's class.
        tensors: One entry per kind of tensor. Tensors that the plan keeps in fp32 are separate entries.
        scales: Loss scales at which the module's gradients neither overflow nor underflow in fp16; None if it has no gradients.
        poles: For each format, the division, root or logarithm of which the largest share of inputs becomes 0, and that share.
        troubles: For each format in which numbers that the plan casts overflow or underflow, a reason; other formats are absent.
        stored: As ``troubles``, if everything, parameters included, is stored in the format, without master weights or loss
            scale.
        computed: Low formats in which the plan computes this region; empty if the plan keeps everything in fp32.
        trouble: Why numbers overflow or underflow in one of the formats of ``computed``; empty if they do not, or if none of
            these formats was requested.
    """

    path: str
    module: str
    tensors: tuple[TensorForecast, ...]
    scales: ScaleRange | None
    poles: dict[str, tuple[str, float]]
    troubles: dict[str, str]
    stored: dict[str, str]
    computed: tuple[str, ...] = ()
    trouble: str = ""

    def tensor(self, kind: Kind, kept: bool = False) -> TensorForecast | None:
        """Return the forecast of one kind of tensor; None if the region has no such tensors.

        ``kept`` selects the tensors that the plan keeps in fp32.
        """
        return next((t for t in self.tensors if t.kind == kind and t.kept is kept), None)


@dataclass(frozen=True)
class Spread:
    """Where overflows in one format spread to, observed in a run of the plan with that format.

    Attributes:
        sources: Regions whose own activations overflow.
        reached: Other regions whose results become non-finite.
        gradients: Whether parameter gradients become non-finite too, so that the step is lost.
    """

    sources: tuple[str, ...]
    reached: tuple[str, ...]
    gradients: bool

    def __or__(self, other: Spread) -> Spread:
        """Return the union of two runs' results."""
        reached = tuple(dict.fromkeys([*self.reached, *other.reached]))
        return Spread(self.sources, reached, self.gradients or other.gradients)


@dataclass(frozen=True)
class Forecast(Result):
    """What formats would do to a model's numbers.

    Attributes:
        model: The model's class.
        plan: The plan whose casts are assumed.
        formats: The formats that the forecast covers.
        answer: The result in a few sentences.
        plan_answer: What the plan's own formats do per region, in a sentence; empty if they were not asked for.
        recommendation: The plan line of the low format that holds most regions, with the others in fp32; None if neither ``bf16``
            nor ``fp16`` was asked for or holds the model itself.
        regions: The regions that compute something, in model order.
        scales: Loss scales at which fp16 holds all gradients; None without fp16 or gradients.
        loss_scale: Loss scale at which gradients were cast to fp16; 1 without one.
        microbatches: Number of microbatches that were run, on all ranks together.
        passes: Number of forward/backward passes, on all ranks together.
        spreads: Per format in which activations overflow, where the overflows spread to.
        notes: Further remarks, a sentence each.
        environment: Device and versions of the first rank.
        ranks: Number of processes whose batches were used.
    """

    kind: ClassVar[str] = "forecast"
    model: str
    plan: Plan
    formats: tuple[str, ...]
    answer: str
    plan_answer: str
    recommendation: str | None
    regions: tuple[RegionForecast, ...]
    scales: ScaleRange | None
    loss_scale: float
    microbatches: int
    passes: int
    spreads: dict[str, Spread]
    notes: tuple[str, ...]
    environment: Environment
    ranks: int = 1

    def region(self, path: str) -> RegionForecast:
        """Return the region of a module path.

        Raises:
            PlanError: No module with this path computed anything.
        """
        for region in self.regions:
            if region.path == path:
                return region
        known = ", ".join(repr(region.path) for region in self.regions[:12])
        raise PlanError(
            f"Forecast.region({path!r}): no module with this path computed anything; modules that did: {known}, ..."
        )

    def _fields(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        regions = [dataclasses.asdict(region) for region in self.regions]
        return {**fields, "plan": str(self.plan), "words": in_words(self.plan), "regions": regions, "scales": _asdict(self.scales),
                "environment": _asdict(self.environment), "workload": self.model, "description": "",
                "spreads": {name: _asdict(spread) for name, spread in self.spreads.items()},
                "ranges": {name: _ends(FORMATS[name]) for name in self.formats}}  # fmt: skip

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``forecast.json`` and the page ``forecast.html``.

        Args:
            folder: Created if it does not exist.

        Returns:
            The page's path; if Jinja is missing, a warning is given, and the JSON file's path is returned.
        """
        return self._save(Path(folder) / "forecast.html", Path(folder) / "forecast.json")[0]


def _asdict(value: Any) -> dict[str, Any] | None:
    return None if value is None else dataclasses.asdict(value)


def _ends(format: Format) -> list[float]:
    return [format.smallest_subnormal, format.smallest_normal, format.max]
