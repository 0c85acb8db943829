"""Rewrite scripts that use Apex amp, Colossal-AI AMP or torch.amp so that they use castwise.

``files``: which files, and how they are read and written. ``view``: a script as a tree, and what its names mean.
``edits``: changes collected and applied at once. ``imports``, ``dropins``: import statements. ``objects``, ``loop``: what a
script shows of its models, optimizers and steps. ``torch_names``, ``torch_session``, ``torch_write``, ``apex``,
``colossalai``: what becomes of each origin. ``rewriting``: one script, all of it. ``result``: what was found, and how it
is shown.

A rewrite is made where it is certain to keep the meaning of the script; the rest is left as it is and listed.
"""

from __future__ import annotations

import importlib.util
import os

from castwise.errors import MigrateError
from castwise.migrate.result import FileResult, Finding, Migration

__all__ = ["FileResult", "Finding", "Migration", "migrate"]

HAS_LIBCST = importlib.util.find_spec("libcst") is not None


def migrate(path: str | os.PathLike[str], *, write: bool = False) -> Migration:
    """Rewrite a script, or every script below a folder.

    Args:
        path: A file, or a folder whose ``.py`` files are meant; hidden folders, virtual environments and symbolic
            links in it are passed over.
        write: Write the files; without it nothing is changed.

    Returns:
        What would be changed, or was, file by file, and what could not be decided.

    Raises:
        MigrateError: There is no such path, or LibCST is not installed.
    """
    if not HAS_LIBCST:
        raise MigrateError(
            "migrate: this needs LibCST, which is not installed. Install it with: pip install 'castwise[migrate]'"
        )
    from castwise.migrate.files import migrate_files

    return migrate_files(path, write=write)
