"""torch.amp: a script's names of it change to castwise's classes, which take the same arguments and give the same results."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import libcst as cst
from libcst import metadata as meta

from castwise.bridges.scripts.migrate.edits import Edits, small, statement, with_names
from castwise.bridges.scripts.migrate.program import Stay
from castwise.bridges.scripts.reading.view import View, inside, root

_HOMES = {
    "torch.amp": "castwise",
    "torch.cuda.amp": "castwise.compat.torch_amp.cuda",
    "torch.cpu.amp": "castwise.compat.torch_amp.cpu",
}
_PARTS = {
    "autocast": "autocast_mode",
    "custom_bwd": "autocast_mode",
    "custom_fwd": "autocast_mode",
    "GradScaler": "grad_scaler",
}
_CUSTOM = {"custom_bwd", "custom_fwd"}
SWAPS = {
    f"{home}{part}.{name}": to
    for home, to in _HOMES.items()
    for name, module in _PARTS.items()
    for part in ("", f".{module}")
    if home != "torch.cpu.amp" or name not in _CUSTOM
} | {"torch.autocast": "castwise", "torch.GradScaler": "castwise"}
"""Names of torch, and the module that has castwise's object of the same name."""
_SAID = (
    "castwise's classes replace torch's: operator lists, hysteresis and agreement over ranks become available; "
    "nothing else changes"
)
_SCALER = (
    ", except that GradScaler raises LossScaleError when ten updates in a row overflow at the smallest scale, where torch's "
    "skips every further step, and that it scales a 1-d fp16 loss in fp32"
)
_COMPARED = "it is compared with other classes"
_OF_CLASS = "an attribute of the class itself is used"
_GIVEN = "other code receives the class itself"
_EXPORTED = "other scripts import it from this one"
"""Reasons why all of a script's uses stay."""
_CALLS_IT = {"partial", "partialmethod", "field", "print"}
"""Functions that do no more with a class than call it."""


@dataclasses.dataclass(frozen=True)
class _Use:
    """A use of a name of torch.amp.

    Attributes:
        node: A name that the script imports, or a chain of attributes.
        name: Torch's name.
        why: Why torch's object is needed here; empty if it is not.
    """

    node: cst.Name | cst.Attribute
    name: str
    why: str

    @property
    def last(self) -> str:
        """The name without its module."""
        return self.name.rpartition(".")[2]


def swap_names(edits: Edits, exported: frozenset[str] = frozenset(), stay: Stay | None = None) -> None:
    """Change names of torch.amp to castwise's where these do the same; scripts that import castwise stay.

    Args:
        edits: Where the changes are collected.
        exported: Names that other scripts import from this one; ``*`` if that may be any.
        stay: Why the whole program keeps torch's; None if it does not.
    """
    view = edits.view
    uses = list(_uses(view, exported))
    if not uses or any(
        isinstance(node, (cst.Import, cst.ImportFrom)) and _imports_castwise(view, node)
        for node in view.nodes
    ):
        return
    if stay is not None:
        edits.say(uses[0].node, "left", f"names of torch.amp stay: {stay.why}")
        return
    kept = {use.name for use in uses if use.why and isinstance(use.node, cst.Name)}
    kept |= {use.last for use in uses if use.why in (_COMPARED, _OF_CLASS, _GIVEN)}
    for node, alias, name in _imported(view):
        if {alias.evaluated_alias or alias.evaluated_name, "*"} & exported:
            kept.add(name)
            edits.say(node, "left", f"{name} stays: {_EXPORTED}")
    for use in (use for use in uses if use.why):
        edits.say(use.node, "left", f"{use.name} stays: {use.why}")
    moving = [
        use
        for use in uses
        if not use.why and use.last not in kept and not (use.name in kept and isinstance(use.node, cst.Name))
    ]
    custom = [use for use in uses if use.last in _CUSTOM]
    if {use.last for use in custom} != _CUSTOM or not all(use in moving for use in custom):
        moving = [use for use in moving if use not in custom]
        for use in custom:
            edits.say(
                use.node, "left", f"{use.name} stays: custom_fwd and custom_bwd of a script change together"
            )
    swapped = _swap_imports(edits, {use.name for use in moving if isinstance(use.node, cst.Name)})
    swapped += _swap_chains(edits, [use for use in moving if isinstance(use.node, cst.Attribute)])
    if swapped:
        scaler = any(use.last == "GradScaler" for use in moving)
        edits.say(min(swapped, key=view.position), "kept", _SAID + _SCALER * scaler)


