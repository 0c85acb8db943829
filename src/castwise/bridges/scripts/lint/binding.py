"""Bind names, attributes and items in an abstract run."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from castwise.bridges.scripts.lint.values import (
    Box,
    Class,
    Const,
    Instance,
    Namespace,
    Scope,
    State,
    Unknown,
    Value,
    code,
)

if TYPE_CHECKING:
    from castwise.bridges.scripts.lint.machine import Machine


def bind(machine: Machine, target: ast.expr, over: Value | None, item: Value | None, scope: Scope) -> None:
    """Bind the target of a loop to an item, or to an unknown one of what the loop runs over."""
    if item is not None:
        machine.assign(target, item, scope)
        return
    for each in ast.walk(target):
        if isinstance(each, ast.Name):
            new = machine.unknown(each, each.id, turn=machine.turn())
            new.is_tensor = True
            if over is not None:
                new.modules, new.low, new.formats = over.modules, over.low, over.formats
                new.is_of_gradients = over.is_of_gradients
            machine.assign(each, new, scope)


def assign(machine: Machine, target: ast.expr, value: Value, scope: Scope) -> None:
    """Bind a target of an assignment."""
    match target:
        case ast.Name(id=name):
            scope.set(name, value)
        case ast.Attribute(value=of, attr=name):
            set_attribute(machine, machine.eval(of, scope), name, value)
        case ast.Subscript(value=of, slice=key):
            box = machine.eval(of, scope)
            if isinstance(box, Box):
                index = machine.eval(key, scope)
                box.items[key_of(index)] = value
            elif value.low is not None and isinstance(box, (State, Unknown)):
                box.low = value.low
        case ast.Starred(value=inner):
            machine.assign(inner, value, scope)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            items = list(value.items.values()) if isinstance(value, Box) and not value.is_dict else []
            for number, part in enumerate(parts):
                if len(items) == len(parts):
                    machine.assign(part, items[number], scope)
                else:
                    _bind_part(machine, part, value, scope)


def _bind_part(machine: Machine, target: ast.expr, of: Value, scope: Scope) -> None:
    """Bind a name to one part of a value whose parts are not known."""
    new = machine.unknown(target, code(target), of)
    new.modules, new.low, new.made = of.modules, of.low, isinstance(of, Unknown) and of.made
    new.is_tensor = isinstance(of, Unknown) and of.is_tensor
    machine.assign(target, new, scope)


def set_attribute(machine: Machine, of: Value, name: str, value: Value) -> None:
    """Set an attribute of a value."""
    if name == "requires_grad" and not (isinstance(value, Const) and value.value is True):
        for module in of.modules:
            module.is_frozen = True
    if name == "data" and value.low is not None:
        for module in of.modules:
            module.low = value.low
    if isinstance(of, (Instance, Unknown)):
        of.fields[name] = value
        if isinstance(of, Unknown) or (of.kind is not None and not machine.library.is_closed(of.kind)):
            machine.library.escapes([value])
    elif isinstance(of, Class) and of.names is not None:
        of.names.set(name, value)
    elif isinstance(of, Namespace) and of.module is not None:
        of.module.names.set(name, value)


def key_of(index: Value) -> object:
    """A dictionary's key: the literal, or an object that equals no other."""
    return index.value if isinstance(index, Const) else object()
