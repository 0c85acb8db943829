"""Apex and Colossal-AI: only the imports of a script change, to castwise's drop-in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import libcst as cst

from castwise.bridges.scripts.migrate.edits import Edits, small, statement, with_names
from castwise.bridges.scripts.migrate.program import BY_NAME, Stay, named_in_text
from castwise.bridges.scripts.migrate.served import (
    LIBRARIES,
    here,
    home,
    imported,
    is_module,
    lacking,
    lacks,
    library_of,
    row,
    serves,
)
from castwise.bridges.scripts.reading.view import View, root, text

_PAGES = {"apex": "docs/compat.md#apex", "colossalai": "docs/compat.md#colossal-ai"}
_KERNELS = re.compile(
    r"(amp_C|apex_C|syncbn|fmhalib|fast_multihead_attn|nccl_p2p_cuda|peer_memory_cuda"
    r"|(dist\w*_|fused_)(adam|lamb|sgd|novograd)\w*_cuda|fused_(layer_norm|dense|weight_gradient_mlp)_cuda"
    r"|(mlp|xentropy|focal_loss|transducer_joint|transducer_loss|permutation_search|fast_layer_norm)_cuda"
    r"|(scaled|generic_scaled)_(upper_triang_)?(masked_)?softmax_cuda)$"
)
"""Modules that Apex compiles and installs under separate names."""


def rewrite_imports(edits: Edits, stays: Mapping[str, Stay] = MappingProxyType({})) -> None:
    """Change imports to the drop-ins if these have the name, and report what to use instead of other names.

    Imports of the libraries in ``stays`` do not change.
    """
    drop_ins = _DropIns(edits, stays)
    for node in edits.view.nodes:
        if isinstance(node, cst.Import):
            drop_ins.rewrite_plain(node)
        elif isinstance(node, cst.ImportFrom):
            drop_ins.rewrite_from(node)
        elif isinstance(node, (cst.Name, cst.Attribute)):
            drop_ins.look_at_name(node)
        elif isinstance(node, cst.Call):
            drop_ins.look_at_call(node)
        elif isinstance(node, cst.SimpleString):
            drop_ins.look_at_text(node)
    if any(stay.kind == "install" and stay.starts for stay in stays.values()) and drop_ins.stayed:
        _install(edits, [library for library in LIBRARIES if library in drop_ins.stayed])


def _install(edits: Edits, libraries: Iterable[str]) -> None:
    """Add code that installs drop-ins under the libraries' names before the rest of the script runs."""
    names = ", ".join(f'"{library}"' for library in libraries)
    lines = [statement("import castwise.compat"), statement(f"castwise.compat.install({names})")]
    body = edits.view.module.body
    before = 0
    while before < len(body) and _goes_first(edits.view, body[before], before):
        before += 1
    edits.replace(
        edits.view.module,
        lambda module: module.with_changes(body=[*module.body[:before], *lines, *module.body[before:]]),
    )


def _goes_first(view: View, line: cst.CSTNode, index: int) -> bool:
    """Whether a statement is the script's docstring, or an import from the future."""
    first = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
    if isinstance(first, cst.ImportFrom):
        return _modules(view, first) == ["__future__"]
    return index == 0 and isinstance(first, cst.Expr) and isinstance(first.value, cst.BaseString)


def _modules(view: View, node: cst.CSTNode) -> list[str]:
    """The modules that an import statement names."""
    if isinstance(node, cst.Import):
        return [alias.evaluated_name for alias in node.names]
    if isinstance(node, cst.ImportFrom) and node.module is not None and not node.relative:
        return [view.code(node.module)]
    return []


