"""What is silently wrong with precision in a training script, found by reading it.

``rules``: what is looked for. ``script``: what they see of a script. ``files``: the faults of each file. Scripts are
read by :mod:`castwise.bridges.scripts.reading`, and neither they nor torch are imported. A rule says something where the script
itself shows it; what may come from elsewhere (an argument, a configuration, another file) is taken to be right.
"""

from __future__ import annotations

import os

from castwise.bridges.scripts.lint.result import Fault, Lint
from castwise.bridges.scripts.reading.library import check_libcst

__all__ = ["Fault", "Lint", "lint"]


def lint(path: str | os.PathLike[str]) -> Lint:
    """Look through a script, or every script below a folder.

    Args:
        path: A file, or a folder whose ``.py`` files are meant; hidden folders and virtual environments in it are passed
            over.

    Returns:
        What was found, by file and line.

    Raises:
        LintError: There is no such path.
        MissingLibraryError: LibCST is not installed.
    """
    check_libcst("doctor --lint")
    from castwise.bridges.scripts.lint.files import lint_files

    return lint_files(path)
