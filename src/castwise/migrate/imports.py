"""Import statements: what is not used any more goes, and castwise comes in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst import metadata as meta

from castwise.migrate.edits import Change, Edits, statement
from castwise.migrate.view import View

__all__ = ["dropped_aliases"]

_MIXED_PRECISION = re.compile(r"^(apex|colossalai)\b|^torch\..*\b(amp|autocast|GradScaler)\b")
"""Modules and names that are of no use any more once nothing names them; ``import torch`` stays."""


def dropped_aliases(edits: Edits, keep: frozenset[str]) -> None:
    """Take out of import statements what nothing in the script uses any more, and import castwise where it is needed.

    Args:
        edits: Its ``rewritten`` are the names that were replaced.
        keep: Names that other scripts import from this one.
    """
    view = edits.view
    place: cst.SimpleStatementLine | None = None
    for node in view.nodes:
        if not isinstance(node, (cst.Import, cst.ImportFrom)) or isinstance(node.names, cst.ImportStar):
            continue
        aliases = [alias for alias in node.names if not _is_unused_now(edits, node, alias, keep)]
        if len(aliases) == len(node.names):
            continue
        line = view.parent(node)
        if aliases:
            edits.replace(node, _with_aliases(aliases))
        elif isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
            if (
                view.parent(line) is view.module
                and place is None
                and edits.needs_castwise
                and not _imported(view)
            ):
                place = line
                edits.replace(line, statement("import castwise", like=line))
            elif len(getattr(view.suite(line), "body", ())) > 1:
                edits.drop(line)
    if edits.needs_castwise and place is None and not _imported(view):
        _add_import(edits)


def _with_aliases(aliases: Sequence[cst.ImportAlias]) -> Change:
    def change(updated: cst.Import | cst.ImportFrom) -> Any:
        names = list(aliases)
        names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated.with_changes(names=names)

    return change


def _is_unused_now(
    edits: Edits, node: cst.Import | cst.ImportFrom, alias: cst.ImportAlias, keep: frozenset[str]
) -> bool:
    bound = alias.evaluated_alias or alias.evaluated_name
    module = "" if isinstance(node, cst.Import) or node.module is None else f"{edits.view.code(node.module)}."
    if not _MIXED_PRECISION.search(f"{module}{alias.evaluated_name}"):
        return False
    if "." in bound or bound in keep or bound in edits.view.strings:
        return False
    scope = edits.view.scope(node)
    found = [] if scope is None else [item for item in scope[bound] if isinstance(item, meta.Assignment)]
    mine = [item for item in found if item.node is node]
    references = [access.node for item in mine for access in item.references]
    return bool(references) and all(reference in edits.rewritten for reference in references)


def _imported(view: View) -> bool:
    return any(
        isinstance(node, cst.ImportAlias)
        and node.evaluated_name == "castwise"
        and node.evaluated_alias in (None, "castwise")
        and _at_top(view, node)
        for node in view.nodes
    )


def _at_top(view: View, alias: cst.ImportAlias) -> bool:
    holder = view.parent(alias)
    return isinstance(holder, cst.Import) and view.parent(view.statement(alias)) is view.module


def _add_import(edits: Edits) -> None:
    """After the imports at the head of the script, else after its docstring."""
    view = edits.view
    last: cst.BaseStatement | None = None
    for number, line in enumerate(view.module.body):
        small = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
        if isinstance(small, (cst.Import, cst.ImportFrom)):
            last = line
        elif not (number == 0 and isinstance(small, cst.Expr) and isinstance(small.value, cst.BaseString)):
            break
        elif last is None:
            last = line
    new = statement("import castwise")
    if last is not None:
        edits.insert_after(last, new)
        return
    first = view.module.body[0]
    edits.replace(
        view.module,
        lambda module: module.with_changes(body=[new, *module.body]) if first is not None else module,
    )
