"""Scripts modelled on public ones, with marked faults, and sound scripts that resemble faulty ones.

Each file of the folder ``corpus`` holds many programs: a line ``##### name/file.py`` begins a file, and ``name`` is the
program. A faulty line ends with ``# fault: rule``, or ``# fault: rule when flag``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from castwise.bridges.scripts.lint import Fault, lint

FOLDER = Path(__file__).with_name("corpus")
_BEGINS = re.compile(r"^##### (\S+)\n", re.MULTILINE)
_MARK = re.compile(r"# fault: ([\w-]+)")
_NEAR = 3
"""Lines between a mark and its report, which may name the statement or a line inside it."""


class Program(NamedTuple):
    """A program: its name, and the text of each file by path."""

    name: str
    files: dict[str, str]

    def marks(self) -> set[tuple[str, int, str]]:
        """Return the marked faults: file, line and rule."""
        return {
            (file, number, found[1])
            for file, text in self.files.items()
            for number, line in enumerate(text.splitlines(), 1)
            if (found := _MARK.search(line))
        }

    def check(self, folder: Path) -> tuple[Fault, ...]:
        """Write the program without marks to a folder and lint it."""
        for file, text in self.files.items():
            path = folder / self.name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(re.sub(r"\s*# fault: .*", "", text))
        return lint(folder / self.name).findings


def programs(kind: str) -> Iterator[Program]:
    """Return the programs with faults of one kind, or the ``sound`` programs."""
    parts = _BEGINS.split((FOLDER / f"{kind}.txt").read_text())[1:]
    found: dict[str, dict[str, str]] = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        program, _, file = name.partition("/")
        found.setdefault(program, {})[file] = text
    return (Program(name, files) for name, files in found.items())


def kinds() -> list[str]:
    """Return the kinds of faults."""
    return sorted(path.stem for path in FOLDER.glob("*.txt") if path.stem != "sound")


def compare(program: Program, findings: tuple[Fault, ...]) -> tuple[set[tuple[str, int, str]], list[Fault]]:
    """Return the marked faults that were missed, and the findings without a mark."""
    marks = program.marks()

    def fits(fault: Fault, mark: tuple[str, int, str]) -> bool:
        file, line, rule = mark
        return fault.path.as_posix().endswith(file) and fault.rule == rule and abs(fault.line - line) <= _NEAR

    missed = {mark for mark in marks if not any(fits(fault, mark) for fault in findings)}
    return missed, [fault for fault in findings if not any(fits(fault, mark) for mark in marks)]
