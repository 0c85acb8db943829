"""Find complete checkpoints in a folder, and write checkpoints so that they appear only when they are complete.

A checkpoint is written into a hidden folder, which is renamed once everything is on disk. So a folder named
``step-…`` is complete unless it is damaged later. Its manifest is written last and lists its files. After a crash, a
folder ``runs/a`` of checkpoints may have other folders too. ``.step-00000123.partial`` was never finished.
``.step-00000123.replaced`` is the former checkpoint of a step that was saved again. ``.step-00000123.deleted`` was
being deleted. The next save removes them. The file ``.lock`` names the process that saves into the folder.

While another process saves, a reader may find that a folder has gone or was replaced between two reads. So a skipped
folder is reported only if it has not changed since (:func:`look`). A save that is still running does not count as
interrupted.

No file is trusted: the files that this module reads are JSON of limited size, and every part of it is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from castwise.core.checkpoint.lock import hold, is_held
from castwise.core.plans.text import read_json, shown
from castwise.errors import CheckpointError

FORMAT = "castwise checkpoint"
VERSION = 2
MANIFEST = "checkpoint.json"
VALUES = "values.json"
"""The name of the file that holds everything except tensors, and the positions of the tensors in other files."""
DEEPEST = 200
"""The maximum nesting depth of the JSON in the values file."""
_FILE = re.compile(r"values\.json|rank-[0-9]{5,9}\.safetensors")
_LARGEST_MANIFEST = 1 << 26
_NAME = re.compile(r"step-([0-9]{1,18})")
_HIDDEN = re.compile(r"\.step-([0-9]{1,18})\.(partial|replaced|deleted)")
_CHUNK = 1 << 20
LOOKS = 100
"""The maximum number of times that a folder is read, if it changes each time while it is read."""
_writing: set[Path] = set()
"""The hidden folders that this process is writing now."""


@dataclass(frozen=True)
class Skipped:
    """A folder that was skipped in the search for a checkpoint, and the reason."""

    path: Path
    reason: str


def candidates(folder: Path) -> list[tuple[int, Path]]:
    """Return the steps and paths of all folders in ``folder`` that may be checkpoints, the latest step first.

    The list is empty if ``folder`` does not exist.
    """
    plain: list[tuple[int, bool, Path]] = []
    hidden: list[tuple[int, bool, Path]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if (match := _NAME.fullmatch(path.name)) and path.is_dir():
            plain.append((int(match[1]), True, path))
        elif (match := _HIDDEN.fullmatch(path.name)) and match[2] != "deleted":
            hidden.append((int(match[1]), match[2] == "replaced", path))
    steps = {step for step, _, _ in plain}
    # A replaced checkpoint counts only if a crash came between the two renames that replace a checkpoint.
    hidden = [one for one in hidden if not (one[1] and one[0] in steps)]
    return [(step, path) for step, _, path in sorted(plain + hidden, reverse=True)]


def look(folder: Path) -> list[tuple[int, Path, tuple[int, int]]]:
    """Return what :func:`candidates` returns, with a fingerprint of each folder.

    The fingerprint changes if the folder is replaced or changed. While a folder is being written, its fingerprint stays
    the same until the folder is renamed.
    """
    found = []
    for step, path in candidates(folder):
        with contextlib.suppress(OSError):  # the folder was deleted since it was listed
            about = path.stat()
            found.append((step, path, (about.st_ino, 0 if _is_partial(path) else about.st_mtime_ns)))
    return found


def is_being_saved(path: Path) -> bool:
    """Whether an unfinished folder belongs to a running save, of this process or another."""
    return _is_partial(path) and (path.absolute() in _writing or is_held(path.parent))


def _is_partial(path: Path) -> bool:
    return path.name.endswith(".partial")


def _raw_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint without checking its fields, or None if castwise did not write it."""
    manifest = read_json(_read(path / MANIFEST, _LARGEST_MANIFEST).decode())
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None


