"""Move scripts that use Apex amp, Colossal-AI AMP or torch.amp to castwise.

``files``: which files, and how they are written; :mod:`castwise.bridges.scripts.reading` reads them. ``program``: which of them
belong together, and whose imports stay in them. ``edits``: changes collected and applied at once.
``dropins``: imports of Apex and Colossal-AI come to name castwise's drop-ins, which run the script as it is; ``served``:
what these have. ``torch_session``: what a script shows of torch's scaler, with its models and optimizers
(``torch_objects``) and the order of its steps (``torch_loop``); ``torch_write``: a session of castwise in their place.
``rewriting``: one script, all of it. ``result``: what was found, and how it is shown.

A change is made where it is certain to keep the meaning of the script; the rest is left as it is and listed.
"""

from __future__ import annotations

import os

from castwise.bridges.scripts.migrate.result import FileResult, Finding, Migration
from castwise.bridges.scripts.reading.library import check_libcst

__all__ = ["FileResult", "Finding", "Migration", "migrate"]


def migrate(path: str | os.PathLike[str], *, write: bool = False) -> Migration:
    """Move a script, or every script below a folder, to castwise.

    Args:
        path: A file, or a folder whose ``.py`` files are meant; hidden folders, virtual environments and symbolic
            links in it are passed over.
        write: Write the files; without it nothing is changed.

    Returns:
        What would be changed, or was, file by file, and what could not be decided.

    Raises:
        MigrateError: There is no such path.
        MissingLibraryError: LibCST is not installed.
    """
    check_libcst("migrate")
    from castwise.bridges.scripts.migrate.files import migrate_files

    return migrate_files(path, write=write)
