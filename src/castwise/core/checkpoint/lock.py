"""A lock that allows only one process to save into a folder, until the process ends or saves into another folder."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from pathlib import Path

from castwise.errors import CheckpointError

LOCK = ".lock"
_PATIENCE_S = 0.2
"""How long to wait for a lock, in seconds. A process that only tests a lock holds it for some microseconds."""
_held: tuple[Path, int, int] | None = None
"""The folder that is locked, the file handle of the lock, and the id of the process that locked it.

The id is compared because a forked child holds no lock."""


def hold(folder: Path, call: str) -> None:
    """Acquire the lock of a folder, and release the lock that this process holds on another folder.

    The operating system releases the lock when the process ends for any reason, so no stale lock is left. The lock file
    names the process that holds it. The ranks of a job share one lock, which the first rank acquires.

    Args:
        folder: The folder.
        call: The call for which the lock is needed, for error messages.

    Raises:
        CheckpointError: Another process saves into the folder, or the lock file cannot be opened.
    """
    global _held
    folder = folder.resolve()
    if _held is not None and _held[2] == os.getpid():
        if _held[0] == folder and _same_file(folder / LOCK, _held[1]):
            return
        os.close(_held[1])
    _held = None
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
    except OSError as error:
        why = "it is a link" if (folder / LOCK).is_symlink() else error.strerror
        raise CheckpointError(
            f"{call}: {folder / LOCK}, which names the process that saves there, cannot be opened: {why}. Delete it, or name "
            f"another folder."
        ) from None
    try:
        _take(handle, patience_s=_PATIENCE_S)
    except BlockingIOError:
        owner = os.read(handle, 200).decode(errors="replace").strip()
        os.close(handle)
        raise CheckpointError(
            f"{call}: another process saves into {folder}: {owner or 'a process that has just started'}. Only one "
            "training may save into a folder: name another folder, or end that process."
        ) from None
    except BaseException:
        os.close(handle)
        raise
    os.truncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    _held = folder, handle, os.getpid()


def is_held(folder: Path) -> bool:
    """Whether another process holds the lock of a folder. False if that cannot be found out."""
    folder = folder.resolve()
    if _held is not None and _held[2] == os.getpid() and _held[0] == folder:
        return False  # closing the file here would release the lock
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return False
    try:
        _take(handle, shared=True)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _take(handle: int, *, shared: bool = False, patience_s: float = 0.0) -> None:
    """Lock an open file against other processes.

    Raises:
        BlockingIOError: Another process has locked the file, and does not release it within ``patience_s``.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no such lock: the user is responsible there
        return
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.lockf(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a file system without locks, as on some clusters
            if time.monotonic() >= deadline:
                raise BlockingIOError(error.errno, "locked") from None
            time.sleep(0.01)
        else:
            return


def _same_file(path: Path, handle: int) -> bool:
    """Whether the open file ``handle`` is still the file at ``path``.

    The folder may have been deleted and created again.
    """
    with contextlib.suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(handle))
    return False