def read_manifest(path: Path) -> dict[str, Any] | str:
    """Return the manifest of a checkpoint, or a string that says why the checkpoint is not valid."""
    if _is_partial(path):
        return "is being saved" if is_being_saved(path) else "was never finished: the save was interrupted"
    try:
        manifest = _raw_manifest(path)
    except FileNotFoundError:
        if not path.exists():
            return "does not exist; a later save may have deleted it"
        return f"has no {MANIFEST}: it is damaged or was written by another program"
    except (OSError, ValueError) as error:
        return f"its {MANIFEST} cannot be read: {error}"
    if manifest is None:
        return f"its {MANIFEST} was not written by castwise"
    if manifest.get("version") != VERSION:
        return (
            f"has format version {shown(manifest.get('version'))}, and this castwise reads {VERSION}; use the castwise that "
            f"wrote it, {shown(manifest.get('castwise'))}"
        )
    if manifest.get("sha256") != _digest(manifest):
        return f"its {MANIFEST} is damaged: its sha256 does not match"
    if not _is_sound(manifest):
        return f"its {MANIFEST} has missing fields or fields of the wrong type"
    named = _NAME.fullmatch(path.name)
    if named and int(named[1]) != manifest["step"]:
        return f"belongs to step {manifest['step']} according to its {MANIFEST}"
    return manifest


def _digest(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _is_sound(manifest: Mapping[str, Any]) -> bool:
    """Whether all fields of a manifest have the right types."""
    files = manifest.get("files")
    return (
        all(
            type(manifest.get(key)) is int and least <= manifest[key] < 10**18
            for key, least in (("step", 0), ("world_size", 1))
        )
        and all(isinstance(manifest.get(key), str) for key in ("castwise", "torch", "plan", "digest"))
        and isinstance(files, dict)
        and VALUES in files
        and all(
            _FILE.fullmatch(name)
            and isinstance(about, dict)
            and type(about.get("size")) is int
            and about["size"] >= 0
            and isinstance(about.get("crc32"), str)
            for name, about in files.items()
        )
    )


def read_values(path: Path, manifest: Mapping[str, Any]) -> Any:
    """Return everything in a checkpoint except the bytes of its tensors, as JSON.

    Raises:
        CheckpointError: The values file differs from what the manifest says, or is not JSON.
    """
    wanted = manifest["files"][VALUES]
    try:
        data = _read(path / VALUES, wanted["size"])
        if (len(data), f"{zlib.crc32(data):08x}") != (wanted["size"], wanted["crc32"]):
            raise ValueError("its contents have changed since the save (crc32 differs)")
        return read_json(data.decode(), DEEPEST)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"its {VALUES} cannot be read: {error}") from None


