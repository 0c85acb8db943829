"""Write result files atomically."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes, errors: str = "strict") -> None:
    """Write a file atomically, so that after a full disk, an interrupt or a kill the old content remains.

    Args:
        path: Path of the file. Its folder must exist.
        content: The whole content. Text is written as UTF-8.
        errors: How to handle characters that UTF-8 lacks, as for ``str.encode``.

    Raises:
        OSError: The file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode(errors=errors))
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
