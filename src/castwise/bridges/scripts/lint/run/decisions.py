"""Decide the tests of an abstract run: by its values, or by the choices that the run is made for."""

from __future__ import annotations

import ast
import contextlib
import functools
import operator
import re
from collections.abc import Callable
from typing import Any

from castwise.bridges.scripts.lint.run.machine import Machine
from castwise.bridges.scripts.lint.run.values import (
    Box,
    Const,
    External,
    Scope,
    Unknown,
    Value,
    code,
)

_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
}

_RELEVANT = re.compile(
    r"scal|backward|\bstep\(|save|clip|cast|half|float16|float\(|\.to\(|dtype|\bamp\b|fp16|bf16|precision|state_dict|optim"
    r"|\breturn\b|\bcontinue\b|\bbreak\b|\braise\b|exit\("
)


def is_true(machine: Machine, value: Value, node: ast.AST, default: bool = True) -> bool:
    """Whether a value is true, by a choice if the script does not decide it."""
    if value.scale_of is not None:
        machine.tested.add(value.scale_of)
    match value:
        case Const(value=it):
            return bool(it)
        case Box(items=items, is_open=is_open):
            return bool(items) or is_open
        case Unknown(is_object=True):
            return True
        case Unknown(text=text, turn=turn):
            if machine.choices.get(f"{text} is None", _known_none(machine, text)) == "T":
                return False
            return choose(machine, text, default, turn)
    return True


def _known_none(machine: Machine, text: str) -> str:
    return "T" if machine.asked.get(f"{text} is None", (False,))[0] else "F"


def truth(machine: Machine, node: ast.expr, scope: Scope, default: bool = True) -> bool:
    """Whether an expression is true; ``default`` is the preferred decision."""
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            return all(truth(machine, each, scope, default) for each in values)
        case ast.BoolOp(values=values):
            return any(truth(machine, each, scope, default) for each in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not truth(machine, operand, scope, not default)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return compare(machine, node, op, machine.eval(left, scope), machine.eval(right, scope), default)
    return is_true(machine, machine.eval(node, scope), node, default)


def compare(
    machine: Machine, node: ast.Compare, op: ast.cmpop, left: Value, right: Value, default: bool
) -> bool:
    """Whether a comparison is true."""
    for each in (left, right):
        if each.scale_of is not None:
            machine.tested.add(each.scale_of)
    negated = isinstance(op, (ast.NotEq, ast.IsNot, ast.NotIn))
    if isinstance(op, (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)):
        found = _equal(machine, node, left, right, default != negated)
        return found != negated
    if isinstance(op, (ast.In, ast.NotIn)) and isinstance(right, Box):
        known = [each.value for each in right.items.values() if isinstance(each, Const)]
        if right.is_dict:
            known = list(right.items)
        if isinstance(left, Const) and not right.is_open:
            return (left.value in known) != negated
        if isinstance(left, Unknown) and left.text in machine.equal_to:
            return (machine.equal_to[left.text] in known) != negated
    signs = {ast.In: "in", ast.NotIn: "in", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
    text = f"{machine.text(left, node.left)} {signs.get(type(op), '?')} {machine.text(right, node.comparators[0])}"
    turns = [each.turn for each in (left, right) if isinstance(each, Unknown) and each.turn is not None]
    if not turns and isinstance(left, Const) and isinstance(right, Const) and not machine.loops:
        with contextlib.suppress(TypeError):
            return bool(_ORDER[type(op)](left.value, right.value))
    return choose(machine, text, default != negated, max(turns) if turns else None) != negated


def _equal(machine: Machine, node: ast.Compare, left: Value, right: Value, default: bool) -> bool:
    if isinstance(left, Const) and not isinstance(right, Const):
        left, right = right, left
    if isinstance(left, Const) and isinstance(right, Const):
        return left.value == right.value
    if isinstance(left, External) and isinstance(right, External):
        return _short(left.name) == _short(right.name)
    if isinstance(left, Unknown):
        if isinstance(right, Const) and right.value is None:
            if left.is_object or left.is_tensor or left.made or left.text in machine.equal_to:
                return False
            if left.turn is None and machine.asked.get(left.text, (False,))[0]:
                return False  # the script has tested it as true before
            return choose(machine, f"{left.text} is None", default, left.turn)
        if isinstance(right, (Const, External)):
            wanted = right.value if isinstance(right, Const) else right.name
            return equals(machine, left, wanted, default)
        turns = [each.turn for each in (left, right) if isinstance(each, Unknown) and each.turn is not None]
        text = f"{left.text} == {machine.text(right, node.comparators[0])}"
        return choose(machine, text, default, max(turns) if turns else None)
    return left is right


def equals(machine: Machine, value: Unknown, wanted: object, default: bool = True) -> bool:
    """Decide whether an unknown value equals a literal; afterwards it equals no other."""
    if value.text in machine.equal_to:
        return machine.equal_to[value.text] == wanted
    shown = wanted if isinstance(wanted, str) and wanted.startswith("torch.") else repr(wanted)
    found = choose(machine, f"{value.text} == {shown}", default, value.turn)
    if found and value.turn is None:
        machine.equal_to[value.text] = wanted
    return found


def choose(machine: Machine, text: str, default: bool, turn: int | None = None) -> bool:
    """Decide a test that the script does not decide."""
    machine.decided.append(text)
    pattern = machine.choices.get(text)
    if pattern is None:
        return machine.asked.setdefault(text, (default, turn is not None))[0]
    decided = pattern[min(turn or 0, len(pattern) - 1)] == "T"
    machine.asked.setdefault(text, (decided, turn is not None))
    return decided


def _short(name: str) -> str:
    return {"torch.half": "torch.float16", "torch.float": "torch.float32"}.get(name, name)


@functools.lru_cache(maxsize=4096)
def is_relevant(node: ast.If | ast.IfExp) -> bool:
    """Whether a test may decide what happens to gradients, scalers or stored weights."""
    return _RELEVANT.search(code(node)) is not None
