"""The files that are scripts, and their text."""

from __future__ import annotations

import io
import os
import tokenize
from pathlib import Path

_PASSED_OVER = {"__pycache__", "node_modules", "site-packages"}


def scripts_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """Scripts below a folder in the order of their paths, and symbolic links to scripts."""
    scripts: list[Path] = []
    links: list[Path] = []
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is_passed_over(Path(here, name)))
        for name in sorted(files):
            file = Path(here, name)
            if file.suffix == ".py":
                (links if file.is_symlink() else scripts).append(file)
    return scripts, links


def _is_passed_over(folder: Path) -> bool:
    return (
        folder.name.startswith(".")
        or folder.name in _PASSED_OVER
        or folder.is_symlink()
        or (folder / "pyvenv.cfg").exists()
    )


def decode(raw: bytes) -> tuple[str, str]:
    """The text with its newlines unchanged, and the declared encoding of the file."""
    if b"\0" in raw:
        raise SyntaxError("it holds null bytes, as binary files do")
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    return raw.decode(encoding), encoding


def reason(error: Exception) -> str:
    """Why a file could not be read, parsed or written, in one line."""
    if isinstance(error, UnicodeError):
        return f"its text is not {error.encoding}" if hasattr(error, "encoding") else str(error)
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return " ".join(str(error).split())
