"""Copies the working folder, so that scripts which run in the copy overwrite no file of the original."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from castwise.errors import CastwiseError

LARGEST_BYTES = 1 << 30
"""The largest working folder that is copied, in bytes."""
_LINKED = {".git", ".venv", "venv", "node_modules"}
_LEFT_OUT = {"__pycache__"}


def copied(folder: Path, scratch: Path) -> Path:
    """Copy the working folder.

    Symbolic links to something inside the folder point into the copy. Other links keep their targets. ``.git``, virtual
    environments and ``node_modules`` are linked instead of copied. Unreadable files, special files and ``__pycache__`` are
    left out.

    Args:
        folder: Path of the copy.
        scratch: Folder that contains the copies, and is not copied itself if it lies in the working folder.

    Raises:
        CastwiseError: The folder is too large, or the disk is full.
    """
    here = Path.cwd()
    if sum(_sizes(here)) > LARGEST_BYTES:
        raise CastwiseError(
            f"castwise try: the working folder holds more than {LARGEST_BYTES >> 30} GiB, which is not copied for each plan; run "
            "it from a smaller folder, or with --in-place, in which each run overwrites the files of the previous run"
        )
    try:
        _copy(here, folder, here, folder, scratch)
    except OSError as error:
        raise CastwiseError(
            f"castwise try: the working folder cannot be copied into {str(scratch)!r}: {error.strerror}. Set the environment variable "
            "TMPDIR to a folder with enough space, or use --in-place, in which each run overwrites the files of the previous run"
        ) from error
    return folder


def into_copy(words: Sequence[str], folder: Path) -> list[str]:
    """Return a script's arguments, in which absolute paths into the working folder are replaced by paths into the copy."""
    here = os.path.join(os.getcwd(), "")
    return [word if here == os.sep else word.replace(here, os.path.join(folder, "")) for word in words]


def script_in_copy(script: str) -> str:
    """Return the path of a script relative to the working folder, or its absolute path if the script lies outside."""
    path, here = os.path.abspath(script), os.path.join(os.getcwd(), "")
    return path.removeprefix(here)


def _copy(source: Path, target: Path, here: Path, there: Path, scratch: Path) -> None:
    target.mkdir()
    with contextlib.suppress(PermissionError), os.scandir(source) as entries:
        for entry in entries:
            to = target / entry.name
            with contextlib.suppress(
                PermissionError, FileNotFoundError
            ):  # another process may be writing there
                if entry.name in _LINKED and not entry.is_symlink():
                    to.symlink_to(entry.path)
                elif entry.is_symlink():
                    to.symlink_to(_led(entry.path, here, there))
                elif entry.is_file():
                    shutil.copy2(entry, to)
                elif entry.is_dir() and entry.name not in _LEFT_OUT and not os.path.samefile(entry, scratch):
                    _copy(Path(entry), to, here, there, scratch)
    shutil.copystat(source, target)


def _led(link: str, here: Path, there: Path) -> Path:
    leads = Path(os.path.realpath(link))
    return there / leads.relative_to(here) if leads.is_relative_to(here) else leads


def _sizes(folder: Path) -> Iterator[int]:
    for at, folders, files in os.walk(folder):
        folders[:] = set(folders) - _LINKED - _LEFT_OUT
        for name in files:
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(at, name)).st_size
