"""Methods of objects that the program does not define."""

from __future__ import annotations

import ast

from castwise.bridges.scripts.lint.run.binding import enter, enter_value
from castwise.bridges.scripts.lint.run.decisions import equals
from castwise.bridges.scripts.lint.run.machine import Machine
from castwise.bridges.scripts.lint.run.names import (
    CASTS,
    CLIPS,
    IN_PLACE,
    MODULES,
    PARAMETERS,
    PARSER,
    PARSES,
    SCALED,
    SCHEDULED,
    called_name,
    format_of,
    is_optimizer,
    is_scheduler,
)
from castwise.bridges.scripts.lint.run.objects import merge, norm_of, same, unseen
from castwise.bridges.scripts.lint.run.values import (
    Arguments,
    Autocast,
    Box,
    Const,
    Contexts,
    Function,
    Instance,
    Low,
    Method,
    Place,
    Scaler,
    Scheduler,
    State,
    Unknown,
    Value,
    code,
)


def method(
    machine: Machine, of: Value, name: str, arguments: Arguments, node: ast.AST, seen: Unknown | None = None
) -> Value:
    """Call a method that is not in the program."""
    given, named = arguments
    first = given[0] if given else next(iter(named.values()), None)
    if isinstance(of, Unknown):
        of.is_object = of.is_object or not of.is_tensor
    if isinstance(of, Scaler) or (isinstance(of, Unknown) and SCALED.search(of.text) and name in ("scale", "unscale_", "step", "update", "get_scale", "state_dict", "is_enabled")):  # fmt: skip
        return _scaler_method(machine, of, name, arguments, node)
    if isinstance(of, Unknown) and of.options is not None and name in (*PARSES, *PARSER):
        return _parser_method(machine, of, of.options, name, arguments, node)
    if isinstance(of, Contexts) and name == "enter_context" and first is not None:
        return enter_value(machine, first, node)
    if isinstance(of, Autocast) and name in ("__enter__", "__exit__"):
        if name == "__enter__":
            enter(machine, of)
        elif of in machine.regions:
            machine.regions.remove(of)
        return of
    if isinstance(of, Autocast) and name == "__call__" and isinstance(first, Function):
        first.regions = (*first.regions, of)
        return first
    if isinstance(of, Box):
        return _box_method(machine, of, name, arguments, node)
    if isinstance(of, Const) and isinstance(of.value, str):
        if name in ("lower", "upper", "strip", "startswith", "endswith") and all(isinstance(each, Const) for each in given):  # fmt: skip
            try:
                return machine.const(node, getattr(of.value, name)(*(each.value for each in given if isinstance(each, Const))))  # fmt: skip
            except (TypeError, ValueError):
                pass
        return machine.unknown(node, code(node))
    if name == "backward" and not isinstance(of, Instance):
        machine.rules.backward(of, node)
        return machine.const(node, None)
    is_spelled = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and SCHEDULED.search(code(node.func.value))  # fmt: skip
    is_named = isinstance(of, Unknown) and len(given) + len(named) < 2 and (is_spelled or SCHEDULED.search(called_name(of.text)))  # fmt: skip
    is_of_program = isinstance(of, Instance) and name == "step" and is_scheduler(of)
    if isinstance(of, Scheduler) or is_of_program or (is_named and name == "step"):
        if name == "step" and first is None:  # a scheduler with an argument follows a metric or the epoch
            machine.rules.scheduled(of, node)
        return State(machine.place(node), of=of) if name == "state_dict" else machine.const(node, None)
    if name == "step" and is_optimizer(of):
        for each in given:
            if isinstance(each, (Function, Method)):
                machine.call(each, ([], {}), node)
        machine.rules.stepped(of, node)
        return machine.const(node, None)
    if name == "zero_grad":
        machine.rules.zeroed(of)
        return machine.const(node, None)
    if name == "state_dict":
        return State(machine.place(node), of=of, low=of.low)
    if name in PARAMETERS or name in MODULES:
        new = machine.unknown(node, f"{machine.text(of, node)}.{name}()")
        new.modules, new.is_tensor = frozenset({of}) | of.modules, True
        return new
    if CLIPS.search(name):
        return norm_of(machine, machine.rules.clipped(node, arguments, of), arguments, node)
    if of.is_of_gradients and (name in ("clamp_", "clip_") or (name == "mul_" and first and first.is_of_gradients)):  # fmt: skip
        machine.rules.clipped(node, arguments, of)
        return of
    if name == "requires_grad_" and first is not None and not (isinstance(first, Const) and first.value is True):  # fmt: skip
        for module in (of, *of.modules):
            module.is_frozen = True
    if name in (*CASTS, "to", "type", "type_as", *IN_PLACE):
        return _cast(machine, of, name, arguments, node)
    if name in ("clone", "detach", "numpy") and isinstance(of, Unknown):
        new_value = same(machine, node, of)
        if name != "clone":
            new_value.formats, new_value.scaler = frozenset(), None
        return new_value
    if isinstance(of, State) and name in ("items", "values", "copy"):
        new = machine.unknown(node, f"{machine.text(of, node)}.{name}()")
        new.low, new.is_tensor = of.low, True
        new.fields["of"] = of
        return new
    function = seen if seen is not None else of
    result = unseen(machine, function, arguments, node, f"{machine.text(of, node)}.{name}")
    if not isinstance(result, Unknown):
        return result
    result.formats |= of.formats
    result.scale_of = result.scale_of or of.scale_of
    if isinstance(of, Unknown):
        if result.turn is None:
            result.turn = of.turn
        result.is_tensor = of.is_tensor
        if of.is_tensor and not given:
            result.scaler = of.scaler
    if name == "from_pretrained":
        form = format_of(named.get("torch_dtype") or named.get("dtype"))
        if form in ("fp16", "bf16"):
            result.low = Low(form, machine.place(node))
    return result


