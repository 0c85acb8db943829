"""Apex and Colossal-AI: a script stays as it is, and its imports name castwise's drop-in."""

from __future__ import annotations

import re
from collections.abc import Iterable

import libcst as cst

from castwise.migrate.edits import Edits, small
from castwise.migrate.served import (
    LIBRARIES,
    here,
    home,
    imported,
    is_module,
    lacking,
    lacks,
    library_of,
    row,
)
from castwise.migrate.view import View, root

_PAGES = {"apex": "docs/compat.md#apex", "colossalai": "docs/compat.md#colossal-ai"}
_KERNELS = {"amp_C", "apex_C", "fused_layer_norm_cuda", "syncbn"}
_BY_TEXT = re.compile(r"(^|\.)(import_module|__import__|find_spec|find_loader)$")


def rewrite_imports(edits: Edits, own: frozenset[str] = frozenset()) -> None:
    """Let imports name the drop-ins where these have the name, and say of the other names what to use instead.

    Imports of ``own``, libraries that the program itself holds, stay.
    """
    drop_ins = _DropIns(edits, frozenset(LIBRARIES) - own)
    for node in edits.view.nodes:
        if own.intersection(map(library_of, _modules(edits.view, node))):
            edits.say(
                node, "left", f"{', '.join(sorted(own))} is a part of this program, so its imports stay"
            )
        if isinstance(node, cst.Import):
            drop_ins.rewrite_plain(node)
        elif isinstance(node, cst.ImportFrom):
            drop_ins.rewrite_from(node)
        elif isinstance(node, (cst.Name, cst.Attribute)):
            drop_ins.look_at_name(node)
        elif isinstance(node, cst.Call):
            drop_ins.look_at_call(node)


def _modules(view: View, node: cst.CSTNode) -> list[str]:
    """The modules that an import statement names."""
    if isinstance(node, cst.Import):
        return [alias.evaluated_name for alias in node.names]
    if isinstance(node, cst.ImportFrom) and node.module is not None and not node.relative:
        return [view.code(node.module)]
    return []


