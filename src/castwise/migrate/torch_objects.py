"""The model, the optimizer and other objects of a training script: where they are made, and what is done with them."""

from __future__ import annotations

import dataclasses
import re

import libcst as cst
from libcst import metadata as meta

from castwise.migrate.view import Suite, Undecided, View, inside, root

_WRAPPER = re.compile(
    r"DataParallel|^DDP$|^DP$|^FSDP$|fully_shard|compile$|parallelize|Engine|^(script|trace)$"
)
_HARMLESS = {
    "train", "eval", "parameters", "named_parameters", "zero_grad", "state_dict", "load_state_dict", "modules",
    "named_modules", "children", "named_children", "buffers", "named_buffers", "requires_grad_", "training", "no_sync",
}  # fmt: skip
"""What may be asked of a model without running it."""


@dataclasses.dataclass(frozen=True)
class Thing:
    """A variable of a script.

    Attributes:
        name: Its name.
        scope: Where it lives.
        assignments: Everything that binds it there, in the order of lines.
    """

    name: str
    scope: meta.Scope
    assignments: tuple[meta.Assignment, ...]


def thing(view: View, name: cst.Name) -> Thing:
    """The variable that a name means.

    Raises:
        Undecided: It is not bound by plain assignments of one scope alone.
    """
    found = view.bindings(name)
    plain = [
        item for item in found if isinstance(item, meta.Assignment) and view.assigned_value(item) is not None
    ]
    if not found or len(plain) < len(found) or len({id(item.scope) for item in plain}) != 1:
        raise Undecided(name, f"where {name.value!r} comes from cannot be seen in one place")
    return Thing(name.value, plain[0].scope, tuple(plain))


def references(view: View, of: Thing) -> list[cst.Name]:
    """Where a variable is read, in the order of the script."""
    nodes = {access.node for item in of.assignments for access in item.references}
    return sorted((node for node in nodes if isinstance(node, cst.Name)), key=view.position)


def models_of(view: View, optimizer: Thing) -> list[cst.Name]:
    """The models whose parameters an optimizer was made with.

    Raises:
        Undecided: That cannot be seen.
    """
    item = optimizer.assignments[0]
    value = view.assigned_value(item)
    if len(optimizer.assignments) > 1 or not isinstance(value, cst.Call) or not value.args:
        raise Undecided(item.node, f"how {optimizer.name!r} is made cannot be seen")
    first = value.args[0].value
    if any(
        isinstance(node, cst.Call) and (view.origin(node.func) or "").startswith("torch.optim.")
        for node in inside(first)
    ):
        raise Undecided(item.node, f"{optimizer.name!r} is made around another optimizer")
    names: dict[str, cst.Name] = {}
    for node in inside(first):
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            name = root(node.func.value)
            if node.func.attr.value in ("parameters", "named_parameters") and name is not None:
                names.setdefault(name.value, name)
    if not names:
        raise Undecided(item.node, f"which model {optimizer.name!r} updates cannot be seen")
    return list(names.values())


def check_apart(view: View, optimizers: list[Thing]) -> None:
    """See that no two optimizers update the same parameters, as far as it is written: a session refuses that.

    Raises:
        Undecided: One takes all that another takes a part of.
    """
    for one in optimizers:
        for other in (other for other in optimizers if other is not one):
            for whole in _taken(view, one, whole=True):
                if any(f"{part}.".startswith(f"{whole}.") for part in _taken(view, other, whole=False)):
                    node = one.assignments[0].node
                    raise Undecided(node, f"{one.name!r} updates parameters that {other.name!r} updates too")


def _taken(view: View, optimizer: Thing, *, whole: bool) -> list[str]:
    """The modules that an optimizer takes parameters of; ``whole``: all of them, through no condition."""
    value = view.assigned_value(optimizer.assignments[0])
    first = value.args[0].value if isinstance(value, cst.Call) and value.args else cst.Tuple([])
    asked = [node.func for node in inside(first) if isinstance(node, cst.Call)]
    if whole and any(isinstance(node, (cst.BaseComp, cst.Lambda)) for node in inside(first)):
        return []
    return [
        view.code(name.value)
        for name in asked
        if isinstance(name, cst.Attribute) and name.attr.value in ("parameters", "named_parameters")
    ]


def only_wrapped_later(view: View, model: Thing, prepared_at: tuple[int, int], suite: Suite | None) -> None:
    """See that a model is whole when it is prepared and is at most wrapped from then on.

    Raises:
        Undecided: It is wrapped before, or becomes something else after.
    """
    for item in model.assignments:
        value = view.assigned_value(item)
        assert value is not None
        wrapped = wraps(view, value)
        if view.position(item.node) > prepared_at:
            if not (
                wrapped
                and isinstance(value, cst.Call)
                and value.args
                and view.code(value.args[0].value) == model.name
            ):
                raise Undecided(
                    item.node, f"{model.name!r} becomes something else after its optimizer was made"
                )
        elif wrapped:
            raise Undecided(
                item.node,
                f"{model.name!r} is wrapped before its optimizer is made, and amp.prepare goes before wrapping",
            )
        elif view.suite(item.node) is not suite:
            raise Undecided(item.node, f"{model.name!r} is made in another block than its optimizer")


def wraps(view: View, value: cst.BaseExpression) -> bool:
    """Whether a value is made by DistributedDataParallel, torch.compile or the like, as far as names tell.

    Functions of the script that make it are looked into.
    """
    calls = [node for node in inside(value) if isinstance(node, cst.Call)]
    made_by = [item.node for call in calls for item in _bindings(view, call.func)]
    calls += [
        node
        for function in made_by
        if isinstance(function, cst.FunctionDef)
        for node in inside(function)
        if isinstance(node, cst.Call)
    ]
    return any(_WRAPPER.search(view.code(call.func).rpartition(".")[2]) for call in calls)


def _bindings(view: View, called: cst.BaseExpression) -> list[meta.Assignment]:
    found = view.bindings(called) if isinstance(called, cst.Name) else []
    return [item for item in found if isinstance(item, meta.Assignment)]


def is_harmless(view: View, name: cst.Name) -> bool:
    """Whether this use of a model neither runs it nor hands it to code that might."""
    outer = view.parent(name)
    while isinstance(outer, cst.Attribute) and isinstance(around := view.parent(outer), cst.Attribute):
        outer = around  # of a part of it
    return isinstance(outer, cst.Attribute) and outer.attr.value in _HARMLESS
