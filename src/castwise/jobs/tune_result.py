"""What a search for a plan found: the plan, and the evidence as a table, JSON and a page."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise.jobs.bench_result import _plain
from castwise.plans.plan import Plan
from castwise.tuning.evidence import Evidence

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["TuneResult"]


@dataclass(frozen=True)
class TuneResult:
    """The plan that a search chose, and why.

    Attributes:
        plan: Ready for ``castwise.Amp(result.plan)``.
        evidence: All that was measured on the way.
    """

    plan: Plan
    evidence: Evidence

    @property
    def answer(self) -> str:
        """The result in one sentence."""
        return self.evidence.answer

    def to_dict(self) -> dict[str, Any]:
        """The record that reports are made from: plain data, with numbers that are not finite as None."""
        record: dict[str, Any] = _plain({
            "kind": "tune",
            "version": 1,
            **dataclasses.asdict(self.evidence),
            "passes": self.evidence.passes,
        })
        return record

    def to_json(self) -> str:
        """The record as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def table(self) -> RenderableType:
        """The answer and the plans as a table for ``rich.print``."""
        from castwise.report.tune_table import tune_table

        return tune_table(self.to_dict())

    def save(self, folder: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Write the page, the plan, the evidence and the plots.

        Args:
            folder: Where to; made if it does not exist.

        Returns:
            Paths of the files: ``report.html`` first, then ``plan.json``, ``evidence.json`` and the pictures.
        """
        from castwise.report.tune_page import write_tune_page

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        plan = folder / "plan.json"
        self.plan.save(plan)
        data = folder / "evidence.json"
        data.write_text(self.to_json() + "\n", encoding="utf-8")
        page, *pictures = write_tune_page(self.to_dict(), folder)
        return (page, plan, data, *pictures)
