"""Changes to a script, collected first and applied at once, so that places stay those of the script as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import libcst as cst

from castwise.migrate.result import Finding
from castwise.migrate.view import View, root

__all__ = ["FLOOR", "Change", "Edits", "statement"]

FLOOR = "the loss scale stops at 2**-14, and gradients that overflow there again and again raise a LossScaleError; it fell to zero before"
"""What a plan's loss scale does otherwise than those of torch and Apex."""

Change = Callable[[Any], Any]


def statement(code: str, like: cst.BaseStatement | None = None) -> cst.SimpleStatementLine:
    """A line of code; with the comments and empty lines of the statement ``like``."""
    line = cst.parse_statement(code)
    assert isinstance(line, cst.SimpleStatementLine)
    if isinstance(like, cst.SimpleStatementLine):
        line = line.with_changes(
            leading_lines=like.leading_lines, trailing_whitespace=like.trailing_whitespace
        )
    return line


class Edits:
    """What is to become of the nodes of a script, and what there is to say about it.

    Args:
        view: The script.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.changes: dict[cst.CSTNode, Change] = {}
        self.inserted: dict[cst.CSTNode, list[cst.BaseStatement]] = {}
        self.before: dict[cst.CSTNode, cst.SimpleStatementLine] = {}
        self.dropped: set[cst.CSTNode] = set()
        self.rewritten: set[cst.CSTNode] = set()
        self.findings: list[Finding] = []
        self.needs_castwise = False

    def replace(self, node: cst.CSTNode, change: Change | cst.CSTNode) -> None:
        """Put another node in the place of one, or what a function makes of it once what is inside it was changed."""
        self.changes[node] = change if callable(change) else lambda _: change

    def insert_after(self, place: cst.BaseStatement, *lines: cst.BaseStatement) -> None:
        """Add statements after one."""
        self.inserted.setdefault(place, []).extend(lines)

    def insert_before(self, place: cst.SimpleStatementLine, line: cst.SimpleStatementLine) -> None:
        """Add a statement before one, whose comments and empty lines come to stand above both."""
        self.before[place] = line

    def drop(self, line: cst.BaseStatement) -> None:
        """Take a statement out; its comments stay."""
        self.dropped.add(line)

    def mark(self, node: cst.CSTNode) -> None:
        """Note that a use of an imported name is not there any more."""
        name = root(node) if isinstance(node, cst.BaseExpression) else None
        self.rewritten.update({node} if name is None else {node, name})

    def left(self, node: cst.CSTNode, text: str) -> None:
        """Say that something is not rewritten, and why."""
        self._say(Finding(self.view.line(node), "left", text))

    def differs(self, node: cst.CSTNode, text: str) -> None:
        """Say that the rewritten script behaves otherwise."""
        self._say(Finding(self.view.line(node), "differs", text))

    def _say(self, finding: Finding) -> None:
        if finding not in self.findings:
            self.findings.append(finding)

    def use(self, name: str) -> cst.BaseExpression:
        """An expression for a public name of castwise."""
        self.needs_castwise = True
        return cst.parse_expression(f"castwise.{name}")

    def apply(self) -> str:
        """The script with all changes made."""
        if not (self.changes or self.inserted or self.before or self.dropped):
            return self.view.module.code
        return self.view.module.visit(_Applier(self)).code


class _Applier(cst.CSTTransformer):
    def __init__(self, edits: Edits) -> None:
        super().__init__()
        self.edits = edits
        self.gone: set[int] = set()
        self.kept: list[cst.CSTNode] = []  # so that an id in gone stays that of one node

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        edits = self.edits
        if isinstance(original_node, (cst.IndentedBlock, cst.Module)):
            updated_node = self._without_gone(updated_node)
        change = edits.changes.get(original_node)
        if change is not None:
            updated_node = change(updated_node)
        if original_node in edits.dropped:
            self.gone.add(id(updated_node))
            self.kept.append(updated_node)
        first, extra = edits.before.get(original_node), edits.inserted.get(original_node, [])
        if first is not None:
            first = first.with_changes(leading_lines=updated_node.leading_lines)
            return cst.FlattenSentinel([first, updated_node.with_changes(leading_lines=[]), *extra])
        return cst.FlattenSentinel([updated_node, *extra]) if extra else updated_node

    def _without_gone(self, block: Any) -> Any:
        """Take dropped statements out, and hand their comments to what follows them."""
        body: list[Any] = []
        waiting: list[cst.EmptyLine] = []
        changed = False
        for node in block.body:
            if id(node) in self.gone:
                changed = True
                waiting += _comments(node)
            elif waiting:
                body.append(node.with_changes(leading_lines=[*waiting, *node.leading_lines]))
                waiting = []
            else:
                body.append(node)
        if not changed:
            return block
        block = block.with_changes(body=body)
        if waiting:
            block = block.with_changes(footer=[*waiting, *block.footer])
        return block


def _comments(line: cst.SimpleStatementLine) -> list[cst.EmptyLine]:
    lines = list(line.leading_lines)
    if line.trailing_whitespace.comment is not None:
        lines.append(cst.EmptyLine(comment=line.trailing_whitespace.comment))
    commented = any(empty.comment is not None for empty in lines)
    return lines if commented else []
