"""Drop-ins, trainer integrations and script tools use only castwise's public API, like a separate package."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import castwise
from castwise import errors

ROOT = Path(__file__).parents[3]
API = runpy.run_path(str(ROOT / "scripts" / "api_page.py"))
PUBLIC = {
    *(f"castwise.{name}" for name in (*castwise.__all__, "checkpoint", "errors")),
    *(f"castwise.errors.{name}" for name in errors.__all__),
    "castwise.core.checkpoint",
    *(f"{module.__name__}.{name}" for _, module, names in API["FURTHER"] for name in names),
}


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a module imports from castwise, outside of these three packages."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "castwise"
        ):
            names = [f"castwise.{node.attr}"]
        for name in names:
            if name.startswith("castwise.") and not name.startswith((
                "castwise.bridges.compat",
                "castwise.bridges.trainers",
                "castwise.bridges.scripts",
            )):
                yield name


@pytest.mark.parametrize("room", ["compat", "trainers", "scripts"])
def test_only_public_names_are_imported(room: str) -> None:
    files = sorted((ROOT / "src" / "castwise" / "bridges" / room).rglob("*.py"))
    assert files
    used = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in imported(ast.parse(path.read_text(encoding="utf-8")))
        if name not in PUBLIC
    }
    assert not used, "not in docs/api.md:\n" + "\n".join(sorted(used))


@pytest.mark.parametrize(
    "line",
    [
        "from castwise.core.masters import attach",
        "import castwise.core.session",
        "from castwise.core import _torch",
    ],
)
def test_the_search_finds_what_is_not_public(line: str) -> None:
    assert not set(imported(ast.parse(line))) <= PUBLIC
