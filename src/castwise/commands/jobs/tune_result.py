"""The result of :func:`castwise.tune`: the plan, and all measurements as a table, JSON and a page."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from castwise.core.plans.plan import Plan
from castwise.lab.result import Result
from castwise.lab.search.evidence import Evidence


@dataclass(frozen=True)
class TuneResult(Result):
    """The result of :func:`castwise.tune`: the plan that it chose, and all its measurements.

    Train under the plan with ``castwise.Amp(result.plan)``. All measurements of the search are in ``result.evidence``.

    Attributes:
        plan: The chosen plan, which decides the formats in which the model computes and stores its weights.
        files: The paths of the files that :func:`castwise.tune` itself has written, if it was called with ``out``.
            They have the names that :meth:`save` uses.
    """

    kind: ClassVar[str] = "tune"
    plan: Plan
    evidence: Evidence
    files: tuple[Path, ...] = ()

    @property
    def answer(self) -> str:
        """The result in one sentence."""
        return self.evidence.answer

    def _fields(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.evidence), "passes": self.evidence.passes}

    def save(self, folder: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Write the plan, the measurements, and a page with plots into a folder.

        Args:
            folder: The output folder, which is created if it does not exist.

        Returns:
            The paths of the files: ``report.html`` first, then ``plan.json``, ``evidence.json`` and the pictures. If
            matplotlib or Jinja is not installed, the page and the pictures are left out with a warning.
        """
        plan = Path(folder) / "plan.json"
        plan.parent.mkdir(parents=True, exist_ok=True)
        self.plan.save(plan)  # first, since the other files take longer and may be interrupted
        first, *others = self._save(Path(folder) / "report.html", Path(folder) / "evidence.json")
        return (first, plan, *others)
