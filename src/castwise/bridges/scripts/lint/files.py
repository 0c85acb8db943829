"""Which files are looked through."""

from __future__ import annotations

import os
import re
from pathlib import Path

from castwise.bridges.scripts.lint.result import Finding, Lint
from castwise.bridges.scripts.lint.rules import findings
from castwise.bridges.scripts.migrate.files import decode, scripts_below
from castwise.bridges.scripts.migrate.view import View
from castwise.errors import LintError

_CONCERNS = re.compile(rb"autocast|GradScaler|\bhalf\b|b?float16")
"""What a file must hold to be parsed at all."""


def lint_files(path: str | os.PathLike[str]) -> Lint:
    """As :func:`castwise.bridges.scripts.lint.lint`, with LibCST there.

    Raises:
        LintError: There is no such path.
    """
    given = Path(path)
    if not given.exists():
        raise LintError(f"doctor --lint: there is no file or folder {str(given)!r}")
    files = scripts_below(given)[0] if given.is_dir() else [given]
    found: list[Finding] = []
    problems: list[tuple[Path, str]] = []
    for file in files:
        try:
            raw = file.read_bytes()
            if not _CONCERNS.search(raw):
                continue
            view = View(decode(raw)[0])
        except (OSError, SyntaxError, ValueError, LookupError, RecursionError) as error:
            problems.append((file, f"cannot be read: {' '.join(str(error).split()) or type(error).__name__}"))
            continue
        found += [Finding(file, line, rule, why, instead) for line, rule, why, instead in findings(view)]
    return Lint(tuple(sorted(found)), len(files), tuple(problems))
