"""What a forecast found, as frozen data that turns into a table, JSON and a page."""

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
        poles: By format the share of values that become 0 and that a function divides by, or takes the root or the logarithm of;
            of the function with the most.
        troubles: By format why it does not hold them where the plan casts; formats that hold are absent.
        stored: The same where everything, parameters too, is stored in the format, without masters and loss scale.
        computed: Low formats that the plan itself computes in here; none where it keeps all in fp32.
        trouble: Why one of these does not hold the numbers; empty where they do, or were not asked for.
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
        """The tensors of a kind, or None."""
        return next((t for t in self.tensors if t.kind == kind and t.kept is kept), None)


@dataclass(frozen=True)
class Spread:
    """What becomes of values that overflow in a format, seen in a run of the plan in it.

    Attributes:
        sources: Regions whose own activations overflow.
        reached: Others whose results are not finite then.
        gradients: Whether gradients of parameters are not finite either, so that the step is lost.
    """

    sources: tuple[str, ...]
    reached: tuple[str, ...]
    gradients: bool

    def __or__(self, other: Spread) -> Spread:
        """What is seen in either of two runs."""
        reached = tuple(dict.fromkeys([*self.reached, *other.reached]))
        return Spread(self.sources, reached, self.gradients or other.gradients)


@dataclass(frozen=True)
class Forecast(Result):
    """What formats would do to a model's numbers.

    Attributes:
        model: Its class.
        plan: The plan whose casts are assumed.
        formats: Asked for.
        answer: In a few sentences.
        plan_answer: What the plan's own formats do, region by region, in a sentence; empty where they were not asked for.
        recommendation: The line of the plan whose format holds the most, with regions in fp32 where it does not; None where no
            format of ``bf16`` and ``fp16`` was asked for or holds the model itself.
        regions: In the model's order, those that compute something.
        scales: Loss scales under which fp16 holds all gradients; None without fp16 or gradients.
        loss_scale: With which gradients were cast to fp16; 1 without.
        microbatches: That were run, on all ranks together.
        passes: Forward/backwards it took, on all ranks together.
        spreads: By format in which activations overflow what these become.
        notes: What else to know, a sentence each.
        environment: Where it was made, by the first rank.
        ranks: Processes whose batches it is made of.
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
        """The region of a module path.

        Raises:
            PlanError: There is none.
        """
        for region in self.regions:
            if region.path == path:
                return region
        known = ", ".join(repr(region.path) for region in self.regions[:12])
        raise PlanError(
            f"Forecast.region({path!r}): no module of that path computed anything; modules that did are {known}, ..."
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
            folder: Where to; made if it does not exist.

        Returns:
            The path of the page; where Jinja is missing a warning says so, and it is that of the JSON file.
        """
        return self._save(Path(folder) / "forecast.html", Path(folder) / "forecast.json")[0]


def _asdict(value: Any) -> dict[str, Any] | None:
    return None if value is None else dataclasses.asdict(value)


def _ends(format: Format) -> list[float]:
    return [format.smallest_subnormal, format.smallest_normal, format.max]
