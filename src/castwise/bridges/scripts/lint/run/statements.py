"""Execute statements in an abstract run."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from castwise.bridges.scripts.lint.run.binding import assign, bind, enter_value
from castwise.bridges.scripts.lint.run.decisions import equals, is_relevant, truth
from castwise.bridges.scripts.lint.run.flow import BreakError, ContinueError, RaiseError, ReturnError
from castwise.bridges.scripts.lint.run.machine import Machine
from castwise.bridges.scripts.lint.run.objects import as_region, combine
from castwise.bridges.scripts.lint.run.values import (
    Box,
    Class,
    Const,
    Contexts,
    External,
    Function,
    Namespace,
    Place,
    Scope,
    Unknown,
    Value,
    code,
)

_ITEMS = 4
"""Rounds of a loop over a sequence whose items are known."""


def _nothing(machine: Machine, node: ast.stmt, scope: Scope) -> None:
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.expr) and isinstance(node, ast.Assert):
            machine.eval(each, scope)
            break


def _expr(machine: Machine, node: ast.Expr, scope: Scope) -> None:
    machine.eval(node.value, scope)


def _assign(machine: Machine, node: ast.Assign, scope: Scope) -> None:
    value = machine.eval(node.value, scope)
    for target in node.targets:
        assign(machine, target, value, scope)


def _ann_assign(machine: Machine, node: ast.AnnAssign, scope: Scope) -> None:
    if node.value is not None:
        assign(machine, node.target, machine.eval(node.value, scope), scope)


def _aug_assign(machine: Machine, node: ast.AugAssign, scope: Scope) -> None:
    before, value = machine.eval(node.target, scope), machine.eval(node.value, scope)
    if isinstance(before, Box):
        if isinstance(value, Box):
            for key, each in list(value.items.items()):
                before.add(each, key if before.is_dict else None)
        else:
            before.is_open = True
        return
    result = combine(machine, node, node.op, before, value)
    if isinstance(result, Unknown):
        result.text = code(node.target)
        if isinstance(before, Const):
            result.turn = machine.turn()
    assign(machine, node.target, result, scope)


def _return(machine: Machine, node: ast.Return, scope: Scope) -> NoReturn:
    raise ReturnError(machine.const(node, None) if node.value is None else machine.eval(node.value, scope))


def _raise(machine: Machine, node: ast.Raise, scope: Scope) -> NoReturn:
    raise RaiseError


def _break(machine: Machine, node: ast.Break, scope: Scope) -> NoReturn:
    raise BreakError


def _continue(machine: Machine, node: ast.Continue, scope: Scope) -> NoReturn:
    raise ContinueError


def _global(machine: Machine, node: ast.Global, scope: Scope) -> None:
    for name in node.names:
        scope.elsewhere[name] = scope.module.names


def _nonlocal(machine: Machine, node: ast.Nonlocal, scope: Scope) -> None:
    for name in node.names:
        here = scope.outer
        while here is not None and name not in here.values:
            here = here.outer
        if here is not None:
            scope.elsewhere[name] = here


def _if(machine: Machine, node: ast.If, scope: Scope) -> None:
    machine.decided.clear()
    is_taken = truth(machine, node.test, scope, default=not _ends(node.body) or bool(node.orelse))
    if machine.decided and is_relevant(node):
        machine.relevant.update(machine.decided)
    if is_taken:
        machine.block(node.body, scope)
    else:
        machine.block(node.orelse, scope)
    machine.rules.tested(node, node.test)


def _for(machine: Machine, node: ast.For | ast.AsyncFor, scope: Scope) -> None:
    _loop(machine, node, machine.eval(node.iter, scope), scope)


def _while(machine: Machine, node: ast.While, scope: Scope) -> None:
    if not truth(machine, node.test, scope):
        return
    _loop(machine, node, None, scope)


def _loop(
    machine: Machine, node: ast.For | ast.AsyncFor | ast.While, over: Value | None, scope: Scope
) -> None:
    rounds: list[Value | None] = [None, None]
    is_known = isinstance(over, Box) and (not over.is_open or bool(over.items))
    if isinstance(over, Box) and is_known:
        rounds = [*list(over.items.values())[:_ITEMS]]
        if over.is_dict:
            rounds = [machine.const(node, key) for key in list(over.items)[:_ITEMS]]
    else:
        machine.loops.append(node)
    machine.turns.append(0)
    try:
        for number, item in enumerate(rounds):
            machine.turns[-1] = min(number, 1)
            if not isinstance(node, ast.While):
                bind(machine, node.target, over, item, scope)
            try:
                machine.block(node.body, scope)
            except ContinueError:
                continue
    except BreakError:
        return
    finally:
        if not is_known:
            machine.loops.pop()
        machine.turns.pop()
    machine.block(node.orelse, scope)


def _with(machine: Machine, node: ast.With | ast.AsyncWith, scope: Scope) -> None:
    before = len(machine.regions)
    after: list[tuple[list[ast.stmt], Scope]] = []
    try:
        for item in node.items:
            if isinstance(item.context_expr, ast.BoolOp):
                entered = [machine.eval(each, scope) for each in item.context_expr.values]
                machine.rules.joined(item.context_expr, entered)
                value = entered[-1] if isinstance(item.context_expr.op, ast.And) else entered[0]
            else:
                value = machine.eval(item.context_expr, scope)
            value = enter_value(machine, value, node)
            if isinstance(value, Contexts):
                after += value.after
            if item.optional_vars is not None:
                assign(machine, item.optional_vars, value, scope)
        machine.block(node.body, scope)
    finally:
        del machine.regions[before:]
        for body, inner in reversed(after):
            machine.block(body, inner)


def _try(machine: Machine, node: ast.Try | ast.TryStar, scope: Scope) -> None:
    try:
        try:
            machine.block(node.body, scope)
        except RaiseError:
            if not node.handlers:
                raise
            machine.block(node.handlers[0].body, scope)
        else:
            machine.block(node.orelse, scope)
    finally:
        machine.block(node.finalbody, scope)


def _match(machine: Machine, node: ast.Match, scope: Scope) -> None:
    subject = machine.eval(node.subject, scope)
    for case in node.cases:
        pattern = case.pattern
        is_last = isinstance(pattern, ast.MatchAs) and pattern.pattern is None
        literal = pattern.value.value if isinstance(pattern, ast.MatchValue) and isinstance(pattern.value, ast.Constant) else None  # fmt: skip
        if isinstance(subject, Const) and literal is not None:
            taken = subject.value == literal
        elif isinstance(subject, Unknown) and literal is not None:
            taken = equals(machine, subject, literal)
        else:
            taken = is_last
        if taken:
            machine.block(case.body, scope)
            return


def _function_def(machine: Machine, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
    scope.set(node.name, define(machine, node, scope, None))


def define(
    machine: Machine, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope, owner: Class | None
) -> Function:
    """The function that a definition makes."""
    made = [machine.eval(each, scope) for each in node.decorator_list]
    named = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    return Function(
        machine.place(node),
        node=node,
        scope=scope,
        owner=owner,
        regions=tuple(each for each in (as_region(machine, one) for one in made) if each),
        decorators=frozenset(code(each).rpartition(".")[2] for each in named),
    )


def _class_def(machine: Machine, node: ast.ClassDef, scope: Scope) -> None:
    bases = tuple(machine.eval(each, scope) for each in node.bases)
    names = Scope(scope.module, scope)
    kind = Class(machine.place(node), node=node, names=names, bases=bases)
    scope.set(node.name, kind)
    for each in node.body:
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.set(each.name, define(machine, each, scope, kind))
        elif isinstance(each, ast.AnnAssign) and each.value is None:
            continue
        else:
            machine.block([each], names)


def _import(machine: Machine, node: ast.Import, scope: Scope) -> None:
    for each in node.names:
        found = _imported(machine, each.name, 0)
        if found is not None and each.asname:
            scope.set(each.asname, found)
        elif found is not None and "." not in each.name:
            scope.set(each.name, found)
        else:
            name = each.name if each.asname else each.name.partition(".")[0]
            scope.set(each.asname or name, External(machine.place(node), name=name))


def _import_from(machine: Machine, node: ast.ImportFrom, scope: Scope) -> None:
    home = _imported(machine, node.module or "", node.level)
    for each in node.names:
        if each.name == "*":
            if isinstance(home, Namespace) and home.module is not None:
                for name, known in home.module.names.values.items():
                    if not name.startswith("_"):
                        scope.set(name, known)
            continue
        value: Value | None = None
        if isinstance(home, Namespace) and home.module is not None:
            value = home.module.names.get(each.name)
        if value is None:
            inner = f"{node.module}.{each.name}" if node.module else each.name
            value = _imported(machine, inner, node.level)
        if value is None:
            value = External(machine.place(node), name=f"{'.' * node.level}{node.module or ''}.{each.name}")
        scope.set(each.asname or each.name, value)


def _imported(machine: Machine, name: str, level: int) -> Namespace | None:
    path = machine.program.find(name, level, machine.path)
    if path is None:
        return None
    module = machine.load(path, name)
    return Namespace(Place(path, 1, 0), module=module)


def _ends(body: Sequence[ast.stmt]) -> bool:
    """Whether a block leaves the code around it."""
    last = body[-1]
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return code(last.value.func) in ("sys.exit", "exit", "quit", "os._exit")
    return isinstance(last, (ast.Return, ast.Raise, ast.Continue, ast.Break))


_EXECUTE: dict[type[ast.stmt], Callable[[Any, Any, Scope], None]] = {
    ast.Expr: _expr, ast.Assign: _assign, ast.AnnAssign: _ann_assign, ast.AugAssign: _aug_assign, ast.Return: _return,
    ast.Raise: _raise, ast.Break: _break, ast.Continue: _continue, ast.Global: _global, ast.Nonlocal: _nonlocal,
    ast.If: _if, ast.For: _for, ast.AsyncFor: _for, ast.While: _while, ast.With: _with, ast.AsyncWith: _with,
    ast.Try: _try, ast.TryStar: _try, ast.Match: _match, ast.FunctionDef: _function_def,
    ast.AsyncFunctionDef: _function_def, ast.ClassDef: _class_def, ast.Import: _import, ast.ImportFrom: _import_from,
}  # fmt: skip


def execute(machine: Machine, node: ast.stmt, scope: Scope) -> None:
    """Execute a statement."""
    _EXECUTE.get(type(node), _nothing)(machine, node, scope)
