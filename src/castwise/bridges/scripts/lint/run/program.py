"""The files of a program: a script, and the files beside it that it imports."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

from castwise.bridges.scripts.lint.run.values import Module
from castwise.bridges.scripts.reading.files import decode


def parse(raw: bytes) -> tuple[ast.Module, str]:
    """The syntax tree of a file, and its text.

    Raises:
        SyntaxError: It is not Python, or nested too deeply.
        ValueError: Its text cannot be decoded.
    """
    text = decode(raw)[0]
    with warnings.catch_warnings(action="ignore"):
        try:
            return ast.parse(text), text
        except (RecursionError, MemoryError):
            raise SyntaxError("its expressions are nested too deeply") from None


_FILES = 40
"""Files of one program that are read."""


class Program:
    """Parses each file once, and finds the files that an import names.

    Args:
        path: The script that is started.
        parsed: Files that other programs have parsed; this one adds to them.
    """

    def __init__(self, path: Path, parsed: dict[Path, tuple[ast.Module, str]]) -> None:
        self.path = path
        self.folder = path.parent
        self._parsed = parsed
        self._trees: dict[Path, tuple[ast.Module, str] | None] = {}
        self._text = (0, "")

    def text(self) -> str:
        """The text of all files that were read."""
        if self._text[0] != len(self._trees):
            self._text = (
                len(self._trees),
                "\n".join(each[1] for each in self._trees.values() if each),
            )
        return self._text[1]

    def load(self, path: Path) -> Module:
        """A file as a module without values.

        Raises:
            SyntaxError: It is not Python, or nested too deeply.
            ValueError: Its text cannot be decoded.
            OSError: It cannot be read.
        """
        found = self._trees.get(path)
        if found is None:
            found = self._trees[path] = self._parse(path)
        return Module(path, found[0])

    def find(self, name: str, level: int, importer: Path) -> Path | None:
        """The file that an import names, if it lies in the folder of the script or below and can be parsed.

        A package around the script is not one: it would import the script.
        """
        start = importer.parent
        for _ in range(level - 1):
            start = start.parent
        parts = [part for part in name.split(".") if part]
        if not parts:
            return None
        base = start.joinpath(*parts)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            is_around = path.name == "__init__.py" and self.path.is_relative_to(path.parent)
            if path.is_relative_to(self.folder) and not is_around and self._is_readable(path):
                return path
        return None

    def _is_readable(self, path: Path) -> bool:
        if path not in self._trees:
            full = sum(each is not None for each in self._trees.values()) >= _FILES
            try:
                self._trees[path] = None if full or not path.is_file() else self._parse(path)
            except (OSError, SyntaxError, ValueError, LookupError):
                self._trees[path] = None
        return self._trees[path] is not None

    def _parse(self, path: Path) -> tuple[ast.Module, str]:
        if path not in self._parsed:
            self._parsed[path] = parse(path.read_bytes())
        return self._parsed[path]