def _imports_castwise(view: View, node: cst.Import | cst.ImportFrom) -> bool:
    names = (
        [alias.evaluated_name for alias in node.names]
        if isinstance(node, cst.Import)
        else [_module(view, node)]
    )
    return any(f"{name}.".startswith("castwise.") for name in names)


def _module(view: View, node: cst.ImportFrom) -> str:
    return view.code(node.module) if node.module is not None and not node.relative else ""


def _imported(view: View) -> Iterator[tuple[cst.ImportFrom, cst.ImportAlias, str]]:
    """The imports of single names of torch.amp."""
    for node in view.nodes:
        if isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar):
            for alias in node.names:
                name = f"{_module(view, node)}.{alias.evaluated_name}"
                if name in SWAPS:
                    yield node, alias, name


# --- uses ---------------------------------------------------------------------------------------------------


def _uses(view: View, exported: frozenset[str]) -> Iterator[_Use]:
    """The uses of names of torch.amp, outside of imports and annotations."""
    for node in view.nodes:
        if not isinstance(node, (cst.Name, cst.Attribute)):
            continue
        parent = view.parent(node)
        names = SWAPS.keys() & view.origins(node)
        if not names or (isinstance(parent, cst.Attribute) and parent.attr is node):
            continue
        around = [*view.around(node)]
        if any(isinstance(outer, (cst.Import, cst.ImportFrom, cst.Annotation)) for outer in around):
            continue
        is_bound = (
            isinstance(parent, (cst.AssignTarget, cst.AnnAssign, cst.Del))
            and getattr(parent, "value", None) is not node
        )
        if isinstance(node, cst.Name) and is_bound:
            continue
        why = "the script replaces it" if is_bound else _why(view, node, exported)
        if isinstance(node, cst.Attribute) and not _is_imported(view, node):
            why = "the script may give the name before it another meaning"
        for name in sorted(names):
            yield _Use(node, name, why)


def _is_imported(view: View, chain: cst.Attribute) -> bool:
    """Whether the first name of a chain is only ever imported, as one thing."""
    first = root(chain)
    items = [] if first is None else view.bindings(first)
    return view.origin(chain) is not None and all(isinstance(item, meta.ImportAssignment) for item in items)


def _why(view: View, node: cst.CSTNode, exported: frozenset[str], seen: frozenset[str] = frozenset()) -> str:
    """Why a use needs torch's object; empty if it does not.

    Args:
        view: The script.
        node: The use: a name of the class, or of a variable that has it.
        exported: As in :func:`swap_names`.
        seen: Variables whose uses are looked at already.
    """
    inner = node
    for outer in view.around(node):
        if isinstance(outer, cst.Attribute):
            return _OF_CLASS
        if isinstance(outer, (cst.Comparison, cst.MatchClass)) or (
            isinstance(outer, cst.DictElement) and outer.key is inner
        ):
            return "" if isinstance(outer, cst.Comparison) and _asks_none(outer) else _COMPARED
        if isinstance(outer, cst.ClassDef):
            return (
                "a class that derives from it may override what only torch's calls"
                if inner in outer.bases
                else ""
            )
        if (
            isinstance(outer, cst.Call)
            and inner is not outer.func
            and view.called(outer) in ("isinstance", "issubclass", "register")
        ):
            return "objects of torch's class must be recognised too"
        if isinstance(outer, cst.Call):
            return "" if inner is outer.func or view.called(outer) in _CALLS_IT else _GIVEN
        if targets := _targets(outer, inner):
            return _why_name(view, targets, exported, seen)
        if isinstance(outer, (cst.BaseStatement, cst.BaseSmallStatement, cst.Lambda)):
            return ""
        inner = outer
    return ""