class _DropIns:
    """One script's way to the drop-ins of some libraries; what there is to say about a name is said once."""

    def __init__(self, edits: Edits, libraries: frozenset[str]) -> None:
        self.edits = edits
        self.view = edits.view
        self.libraries = libraries
        self.said: set[str] = set()

    # --- imports ------------------------------------------------------------------------------------------

    def rewrite_plain(self, node: cst.Import) -> None:
        """``import apex``, ``import apex.amp``, ``import apex.amp as amp``, also beside others."""
        aliases, binds = [], []
        for alias in node.names:
            name = alias.evaluated_name
            library = library_of(name)
            if library in _KERNELS:
                self.edits.say(
                    node,
                    "left",
                    f"{name} is Apex's compiled code, and castwise has none: use torch's operators",
                )
            elif library in self.libraries and not is_module(here(name)):
                self._say_absent(node, name, name)
            elif library in self.libraries:
                self._say_kept(node, library)
                binds += [library] if alias.asname is None else []
                if alias.asname is None and here(name) == library:
                    continue
                alias = alias.with_changes(name=_dotted(here(name)))  # loads the part
            aliases.append(alias)
        if aliases != list(node.names):
            bound = [small(f"from castwise.compat import {library}") for library in dict.fromkeys(binds)]
            self._put(node, [*_with_names(node, aliases), *bound])

    def rewrite_from(self, node: cst.ImportFrom) -> None:
        """``from apex import amp``, and the like of it."""
        module = next(iter(_modules(self.view, node)), "")
        library = library_of(module)
        if library not in self.libraries:
            return
        if isinstance(node.names, cst.ImportStar):
            if is_module(here(module)):
                self._say_kept(node, library)
                self._put(node, [node.with_changes(module=_dotted(here(module)))])
                for word in sorted(self.view.words):
                    self._say_row(node, f"{here(module)}.{word}")
            else:
                self._say_absent(node, module, module)
            return
        homes: dict[str, list[cst.ImportAlias]] = {}
        new: list[cst.BaseSmallStatement] = []
        for alias in node.names:
            last = alias.evaluated_name
            found = home(here(module), last)
            if here(f"{module}.{last}") == library:  # from colossalai import legacy
                new.append(small(f"import castwise.compat.{library} as {alias.evaluated_alias or last}"))
                self._say_kept(node, library)
                continue
            homes.setdefault(found, []).append(alias)
            if found:
                self._say_kept(node, library)
                self._say_row(node, f"{found}.{last}")
            else:
                self._say_absent(
                    node, f"{module}.{last}" if is_module(here(module)) else module, f"{module}.{last}"
                )
        if new or any(homes):
            for found, aliases in homes.items():
                rest = _with_names(node, aliases)
                new += [each.with_changes(module=_dotted(found)) for each in rest] if found else rest
            self._put(node, new)

    def _put(self, node: cst.Import | cst.ImportFrom, new: list[cst.BaseSmallStatement]) -> None:
        """Statements in the place of one: lines of their own, or behind semicolons where they stand behind a colon."""
        line = self.view.parent(node)
        alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
        if alone and self.view.suite(node) is not None:
            assert isinstance(line, cst.SimpleStatementLine)
            self.edits.replace(node, new[0])
            self.edits.insert_after(line, *(cst.SimpleStatementLine([each]) for each in new[1:]))
        else:
            ends = [cst.MaybeSentinel.DEFAULT] * (len(new) - 1) + [node.semicolon]
            parts = [each.with_changes(semicolon=end) for each, end in zip(new, ends, strict=True)]
            self.edits.replace(node, cst.FlattenSentinel(parts))

    # --- uses ---------------------------------------------------------------------------------------------

    def look_at_name(self, node: cst.Name | cst.Attribute) -> None:
        """Say what is absent or differs of a name that is reached from an import."""
        dotted = self._dotted(node)
        if dotted and isinstance(node, cst.Attribute) and self.view.code(node) == "colossalai.legacy":
            self.edits.replace(node, cst.Name("colossalai"))
        if isinstance(self.view.parent(node), cst.Attribute):
            return  # the whole chain is looked at
        part = lacks(dotted)
        if part:
            self._say_absent(node, part, dotted)
        else:
            self._say_row(node, dotted)

    def look_at_call(self, node: cst.Call) -> None:
        """Say what is absent or differs of arguments that are given by name, and list imports by text."""
        dotted = self._dotted(node.func)
        for argument in node.args:
            if dotted and argument.keyword is not None:
                self._say_row(node, f"{dotted}({argument.keyword.value})")
        first = node.args[0].value if node.args else None
        if isinstance(first, cst.SimpleString) and _BY_TEXT.search(self.view.code(node.func)):
            name = first.evaluated_value
            if isinstance(name, str) and library_of(name) in self.libraries:
                self.edits.say(
                    node,
                    "left",
                    f"{name} is named as text, which stays: castwise.compat.install() serves it by that name",
                )

    def _dotted(self, node: cst.CSTNode) -> str:
        """What a name or attribute is in the drop-in; empty for anything else."""
        first = root(node) if isinstance(node, (cst.Name, cst.Attribute)) else None
        for origin in () if first is None else self.view.origins(first):
            if library_of(origin) in self.libraries:
                found = imported(here(origin))
                assert first is not None
                chain = "".join(self.view.code(node).split()).removeprefix(first.value)
                return here(found + chain) if found else ""
        return ""

    # --- what there is to say -----------------------------------------------------------------------------

    def _say_kept(self, node: cst.CSTNode, library: str) -> None:
        if library not in self.said:
            self.said.add(library)
            self.edits.say(
                node,
                "kept",
                f"castwise.compat.{library} runs this script as it is written; {_PAGES[library]} says of each name "
                "whether it works, differs or is absent",
            )

    def _say_absent(self, node: cst.CSTNode, part: str, dotted: str) -> None:
        if part not in self.said:
            self.said.add(part)
            self.edits.say(node, "left", lacking(here(part), here(dotted)))

    def _say_row(self, node: cst.CSTNode, dotted: str) -> None:
        found = row(dotted)
        if found is not None and found.status == "absent":
            self._say_absent(node, dotted, dotted)
        elif found is not None and found.status == "differs" and dotted not in self.said:
            self.said.add(dotted)
            self.edits.say(node, "differs", f"{dotted}: {found.note.replace('`', '')}")


def _dotted(name: str) -> cst.BaseExpression:
    return cst.parse_expression(f"castwise.compat.{name}")


def _with_names(
    node: cst.Import | cst.ImportFrom, aliases: Iterable[cst.ImportAlias]
) -> list[cst.BaseSmallStatement]:
    """The statement with these names alone; none where there are none."""
    names = list(aliases)
    if not names:
        return []
    if isinstance(node, cst.Import) or node.lpar is None:
        names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return [node.with_changes(names=names)]
