"""The files of a migration, read and written as a whole, in their encoding and with their newlines."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import stat
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from castwise.bridges.scripts.migrate.program import Script, Stay, loaded, look, staying
from castwise.bridges.scripts.migrate.result import FileResult, Finding, Migration
from castwise.bridges.scripts.migrate.rewriting import rewrite
from castwise.bridges.scripts.reading.files import decode, reason, scripts_below
from castwise.errors import MigrateError

_CONCERNS = re.compile(rb"\bapex\b|colossalai|autocast|GradScaler|custom_fwd|custom_bwd")
"""Text that a file must contain to be parsed at all; other files, such as Python 2, are ignored."""


def migrate_files(path: str | os.PathLike[str], *, write: bool) -> Migration:
    """Do the work of :func:`castwise.bridges.scripts.migrate.migrate`, after LibCST was imported.

    Raises:
        MigrateError: There is no such path.
    """
    given = Path(path)
    if not given.exists():
        raise MigrateError(f"migrate: there is no file or folder {str(given)!r}")
    found, links = scripts_below(given) if given.is_dir() else ([given], [])
    results = [_link(link) for link in links]
    raws: dict[Path, bytes] = {}
    texts: dict[Path, tuple[str, str]] = {}
    for file in found:
        try:
            if not file.is_file():
                raise OSError("it is not a regular file")
            raws[file] = file.read_bytes()
            if not given.is_dir() or _CONCERNS.search(raws[file]):
                texts[file] = decode(raws[file])
        except (OSError, SyntaxError, ValueError, LookupError) as error:  # codecs may raise any exception
            results.append(FileResult(file, problem=f"cannot be read: {reason(error)}"))
    root = given if given.is_dir() else _root(given)
    others = {} if given.is_dir() else _others(given, root)
    scripts = {file: look(raw) for file, raw in {**raws, **others}.items()} if texts else {}
    exported, stays = _imported_names(scripts), staying(scripts, root)
    for file, (text, _) in texts.items():
        module = file.parent.name if file.stem == "__init__" else file.stem
        result = _one(file, text, frozenset(exported.get(module, ())), stays[file])
        result = _with_others(result, {os.path.relpath(other, root): raw for other, raw in others.items()})
        if result.changed or result.findings or result.problem:
            results.append(result)
    if write:
        encodings = {file: encoding for file, (_, encoding) in texts.items()}
        results = _write(results, raws, encodings)
    results.sort(key=lambda result: result.path)
    return Migration(tuple(results), looked_at=len(found))


def _root(file: Path) -> Path:
    """The folder in which a script's absolute imports start: the one that contains its package."""
    root = file.parent
    while (root / "__init__.py").is_file() and root != root.parent:
        root = root.parent
    return root


def _others(given: Path, root: Path) -> dict[Path, bytes]:
    """Scripts that may belong to one that is migrated alone: those in its folder, and those that they import."""
    others: dict[Path, bytes] = {}
    waiting = [given, *sorted(given.parent.glob("*.py"))]
    while waiting:
        file = waiting.pop()
        if file in others or not file.is_file() or not os.access(file, os.R_OK):
            continue
        others[file] = file.read_bytes()
        for each in look(others[file]).imports:
            waiting += loaded(file, each, root)
    others.pop(given, None)
    return others


def _imported_names(scripts: Mapping[Path, Script]) -> dict[str, set[str]]:
    """The names that scripts use from modules, by the last part of the module's name; ``*`` if it may be any name."""
    names: dict[str, set[str]] = defaultdict(set)
    for file, script in scripts.items():
        for each in script.imports:
            uses_all = "*" in each.names and file.stem != "__init__"
            names[each.module.rpartition(".")[2]].update(script.words - {"*"} if uses_all else each.names)
        for dotted in script.reached:
            module, _, name = dotted.rpartition(".")
            names[module.rpartition(".")[2]].add(name)
    return names


def _with_others(result: FileResult, others: Mapping[str, bytes]) -> FileResult:
    """A script on a drop-in, with a note on scripts of its program that would still use the library itself."""
    names = [name for name, raw in others.items() if re.search(rb"\bapex\b|colossalai", raw)]
    if not names or all(finding.kind != "kept" for finding in result.findings):
        return result
    said = f"the drop-in and the library share no state, and {', '.join(sorted(names))} may use the library too: migrate the whole folder"
    return dataclasses.replace(result, findings=(Finding(1, "left", said), *result.findings))


