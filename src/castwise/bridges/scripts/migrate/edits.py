"""Changes to a script, collected first and applied at once, so that positions refer to the original script."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import libcst as cst

from castwise.bridges.scripts.migrate.result import Finding, Kind
from castwise.bridges.scripts.reading.view import View

Change = Callable[[Any], Any]


def statement(code: str) -> cst.SimpleStatementLine:
    """A line of code."""
    line = cst.parse_statement(code)
    assert isinstance(line, cst.SimpleStatementLine)
    return line


def small(code: str) -> cst.BaseSmallStatement:
    """A statement that shares its line with others."""
    return statement(code).body[0]


def with_names(
    node: cst.Import | cst.ImportFrom, aliases: Iterable[cst.ImportAlias]
) -> list[cst.BaseSmallStatement]:
    """The statement with only these names; no statement if there are none."""
    names = list(aliases)
    if not names:
        return []
    if isinstance(node, cst.Import) or node.lpar is None:
        names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    elif not isinstance(node.names, cst.ImportStar) and "#" not in cst.Module([]).code_for_node(names[-1]):
        names[-1] = names[-1].with_changes(comma=node.names[-1].comma)
    return [node.with_changes(names=names)]


class Edits:
    """The changes to a script's nodes, and the notes about them."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.changes: dict[cst.CSTNode, Change] = {}
        self.inserted: dict[cst.CSTNode, list[cst.BaseStatement]] = {}
        self.findings: list[Finding] = []

    def replace(self, node: cst.CSTNode, change: Change | cst.CSTNode | cst.FlattenSentinel[Any]) -> None:
        """Replace a node by others, or by the result of a function of the node, after changes inside it."""
        self.changes[node] = change if callable(change) else lambda _: change

    def insert_after(self, place: cst.BaseStatement, *lines: cst.BaseStatement) -> None:
        """Add statements after a statement."""
        self.inserted.setdefault(place, []).extend(lines)

    def put(self, node: cst.Import | cst.ImportFrom, new: list[cst.BaseSmallStatement]) -> None:
        """Replace one statement by several: on separate lines, or separated by semicolons after a colon."""
        line = self.view.parent(node)
        alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
        if alone and self.view.suite(node) is not None:
            assert isinstance(line, cst.SimpleStatementLine)
            self.replace(node, new[0])
            self.insert_after(line, *(cst.SimpleStatementLine([each]) for each in new[1:]))
        else:
            ends = [cst.MaybeSentinel.DEFAULT] * (len(new) - 1) + [node.semicolon]
            parts = [each.with_changes(semicolon=end) for each, end in zip(new, ends, strict=True)]
            self.replace(node, cst.FlattenSentinel(parts))

    def add_beside(self, node: cst.Import | cst.ImportFrom, *new: cst.BaseSmallStatement) -> None:
        """Add statements after one, on its line, after changes of it."""
        former = self.changes.get(node)

        def change(updated: Any) -> Any:
            got = updated if former is None else former(updated)
            parts = [*(got.nodes if isinstance(got, cst.FlattenSentinel) else [got]), *new]
            ends = [cst.MaybeSentinel.DEFAULT] * (len(parts) - 1) + [node.semicolon]
            return cst.FlattenSentinel([
                part.with_changes(semicolon=end) for part, end in zip(parts, ends, strict=True)
            ])

        self.changes[node] = change

    def say(self, node: cst.CSTNode, kind: Kind, text: str) -> None:
        """Note something about the line of a node, once."""
        finding = Finding(self.view.line(node), kind, text)
        if finding not in self.findings:
            self.findings.append(finding)

    def apply(self) -> str:
        """The script with all changes applied."""
        if not (self.changes or self.inserted):
            return self.view.text
        return self.view.module.visit(_Applier(self)).code


class _Applier(cst.CSTTransformer):
    def __init__(self, edits: Edits) -> None:
        super().__init__()
        self.edits = edits

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        change = self.edits.changes.get(original_node)
        if change is not None:
            updated_node = change(updated_node)
        extra = self.edits.inserted.get(original_node, [])
        return cst.FlattenSentinel([updated_node, *extra]) if extra else updated_node
