"""The model, the optimizer and other objects of a training script: where they are created, and how they are used."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Container, Sequence

import libcst as cst
from libcst import metadata as meta

from castwise.bridges.scripts.migrate.torch_loop import Undecided
from castwise.bridges.scripts.reading.torch_amp import (
    AUTOCAST,
    CASTS,
    FORMATS,
    asked_for_parameters,
    is_optimizer,
)
from castwise.bridges.scripts.reading.view import Suite, View, inside, root

_WRAPPER = re.compile(
    r"DataParallel|^DDP$|^DP$|^FSDP$|fully_shard|compile$|parallelize|Engine|^(script|trace)$"
)
_HARMLESS = {
    "train", "eval", "parameters", "named_parameters", "zero_grad", "state_dict", "load_state_dict", "modules",
    "named_modules", "children", "named_children", "buffers", "named_buffers", "requires_grad_", "training", "no_sync",
}  # fmt: skip
"""Attributes and methods of a model that can be used without running it."""
_GIVES_ITSELF = {"train", "eval", "requires_grad_"}
_HOLDS_ITSELF = {"modules", "named_modules"}
_LOOPS = (cst.For, cst.While, cst.BaseComp)
_LAZY = re.compile(r"torch\.nn\.(modules\.\w+\.)?Lazy\w+")
_NO_GRADIENTS = {"torch.no_grad", "torch.inference_mode"}


@dataclasses.dataclass(frozen=True)
class Thing:
    """A variable of a script.

    Attributes:
        name: Its name.
        scope: Its scope.
        assignments: Everything that binds it there, in the order of lines.
    """

    name: str
    scope: meta.Scope
    assignments: tuple[meta.Assignment, ...]


def thing(view: View, name: cst.Name) -> Thing:
    """The variable that a name refers to.

    Raises:
        Undecided: The name is not bound only by plain assignments in one scope.
    """
    found = view.bindings(name)
    plain = [
        item for item in found if isinstance(item, meta.Assignment) and view.assigned_value(item) is not None
    ]
    if not found or len(plain) < len(found) or len({id(item.scope) for item in plain}) != 1:
        raise Undecided(name, f"the script does not show where {name.value!r} comes from")
    return Thing(name.value, plain[0].scope, tuple(plain))


def references(view: View, of: Thing) -> list[cst.Name]:
    """Where a variable is read, in the order of the script."""
    nodes = {access.node for item in of.assignments for access in item.references}
    return sorted((node for node in nodes if isinstance(node, cst.Name)), key=view.position)


def models_of(view: View, optimizer: Thing) -> list[cst.Name]:
    """The models with whose parameters an optimizer was created.

    Raises:
        Undecided: The script does not show these models.
    """
    item = optimizer.assignments[0]
    value = view.assigned_value(item)
    if len(optimizer.assignments) > 1 or not isinstance(value, cst.Call) or not value.args:
        raise Undecided(item.node, f"the script does not show how {optimizer.name!r} is made")
    first = value.args[0].value
    if any(
        isinstance(node, cst.Call) and is_optimizer(view.origin(node.func) or "") for node in inside(first)
    ):
        raise Undecided(item.node, f"{optimizer.name!r} wraps another optimizer")
    names: dict[str, cst.Name] = {}
    for name in filter(None, map(root, asked_for_parameters(first))):
        names.setdefault(name.value, name)
    if not names:
        raise Undecided(item.node, f"the script does not show which model {optimizer.name!r} updates")
    return list(names.values())


def check_apart(view: View, optimizers: list[Thing]) -> None:
    """Check that no two optimizers visibly update the same parameters, which a session refuses.

    Raises:
        Undecided: One optimizer updates all parameters of a module, and another one updates a part of them.
    """
    for one in optimizers:
        for other in (other for other in optimizers if other is not one):
            for whole in _taken(view, one, whole=True):
                if any(f"{part}.".startswith(f"{whole}.") for part in _taken(view, other, whole=False)):
                    node = one.assignments[0].node
                    raise Undecided(node, f"{one.name!r} and {other.name!r} update the same parameters")


def _taken(view: View, optimizer: Thing, *, whole: bool) -> list[str]:
    """The modules whose parameters an optimizer uses; ``whole``: only those of which it uses all, unconditionally."""
    value = view.assigned_value(optimizer.assignments[0])
    first = value.args[0].value if isinstance(value, cst.Call) and value.args else cst.Tuple([])
    if whole and any(isinstance(node, (cst.BaseComp, cst.Lambda)) for node in inside(first)):
        return []
    return [view.code(module) for module in asked_for_parameters(first)]


def only_wrapped_later(view: View, model: Thing, prepared_at: tuple[int, int], suite: Suite | None) -> None:
    """Check that a model is complete when it is prepared, and is only wrapped after that.

    Raises:
        Undecided: The model is wrapped before it is prepared, or reassigned after.
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
                raise Undecided(item.node, f"{model.name!r} is reassigned after its optimizer was made")
        elif wrapped:
            raise Undecided(
                item.node,
                f"{model.name!r} is wrapped before its optimizer is made, but amp.prepare must come before wrapping",
            )
        elif view.suite(item.node) is not suite:
            raise Undecided(item.node, f"{model.name!r} is made in a different block from its optimizer")