def _parser_method(
    machine: Machine, of: Unknown, options: set[Place], name: str, arguments: Arguments, node: ast.AST
) -> Value:
    """A method of a parser of the command line, which returns a part of it, or the parsed options."""
    given, named = arguments
    new = machine.unknown(node, "args" if name in PARSES else of.text)
    new.options, new.is_object = options, True
    if name == "add_argument":
        spelled = [str(each.value) for each in given if isinstance(each, Const)]
        long = next((each for each in spelled if each.startswith("--")), "")
        dest = named.get("dest")
        name = str(dest.value) if isinstance(dest, Const) else long.lstrip("-").replace("-", "_")
        if long:
            place = machine.place(node)
            machine.rules.facts.options[place] = name, long
            options.add(place)
    if name == "parse_known_args":
        return Box(machine.place(node), items={0: new, 1: machine.unknown(node, "rest")})
    return new


def _scaler_method(machine: Machine, of: Value, name: str, arguments: Arguments, node: ast.AST) -> Value:
    given, named = arguments
    first = given[0] if given else next(iter(named.values()), None)
    rules = machine.rules
    if name == "scale" and first is not None:
        if isinstance(first, Box):
            items = {
                key: _scaler_method(machine, of, name, ([each], {}), node)
                for key, each in first.items.items()
            }
            return Box(machine.place(node), items=items)
        new = machine.unknown(node, f"{machine.text(of, node)}.scale(...)", first)
        new.scaler, new.is_tensor = of, True
        return new
    if name == "unscale_" and first is not None:
        rules.unscaled(of, first, node)
    elif name == "step" and first is not None:
        for each in given[1:]:
            if isinstance(each, (Function, Method)):
                machine.call(each, ([], {}), node)
        rules.scaler_stepped(of, first, node)
        new = machine.unknown(node, "the result of scaler.step()", turn=machine.turn())
        new.scale_of = of
        return new
    elif name == "update":
        rules.updated(of)
    elif name == "state_dict":
        rules.state_read(of)
        return State(machine.place(node), of=of)
    elif name == "is_enabled":
        return machine.const(node, of.is_on) if isinstance(of, Scaler) else machine.unknown(node, f"{machine.text(of, node)}.is_enabled()")  # fmt: skip
    elif name in ("load_state_dict",):
        return machine.const(node, None)
    else:
        rules.scale_read(of)
        new = machine.unknown(node, f"{machine.text(of, node)}.{name}()", turn=machine.turn())
        new.scale_of = of
        return new
    return machine.const(node, None)


def _box_method(machine: Machine, of: Box, name: str, arguments: Arguments, node: ast.AST) -> Value:
    given, named = arguments
    first = given[0] if given else None
    if name == "append" and first is not None:
        of.add(first)
    elif name in ("update", "extend"):
        if first is not None:
            merge(machine, of, first)
        of.items.update(named)
    elif name == "get" and isinstance(first, Unknown) and of.items and not of.is_open:
        found = next((item for key, item in of.items.items() if equals(machine, first, key)), None)
        return found or (given[1] if len(given) > 1 else machine.const(node, None))
    elif name in ("get", "pop", "setdefault") and isinstance(first, Const):
        if first.value in of.items:
            return of.items[first.value]
        if name == "setdefault" and len(given) > 1:
            of.items[first.value] = given[1]
        return given[1] if len(given) > 1 else machine.const(node, None) if not of.is_open and name == "get" else machine.unknown(node, code(node), of)  # fmt: skip
    elif name == "items" and of.is_dict:
        items = [Box(machine.place(node), items={0: machine.const(node, key), 1: each}) for key, each in of.items.items()]  # fmt: skip
        return Box(machine.place(node), items=dict(enumerate(items)), is_open=of.is_open)
    elif name == "values":
        return Box(machine.place(node), items=dict(enumerate(of.items.values())), is_open=of.is_open)
    elif name == "copy":
        return Box(machine.place(node), items=dict(of.items), is_dict=of.is_dict, is_open=of.is_open)
    return machine.unknown(node, code(node), of)


def _cast(machine: Machine, of: Value, name: str, arguments: Arguments, node: ast.AST) -> Value:
    """``.half()``, ``.to(...)``, ``.cuda()``: a tensor's is new, and a module's is the same object."""
    given, named = arguments
    form = CASTS.get(name) if not given else None
    if name in ("to", "type"):
        found = (format_of(each) for each in (*given, *named.values()))
        form = next(filter(None, found), None)
    machine.rules.moved(name, given)
    low = Low(form, machine.place(node)) if form in ("fp16", "bf16") else None
    if isinstance(of, Instance) or (isinstance(of, Unknown) and not of.is_tensor):
        if form is not None:
            of.low = low
            if low is not None:
                machine.rules.rounded(of)
        return of
    new = machine.unknown(node, machine.text(of, node), of)
    new.modules, new.scaler, new.is_tensor = of.modules, of.scaler, True
    if form is None:
        new.low = of.low
    elif low is not None:
        new.low = low if of.low is None else of.low
        machine.rules.rounded(new)
    else:
        new.modules = frozenset()
    return new
