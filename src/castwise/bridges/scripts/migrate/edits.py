"""Changes to a script, collected first and applied at once, so that positions refer to the original script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import libcst as cst

from castwise.bridges.scripts.migrate.result import Finding, Kind
from castwise.bridges.scripts.reading.view import View

Change = Callable[[Any], Any]


def statement(code: str, like: cst.BaseStatement | None = None) -> cst.SimpleStatementLine:
    """A line of code, with the comments and empty lines of the statement ``like``."""
    line = cst.parse_statement(code)
    assert isinstance(line, cst.SimpleStatementLine)
    if isinstance(like, cst.SimpleStatementLine):
        line = line.with_changes(
            leading_lines=like.leading_lines, trailing_whitespace=like.trailing_whitespace
        )
    return line


def small(code: str) -> cst.BaseSmallStatement:
    """A statement that shares its line with others."""
    return statement(code).body[0]


class Edits:
    """The changes to a script's nodes, and the notes about them."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.changes: dict[cst.CSTNode, Change] = {}
        self.inserted: dict[cst.CSTNode, list[cst.BaseStatement]] = {}
        self.dropped: set[cst.CSTNode] = set()
        self.findings: list[Finding] = []

    def replace(self, node: cst.CSTNode, change: Change | cst.CSTNode | cst.FlattenSentinel[Any]) -> None:
        """Replace a node by others, or by the result of a function of the node, after changes inside it."""
        self.changes[node] = change if callable(change) else lambda _: change

    def insert_after(self, place: cst.BaseStatement, *lines: cst.BaseStatement) -> None:
        """Add statements after a statement."""
        self.inserted.setdefault(place, []).extend(lines)

    def drop(self, line: cst.BaseStatement) -> None:
        """Remove a statement; its comments stay."""
        self.dropped.add(line)

    def say(self, node: cst.CSTNode, kind: Kind, text: str) -> None:
        """Note something about the line of a node, once."""
        finding = Finding(self.view.line(node), kind, text)
        if finding not in self.findings:
            self.findings.append(finding)

    def apply(self) -> str:
        """The script with all changes applied."""
        if not (self.changes or self.inserted or self.dropped):
            return self.view.text
        return self.view.module.visit(_Applier(self)).code


class _Applier(cst.CSTTransformer):
    def __init__(self, edits: Edits) -> None:
        super().__init__()
        self.edits = edits
        self.gone: dict[int, cst.CSTNode] = {}  # by id; the nodes are referenced, so that ids are not reused

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        edits = self.edits
        if isinstance(original_node, (cst.IndentedBlock, cst.Module)):
            updated_node = self._without_gone(updated_node)
        change = edits.changes.get(original_node)
        if change is not None:
            updated_node = change(updated_node)
        if original_node in edits.dropped:
            self.gone[id(updated_node)] = updated_node
        extra = edits.inserted.get(original_node, [])
        return cst.FlattenSentinel([updated_node, *extra]) if extra else updated_node

    def _without_gone(self, block: Any) -> Any:
        """Remove dropped statements, and move their comments to the next statement."""
        body: list[Any] = []
        waiting: list[cst.EmptyLine] = []
        for node in block.body:
            if id(node) in self.gone:
                waiting += _comments(node)
                continue
            if waiting:
                node = node.with_changes(leading_lines=[*waiting, *node.leading_lines])
                waiting = []
            body.append(node)
        if len(body) == len(block.body):
            return block
        return block.with_changes(body=body, footer=[*waiting, *block.footer])


def _comments(line: cst.SimpleStatementLine) -> list[cst.EmptyLine]:
    lines = list(line.leading_lines)
    if line.trailing_whitespace.comment is not None:
        lines.append(cst.EmptyLine(comment=line.trailing_whitespace.comment))
    return lines if any(empty.comment is not None for empty in lines) else []
