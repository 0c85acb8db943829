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
    """The effect of casting all tensors of one kind in one module to each requested format.

    Attributes:
        kind: The kind of tensor. ``activations`` are the results of functions in the forward pass, and ``gradients``
            are the gradients of these results. ``updates`` are the nonzero elements of the optimizer's updates. The
            other kinds are ``weights`` and ``weight gradients``.
        kept: Whether the plan keeps these tensors in fp32.
        count: The number of values. A complex value counts twice.
        not_finite: The number of values that are infinite or NaN already in fp32, such as those of a mask. They are
            excluded from all other figures.
        largest: The largest magnitude.
        histogram: The magnitudes, counted by powers of two. For a large tensor, a sample of the values is counted.
        casts: For each format, the effect of an unscaled cast. If training would multiply these tensors by a scale,
            the effect of a scaled cast follows. For ``updates``, the formats are those in which weights can be
            stored, and ``flush`` is the share of the update that rounding loses.
    """

    kind: Kind
    kept: bool
    count: int
    not_finite: int
    largest: float
    histogram: Histogram
    casts: tuple[Cast, ...]

    def cast(self, format: str, scaled: bool = True) -> Cast | None:
        """Return the effect of casting these tensors to a format.

        Args:
            format: The name of the format.
            scaled: Whether to return the effect of the scaled cast. If there is only one cast for the format, it is
                returned in either case.

        Returns:
            The effect, or None if the format was not requested.
        """
        found = [cast for cast in self.casts if cast.format == format]
        return next(
            (cast for cast in found if (cast.scale is not None) is scaled), found[0] if found else None
        )


@dataclass(frozen=True)
class RegionForecast:
    """What low-precision formats would do to the tensors of one module, without those of its submodules.

    Attributes:
        path: The path of the module. It is empty for the model itself.
        module: The name of the module's class.
        tensors: One entry for each kind of tensor. Tensors that the plan keeps in fp32 have entries of their own.
        scales: The loss scales at which the module's gradients neither overflow nor underflow in fp16. None if the
            module has no gradients.
        poles: For each format, the division, root or logarithm whose inputs most often become 0, and the share of its
            inputs that do.
        troubles: For each format in which values that the plan casts overflow or underflow, the reason as text.
            Formats without such trouble are absent.
        stored: The same as ``troubles`` for another case: the format stores everything, parameters included, without
            fp32 master weights or a loss scale.
        computed: The formats below fp32 in which the plan computes this module. Empty if the plan keeps everything in
            fp32.
        trouble: Why values overflow or underflow in one of the formats of ``computed``. Empty if they do not, or if
            none of these formats was requested.
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
        """Return the forecast of one kind of tensor.

        Args:
            kind: The kind of tensor, such as ``weights`` or ``gradients``.
            kept: Whether to return the tensors that the plan keeps in fp32, instead of those that it casts.

        Returns:
            The forecast, or None if the module has no such tensors.
        """
        return next((t for t in self.tensors if t.kind == kind and t.kept is kept), None)


@dataclass(frozen=True)
class Spread:
    """Where overflows in one format spread to, as observed in a run of the plan with that format.

    Attributes:
        sources: The paths of the modules whose activations overflow.
        reached: The paths of the other modules whose results become non-finite.
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
    """The result of :func:`castwise.forecast`: what low-precision formats would do to a model's numbers.

    It says for each module and each format how many values would overflow, underflow or lose digits. A plan decides
    which tensors are cast. Here a region is a module that computes something, with its own tensors but without those
    of its submodules.

    Attributes:
        model: The name of the model's class.
        plan: The plan that decides which tensors are cast.
        formats: The formats that the forecast covers.
        answer: The result in a few sentences.
        plan_answer: What the plan's own formats do in each region, in a sentence. Empty if these formats were not
            requested.
        recommendation: A plan, in its one-line text form. It uses ``bf16`` or ``fp16``, whichever can represent more
            regions, and keeps the other regions in fp32. None if neither format was requested, or if neither can
            represent the model itself.
        regions: The forecast of each region, in model order.
        scales: The loss scales at which fp16 can represent all gradients. None without fp16 or without gradients.
        loss_scale: The loss scale at which gradients were cast to fp16. It is 1 without a loss scale.
        microbatches: The number of microbatches that were run, on all ranks together.
        passes: The number of forward and backward passes, on all ranks together.
        spreads: For each format in which activations overflow, the modules that the overflows spread to.
        notes: Further remarks, each a sentence.
        environment: The device and the versions of the first rank.
        ranks: The number of processes whose batches were used.
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
        """Return the forecast of one module, by its path.

        Args:
            path: The path of the module. An empty text stands for the model itself.

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
        """Write ``forecast.json`` and ``forecast.html``, a page for a browser, into a folder.

        Args:
            folder: The output folder, which is created if it does not exist.

        Returns:
            The path of the page. If Jinja is not installed, a warning is given, no page is written, and the path of
            the JSON file is returned.
        """
        return self._save(Path(folder) / "forecast.html", Path(folder) / "forecast.json")[0]


def _asdict(value: Any) -> dict[str, Any] | None:
    return None if value is None else dataclasses.asdict(value)


def _ends(format: Format) -> list[float]:
    return [format.smallest_subnormal, format.smallest_normal, format.max]
