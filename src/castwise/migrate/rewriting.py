"""One script, all of it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from castwise.migrate.apex import rewrite_apex
from castwise.migrate.colossalai import rewrite_colossalai
from castwise.migrate.dropins import uses
from castwise.migrate.edits import Edits
from castwise.migrate.imports import dropped_aliases
from castwise.migrate.result import Finding
from castwise.migrate.torch_names import autocast_calls, rewrite_names, scaler_calls
from castwise.migrate.torch_write import rewrite_session
from castwise.migrate.view import View

__all__ = ["exports_used", "rewrite"]

_FROM = re.compile(r"^\s*from\s+\.*([\w.]*)\s+import\s+\(?([^#\n)]*(?:\n[^)]*)?)", re.MULTILINE)


def rewrite(text: str, *, exported: frozenset[str] = frozenset()) -> tuple[str, list[Finding]]:
    """Rewrite a script.

    Args:
        text: The script.
        exported: Names that other scripts import from this one, which have to stay.

    Returns:
        The script as rewritten, and what there is to say about its lines.

    Raises:
        SyntaxError: It cannot be parsed.
    """
    view = View(text)
    edits = Edits(view)
    if _binds_castwise(view):
        return text, [
            Finding(1, "left", "the name castwise is used for something else here, so nothing is rewritten")
        ]
    by_torch = bool(autocast_calls(view) or scaler_calls(view))
    libraries = [library for library in ("apex", "colossalai") if uses(view, library)]
    done = rewrite_session(edits) if not libraries else set()
    rewrite_names(edits, done)
    alone = not by_torch and len(libraries) == 1
    rewrite_apex(edits, alone=alone)
    rewrite_colossalai(edits, alone=alone)
    dropped_aliases(edits, exported)
    return edits.apply(), sorted(edits.findings)


def exports_used(texts: Iterable[str]) -> dict[str, frozenset[str]]:
    """Names that scripts import from modules, by the last part of the module's name."""
    found: dict[str, set[str]] = {}
    for text in texts:
        for module, names in _FROM.findall(text):
            stem = module.rpartition(".")[2]
            found.setdefault(stem, set()).update(re.findall(r"\w+", names))
    return {stem: frozenset(names) for stem, names in found.items()}


def _binds_castwise(view: View) -> bool:
    scope = view.scope(view.module)
    if scope is None or "castwise" not in view.words:
        return False
    return any(not _is_import(item) for item in scope["castwise"])


def _is_import(item: object) -> bool:
    return type(item).__name__ == "ImportAssignment"
