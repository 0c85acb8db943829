"""Evaluate expressions in an abstract run."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence

from castwise.bridges.scripts.lint.run.binding import assign, bind, key_of
from castwise.bridges.scripts.lint.run.calls import evaluate_call
from castwise.bridges.scripts.lint.run.decisions import compare, equals, is_relevant, is_true, truth
from castwise.bridges.scripts.lint.run.machine import Machine
from castwise.bridges.scripts.lint.run.names import is_method
from castwise.bridges.scripts.lint.run.objects import combine, merge, same
from castwise.bridges.scripts.lint.run.values import (
    Box,
    Class,
    Const,
    External,
    Function,
    Instance,
    Method,
    Namespace,
    Place,
    Scope,
    Unknown,
    Value,
    code,
)

_ITEMS = 4
"""Items of a sequence over which a comprehension runs."""


def evaluate(machine: Machine, node: ast.expr, scope: Scope) -> Value:
    """The value of an expression."""
    match node:
        case ast.Constant(value=value):
            return machine.const(node, value)
        case ast.Name(id=name):
            found = scope.get(name)
            if found is not None:
                return found
            if hasattr(builtins, name):
                return External(machine.place(node), name=name)
            new = machine.unknown(node, name)
            scope.module.names.set(name, new)
            return new
        case ast.Attribute(value=of, attr=name):
            return machine.attribute(machine.eval(of, scope), name, node)
        case ast.Call():
            return evaluate_call(machine, node, scope)
        case ast.BoolOp(op=op, values=values):
            return _eval_bool(machine, op, values, scope)
        case ast.UnaryOp(op=ast.Not()):
            return machine.const(node, truth(machine, node, scope))
        case ast.UnaryOp(operand=operand):
            inner = machine.eval(operand, scope)
            return inner if isinstance(inner, Const) else same(machine, node, inner)
        case ast.Compare(left=left, comparators=right):
            if len(right) == 1:
                return _evalcompare(machine, node, scope)
            sources = [machine.eval(each, scope) for each in (left, *right)]
            return machine.unknown(node, code(node), *sources)
        case ast.BinOp(left=left, op=sign, right=right_side):
            return combine(machine, node, sign, machine.eval(left, scope), machine.eval(right_side, scope))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            machine.decided.clear()
            is_taken = truth(machine, test, scope)
            if is_relevant(node):
                machine.relevant.update(machine.decided)
            found = machine.eval(body if is_taken else orelse, scope)
            machine.rules.tested(node, test)
            return found
        case ast.NamedExpr(target=target, value=inner_node):
            named = machine.eval(inner_node, scope)
            assign(machine, target, named, scope)
            return named
        case ast.Dict(keys=keys, values=entries):
            return _eval_dict(machine, node, keys, entries, scope)
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            return _eval_list(machine, node, elements, scope)
        case ast.Subscript(value=of, slice=key):
            return _eval_item(machine, node, machine.eval(of, scope), key, scope)
        case ast.Lambda():
            return Function(machine.place(node), node=node, scope=scope)
        case ast.Starred(value=inner_node) | ast.Await(value=inner_node):
            return machine.eval(inner_node, scope)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            return _eval_comprehension(machine, node, scope)
        case ast.Yield(value=inner_or_none):
            given = machine.const(node, None) if inner_or_none is None else machine.eval(inner_or_none, scope)
            machine.yielded.append(given)
            return machine.unknown(node, "yield")
        case ast.JoinedStr(values=values):
            for each in values:
                if isinstance(each, ast.FormattedValue):
                    machine.eval(each.value, scope)
            return machine.unknown(node, code(node))
    return machine.unknown(node, code(node))


def _evalcompare(machine: Machine, node: ast.Compare, scope: Scope) -> Value:
    left, right = machine.eval(node.left, scope), machine.eval(node.comparators[0], scope)
    sides = (left, right)
    known = isinstance(node.ops[0], (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn))
    if known or all(isinstance(each, Const) for each in sides):
        decided = compare(machine, node, node.ops[0], left, right, default=True)
        result = machine.const(node, decided)
        result.scale_of = left.scale_of or right.scale_of
        return result
    return machine.unknown(node, code(node), *sides)


def _eval_bool(machine: Machine, op: ast.boolop, values: Sequence[ast.expr], scope: Scope) -> Value:
    value = machine.eval(values[0], scope)
    for each in values[1:]:
        known = is_true(machine, value, values[0])
        if known != isinstance(op, ast.And):
            return value if not isinstance(value, Unknown) or known else machine.const(values[0], False)
        value = machine.eval(each, scope)
    return value


def _eval_dict(
    machine: Machine,
    node: ast.AST,
    keys: Sequence[ast.expr | None],
    entries: Sequence[ast.expr],
    scope: Scope,
) -> Box:
    box = Box(machine.place(node), is_dict=True, maker=scope)
    for key, entry in zip(keys, entries, strict=True):
        value = machine.eval(entry, scope)
        if key is None:
            merge(machine, box, value)
            continue
        box.add(value, key_of(machine.eval(key, scope)))
    return box


def _eval_list(machine: Machine, node: ast.AST, elements: Sequence[ast.expr], scope: Scope) -> Box:
    box = Box(machine.place(node), maker=scope)
    for each in elements:
        value = machine.eval(each, scope)
        if isinstance(each, ast.Starred):
            merge(machine, box, value)
        else:
            box.add(value)
    return box


def _eval_item(machine: Machine, node: ast.Subscript, of: Value, key: ast.expr, scope: Scope) -> Value:
    if isinstance(key, ast.Slice):
        return of
    index = machine.eval(key, scope)
    if isinstance(of, Box) and of.items:
        if isinstance(index, Const):
            name = index.value
            if isinstance(name, int) and not of.is_dict and name < 0:
                name += len(of.items)
            if name in of.items:
                return of.items[name]
        elif of.is_dict and not of.is_open:
            for name, item in of.items.items():
                if isinstance(index, Unknown) and equals(machine, index, name):
                    return item
    if isinstance(of, Unknown) and isinstance(index, Const) and index.value in of.fields:
        return of.fields[str(index.value)]
    new = machine.unknown(node, f"{machine.text(of, node.value)}[{machine.text(index, key)}]", of, index)
    new.modules, new.low, new.scaler = of.modules, of.low, of.scaler
    new.is_tensor = isinstance(of, Unknown) and of.is_tensor
    if isinstance(of, Unknown) and isinstance(index, Const) and isinstance(index.value, str):
        of.fields[index.value] = new
    return new


def _eval_comprehension(
    machine: Machine, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, scope: Scope
) -> Value:
    inner = Scope(scope.module, scope)
    box = Box(machine.place(node), is_dict=isinstance(node, ast.DictComp), is_open=True, maker=scope)

    def rounds(generators: Sequence[ast.comprehension]) -> Iterator[None]:
        if not generators:
            yield
            return
        over = machine.eval(generators[0].iter, inner)
        items: list[Value | None] = [None]
        if isinstance(over, Box) and (over.items or not over.is_open):
            items = [*list(over.items.values())[:_ITEMS]]
            if over.is_dict:
                items = [machine.const(node, key) for key in list(over.items)[:_ITEMS]]
            box.is_open = over.is_open or len(over.items) > _ITEMS
        for item in items:
            machine.spend()
            bind(machine, generators[0].target, over, item, inner)
            yield from rounds(generators[1:])

    for _ in rounds(node.generators):
        if isinstance(node, ast.DictComp):
            box.items[key_of(machine.eval(node.key, inner))] = machine.eval(node.value, inner)
        else:
            box.add(machine.eval(node.elt, inner))
    return box


def attribute(machine: Machine, of: Value, name: str, node: ast.AST) -> Value:
    """An attribute of a value."""
    match of:
        case External(name=home):
            return External(machine.place(node), name=f"{home}.{name}")
        case Namespace(module=module) if module is not None:
            found = module.names.get(name)
            if found is not None:
                return found
            inner = machine.program.find(name, 1, module.path) if module.path.stem == "__init__" else None
            if inner is not None:
                return Namespace(Place(inner, 1, 0), module=machine.load(inner, name))
            return External(machine.place(node), name=f"{module.path.stem}.{name}")
        case Instance(kind=kind, fields=fields) if kind is not None:
            if name in fields:
                return fields[name]
            return _member(machine, of, kind.find(name), name, node)
        case Class():
            found = of.find(name)
            if isinstance(found, Function) and "classmethod" in found.decorators:
                return Method(machine.place(node), of=of, name=name, function=found)
            if found is not None:
                return found
            return machine.unknown(node, f"{machine.text(of, node)}.{name}")
        case Unknown(fields=fields, text=text, turn=turn):
            if name in ("module", "_orig_mod") and not of.is_tensor:
                return of
            if name not in fields:
                new = machine.unknown(node, f"{text}.{name}", of, turn=turn)
                new.place, new.loops, new.owner = of.place, of.loops, (of, name)
                new.is_tensor, new.low, new.modules, new.scaler = (
                    of.is_tensor,
                    of.low,
                    of.modules,
                    of.scaler,
                )
                new.is_of_gradients = of.is_of_gradients or (name == "grad" and of.is_tensor)
                fields[name] = new
            return fields[name]
        case Const(value=value) if isinstance(value, str) and name == "type":
            return of  # the ``type`` of a device
    return Method(machine.place(node), of=of, name=name)


def _member(machine: Machine, of: Instance, found: Value | None, name: str, node: ast.AST) -> Value:
    """A name of the class of an object."""
    if isinstance(found, Function):
        if found.decorators & {"property", "cached_property"}:
            return machine.call_function(found, ([of], {}), node)
        if "staticmethod" in found.decorators:
            return found
        bound = of.kind if "classmethod" in found.decorators else of
        return Method(machine.place(node), of=bound, name=name, function=found)
    if found is not None:
        return found
    if is_method(of, name):
        return Method(machine.place(node), of=of, name=name)
    new = machine.unknown(node, f"self.{name}")
    new.place, new.loops, new.owner = of.place, of.loops, (of, name)
    of.fields[name] = new
    return new
