"""Which files a migration reads, and how it reads and writes them: whole, in their own encoding and newlines."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import os
import re
import stat
import tempfile
import tokenize
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from castwise.errors import MigrateError
from castwise.migrate.result import FileResult, Finding, Migration
from castwise.migrate.rewriting import rewrite
from castwise.migrate.served import LIBRARIES

_CONCERNS = re.compile(rb"\bapex\b|colossalai|autocast|GradScaler|custom_fwd|custom_bwd")
"""What a file must hold to be parsed at all: one of Python 2 beside the scripts is none of our business."""
_PASSED_OVER = {"__pycache__", "node_modules", "site-packages"}


def migrate_files(path: str | os.PathLike[str], *, write: bool) -> Migration:
    """As :func:`castwise.migrate.migrate`, with LibCST there.

    Raises:
        MigrateError: There is no such path.
    """
    given = Path(path)
    if not given.exists():
        raise MigrateError(f"migrate: there is no file or folder {str(given)!r}")
    root = given if given.is_dir() else given.parent
    found, links = _scripts(given) if given.is_dir() else ([given], [])
    results = [_link(link) for link in links]
    texts: dict[Path, tuple[bytes, str, str]] = {}
    beside = [] if given.is_dir() else [each for each in sorted(root.glob("*.py")) if each.is_file()]
    neighbours = {
        each.name: each.read_bytes() for each in beside if each != given and os.access(each, os.R_OK)
    }
    importers = [*neighbours.values()]
    for file in found:
        try:
            raw = file.read_bytes()
            importers.append(raw)
            if not given.is_dir() or _CONCERNS.search(raw):
                texts[file] = (raw, *_decode(raw))
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            results.append(FileResult(file, problem=f"cannot be read: {_reason(error)}"))
    makes_scalers = any("GradScaler" in text for _, text, _ in texts.values())
    exported = _imported_names(importers if makes_scalers else ())
    for file, (raw, text, encoding) in texts.items():
        module = file.parent.name if file.stem == "__init__" else file.stem
        result = _one(file, text, frozenset(exported.get(module, ())), _own(file, root))
        result = _with_neighbours(result, neighbours)
        if write and result.changed:
            result = _write(result, raw, encoding)
        if result.changed or result.findings or result.problem:
            results.append(result)
    results.sort(key=lambda result: result.path)
    return Migration(tuple(results), looked_at=len(found))


def _imported_names(scripts: Iterable[bytes]) -> dict[str, set[str]]:
    """What scripts import from modules, by the last part of the module's name; ``*`` where that may be any name."""
    names: dict[str, set[str]] = defaultdict(set)
    for script in scripts:
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(script)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names[(node.module or "").rpartition(".")[2]].update(alias.name for alias in node.names)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    names[alias.name.rpartition(".")[2]].add("*")
    return names


def _own(file: Path, root: Path) -> frozenset[str]:
    """Libraries that are a module or package of the program, beside the file or around it."""
    folders = [folder for folder in file.parents if folder == root or root in folder.parents]
    return frozenset(
        library
        for library in LIBRARIES
        for folder in folders
        if (folder / f"{library}.py").is_file() or (folder / library / "__init__.py").is_file()
    )


def _with_neighbours(result: FileResult, neighbours: Mapping[str, bytes]) -> FileResult:
    """A script on a drop-in, with a word on scripts beside it that would still use the library itself."""
    names = [name for name, raw in neighbours.items() if re.search(rb"\bapex\b|colossalai", raw)]
    if not names or all(finding.kind != "kept" for finding in result.findings):
        return result
    said = f"the drop-in shares nothing with the library, which {', '.join(names)} may use too: migrate the folder"
    return dataclasses.replace(result, findings=(Finding(1, "left", said), *result.findings))


def _one(file: Path, text: str, exported: frozenset[str], own: frozenset[str]) -> FileResult:
    try:
        after, findings = rewrite(text, exported=exported, own=own)
    except RecursionError:
        return FileResult(file, text, text, problem="is nested too deep to be looked at")
    except SyntaxError as error:
        return FileResult(file, text, text, problem=f"is not Python that can be parsed: {_reason(error)}")
    return FileResult(file, text, after, tuple(findings))


def _scripts(folder: Path) -> tuple[list[Path], list[Path]]:
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


def _link(link: Path) -> FileResult:
    where = (
        f"a symbolic link to {os.readlink(link)}, which was not followed; name that file to have it migrated"
    )
    return FileResult(link, findings=(Finding(1, "left", where),))


def _decode(raw: bytes) -> tuple[str, str]:
    """The text, newlines as they are, and the encoding that the file declares."""
    if b"\0" in raw:
        raise SyntaxError("it holds null bytes, as binary files do")
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    return raw.decode(encoding), encoding


def _write(result: FileResult, raw: bytes, encoding: str) -> FileResult:
    """Put the rewritten text into the file: whole or not at all."""
    try:
        _replace(result.path.resolve(), raw, result.after.encode(encoding))
    except (OSError, UnicodeEncodeError) as error:
        return dataclasses.replace(result, problem=f"was not written: {_reason(error)}")
    return dataclasses.replace(result, written=True)


def _replace(path: Path, before: bytes, after: bytes) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    # A new file may take the place of one that is not to be written: the folder alone decides about that.
    if not mode & stat.S_IWUSR or not os.access(path, os.W_OK):
        raise PermissionError(13, "it is read-only")
    if path.read_bytes() != before:
        raise OSError("it was changed by somebody else meanwhile")
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeError):
        return f"its text is not {error.encoding}" if hasattr(error, "encoding") else str(error)
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return " ".join(str(error).split())
