"""The smallest rewrite of a script for another library: its imports, which then name castwise's drop-in."""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst

from castwise.migrate.edits import Edits, statement
from castwise.migrate.view import View

__all__ = ["DROP_INS", "rewrite_imports", "uses"]

DROP_INS: Mapping[str, set[str]] = {
    "apex": {"amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel"},
    "colossalai": {
        "amp", "builder", "context", "core", "engine", "initialize", "logging", "nn", "trainer", "utils",
    },
}  # fmt: skip
"""Libraries that have a drop-in in ``castwise.compat``, and their parts that it serves."""
_FUNCTIONS = {
    "get_default_parser", "initialize", "launch", "launch_from_torch", "launch_from_slurm", "launch_from_openmpi",
}  # fmt: skip
"""What ``from colossalai import`` may also name."""


def uses(view: View, library: str) -> bool:
    """Whether a script imports a library or a part of it."""
    return any(_imports(view, node, library) for node in view.nodes)


def _imports(view: View, node: cst.CSTNode, library: str) -> bool:
    names: list[str] = []
    if isinstance(node, cst.Import):
        names = [alias.evaluated_name for alias in node.names]
    elif isinstance(node, cst.ImportFrom) and node.module is not None and not node.relative:
        names = [view.code(node.module)]
    return any(name.partition(".")[0] == library for name in names)


def rewrite_imports(edits: Edits, library: str, gone: frozenset[str] = frozenset()) -> None:
    """Let the imports of a library name its drop-in; list those that it does not serve.

    Args:
        edits: Where the changes go.
        library: A key of :data:`DROP_INS`.
        gone: Dotted names whose uses are all rewritten already.
    """
    for node in edits.view.nodes:
        if not _imports(edits.view, node, library):
            continue
        if isinstance(node, cst.ImportFrom):
            _rewrite_from(edits, node, library, gone)
        else:
            assert isinstance(node, cst.Import)
            _rewrite_plain(edits, node, library)


def _now(dotted: str) -> str:
    """A name as it was before version 0.3 of Colossal-AI moved it."""
    return dotted.replace("colossalai.legacy", "colossalai", 1)


def _serves(dotted: str) -> bool:
    library, _, rest = _now(dotted).partition(".")
    return not rest or rest.partition(".")[0] in DROP_INS[library]


def _rewrite_from(edits: Edits, node: cst.ImportFrom, library: str, gone: frozenset[str]) -> None:
    view = edits.view
    assert node.module is not None
    module = view.code(node.module)
    names = [] if isinstance(node.names, cst.ImportStar) else [alias.evaluated_name for alias in node.names]
    absent = [module] if not _serves(module) else []
    if module == library:
        absent = [
            f"{module}.{name}" for name in names if not _serves(f"{module}.{name}") and name not in _FUNCTIONS
        ]
    if {f"{module}.{name}" for name in names} <= gone and names:
        return
    if absent:
        served = "; import what it serves by a line of its own" if len(absent) < len(names) else ""
        edits.left(node, f"castwise.compat.{library} has no {', '.join(absent)}{served}")
        return
    dotted = cst.parse_expression(f"castwise.compat.{_now(module)}")
    edits.replace(node, lambda updated: updated.with_changes(module=dotted))


def _rewrite_plain(edits: Edits, node: cst.Import, library: str) -> None:
    """``import apex`` and ``import apex.amp as amp``."""
    view = edits.view
    line = view.parent(node)
    if len(node.names) > 1:
        edits.left(node, f"imports {library} beside others; put it on a line of its own")
        return
    alias = node.names[0]
    name = alias.evaluated_name
    if not _serves(name):
        edits.left(node, f"castwise.compat.{library} has no {name}")
    elif alias.evaluated_alias is not None:
        outer, _, inner = f"castwise.compat.{_now(name)}".rpartition(".")
        edits.replace(node, _small(f"from {outer} import {inner} as {alias.evaluated_alias}"))
    elif isinstance(line, cst.SimpleStatementLine):
        # Binds the library's own name, as `import apex.amp` does.
        edits.replace(node, _small(f"from castwise.compat import {library}"))
        if "." in name:  # loads a part of it besides
            edits.insert_after(line, statement(f"import castwise.compat.{_now(name)}"))
        for absent in _absent_attributes(view, library):
            edits.left(absent, f"castwise.compat.{library} has no {view.code(absent)}")


def _small(code: str) -> cst.BaseSmallStatement:
    return statement(code).body[0]


def _absent_attributes(view: View, library: str) -> list[cst.Attribute]:
    found = []
    for node in view.nodes:
        if (
            isinstance(node, cst.Attribute)
            and isinstance(node.value, cst.Name)
            and node.value.value == library
        ):
            origin = view.origin(node)
            if origin is not None and not _serves(origin) and origin.rpartition(".")[2] not in _FUNCTIONS:
                found.append(node)
    return found
