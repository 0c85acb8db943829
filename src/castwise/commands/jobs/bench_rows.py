"""State of a running bench: the plans, their names and the measurements so far."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from castwise.commands.jobs.bench_result import PlanResult, Timing
from castwise.core.plans.plan import PRESETS, Plan, as_plan
from castwise.core.plans.words import in_words
from castwise.lab.timing import stats
from castwise.lab.timing.apart import Kind
from castwise.lab.timing.runners import TrainingRun
from castwise.lab.timing.timing import Lap, speedup

BASELINE = "fp32"


@dataclass
class Row:
    """State of one plan in a running bench.

    Attributes:
        plan: The plan.
        result: The result so far.
        run: The training in this process, while it runs.
        training: Times of that training.
        inference: Times of inference in this process.
        starts_s: Times of training and inference in separate processes, by start and round.
        images: Pictures from the trained model, thinned.
    """

    plan: Plan
    result: PlanResult
    run: TrainingRun | None = None
    training: Lap | None = None
    inference: Lap | None = None
    starts_s: dict[Kind, list[list[float]]] = field(default_factory=dict)
    images: dict[str, list[list[float]]] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, plan: Plan) -> Self:
        """Create a row without measurements."""
        return cls(plan, PlanResult(name, str(plan), plan.digest, "ok"))

    @property
    def name(self) -> str:
        """Name of the plan."""
        return self.result.name

    @property
    def is_ok(self) -> bool:
        """Whether the plan's status is ``ok`` so far."""
        return self.result.status == "ok"

    def found(self, **changes: Any) -> None:
        """Change fields of the result."""
        self.result = dataclasses.replace(self.result, **changes)

    def note(self, text: str) -> None:
        """Add a sentence to the result."""
        self.found(notes=(*self.result.notes, text))


def rows_of(plans: Iterable[Any]) -> list[Row]:
    """Create one row per plan, the baseline first."""
    if isinstance(plans, (str, Plan, torch.dtype)):
        plans = (plans,)
    rows: dict[str, Row] = {}
    for given in plans:
        plan = as_plan(given)
        name = _name(given, plan)
        if name in rows and rows[name].plan != plan:
            name = f"{name} ({plan.digest[:8]})"
        rows.setdefault(name, Row.of(name, plan))
    base = rows.get(BASELINE) or Row.of(BASELINE, PRESETS[BASELINE])
    return [base, *(row for row in rows.values() if row is not base)]


def _name(given: object, plan: Plan) -> str:
    if isinstance(given, str) and given in PRESETS:
        return given
    name = in_words(plan)
    if name not in PRESETS and isinstance(given, (str, os.PathLike)) and str(given).endswith(".json"):
        path = Path(given)
        return path.parent.name if path.stem == "plan" and path.parent.name else path.stem
    return name


def started(rows: list[Row], kind: Kind) -> list[Timing | None]:
    """For each row, the times by start and the speedup over the first row."""
    times = [row.starts_s.get(kind, []) for row in rows]
    ratios = stats.restarts(times)
    return [
        Timing(
            stats.summarise([second for start in mine for second in start]),
            ratios[0, number] if number and times[0] else None,
            tuple(map(tuple, mine)),
        )
        if mine
        else None
        for number, mine in enumerate(times)
    ]


def in_turns(lap: Lap | None, base: Lap | None, is_base: bool) -> Timing | None:
    """Times of a plan that alternated with the baseline in one process; None if the plan ended early."""
    if lap is None or lap.done:
        return None
    ratio = speedup(base, lap) if base is not None and not is_base else None
    return Timing(stats.summarise(lap.seconds), ratio, (tuple(lap.times_s),))
