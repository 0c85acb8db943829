"""The files that are checked."""

from __future__ import annotations

import os
import re
from pathlib import Path

from castwise.bridges.scripts.lint.result import Fault, Lint
from castwise.bridges.scripts.lint.rules import faults
from castwise.bridges.scripts.reading.files import decode, reason, scripts_below
from castwise.errors import LintError

_CONCERNS = re.compile(rb"autocast|GradScaler|\bhalf\b|b?float16")
"""Text that a file must contain to be parsed at all."""


def lint_files(path: str | os.PathLike[str]) -> Lint:
    """Do the work of :func:`castwise.bridges.scripts.lint.lint`, after LibCST was imported.

    Raises:
        LintError: There is no such path.
    """
    given = Path(path)
    if not given.exists():
        raise LintError(f"doctor --lint: there is no file or folder {str(given)!r}")
    files = scripts_below(given)[0] if given.is_dir() else [given]
    found: list[Fault] = []
    problems: list[tuple[Path, str]] = []
    for file in files:
        try:
            raw = file.read_bytes()
            if _CONCERNS.search(raw):
                found += faults(decode(raw)[0], file)
        except (OSError, SyntaxError, ValueError, LookupError, RecursionError) as error:
            problems.append((file, f"cannot be read: {reason(error) or type(error).__name__}"))
    return Lint(tuple(sorted(found)), len(files), tuple(problems))