def _asks_none(comparison: cst.Comparison) -> bool:
    """Whether a comparison asks of one thing whether it is None."""
    return all(
        isinstance(each.comparator, cst.Name) and each.comparator.value == "None"
        for each in comparison.comparisons
    )


def _targets(outer: cst.CSTNode, value: cst.CSTNode) -> list[cst.CSTNode]:
    """The variables that a statement or a part of one gives a value to; empty if it gives it to none."""
    if isinstance(outer, cst.Assign):
        return [each.target for each in outer.targets]
    if isinstance(outer, (cst.AnnAssign, cst.NamedExpr)):
        return [outer.target]
    if isinstance(outer, (cst.For, cst.CompFor)) and value is outer.iter:
        return [outer.target]
    return [outer.name] if isinstance(outer, cst.Param) and value is outer.default else []


def _why_name(view: View, targets: list[cst.CSTNode], exported: frozenset[str], seen: frozenset[str]) -> str:
    """Why variables need torch's object: the first reason of their uses."""
    own = {id(part) for target in targets for part in inside(target)}
    names = {_last(part) for target in targets for part in inside(target)} - {"", *seen}
    if names & exported:
        return _EXPORTED
    for node in view.nodes:
        if _last(node) not in names or id(node) in own:
            continue
        parent = view.parent(node)
        if isinstance(parent, (cst.Attribute, cst.Arg)) and node in (
            getattr(parent, "attr", None),
            getattr(parent, "keyword", None),
        ):
            continue
        if any(
            isinstance(outer, (cst.Import, cst.ImportFrom, cst.Annotation, cst.AssignTarget))
            for outer in view.around(node)
        ):
            continue
        if why := _why(view, node, exported, seen | names):
            return why
    return ""


def _last(node: cst.CSTNode) -> str:
    """The last part of a dotted name; empty for anything else."""
    name = node.attr if isinstance(node, cst.Attribute) else node
    return name.value if isinstance(name, cst.Name) else ""


# --- changes ------------------------------------------------------------------------------------------------


def _swap_imports(edits: Edits, names: set[str]) -> list[cst.CSTNode]:
    """Import these names from castwise; returns the changed imports."""
    view = edits.view
    nodes = list(dict.fromkeys(node for node, _, name in _imported(view) if name in names))
    for node in nodes:
        assert not isinstance(node.names, cst.ImportStar)
        homes: dict[str, list[cst.ImportAlias]] = {}
        for alias in node.names:
            name = f"{_module(view, node)}.{alias.evaluated_name}"
            homes.setdefault(SWAPS[name] if name in names else "", []).append(alias)
        edits.put(
            node,
            [
                each.with_changes(module=cst.parse_expression(home)) if home else each
                for home, aliases in homes.items()
                for each in with_names(node, aliases)
            ],
        )
    return list(nodes)


def _swap_chains(edits: Edits, uses: list[_Use]) -> list[cst.CSTNode]:
    """Write castwise's names for chains of attributes, and import castwise where the script imports their first names."""
    view = edits.view
    places: dict[tuple[cst.CSTNode | None, str], cst.BaseStatement] = {}
    beside: dict[tuple[cst.Import | cst.ImportFrom, str], None] = {}
    for use in uses:
        first = root(use.node)
        assert first is not None
        edits.replace(use.node, cst.parse_expression(f"{SWAPS[use.name]}.{use.last}"))
        for item in view.bindings(first):
            assert isinstance(item, meta.ImportAssignment)
            line, node = view.statement(item.node), item.node
            if any(outer is line for outer in view.around(use.node)):  # in the statement that imports it
                assert isinstance(node, (cst.Import, cst.ImportFrom))
                beside[node, SWAPS[use.name]] = None
                continue
            block = view.suite(line) if view.suite(line) is view.module else line
            key = block, SWAPS[use.name]
            places[key] = min(places.get(key, line), line, key=view.position)
    for (_, home), line in places.items():
        edits.insert_after(line, statement(f"import {home}"))
    for node, home in beside:
        edits.add_beside(node, small(f"import {home}"))
    return [use.node for use in uses]