def _read(path: Path, largest: int) -> bytes:
    """Read a plain file of at most ``largest`` bytes.

    Raises:
        OSError: The path is a link or otherwise not a plain file, or the file is larger.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError("it is not a plain file")
    with path.open("rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise OSError(f"it has more than {largest:,} bytes")
    return data


def measure(path: Path) -> dict[str, Any]:
    """Return the size in bytes and the crc32 of a file. This reads the file, at 1 to 4 GB/s if the disk is as fast."""
    crc = size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return {"size": size, "crc32": f"{crc:08x}"}


def wrong_files(
    path: Path, files: Iterable[tuple[str, Mapping[str, Any]]], *, checksums: bool = True
) -> str | None:
    """Return a description of the first file that differs from the manifest, or None if all files agree with it.

    With ``checksums``, every file is read and its contents are compared. Otherwise only the sizes are compared.
    """
    for name, wanted in files:
        try:
            about = (path / name).lstat()
            size = about.st_size
            if not stat.S_ISREG(about.st_mode):
                return f"{name} is not a plain file"
            if size != wanted["size"]:
                return f"{name} has {size:,} bytes instead of {wanted['size']:,}"
            if checksums and measure(path / name)["crc32"] != wanted["crc32"]:
                return f"{name} has the right size but other contents (crc32 differs)"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error}"
    return None


class Draft:
    """A checkpoint that is being written. Only the first rank calls its methods; other ranks use its paths."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step
        self.path = folder / f"step-{step:08d}"
        self.partial = self._hidden("partial")

    def _hidden(self, kind: str) -> Path:
        return self.folder / f".{self.path.name}.{kind}"

    def begin(self, values: Any) -> Path | None:
        """Remove leftovers of earlier crashes, create the hidden folder, and write everything except tensors into it.

        Returns:
            The path of a checkpoint of a later step, which will stay the newest, or None if there is none.

        Raises:
            CheckpointError: Another process saves into this folder, another program's folder has the checkpoint's name, or
                the disk is full.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._begin(values)
            return self._later()
        except CheckpointError:
            raise
        except (OSError, ValueError) as error:  # ValueError: a path that no folder can have
            raise self.not_written(f"{type(error).__name__}: {error}") from error

    def _begin(self, values: Any) -> None:
        hold(self.folder, f"save(step={self.step})")
        if self.path.exists() and not _is_ours(self.path):
            raise CheckpointError(
                f"save(step={self.step}): {self.path} exists and has no castwise manifest, so it is not replaced; move it "
                "away, or save into another folder"
            )
        for path in list(self.folder.iterdir()):
            match = _HIDDEN.fullmatch(path.name)
            if match and (match[2] != "replaced" or (self.folder / f"step-{match[1]}").exists()):
                _remove(path)
        _writing.add(self.partial)
        try:
            self.partial.mkdir()
            _write_json(self.partial / VALUES, values, indent=None)
        except BaseException:
            self.abandon()
            raise

    def not_written(self, why: str) -> CheckpointError:
        """Return the exception for a save that failed before the hidden folder got the checkpoint's name."""
        return CheckpointError(
            f"save(step={self.step}): {self.path} was not written; earlier checkpoints are unchanged. {why}"
        )

    def publish(self, about: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the manifest, then complete the checkpoint by renaming the hidden folder to the checkpoint's name.

        Args:
            about: Further fields of the manifest.
            files: The names of the tensor files, with the size and crc32 of each.
        """
        try:
            files = {VALUES: measure(self.partial / VALUES), **files}
            manifest = {"format": FORMAT, "version": VERSION, "step": self.step, **about, "files": files}
            _write_json(self.partial / MANIFEST, {**manifest, "sha256": _digest(manifest)})
            _sync(self.partial)
            replaced = self._hidden("replaced")
            if self.path.exists():
                if replaced.exists():
                    _remove(replaced)
                self.path.rename(replaced)
            self.partial.rename(self.path)
        finally:
            _writing.discard(self.partial)

    def confirm(self) -> None:
        """Flush the new name of the folder to disk, then delete the former checkpoint of the same step, if any."""
        _sync(self.folder)
        replaced = self._hidden("replaced")
        if replaced.exists():
            _remove(replaced)

    def prune(self, keep: int | None) -> None:
        """Delete complete checkpoints of earlier steps, except the ``keep - 1`` latest of them.

        With None, nothing is deleted. Damaged checkpoints, folders of other programs and checkpoints of later steps
        stay.
        """
        if keep is None:
            return
        complete = []
        for step, path in candidates(self.folder):
            manifest = read_manifest(path) if step <= self.step else ""
            if isinstance(manifest, dict) and not wrong_files(
                path, manifest["files"].items(), checksums=False
            ):
                complete.append(path)
        for path in complete[keep:]:
            doomed = path.with_name(f".{path.name.strip('.').partition('.')[0]}.deleted")
            path.rename(doomed)  # so that a partly deleted checkpoint never has a checkpoint's name
            _remove(doomed)

    def abandon(self) -> None:
        """Delete a checkpoint that could not be finished."""
        shutil.rmtree(self.partial, ignore_errors=True)
        _writing.discard(self.partial)

    def _later(self) -> Path | None:
        for step, path in candidates(self.folder):
            if step > self.step and isinstance(read_manifest(path), dict):
                return path
        return None


def _is_ours(path: Path) -> bool:
    """Whether castwise wrote a folder, even if the folder was damaged afterwards."""
    with contextlib.suppress(OSError, ValueError):
        return _raw_manifest(path) is not None
    return False


def _remove(path: Path) -> None:
    """Delete a folder or a file. For a link, only the link itself is deleted."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=indent)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Flush the names in a folder to disk. Windows does this by itself, and cannot open folders."""
    if os.name != "nt":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
