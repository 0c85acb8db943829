"""What a search for a plan found: the plan, and the evidence as a table, JSON and a page."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from castwise.jobs.result import Result
from castwise.plans.plan import Plan
from castwise.tuning.evidence import Evidence

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["TuneResult"]


@dataclass(frozen=True)
class TuneResult(Result):
    """The plan that a search chose, and why.

    Attributes:
        plan: Ready for ``castwise.Amp(result.plan)``.
        evidence: All that was measured on the way.
    """

    kind: ClassVar[str] = "tune"
    plan: Plan
    evidence: Evidence

    @property
    def answer(self) -> str:
        """The result in one sentence."""
        return self.evidence.answer

    def _fields(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.evidence), "passes": self.evidence.passes}

    def table(self) -> RenderableType:
        """The answer and the plans as a table for ``rich.print``."""
        from castwise.report.tune import tune_table

        return tune_table(self.to_dict())

    def save(self, folder: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Write the page, the plan, the evidence and the plots.

        Args:
            folder: Where to; made if it does not exist.

        Returns:
            Paths of the files: ``report.html`` first, then ``plan.json``, ``evidence.json`` and the pictures.
        """
        from castwise.report.tune import write_tune_page

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        plan = folder / "plan.json"
        self.plan.save(plan)
        data = folder / "evidence.json"
        data.write_text(self.to_json() + "\n", encoding="utf-8")
        page, *pictures = write_tune_page(self.to_dict(), folder)
        return (page, plan, data, *pictures)
