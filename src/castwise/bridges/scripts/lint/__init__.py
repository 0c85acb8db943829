"""Find precision errors that raise no exception in a training script, by reading it.

``files``: the files that are checked. ``explore``: makes abstract runs of a script (``run``), one for each way in which its
tests can turn out, and collects what they find. ``options``: options of precision that nothing reads. ``texts``: what each
rule says. ``result``: the findings and their display. Neither scripts nor torch are imported. A rule reports only what
the script itself shows; anything that may come from elsewhere (an argument, a configuration, another file) is assumed to
be right.
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
