"""Bind names, attributes and items in an abstract run."""

from __future__ import annotations

import ast

from castwise.bridges.scripts.lint.run.machine import Machine
from castwise.bridges.scripts.lint.run.names import is_closed
from castwise.bridges.scripts.lint.run.objects import note_escape
from castwise.bridges.scripts.lint.run.values import (
    Autocast,
    Box,
    Class,
    Const,
    Contexts,
    Function,
    Instance,
    Namespace,
    Scope,
    State,
    Unknown,
    Value,
    code,
)

_LONG = 25
"""Length of an expression from which on a variable's name stands for it in messages."""


def bind(machine: Machine, target: ast.expr, over: Value | None, item: Value | None, scope: Scope) -> None:
    """Bind the target of a loop to an item, or to an unknown one of what the loop runs over."""
    if item is not None:
        assign(machine, target, item, scope)
        return
    for each in ast.walk(target):
        if isinstance(each, ast.Name):
            new = machine.unknown(each, each.id, turn=machine.turn())
            new.is_tensor = True
            if over is not None:
                new.modules, new.low, new.formats = over.modules, over.low, over.formats
                new.is_of_gradients = over.is_of_gradients
            assign(machine, each, new, scope)


def assign(machine: Machine, target: ast.expr, value: Value, scope: Scope) -> None:
    """Bind a target of an assignment."""
    match target:
        case ast.Name(id=name):
            if isinstance(value, Unknown) and value.made and len(value.text) > _LONG:
                value.text = name
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
            assign(machine, inner, value, scope)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            items = list(value.items.values()) if isinstance(value, Box) and not value.is_dict else []
            for number, part in enumerate(parts):
                if len(items) == len(parts):
                    assign(machine, part, items[number], scope)
                else:
                    _bind_part(machine, part, value, scope)


def _bind_part(machine: Machine, target: ast.expr, of: Value, scope: Scope) -> None:
    """Bind a name to one part of a value whose parts are not known."""
    new = machine.unknown(target, code(target), of)
    new.modules, new.low, new.made = of.modules, of.low, isinstance(of, Unknown) and of.made
    new.is_tensor = isinstance(of, Unknown) and of.is_tensor
    assign(machine, target, new, scope)


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
        if isinstance(of, Unknown) or (of.kind is not None and not is_closed(of.kind)):
            note_escape(machine, [value])
    elif isinstance(of, Class) and of.names is not None:
        of.names.set(name, value)
    elif isinstance(of, Namespace) and of.module is not None:
        of.module.names.set(name, value)


def key_of(index: Value) -> object:
    """A dictionary's key: the literal, or an object that equals no other."""
    return index.value if isinstance(index, Const) else object()


def enter_value(machine: Machine, value: Value, node: ast.AST) -> Value:
    """Enter a context manager; the result is what ``as`` binds."""
    if isinstance(value, Autocast):
        enter(machine, value)
    elif isinstance(value, Contexts):
        for each in value.regions:
            enter(machine, each)
    elif isinstance(value, Instance) and value.kind is not None:
        method = value.kind.find("__enter__")
        if isinstance(method, Function):
            return machine.call_function(method, ([value], {}), node)
    return value


def enter(machine: Machine, region: Autocast) -> None:
    """Enter an autocast region until the ``with`` that is executed ends."""
    machine.regions.append(region)
    machine.rules.entered(region)
