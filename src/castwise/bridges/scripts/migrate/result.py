"""The findings of a migration, as plain records, and their display."""

from __future__ import annotations

import dataclasses
import difflib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from castwise.errors import MigrateError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Kind = Literal["left", "differs", "kept"]


_STYLES: Mapping[Kind, str] = {"left": "yellow", "differs": "cyan", "kept": "green"}


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """A note about a line of a script.

    Attributes:
        line: In the original script, counted from 1.
        kind: ``left`` if something was not rewritten, ``differs`` if the rewritten script behaves differently,
            ``kept`` if the line stays and a drop-in runs it.
        text: What, why, and what can be done.
    """

    line: int
    kind: Kind
    text: str


@dataclasses.dataclass(frozen=True)
class FileResult:
    """The result for one file.

    Attributes:
        path: Path of the file, beginning with the given path.
        before: Its text.
        after: Its rewritten text; the same if nothing is changed.
        findings: In the order of lines.
        problem: Why the file could not be read, parsed or written; empty if it could.
        written: Whether ``after`` is in the file now.
    """

    path: Path
    before: str = ""
    after: str = ""
    findings: tuple[Finding, ...] = ()
    problem: str = ""
    written: bool = False

    @property
    def changed(self) -> bool:
        """Whether the rewritten text differs."""
        return self.before != self.after

    def diff(self) -> str:
        """The change as a unified diff; lines end as in the file."""
        lines = difflib.unified_diff(
            _lines(self.before), _lines(self.after), f"{self.path}", f"{self.path} (castwise)"
        )
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
        )


@dataclasses.dataclass(frozen=True)
class Migration:
    """The result for all files of a path.

    Attributes:
        files: Files that are changed, have findings, or could not be read, parsed or written.
        looked_at: How many files were read.
    """

    files: tuple[FileResult, ...]
    looked_at: int

    @property
    def changed(self) -> tuple[FileResult, ...]:
        """Files that are rewritten."""
        return tuple(file for file in self.files if file.changed and not file.problem)

    @property
    def problems(self) -> tuple[FileResult, ...]:
        """Files that could not be read, parsed or written."""
        return tuple(file for file in self.files if file.problem)

    def check(self) -> None:
        """Raise if files could not be migrated.

        Raises:
            MigrateError: Files could not be migrated; the message names them.
        """
        if self.problems:
            said = "; ".join(f"{file.path} {file.problem}" for file in self.problems[:5])
            more = f"; and {len(self.problems) - 5} more" if len(self.problems) > 5 else ""
            raise MigrateError(f"migrate: {said}{more}")

    def summary(self) -> str:
        """One sentence: how many files were or would be changed, and how many lines need a look."""
        count = len(self.changed)
        left = sum(finding.kind == "left" for file in self.files for finding in file.findings)
        differs = sum(finding.kind == "differs" for file in self.files for finding in file.findings)
        if any(file.written for file in self.files):
            did = f"rewrote {count} of {_count(self.looked_at, 'file')}"
        elif count:
            did = f"would rewrite {count} of {_count(self.looked_at, 'file')}; --write rewrites them"
        else:
            did = f"nothing to rewrite in {_count(self.looked_at, 'file')}"
        notes = [f"{_count(differs, 'line')} behave{'s' * (differs == 1)} differently"] if differs else []
        notes += [f"{_count(left, 'line')} left to you"] if left else []
        return f"{did}{' (' + ', '.join(notes) + ')' if notes else ''}".capitalize()

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values for JSON: the change of each file as a diff."""
        return {
            "kind": "migrate", "version": 1, "summary": self.summary(), "looked_at": self.looked_at,
            "files": [
                {
                    "path": str(file.path), "changed": file.changed, "written": file.written, "problem": file.problem,
                    "diff": file.diff(), "findings": [dataclasses.asdict(one) for one in file.findings],
                }
                for file in self.files
            ],
        }  # fmt: skip

    def show(self, console: Console) -> None:
        """Print diffs, then the notes by line, then the summary."""
        from rich.text import Text

        parts = [_coloured(file.diff()) for file in self.changed]
        parts += [
            Text.assemble(
                (f"{file.path}:{one.line}: ", "bold"), (f"{one.kind}: ", _STYLES[one.kind]), one.text
            )
            for file in self.files
            for one in file.findings
        ]
        for part in (*parts, Text(self.summary())):
            console.print(part, soft_wrap=True)


def _lines(text: str) -> list[str]:
    """The lines of a text with uniform line ends, so that the diff of a file from Windows is readable."""
    return io.StringIO(text, newline=None).readlines()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _coloured(diff: str) -> Text:
    from rich.text import Text

    out = Text()
    for line in diff.splitlines(keepends=True):
        head = line.startswith(("---", "+++"))
        style = "bold" if head else {"+": "green", "-": "red", "@": "cyan"}.get(line[0], "")
        out.append(line, style=style)
    out.rstrip()
    return out
