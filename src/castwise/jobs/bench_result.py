"""What a bench found, as frozen data that turns into a table, JSON and a page."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise.measure import stats
from castwise.measure.environment import Environment
from castwise.measure.memory import Memory

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["BenchResult", "PlanResult", "Timing"]


@dataclass(frozen=True)
class Timing:
    """Step times of one plan.

    Attributes:
        step: Median and quartiles over rounds, of seconds per step.
        speedup: How many times as fast as the baseline, from interleaved pairs; None for the baseline itself.
        rounds_s: Seconds per step in each round, None where it did not run.
    """

    step: stats.Summary
    speedup: stats.Ratio | None
    rounds_s: tuple[float | None, ...]


@dataclass(frozen=True)
class PlanResult:
    """What the bench found about one plan.

    Attributes:
        name: As the plan was given.
        plan: The plan on one line, as ``Plan.parse`` reads it.
        digest: Of the plan.
        status: ``ok``; ``stopped`` (hopeless); ``unsupported`` (the device or model cannot run it); ``failed``.
        reason: Why it is not ``ok``, in a sentence; else empty.
        training: Times of training steps, where there were enough.
        inference: Times of inference calls, where they were asked for and worked.
        memory: Peaks and saved bytes, where they were asked for and could be measured.
        notes: What else went wrong, in sentences.
        losses: Loss of every step.
        final_loss: The last of them.
        final_loss_difference: Of it from the baseline's.
        skipped_steps: Steps not taken since gradients were not finite.
        metrics: What ``workload.evaluate`` says of the trained model.
    """

    name: str
    plan: str
    digest: str
    status: str
    reason: str = ""
    training: Timing | None = None
    inference: Timing | None = None
    memory: Memory | None = None
    notes: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()
    final_loss: float | None = None
    final_loss_difference: float | None = None
    skipped_steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchResult:
    """Plans side by side on one workload and one machine.

    Attributes:
        workload: Its name.
        description: What it is.
        baseline: Name of the plan that the others are compared with.
        steps: Training steps each plan took.
        rounds: Interleaved rounds the times come from.
        seed: Of weights and data.
        environment: What it was measured on.
        plans: A row per plan, in the order given, the baseline first if it was added.
        images: ``target`` and a prediction per plan, rows of numbers, for workloads that have a picture.
    """

    workload: str
    description: str
    baseline: str
    steps: int
    rounds: int
    seed: int
    environment: Environment
    plans: tuple[PlanResult, ...]
    images: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The record that reports are made from: plain data, with numbers that are not finite as None."""
        record: dict[str, Any] = _plain({"kind": "bench", "version": 1, **dataclasses.asdict(self)})
        return record

    def to_json(self) -> str:
        """The record as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def table(self) -> RenderableType:
        """The rows as a table for ``rich.print``."""
        from castwise.report.tables import bench_table

        return bench_table(self.to_dict())

    def headline(self) -> str:
        """The answer in a sentence or two."""
        from castwise.report.text import headline

        return headline(self.to_dict())

    def save(self, folder: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Write the record, the page and its plots.

        Args:
            folder: Where to; made if it does not exist.

        Returns:
            Paths of the files: ``bench.html`` first, then ``bench.json`` and the pictures.
        """
        from castwise.report.page import write_bench_page

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        data = folder / "bench.json"
        data.write_text(self.to_json() + "\n", encoding="utf-8")
        page, *pictures = write_bench_page(self.to_dict(), folder)
        return (page, data, *pictures)


def _plain(value: Any) -> Any:
    """JSON's own types: mappings, lists, and None for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