def wraps(view: View, value: cst.BaseExpression) -> bool:
    """Whether a value is created by DistributedDataParallel, torch.compile or similar, judged by names.

    Functions of the script that create it are followed.
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
    return any(_WRAPPER.search(view.called(call)) for call in calls)


def _bindings(view: View, called: cst.BaseExpression) -> list[meta.Assignment]:
    found = view.bindings(called) if isinstance(called, cst.Name) else []
    return [item for item in found if isinstance(item, meta.Assignment)]


def keeps(view: View, called: cst.Name) -> bool:
    """Whether a function that the script defines visibly stores its argument."""
    for item in _bindings(view, called):
        if isinstance(item.node, cst.FunctionDef):
            given = {each.name.value for each in item.node.params.params}
            for node in inside(item.node.body):
                if isinstance(node, cst.Name) and node.value in given:
                    user = view.parent(node)
                    around = None if user is None else view.parent(user)
                    is_handed_on = isinstance(around, cst.Call) and isinstance(around.func, cst.Attribute)
                    is_put = isinstance(user, (cst.Assign, cst.AnnAssign, cst.Element, cst.DictElement))
                    if (is_put and getattr(user, "value", None) is node) or (
                        isinstance(user, cst.Arg) and is_handed_on
                    ):
                        return True
    return False


def is_harmless(view: View, name: cst.Name) -> bool:
    """Whether this use of a model neither runs it nor passes it to code that might, also under another name."""
    outer = view.parent(name)
    while isinstance(outer, cst.Attribute) and isinstance(around := view.parent(outer), cst.Attribute):
        outer = around  # a use of a part of it
    if not isinstance(outer, cst.Attribute) or outer.attr.value not in _HARMLESS:
        return False
    call = view.parent(outer)
    user = None if call is None else view.parent(call)
    if outer.attr.value in _GIVES_ITSELF:
        return isinstance(user, cst.Expr)
    if outer.attr.value in _HOLDS_ITSELF:
        return isinstance(user, (cst.For, cst.CompFor)) and not _runs(view, user)
    return True


def _runs(view: View, loop: cst.For | cst.CompFor) -> bool:
    """Whether a loop calls the items that it iterates over, as far as the script shows."""
    called = {
        node.func.value
        for node in inside(loop if isinstance(loop, cst.For) else view.statement(loop))
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Name)
    }
    return any(isinstance(node, cst.Name) and node.value in called for node in inside(loop.target))


def check_derives(view: View, one: Thing, base: str) -> None:
    """Check that a variable's class derives from a class of torch, if the script defines the class.

    Raises:
        Undecided: The class only has the same methods, which is enough for torch's scaler.
    """
    made = [view.assigned_value(item) for item in one.assignments]
    waiting = [value.func for value in made if isinstance(value, cst.Call)]
    while waiting:
        for item in _bindings(view, waiting.pop()):
            if isinstance(item.node, cst.ClassDef):
                bases = [each.value for each in item.node.bases]
                if not [each for each in bases if view.code(each) not in ("object", "ABC", "abc.ABC")]:
                    raise Undecided(
                        one.assignments[0].node, f"the class of {one.name!r} does not derive from {base}"
                    )
                waiting += bases


def check_weights(view: View, model: Thing, until: tuple[int, int]) -> None:
    """Check that a model's weights have a shape and are not converted to a low format before it is prepared.

    Raises:
        Undecided: A session would refuse them.
    """
    values = [value for item in model.assignments if (value := view.assigned_value(item)) is not None]
    uses = [name for name in references(view, model) if view.position(name) < until]
    for node in (inner for place in (*values, *map(view.small, uses)) for inner in inside(place)):
        outer = view.parent(node)
        is_called = isinstance(outer, cst.Call) and outer.func is node
        is_cast = is_called and isinstance(node, cst.Attribute) and node.attr.value in CASTS
        origin = (view.origin(node) if isinstance(node, (cst.Name, cst.Attribute)) else None) or ""
        if is_cast or origin in FORMATS:
            raise Undecided(node, f"weights of {model.name!r} are stored in low precision")
        if _LAZY.fullmatch(origin):
            raise Undecided(node, f"weights of {model.name!r} have no shape before the model runs")


def run_once(
    view: View, model: str, region: cst.With, runs: Sequence[cst.Call], losses: Container[str]
) -> None:
    """Check that an autocast block runs a model once, or once for each of its ``losses``, if gradients are recorded.

    All runs in one block use one low copy of each weight. The gradients of one backward are summed there, in low
    precision, and a step between the runs does not update it; a session makes a copy for each run.

    Raises:
        Undecided: The block runs the model more often.
    """
    graded = [call for call in runs if not _is_without_gradients(view, call)]
    names = [_name_of(view, call) for call in runs]
    distinct = len(set(names)) == len(names) and all(name in losses for name in names)
    for call in runs if graded else ():
        around = itertools.takewhile(lambda outer: outer is not region, view.around(call))
        others = [other for other in runs if other is not call and not _exclude_each_other(view, call, other)]
        if any(isinstance(outer, _LOOPS) for outer in around) or (others and not distinct):
            raise Undecided(
                call,
                f"{model!r} is called more than once in one autocast block, so the calls share low copies of the weights: "
                "put each call in an autocast block of its own in the original script",
            )


def _name_of(view: View, node: cst.CSTNode) -> str:
    """The name assigned by the statement that contains a node."""
    targets = view.targets(view.small(node))
    return view.code(targets[0]) if len(targets) == 1 and isinstance(targets[0], cst.Name) else ""


def _is_without_gradients(view: View, node: cst.CSTNode) -> bool:
    for outer in view.around(node):
        marks: list[cst.BaseExpression] = []
        if isinstance(outer, cst.With):
            marks = [item.item for item in outer.items]
        elif isinstance(outer, cst.FunctionDef):
            marks = [each.decorator for each in outer.decorators]
        names = [mark.func if isinstance(mark, cst.Call) and not mark.args else mark for mark in marks]
        if any(view.origin(name) in _NO_GRADIENTS for name in names):
            return True
    return False


def _exclude_each_other(view: View, one: cst.CSTNode, other: cst.CSTNode) -> bool:
    """Whether two places are different branches of one ``if``."""
    below: dict[cst.CSTNode, cst.CSTNode] = {}
    for place in (one, other):
        inner = place
        for outer in view.around(place):
            if isinstance(outer, (cst.If, cst.IfExp)) and below.setdefault(outer, inner) is not inner:
                return outer.test not in (inner, below[outer])
            inner = outer
    return False


def autocasts(view: View, block: cst.With) -> list[cst.Call]:
    """The torch autocasts that a ``with`` enters."""
    calls = [item.item for item in block.items if isinstance(item.item, cst.Call)]
    return [call for call in calls if view.origin(call.func) in AUTOCAST]
