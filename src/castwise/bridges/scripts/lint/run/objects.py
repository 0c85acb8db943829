"""Objects of torch and other libraries in an abstract run: how they are made, and what is computed with them."""

from __future__ import annotations

import ast

from castwise.bridges.scripts.lint.run.decisions import is_true
from castwise.bridges.scripts.lint.run.machine import Machine
from castwise.bridges.scripts.lint.run.names import (
    AUTOCAST,
    LOSS_NAMES,
    QUIET,
    SAVES,
    SCALED,
    SCALER,
    SCHEDULED,
    format_of,
    is_closed,
    is_optimizer,
)
from castwise.bridges.scripts.lint.run.values import (
    Arguments,
    Autocast,
    Box,
    Class,
    Const,
    External,
    Function,
    Instance,
    Optimizer,
    Place,
    Scaler,
    Scheduler,
    Unknown,
    Value,
    code,
    reachable,
)


def same(machine: Machine, node: ast.AST, value: Value) -> Value:
    """A value computed from one other, such as ``-loss``."""
    new = machine.unknown(node, machine.text(value, node), value)
    new.scaler, new.low = value.scaler, value.low
    new.is_tensor = True
    return new


def combine(machine: Machine, node: ast.AST, operator: ast.operator, left: Value, right: Value) -> Value:
    """The result of ``left + right`` or another operator."""
    if isinstance(operator, ast.BitOr) and isinstance(left, Box) and isinstance(right, Box):
        return Box(machine.place(node), items={**left.items, **right.items}, is_dict=True)
    if isinstance(operator, ast.Add) and isinstance(left, Box) and isinstance(right, Box):
        box = Box(machine.place(node), is_open=left.is_open or right.is_open)
        for each in (*left.items.values(), *right.items.values()):
            box.add(each)
        return box
    text = code(node) if isinstance(node, ast.expr) else "a value"
    new = machine.unknown(node, text, left, right)
    new.scaler = left.scaler or right.scaler
    new.is_tensor = bool(new.formats) or any(isinstance(each, Unknown) and each.is_tensor for each in (left, right))  # fmt: skip
    if isinstance(operator, ast.Mult) and _is_by_hand(node, left, right):
        new.formats = frozenset()
    return new


def _is_by_hand(node: ast.AST, left: Value, right: Value) -> bool:
    """Whether a product may be a loss scaled by hand."""
    parts = [node.left, node.right] if isinstance(node, ast.BinOp) else []
    big = any(isinstance(each, Const) and isinstance(each.value, (int, float)) and each.value >= 64 for each in (left, right))  # fmt: skip
    return big or any(SCALED.search(code(each)) for each in parts)


def make_dict(machine: Machine, arguments: Arguments, node: ast.AST) -> Box:
    """``dict(...)``: of keywords, of another dictionary, or of pairs."""
    given, named = arguments
    scope = machine.frames[-1][0] if machine.frames else None
    box = Box(
        machine.place(node),
        items=dict(named),
        is_dict=True,
        is_open="**" in named,
        maker=scope,
    )
    for each in given:
        pairs = list(each.items.values()) if isinstance(each, Box) and not each.is_dict else []
        if pairs and all(isinstance(pair, Box) and len(pair.items) == 2 for pair in pairs):
            for pair in pairs:
                assert isinstance(pair, Box)
                box.add(pair.items[1], object())
            box.is_open = True
        else:
            merge(machine, box, each)
    return box


def merge(machine: Machine, box: Box, value: Value) -> None:
    """Add what ``**value`` or ``*value`` contains."""
    if isinstance(value, Box):
        for key, each in list(value.items.items()):
            box.add(each, key if box.is_dict else None)
        box.is_open |= value.is_open
    else:
        box.add(value, object())
        box.is_open = True


def as_region(machine: Machine, value: Value) -> Autocast | None:
    """The autocast region that a decorator opens, if it is one."""
    if isinstance(value, Autocast):
        return value
    if isinstance(value, External) and value.name in AUTOCAST:
        return make_autocast(machine, value.name, ([], {}), value.place)
    return None


def note_escape(machine: Machine, values: list[Value]) -> None:
    """Code that the script does not show may use these values."""
    machine.rules.escaped(reachable(values))


def note_instance(machine: Machine, made: Instance, kind: Class, arguments: Arguments) -> None:
    """An object of a class of the program was made."""
    if not is_closed(kind):
        note_escape(machine, [made])
    machine.rules.facts.made.add(kind.place)
    given = reachable([*arguments[0], *arguments[1].values()])
    if kind.derives_from("torch.optim."):
        made.modules = frozenset().union(*(each.modules for each in given))


def unseen(
    machine: Machine, function: Value | None, arguments: Arguments, node: ast.AST, name: str = ""
) -> Value:
    """Call something whose code the script does not show."""
    given, named = arguments
    values = [*given, *named.values()]
    called = name or (machine.text(function, node) if function is not None else "")
    if called.startswith("type("):
        return make_dict(machine, arguments, node)
    contents = reachable(values)
    if not QUIET.search(called):
        machine.rules.escaped(contents)
        if SAVES.search(called):
            machine.rules.saved(node, values)
    if SCHEDULED.search(called) and any(is_optimizer(each) for each in values):
        return Scheduler(machine.place(node), tuple(machine.loops))
    sources = [*contents, function]
    new = machine.unknown(node, code(node) if isinstance(node, ast.expr) else called, *sources)
    new.made = True
    new.formats |= formats_here(machine)
    if SCALED.search(called):
        new.formats = frozenset()
    if LOSS_NAMES.search(called) or (isinstance(node, ast.Call) and LOSS_NAMES.search(code(node.func))):
        machine.rules.lost(node, given)
    if isinstance(function, Unknown) and function.low is not None:
        new.low = function.low
        new.modules = frozenset({function})
    new.is_tensor = isinstance(function, Unknown) and function.made and function.owner is None
    return new


