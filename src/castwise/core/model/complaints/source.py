"""Find the line of user code at which an error was raised, and the expression that was running there."""

from __future__ import annotations

import ast
import dis
import itertools
import linecache
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

_TORCH, _CASTWISE = str(Path(torch.__file__).parent), str(Path(__file__).parents[3])
_WORKLOADS = str(Path(_CASTWISE) / "lab" / "workloads")
_TESTING = str(Path(_TORCH) / "testing")
_STDLIB = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


@dataclass(frozen=True)
class Line:
    """A line of Python code.

    Attributes:
        file: Path of the file.
        number: Line number, from 1.
        function: The function that contains it.
    """

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        """Return the place as text, such as ``model.py, line 12, in forward``."""
        return f"{Path(self.file).name}, line {self.number}, in {self.function}"

    @property
    def text(self) -> str:
        """The source text of the line, or an empty text if the file cannot be read."""
        return linecache.getline(self.file, self.number).strip()


def is_shown(file: str) -> bool:
    """Whether a file is user code, and not part of torch, castwise or Python's standard library."""
    if file.startswith((_WORKLOADS, _TESTING)):
        return True
    if file.startswith((_TORCH, _CASTWISE, "<frozen")):
        return False
    return not file.startswith(_STDLIB) or "-packages" in file


@dataclass(frozen=True)
class Spot:
    """The line of user code that called an operator.

    Attributes:
        line: The innermost line of user code in the traceback, or None if there is none.
        code: The source of the expression that was running, on one line; empty if it cannot be read.
        texts: The source expression of each tensor in that line, by the tensor's ``id``.
        maker: A function that takes the name of a variable in the same function, and returns the assignment that gave
            it its value, or None.
    """

    line: Line | None = None
    code: str = ""
    texts: Mapping[int, str] = field(default_factory=dict)
    maker: Callable[[str], ast.Assign | None] = lambda name: None


@lru_cache(maxsize=16)
def _tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _tree_of(frame: FrameType) -> ast.Module | None:
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    return _tree("".join(lines)) if lines else None


@lru_cache(maxsize=16)
def _ending(
    tree: ast.Module,
) -> dict[tuple[int | None, int | None], list[tuple[ast.AST, ast.expr | ast.AugAssign]]]:
    """Return all expressions and augmented assignments of a syntax tree, by the line and column where they end.

    Each comes with its parent node. Of several that end at the same place, the outer ones come first.
    """
    found: dict[tuple[int | None, int | None], list[tuple[ast.AST, ast.expr | ast.AugAssign]]] = {}
    for parent in ast.walk(tree):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.expr | ast.AugAssign):
                found.setdefault((node.end_lineno, node.end_col_offset), []).append((parent, node))
    return found


def _position(code: CodeType, index: int) -> tuple[int, int, int, int] | None:
    line, last, start, end = next(itertools.islice(code.co_positions(), index // 2, None), (None,) * 4)
    if line is None or last is None or start is None or end is None:
        return None
    return line, start, last, end


def node_of(step: TracebackType) -> ast.AST | None:
    """Return the syntax tree of the expression that was running in a frame of a traceback.

    If the statement writes in place (``a += b``, ``a[i] = b``), return that of the whole statement. Return None if it
    is not found.
    """
    at, tree = _position(step.tb_frame.f_code, step.tb_lasti), _tree_of(step.tb_frame)
    if at is None or tree is None:
        return None
    near = None
    for parent, node in _ending(tree).get(at[2:], ()):
        if (node.lineno, node.col_offset) == at[:2]:
            stored = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
            return parent if stored and isinstance(parent, ast.Assign) else node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            near = near or node  # from Python 3.12 on a method's call begins at the method's name
    return near


def raised_by_hand(trace: TracebackType | None) -> bool:
    """Whether the innermost line of a traceback is a ``raise`` or ``assert`` of user code."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not is_shown(trace.tb_frame.f_code.co_filename):
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def short(node: ast.AST | None) -> str:
    """Return the source text of a syntax tree, on one line of at most 100 characters."""
    text = ast.unparse(node) if node is not None else ""
    return text if len(text) <= 100 else f"{text[:97]}..."


def maker_of(step: TracebackType, name: str) -> ast.Assign | None:
    """Return the last assignment to a variable above the line that was running, in the same function."""
    tree, code = _tree_of(step.tb_frame), step.tb_frame.f_code
    found: ast.Assign | None = None
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Assign) and code.co_firstlineno <= node.lineno < step.tb_lineno:
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    found = max((found or node), node, key=lambda n: (n.lineno, n.col_offset))
    return found
