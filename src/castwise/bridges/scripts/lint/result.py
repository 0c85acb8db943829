"""The findings of a check of scripts, as plain records, and their display."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


_STYLES = {"error": "red", "warning": "yellow"}


@dataclasses.dataclass(frozen=True, order=True)
class Fault:
    """A precision error that raises no exception.

    Attributes:
        path: Path of the script, beginning with the given path.
        line: Counted from 1.
        rule: Short name of the rule.
        why: The effect, in a sentence without a full stop.
        instead: What to write.
        severity: ``error`` if a training or a checkpoint is wrong, ``warning`` if it is worse or slower than it could be.
        when: The flags of the script that switch the error on; empty if it is always there.
    """

    path: Path
    line: int
    rule: str
    why: str
    instead: str
    severity: str = "warning"
    when: str = ""

    def said(self) -> str:
        """The effect, and under which flags."""
        return f"when {self.when}: {self.why}" if self.when else self.why

    def line_of_text(self) -> str:
        """The finding in one line."""
        return f"{self.path}:{self.line}: {self.severity}: {self.rule}: {self.said()}"


@dataclasses.dataclass(frozen=True)
class Lint:
    """The findings.

    Attributes:
        findings: By file and line.
        looked_at: How many files were read.
        problems: Files that could not be read or parsed, each with the reason.
    """

    findings: tuple[Fault, ...]
    looked_at: int
    problems: tuple[tuple[Path, str], ...] = ()

    def summary(self) -> str:
        """The number of findings, in one sentence."""
        files = f"{self.looked_at} file{'s' * (self.looked_at != 1)}"
        count = len(self.findings)
        unread = f"; {len(self.problems)} could not be read" if self.problems else ""
        return f"{count or 'No'} precision problem{'s' * (count != 1)} in {files}{unread}."

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain values for JSON."""
        return {
            "kind": "lint", "version": 2, "summary": self.summary(), "looked_at": self.looked_at,
            "findings": [{**dataclasses.asdict(one), "path": str(one.path)} for one in self.findings],
            "problems": [{"path": str(path), "why": why} for path, why in self.problems],
        }  # fmt: skip

    def show(self, console: Console) -> None:
        """Print each finding, what to write instead, and the summary."""
        from rich.text import Text

        for one in self.findings:
            console.print(
                Text.assemble(
                    (f"{one.path}:{one.line}: ", "bold"),
                    (f"{one.severity}: {one.rule}: ", _STYLES[one.severity]),
                    f"{one.said()}.",
                ),
                soft_wrap=True,
            )
            console.print(Text(f"    write: {one.instead}"), soft_wrap=True)
        for path, why in self.problems:
            console.print(Text.assemble((f"{path}: ", "bold"), why), soft_wrap=True)
        console.print(Text(self.summary()), soft_wrap=True)
