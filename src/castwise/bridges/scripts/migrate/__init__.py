"""Migrate scripts that use Apex amp, Colossal-AI AMP or torch.amp to castwise.

``files``: which files, and how they are written; :mod:`castwise.bridges.scripts.reading` reads them. ``program``: which
of them belong together, and in which of them imports stay. ``edits``: changes collected and applied at once.
``dropins``: changes imports of Apex and Colossal-AI to castwise's drop-ins, which run the script unchanged; ``served``:
the names that these have. ``torch_names``: changes names of torch.amp to castwise's.
``rewriting``: rewrites one script completely. ``result``: the findings and their display.

A change is made only if it is certain to keep the meaning of the script; everything else is left unchanged and listed.
"""

from __future__ import annotations

import os

from castwise.bridges.scripts.migrate.result import FileResult, Finding, Migration
from castwise.bridges.scripts.reading.library import check_libcst

__all__ = ["FileResult", "Finding", "Migration", "migrate"]


def migrate(path: str | os.PathLike[str], *, write: bool = False) -> Migration:
    """Migrate a script, or every script below a folder, to castwise.

    Args:
        path: A file, or a folder whose ``.py`` files are migrated; hidden folders, virtual environments and symbolic
            links in it are skipped.
        write: Write the files; otherwise nothing is changed.

    Returns:
        The changes, made or proposed, file by file, and what could not be decided.

    Raises:
        MigrateError: There is no such path.
        MissingLibraryError: LibCST is not installed.
    """
    check_libcst("migrate")
    from castwise.bridges.scripts.migrate.files import migrate_files

    return migrate_files(path, write=write)
