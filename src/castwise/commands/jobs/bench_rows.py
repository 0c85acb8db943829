"""The state of a running :func:`castwise.bench`: the plans, their names and the measurements so far."""

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
    """A plan in a running :func:`castwise.bench`, with what was measured so far.

    Attributes:
        plan: The plan.
        result: The result so far.
        run: The training in this process, while it runs.
        training: The times of the training in this process.
        inference: The times of inference in this process.
        starts_s: The times in separate processes, by process and timing round, for training and for inference.
        images: Pictures that the trained model predicted, reduced in size.
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
        """Return a row without measurements."""
        return cls(plan, PlanResult(name, str(plan), plan.digest, "ok"))

    @property
    def name(self) -> str:
        """The name of the plan."""
        return self.result.name

    @property
    def is_ok(self) -> bool:
        """Whether the plan's status is ``ok`` so far."""
        return self.result.status == "ok"

    def found(self, **changes: Any) -> None:
        """Change fields of the result."""
        self.result = dataclasses.replace(self.result, **changes)

    def note(self, text: str) -> None:
        """Add a sentence to the notes of the result."""
        self.found(notes=(*self.result.notes, text))


def rows_of(plans: Iterable[Any]) -> list[Row]:
    """Return a row for each plan, the baseline first. The baseline fp32 is added if it is missing."""
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
    """Return the times that separate processes measured for each row, with the speedup over the first row.

    The value is None for a row without such times.
    """
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
    """Return the times of a plan that took turns with the baseline in this process, or None if the plan ended early."""
    if lap is None or lap.done:
        return None
    ratio = speedup(base, lap) if base is not None and not is_base else None
    return Timing(stats.summarise(lap.seconds), ratio, (tuple(lap.times_s),))