def formats_here(machine: Machine) -> frozenset[str | None]:
    """The format in which what is computed here has its gradients; empty outside of enabled autocast regions."""
    regions = machine.regions
    if not regions or not regions[-1].is_on or any(each.is_without_gradients for each in regions):
        return frozenset()
    return frozenset({regions[-1].format})


def call_instance(machine: Machine, of: Instance, kind: Class, arguments: Arguments, node: ast.AST) -> Value:
    """Call an object of a class of the program."""
    for name in ("__call__", "forward"):
        method = kind.find(name)
        if isinstance(method, Function):
            inner = machine.call_function(method, ([of, *arguments[0]], arguments[1]), node)
            if name == "__call__" or not isinstance(inner, Unknown):
                return inner
            inner.formats |= formats_here(machine)
            for each in reachable([*arguments[0], *arguments[1].values()]):
                inner.formats |= each.formats
            if of.low is not None:
                inner.low, inner.modules = of.low, frozenset({of})
            inner.is_tensor = True
            return inner
    result = unseen(machine, None, arguments, node, "a call")
    if of.low is not None:
        result.low, result.modules = of.low, frozenset({of})
    if isinstance(result, Unknown):
        result.is_tensor = True
    return result


def norm_of(machine: Machine, scaler: Value | None, arguments: Arguments, node: ast.AST) -> Unknown:
    """The norm that clipping returns: it is not finite where the scaler skips the step."""
    new = machine.unknown(node, "the norm", *arguments[0], turn=machine.turn())
    new.scale_of = scaler
    return new


def make_device(machine: Machine, value: Value | None, node: ast.AST) -> Value:
    """``torch.device(...)``: the device type as a literal, if the script shows it."""
    if isinstance(value, Const) and isinstance(value.value, str):
        return machine.const(node, value.value.partition(":")[0])
    return value if isinstance(value, Unknown) else machine.unknown(node, code(node))


def named_arguments(order: tuple[str, ...], arguments: Arguments) -> dict[str, Value] | None:
    """The arguments of a call by name; None if the script does not show all of them."""
    given, named = arguments
    if "*" in named or "**" in named:
        return None
    return {**dict(zip(order, given, strict=False)), **named}


def make_autocast(machine: Machine, name: str, arguments: Arguments, place: Place) -> Autocast:
    """The region that a call of autocast makes."""
    implied = AUTOCAST[name]
    order = ("enabled", "dtype", "cache_enabled") if implied else ("device_type", "dtype", "enabled")
    found = named_arguments(order, arguments)
    node = ast.Constant(None, lineno=place.line, col_offset=place.column)
    if found is None:
        return Autocast(place, format=None, device=implied)
    kind = found.get("device_type")
    device = implied
    if isinstance(kind, Const) and isinstance(kind.value, str):
        device = kind.value.partition(":")[0]
    is_on = is_true(machine, found["enabled"], node) if "enabled" in found else True
    given = found.get("dtype")
    form: str | None
    if given is None or (isinstance(given, Const) and given.value is None):
        form = machine.rules.default_format or {"cpu": "bf16", "cuda": "fp16"}.get(device or "")
    else:
        form = format_of(given)
    if form == "fp32":
        is_on = False
    is_switched = isinstance(found.get("enabled"), Unknown)
    return Autocast(place, format=form, device=device, is_on=is_on, is_switched=is_switched)


def make_scaler(machine: Machine, name: str, arguments: Arguments, node: ast.AST) -> Scaler:
    """The scaler that a call makes."""
    implied = SCALER[name]
    order = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
    found = named_arguments(order if implied else ("device", *order), arguments)
    is_on, is_switched, device = True, False, implied
    if found is not None:
        is_on = is_true(machine, found["enabled"], node) if "enabled" in found else True
        is_switched = isinstance(found.get("enabled"), Unknown)
        at = found.get("device")
        device = str(at.value).partition(":")[0] if isinstance(at, Const) else device
    made = machine.place(node), tuple(machine.loops)
    scaler = Scaler(*made, is_on=is_on, is_switched=is_switched, device=device)
    machine.rules.scaler_made(scaler, node, is_seen=found is not None)
    return scaler


def make_optimizer(machine: Machine, name: str, arguments: Arguments, node: ast.AST) -> Optimizer:
    """The optimizer that a call makes."""
    given = reachable([*arguments[0], *arguments[1].values()])
    modules = frozenset().union(*(each.modules for each in given))
    return Optimizer(machine.place(node), tuple(machine.loops), modules=modules, name=name)


def copy_of(machine: Machine, value: Value, node: ast.AST) -> Value:
    """A copy, as ``copy.deepcopy`` makes one."""
    if isinstance(value, Box):
        return Box(value.place, items=dict(value.items), is_dict=value.is_dict, is_open=value.is_open)
    if isinstance(value, Instance):
        return Instance(machine.place(node), kind=value.kind, fields=dict(value.fields), low=value.low)
    new = machine.unknown(node, f"a copy of {machine.text(value, node)}", value)
    new.low = value.low
    return new