def _one(file: Path, text: str, exported: frozenset[str], stays: Mapping[str, Stay]) -> FileResult:
    try:
        after, findings = rewrite(text, exported=exported, stays=stays)
    except RecursionError:
        return FileResult(file, text, text, problem="is nested too deeply to be analysed")
    except SyntaxError as error:
        return FileResult(file, text, text, problem=f"cannot be parsed as Python: {reason(error)}")
    return FileResult(file, text, after, tuple(findings))


def _link(link: Path) -> FileResult:
    where = f"a symbolic link to {os.readlink(link)}, which was not followed; to migrate that file, name it instead of the link"
    return FileResult(link, findings=(Finding(1, "left", where),))


def _write(
    results: Iterable[FileResult], raws: Mapping[Path, bytes], encodings: Mapping[Path, str]
) -> list[FileResult]:
    """Write rewritten texts to their files: all of them, or none if one cannot be written."""
    results = list(results)
    texts: dict[Path, bytes] = {}
    problems: dict[Path, str] = {}
    for result in (result for result in results if result.changed and not result.problem):
        try:
            texts[result.path] = result.after.encode(encodings[result.path])
            _check_writable(result.path.resolve(), raws[result.path])
        except (OSError, UnicodeEncodeError) as error:
            problems[result.path] = f"was not written: {reason(error)}"
    if problems:
        barred = ", ".join(str(path) for path in problems)
        others = dict.fromkeys(texts, f"was not written, because {barred} cannot be written")
        return _with_problems(results, {**others, **problems})
    problems = _put(texts, raws)
    if problems:
        return _with_problems(results, problems)
    return [dataclasses.replace(each, written=each.path in texts) for each in results]


def _with_problems(results: Iterable[FileResult], problems: Mapping[Path, str]) -> list[FileResult]:
    return [dataclasses.replace(each, problem=problems.get(each.path, each.problem)) for each in results]


def _put(texts: Mapping[Path, bytes], raws: Mapping[Path, bytes]) -> dict[Path, str]:
    """Write all texts to new files, then replace each file; if one cannot be replaced, restore the others."""
    staged: dict[Path, str] = {}
    placed: list[Path] = []
    path = Path()
    try:
        for path, text in texts.items():
            staged[path] = _stage(path.resolve(), text)
        for path, name in staged.items():
            _check_writable(path.resolve(), raws[path])
            placed.append(path)
            os.replace(name, path.resolve())
    except BaseException as error:
        kept = [path for path in placed if not _put_back(path.resolve(), raws[path], texts[path])]
        if not isinstance(error, OSError):
            raise
        others = {
            other: f"was written, and the old text could not be restored when {path} could not be written"
            if other in kept
            else f"was not written, because {path} cannot be written"
            for other in texts
        }
        return {**others, path: f"was not written: {reason(error)}"}
    finally:
        for name in staged.values():
            with contextlib.suppress(OSError):
                os.unlink(name)
    return {}


def _put_back(path: Path, before: bytes, after: bytes) -> bool:
    """Whether a file that may have been written has its former content, or that of another program."""
    try:
        if path.read_bytes() == after:
            os.replace(_stage(path, before), path)
    except OSError:
        return False
    return True


def _check_writable(path: Path, before: bytes) -> None:
    # A new file may replace one that is not writable: only the folder's permissions decide.
    if not stat.S_IMODE(path.stat().st_mode) & stat.S_IWUSR or not os.access(path, os.W_OK):
        raise PermissionError(13, "the file is read-only")
    if path.read_bytes() != before:
        raise OSError("the file was changed in the meantime")


def _stage(path: Path, text: bytes) -> str:
    """Write a text to a new file in the same folder, with the same mode and owner; returns its name."""
    now = path.stat()
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(OSError, AttributeError):  # only root may do this, and not on Windows
            os.chown(name, now.st_uid, now.st_gid)
        os.chmod(name, stat.S_IMODE(now.st_mode))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return name
