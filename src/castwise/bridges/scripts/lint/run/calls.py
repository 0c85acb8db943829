"""Call functions and classes of the program in an abstract run."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from castwise.bridges.scripts.lint.run.binding import enter
from castwise.bridges.scripts.lint.run.decisions import truth
from castwise.bridges.scripts.lint.run.flow import ReturnError
from castwise.bridges.scripts.lint.run.functions import call_external
from castwise.bridges.scripts.lint.run.machine import Machine
from castwise.bridges.scripts.lint.run.methods import method
from castwise.bridges.scripts.lint.run.names import is_scheduler
from castwise.bridges.scripts.lint.run.objects import call_instance, note_instance, unseen
from castwise.bridges.scripts.lint.run.values import (
    Arguments,
    Autocast,
    Box,
    Class,
    Contexts,
    External,
    Function,
    Instance,
    Method,
    Partial,
    Scope,
    Unknown,
    Value,
    code,
)

_DEEPEST = 24
"""Calls within calls."""


def evaluate_call(machine: Machine, node: ast.Call, scope: Scope) -> Value:
    """Evaluate the function and the arguments of a call, and call it."""
    if isinstance(node.func, ast.Name) and node.func.id == "super" and scope.get("super") is None:
        return _super(machine, node, scope)
    function = machine.eval(node.func, scope)
    given: list[Value] = []
    named: dict[str, Value] = {}
    for each in node.args:
        value = machine.eval(each, scope)
        if isinstance(each, ast.Starred) and isinstance(value, Box) and not value.is_dict:
            given += value.items.values()
        elif not isinstance(each, ast.Starred):
            given.append(value)
        else:
            named.setdefault("*", value)
    for keyword in node.keywords:
        value = machine.eval(keyword.value, scope)
        if keyword.arg is not None:
            named[keyword.arg] = value
        elif isinstance(value, Box):
            machine.rules.facts.handed.add(value.place)
            named.update({key: item for key, item in value.items.items() if isinstance(key, str)})
            if value.is_open:
                named["**"] = value
        else:
            named["**"] = value
    return machine.call(function, (given, named), node)


def call(machine: Machine, function: Value, arguments: Arguments, node: ast.AST) -> Value:
    """Call a value."""
    given, named = arguments
    match function:
        case Function():
            return call_function(machine, function, arguments, node)
        case Class():
            return _make(machine, function, arguments, node)
        case Method(of=of, name=name, function=Function() as known) if of is not None:
            if name == "step" and isinstance(of, Instance) and is_scheduler(of):
                machine.rules.scheduled(of, node)
            return call_function(machine, known, ([of, *given], named), node)
        case Method(of=of, name=name) if of is not None:
            return method(machine, of, name, arguments, node)
        case Partial(of=of) if of is not None:
            return machine.call(of, ([*function.given, *given], {**function.named, **named}), node)
        case External(name=name):
            return call_external(machine, name, arguments, node)
        case Unknown(owner=(of, name)):
            return method(machine, of, name, arguments, node, function)
        case Instance(kind=kind) if kind is not None:
            return call_instance(machine, function, kind, arguments, node)
    return unseen(machine, function, arguments, node)


def _super(machine: Machine, node: ast.Call, scope: Scope) -> Value:
    owner, first = scope.get("__class__"), None
    if isinstance(owner, Class) and machine.running and scope.get("__self__") is not None:
        first = scope.get("__self__")
    if isinstance(owner, Class) and isinstance(first, Instance) and first.kind is not None:
        # an object with the same fields, on which methods of the base classes are found
        return Instance(first.place, first.loops, kind=Class(owner.place, bases=owner.bases, names=Scope(scope.module, None)), fields=first.fields)  # fmt: skip
    return machine.unknown(node, "super()")


def call_function(machine: Machine, function: Function, arguments: Arguments, node: ast.AST) -> Value:
    """Execute a function; what it returns is the value of its first ``return`` that is reached."""
    definition = function.node
    assert function.scope is not None
    if machine.running.count(definition) or len(machine.running) >= _DEEPEST:
        return machine.unknown(node, _call_text(node))
    machine.spend()
    machine.visited.add(definition)
    scope = Scope(function.scope.module, function.scope)
    before = machine.path, len(machine.regions), machine.yielded
    _bind_arguments(machine, definition.args, arguments, scope, function)
    machine.frames.append((scope, machine.place(node)))
    machine.path, machine.yielded = function.scope.module.path, []
    machine.running.append(definition)
    for region in function.regions:
        enter(machine, region)
    try:
        if isinstance(definition, ast.Lambda):
            return machine.eval(definition.body, scope)
        if "contextmanager" in function.decorators:
            return _manager(machine, definition, scope)
        try:
            machine.block(definition.body, scope)
        except ReturnError as returned:
            if not machine.yielded:
                return returned.value
        if machine.yielded:
            items: dict[object, Value] = dict(enumerate(machine.yielded))
            return Box(machine.place(node), items=items, is_open=True)
        return machine.const(node, None)
    finally:
        machine.running.pop()
        machine.frames.pop()
        machine.path, _, machine.yielded = before
        del machine.regions[before[1] :]


def _manager(machine: Machine, definition: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> Value:
    """What a generator function that is a context manager enters: the regions around its ``yield``."""
    entered: list[Autocast] = []
    after: list[tuple[list[ast.stmt], Scope]] = []

    def search(body: Sequence[ast.stmt]) -> bool:
        for number, statement in enumerate(body):
            if _yields(statement):
                after.append((list(body[number + 1 :]), scope))
            if isinstance(statement, (ast.With, ast.AsyncWith)) and _yields(statement):
                for item in statement.items:
                    value = machine.eval(item.context_expr, scope)
                    entered.extend([value] if isinstance(value, Autocast) else value.regions if isinstance(value, Contexts) else [])  # fmt: skip
                return search(statement.body)
            if isinstance(statement, ast.If) and _yields(statement):
                taken = statement.body if truth(machine, statement.test, scope) else statement.orelse
                if any(map(_yields, taken)):
                    return search(taken)
                machine.block(taken, scope)
            elif isinstance(statement, ast.Try) and any(map(_yields, statement.body)):
                after.append((statement.finalbody, scope))
                return search(statement.body)
            elif _yields(statement):
                return True
            else:
                machine.block([statement], scope)
        return False

    search(definition.body)
    return Contexts(machine.place(definition), regions=tuple(entered), after=tuple(after))


def _bind_arguments(
    machine: Machine, parameters: ast.arguments, arguments: Arguments, scope: Scope, function: Function
) -> None:
    given, named = list(arguments[0]), dict(arguments[1])
    names = [*parameters.posonlyargs, *parameters.args]
    if function.owner is not None and names and given:
        scope.values["__class__"], scope.values["__self__"] = function.owner, given[0]
    defaults = dict(zip(reversed(names), reversed(parameters.defaults), strict=False))
    defaults.update({each: it for each, it in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True) if it is not None})  # fmt: skip
    unseen = named.pop("*", None) is not None
    rest = named.pop("**", None)
    assert function.scope is not None
    for each in (*names, *parameters.kwonlyargs):
        if given and each in names:
            scope.set(each.arg, given.pop(0))
        elif each.arg in named:
            scope.set(each.arg, named.pop(each.arg))
        elif each in defaults and not unseen and rest is None:
            scope.set(each.arg, machine.eval(defaults[each], function.scope))
        else:
            scope.set(each.arg, parameter(machine, each))
    if parameters.vararg is not None:
        scope.set(parameters.vararg.arg, Box(machine.place(parameters.vararg), items=dict(enumerate(given))))
    if parameters.kwarg is not None:
        scope.set(parameters.kwarg.arg, Box(machine.place(parameters.kwarg), items=dict(named), is_dict=True, is_open=rest is not None))  # fmt: skip


def parameter(machine: Machine, node: ast.arg) -> Unknown:
    """An argument that no caller shows."""
    return machine.unknown(node, node.arg)


def _make(machine: Machine, kind: Class, arguments: Arguments, node: ast.AST) -> Value:
    made = Instance(machine.place(node), tuple(machine.loops), kind=kind)
    machine.instances.append(made)
    start = kind.find("__init__")
    if isinstance(start, Function):
        call_function(machine, start, ([made, *arguments[0]], arguments[1]), node)
    elif kind.node is not None:
        fields = [
            each.target.id
            for each in kind.node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]
        made.fields.update(zip(fields, arguments[0], strict=False))
        made.fields.update(arguments[1])
        for name in fields:
            if name not in made.fields and kind.names is not None and name in kind.names.values:
                continue
            made.fields.setdefault(name, machine.unknown(node, f"{kind.node.name}.{name}"))
    if kind.derives_from("torch.nn.") or kind.derives_from("nn."):
        made.low = machine.rules.default_low
    note_instance(machine, made, kind, arguments)
    return made


def _yields(node: ast.AST) -> bool:
    return any(isinstance(each, (ast.Yield, ast.YieldFrom)) for each in ast.walk(node))


def _call_text(node: ast.AST) -> str:
    return code(node) if isinstance(node, ast.expr) else "a call"