class _DropIns:
    """The change of one script to the drop-ins; each note about a name is made once."""

    def __init__(self, edits: Edits, stays: Mapping[str, Stay]) -> None:
        self.edits = edits
        self.view = edits.view
        self.stays = stays
        own = {library for library, stay in stays.items() if stay.kind == "own"}
        self.libraries = frozenset(LIBRARIES) - own
        named = {library_of(module) for node in self.view.nodes for module in _modules(self.view, node)}
        self.others = {library for library in self.libraries & named if self._is_another(library)}
        self.stayed: set[str] = set()
        self.said: set[str] = set()

    def _is_another(self, library: str) -> bool:
        """Whether a module with a library's name is another module: the script uses names of it, and the drop-in has none of them."""
        served = list(self._served(library))
        return bool(served) and not any(served)

    def _served(self, library: str) -> Iterator[bool]:
        """For each name that a script uses from a library, whether the drop-in has it."""
        view = self.view
        for node in view.nodes:
            if isinstance(node, (cst.Import, cst.ImportFrom)):
                for module in _modules(view, node):
                    if library_of(module) != library:
                        continue
                    if isinstance(node, cst.Import):
                        if module != library:
                            yield serves(module)
                    elif not isinstance(node.names, cst.ImportStar):
                        yield from (serves(module, alias.evaluated_name) for alias in node.names)
                    elif module == library:
                        yield any(is_module(f"{module}.{word}") for word in view.words)
                    else:
                        yield serves(module)
            elif isinstance(node, cst.Attribute) and not isinstance(view.parent(node), cst.Attribute):
                first = root(node)
                if first is not None and view.origin(first) == library:
                    yield not lacks(here(self._chain(node, first, library)))

    # --- imports ------------------------------------------------------------------------------------------

    def rewrite_plain(self, node: cst.Import) -> None:
        """``import apex``, ``import apex.amp``, ``import apex.amp as amp``, also beside others."""
        aliases, binds = [], []
        for alias in node.names:
            name = alias.evaluated_name
            library = library_of(name)
            if library in self.libraries and not is_module(here(name)):
                self._say_absent(node, name, name)
            elif name in self.others:
                pass  # an absent name is reported where it is used
            elif library in self.libraries and self._moves(node, library):
                binds += [library] if alias.asname is None else []
                if alias.asname is None and here(name) == library:
                    continue
                alias = alias.with_changes(name=_dotted(here(name)))  # loads the submodule
            else:
                self._look_at_module(node, library)
            aliases.append(alias)
        if aliases != list(node.names):
            bound = [small(f"from castwise.compat import {library}") for library in dict.fromkeys(binds)]
            self.edits.put(node, [*with_names(node, aliases), *bound])

    def rewrite_from(self, node: cst.ImportFrom) -> None:
        """Rewrite ``from apex import amp`` and similar imports."""
        module = next(iter(_modules(self.view, node)), "")
        library = library_of(module)
        if library not in self.libraries:
            self._look_at_module(node, library)
            return
        if isinstance(node.names, cst.ImportStar):
            if not is_module(here(module)):
                self._say_absent(node, module, module)
                return
            if module in self.others:
                self.edits.say(
                    node,
                    "left",
                    f"this file uses nothing that the drop-in of {library} replaces, so the import stays",
                )
                return
            if self._moves(node, library):
                self.edits.put(node, [node.with_changes(module=_dotted(here(module)))])
            for word in sorted(self.view.words):
                self._say_row(node, f"{here(module)}.{word}")
            return
        homes: dict[str, list[cst.ImportAlias]] = {}
        new: list[cst.BaseSmallStatement] = []
        for alias in node.names:
            last = alias.evaluated_name
            found = home(here(module), last)
            if here(f"{module}.{last}") == library:  # from colossalai import legacy
                new.append(small(f"import castwise.compat.{library} as {alias.evaluated_alias or last}"))
                continue
            homes.setdefault(found, []).append(alias)
            if found:
                self._say_row(node, f"{found}.{last}")
            else:
                self._say_absent(
                    node, f"{module}.{last}" if is_module(here(module)) else module, f"{module}.{last}"
                )
        if (new or any(homes)) and self._moves(node, library):
            for found, aliases in homes.items():
                rest = with_names(node, aliases)
                new += [each.with_changes(module=_dotted(found)) for each in rest] if found else rest
            self.edits.put(node, new)

    # --- uses ---------------------------------------------------------------------------------------------

    def look_at_name(self, node: cst.Name | cst.Attribute) -> None:
        """Report what is absent or differs of a name that is reached from an import."""
        dotted = self._dotted(node)
        if not dotted:
            return
        stays = library_of(dotted) in self.stays
        if not stays and isinstance(node, cst.Attribute) and "colossalai.legacy" in self.view.origins(node):
            self.edits.replace(node, node.value)
        if isinstance(self.view.parent(node), cst.Attribute):
            return  # the whole chain is checked
        part = lacks(dotted)
        if part:
            self._say_absent(node, part, dotted)
        else:
            self._say_row(node, dotted)

    def look_at_call(self, node: cst.Call) -> None:
        """Report what is absent or differs of keyword arguments, and list imports by string."""
        dotted = self._dotted(node.func)
        for argument in node.args:
            if dotted and argument.keyword is not None:
                self._say_row(node, f"{dotted}({argument.keyword.value})")
            if (
                argument.keyword
                and argument.keyword.value.endswith("backend")
                and text(argument.value) == "apex"
            ):
                self._moves(node, "apex") if "apex" in self.stays else self._say_text(node, "apex")
        name = text(node.args[0].value) if node.args else None
        if name is not None and BY_NAME.search(self.view.called(node)):
            library = library_of(name)
            if library not in self.libraries:
                self._look_at_module(node, library)
            elif not is_module(here(name)):
                self._say_absent(node, name, name)
            elif library in self.stays:
                self._moves(node, library)
            else:
                self._say_text(node, name)

    def look_at_text(self, node: cst.SimpleString) -> None:
        """List modules of libraries that a string names, unless it is a docstring or an annotation."""
        value = text(node)
        is_code = not isinstance(self.view.parent(node), cst.Expr) and not any(
            isinstance(outer, cst.Annotation) for outer in self.view.around(node)
        )
        if value is not None and is_code:
            for name in named_in_text(value):
                if library_of(name) in self.libraries - self.stays.keys():
                    self._say_text(node, name)

    def _say_text(self, node: cst.CSTNode, name: str) -> None:
        said = f"{name} is named in a string, which is unchanged: castwise.compat.install() provides {name} under that name"
        self.edits.say(node, "left", said)

    def _dotted(self, node: cst.CSTNode) -> str:
        """The drop-in's name for a name or attribute; empty for anything else."""
        first = root(node) if isinstance(node, (cst.Name, cst.Attribute)) else None
        for origin in () if first is None else self.view.origins(first):
            if library_of(origin) in self.libraries:
                found = imported(here(origin))
                assert first is not None
                return here(self._chain(node, first, found)) if found else ""
        return ""

    def _chain(self, node: cst.CSTNode, first: cst.Name, found: str) -> str:
        """``first.a.b`` with the object that its first name stands for."""
        return found + "".join(self.view.code(node).split()).removeprefix(first.value)

    # --- notes ----------------------------------------------------------------------------------------------

    def _moves(self, node: cst.CSTNode, library: str) -> bool:
        """Whether imports of a library change to the drop-in; notes what runs the script, or why they stay."""
        stay = self.stays.get(library)
        runs = f"castwise.compat.{library} runs this script as it is written"
        kept = f"{_PAGES[library]} lists for each name whether it works, differs or is absent"
        if library not in self.said:
            self.said.add(library)
            if stay is None:
                self.edits.say(node, "kept", f"{runs}; {kept}")
            elif stay.kind == "installed":
                self.edits.say(node, "kept", f"castwise.compat.install() serves {library}: {runs}; {kept}")
            elif stay.kind == "lacks":
                said = f"imports of {library} stay: the program needs {stay.why}, which the drop-in lacks"
                self.edits.say(node, "left", said)
            elif stay.starts:
                self.stayed.add(library)
                said = f"{stay.why}, so imports of {library} stay, and castwise.compat.install() imports the drop-in instead"
                self.edits.say(node, "kept", f"{said}: {runs}; {kept}")
            else:
                said = f"{stay.why}, so imports of {library} stay: put castwise.compat.install({library!r}) before all other imports"
                self.edits.say(
                    node,
                    "left",
                    f"{said} of the script that is started; every import of {library} then gives castwise.compat.{library}",
                )
        return stay is None

    def _look_at_module(self, node: cst.CSTNode, library: str) -> None:
        """Note an import of a module that has no drop-in."""
        stay = self.stays.get(library)
        if stay is not None and stay.kind == "own" and library not in self.said:
            self.said.add(library)
            self.edits.say(node, "left", f"{library} is a part of this program, so its imports stay")
        elif _KERNELS.match(library):
            said = (
                f"{library} is Apex's compiled code, which castwise does not include: use torch's operators"
            )
            self.edits.say(node, "left", said)

    def _say_absent(self, node: cst.CSTNode, part: str, dotted: str) -> None:
        said = lacking(here(part), here(dotted))
        if said not in self.said:
            self.said.add(said)
            self.edits.say(node, "left", said)

    def _say_row(self, node: cst.CSTNode, dotted: str) -> None:
        found = row(dotted)
        if found is not None and found.status == "absent":
            self._say_absent(node, dotted, dotted)
        elif found is not None and found.status == "differs" and dotted not in self.said:
            self.said.add(dotted)
            self.edits.say(node, "differs", f"{dotted}: {found.note.replace('`', '')}")


def _dotted(name: str) -> cst.BaseExpression:
    return cst.parse_expression(f"castwise.compat.{name}")
