"""The files that are checked."""

from __future__ import annotations

import ast
import contextlib
import os
import re
from pathlib import Path

from castwise.bridges.scripts.lint.explore import Exploration
from castwise.bridges.scripts.lint.result import Fault, Lint
from castwise.bridges.scripts.reading.files import reason, scripts_below
from castwise.errors import LintError

_CONCERNS = re.compile(
    rb"autocast|GradScaler|\bhalf\b|b?float16|[-_\"'\s](amp|fp16|bf16|(mixed[-_])?precision)[\"'\s:]"
)
"""Words of mixed precision."""
_TORCH = re.compile(rb"\btorch\b")
_TRAINS = re.compile(
    rb"\bautocast\b|\bbackward\b|\bstep\b|torch\.save|\bdump\(|add_argument|\.option\(|\.command\(|\bwith\b[^\n]*\band\b"
)
"""Words of code in which rules can find anything."""
_IMPORTS = re.compile(rb"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import|import[ \t]+([\w.]+))", re.MULTILINE)
_PARSED = 200
"""Parsed files that are kept for others that import them."""
_IGNORED = re.compile(r"#\s*castwise:\s*ignore(?:\[([\w\s,-]*)\])?")


def lint_files(path: str | os.PathLike[str]) -> Lint:
    """Do the work of :func:`castwise.bridges.scripts.lint.lint`.

    Raises:
        LintError: There is no such path.
    """
    given = Path(path)
    if not given.exists():
        raise LintError(f"doctor --lint: there is no file or folder {str(given)!r}")
    files = [file for file in scripts_below(given)[0] if file.is_file()] if given.is_dir() else [given]
    found: set[Fault] = set()
    problems: list[tuple[Path, str]] = []
    lines: dict[Path, list[str]] = {}
    parsed: dict[Path, tuple[ast.Module, str]] = {}
    for file in files:
        try:
            raw = file.read_bytes()
            if not _is_concerned(raw, file):
                continue
            if len(parsed) > _PARSED:
                parsed.clear()
            exploration = Exploration(file, parsed)
        except (OSError, SyntaxError, ValueError, LookupError, RecursionError) as error:
            problems.append((file, f"cannot be read: {reason(error) or type(error).__name__}"))
            continue
        try:
            found |= {each for each in exploration.faults() if not _is_ignored(each, lines)}
        except Exception as error:  # whatever a script contains, the others are checked
            said = f"{type(error).__name__}: {reason(error)}"
            problems.append((
                file,
                f"cannot be checked ({said}); this is a fault of castwise, please report it",
            ))
    return Lint(_once(found), len(files), tuple(problems))


def _is_concerned(raw: bytes, file: Path) -> bool:
    """Whether a script, with the files beside it that it imports, contains torch, a word of mixed precision and training."""
    texts = [raw]
    for found in _IMPORTS.finditer(raw):
        name = (found[1] or found[2]).decode().lstrip(".").replace(".", "/")
        with contextlib.suppress(OSError):
            texts.append((file.parent / f"{name}.py").read_bytes())
    return all(any(map(each.search, texts)) for each in (_TORCH, _CONCERNS, _TRAINS))


def _is_ignored(fault: Fault, lines: dict[Path, list[str]]) -> bool:
    """Whether a comment in the line switches the rule off: ``# castwise: ignore`` or ``# castwise: ignore[rule, ...]``."""
    if fault.path not in lines:
        lines[fault.path] = fault.path.read_text(errors="replace").split("\n")
    said = _IGNORED.search(lines[fault.path][fault.line - 1])
    return said is not None and (said[1] is None or fault.rule in re.split(r"[\s,]+", said[1]))


def _once(found: set[Fault]) -> tuple[Fault, ...]:
    """The findings without those that a run of another file has found too; one that needs no flag comes before one that does."""
    first: dict[tuple[Path, int, str], Fault] = {}
    for each in sorted(found):
        key = each.path.resolve(), each.line, each.rule
        if key not in first or (first[key].when and not each.when):
            first[key] = each
    return tuple(sorted(first.values()))
