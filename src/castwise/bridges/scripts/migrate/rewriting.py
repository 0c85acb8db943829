"""Rewrite one script completely."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from libcst.metadata import BaseAssignment, ImportAssignment

from castwise.bridges.scripts.migrate.dropins import rewrite_imports
from castwise.bridges.scripts.migrate.edits import Edits
from castwise.bridges.scripts.migrate.program import Stay
from castwise.bridges.scripts.migrate.result import Finding
from castwise.bridges.scripts.migrate.torch_names import swap_names
from castwise.bridges.scripts.reading.view import View


def rewrite(
    text: str,
    *,
    exported: frozenset[str] = frozenset(),
    stays: Mapping[str, Stay] = MappingProxyType({}),
) -> tuple[str, list[Finding]]:
    """Rewrite a script.

    Args:
        text: The script.
        exported: Names that other scripts import from this one; ``*`` if that may be any.
        stays: Libraries whose imports stay, and why.

    Returns:
        The rewritten script, and the notes about its lines.

    Raises:
        SyntaxError: The script cannot be parsed.
    """
    view = View(text)
    edits = Edits(view)
    if not all(_is_castwise(item) for item in view.everywhere("castwise")):
        why = "the name castwise is used for something else here, so nothing is rewritten"
        return text, [Finding(1, "left", why)]
    rewrite_imports(edits, stays)
    swap_names(edits, exported, stays.get("torch"))
    return edits.apply(), sorted(edits.findings)


def _is_castwise(item: BaseAssignment) -> bool:
    names = {each.name for each in item.get_qualified_names_for("castwise")}
    return isinstance(item, ImportAssignment) and names == {"castwise"}
