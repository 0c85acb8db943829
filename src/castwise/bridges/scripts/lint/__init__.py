"""Find precision errors that raise no exception in a training script, by reading it.

``rules``: the errors that are searched for. ``script``: the view of a script that rules use. ``files``: the faults of
each file. Scripts are read by :mod:`castwise.bridges.scripts.reading`, and neither they nor torch are imported. A rule
reports only what the script itself shows; anything that may come from elsewhere (an argument, a configuration, another
file) is assumed to be right.
"""

from __future__ import annotations

import os

from castwise.bridges.scripts.lint.result import Fault, Lint

__all__ = ["Fault", "Lint", "lint"]


def lint(path: str | os.PathLike[str]) -> Lint:
    """Check a script, or every script below a folder.

    Args:
        path: A file, or a folder whose ``.py`` files are checked; hidden folders and virtual environments in it are
            skipped.

    Returns:
        The findings, by file and line.

    Raises:
        LintError: There is no such path.
    """
    from castwise.bridges.scripts.lint.files import lint_files

    return lint_files(path)
