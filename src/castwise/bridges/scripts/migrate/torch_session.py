"""Convert hand-written torch.amp to a session: scaler, regions and steps become those of ``castwise.Amp``.

Only if a script shows everything that a session changes, as variables of one function or of the module: which models
and optimizers exist, that a model always runs inside autocast, and that the scale is updated after every step.
"""

from __future__ import annotations

import re

import libcst as cst

from castwise.bridges.scripts.migrate.torch_loop import Event, Undecided, check_gradients, check_windows
from castwise.bridges.scripts.migrate.torch_objects import (
    Thing,
    autocasts,
    check_apart,
    check_derives,
    check_weights,
    is_harmless,
    keeps,
    models_of,
    only_wrapped_later,
    references,
    run_once,
    thing,
    wraps,
)
from castwise.bridges.scripts.reading.torch_amp import AUTOCAST, AmpCall, amp_calls
from castwise.bridges.scripts.reading.view import View

_SCALE_FIELDS = {
    "init_scale": "init",
    "growth_factor": "growth",
    "backoff_factor": "backoff",
    "growth_interval": "interval",
}
_FLOOR = 2.0**-14
_BACKWARD = {"retain_graph", "create_graph", "inputs"}
_UNSEEN = re.compile(r"\bset_autocast_|(?<![.\w])(?<!def )(?:(?:exec|eval)\(|(?:globals|locals|vars)\(\s*\))")
"""Code that accesses variables by strings, or changes autocast's format."""


class Session:
    """What a script shows about its scaler, models and optimizers."""

    def __init__(self, view: View, scaler: AmpCall) -> None:
        self.view = view
        self.arguments = scaler
        self.made = scaler.node
        self.events: list[Event] = []
        self.states: list[cst.Name] = []
        self.optimizers: dict[str, Thing] = {}
        self.updated: dict[str, list[str]] = {}  # model -> its optimizers
        self.models: dict[str, Thing] = {}
        self.regions: list[cst.Call] = []

    # --- looking ------------------------------------------------------------------------------------------

    def look(self, exported: frozenset[str]) -> None:
        """Analyse the script; ``exported`` is as in :func:`castwise.bridges.scripts.migrate.torch_write.rewrite_session`.

        Raises:
            Undecided: The script does something that a session does not support.
        """
        self._look_at_scaler()
        if _UNSEEN.search(self.view.module.code):
            raise Undecided(
                self.made,
                "the script accesses variables by strings (globals, setattr), or sets autocast's dtype for the whole process",
            )
        for use in references(self.view, self.scaler):
            self._look_at_use(use)
        for kind, what in (
            ("step", "the scaler steps no optimizer"),
            ("backward", "the scaler scales no loss"),
        ):
            if not any(event.kind == kind for event in self.events):
                raise Undecided(self.made, f"{what} in this script")
        for event in self.events:
            function = self.view.function(event.node)
            if isinstance(function, cst.FunctionDef) and function.decorators:
                raise Undecided(
                    event.node, "this call is in a decorated function, and the decorator may be torch.compile"
                )
        check_windows(self.view, self.events)
        check_gradients(self.view, self.events)
        self._look_for_plain_steps()
        last = self.home
        for name in sorted(self.optimizers):
            optimizer = self.optimizers[name]
            if optimizer.scope is not self.scaler.scope:
                raise Undecided(
                    optimizer.assignments[0].node, f"{name!r} is not created in the same scope as the scaler"
                )
            last = max(last, self._line(optimizer.assignments[0].node), key=self.view.index)
            for model in models_of(self.view, optimizer):
                self.updated.setdefault(model.value, []).append(name)
                self.models.setdefault(model.value, thing(self.view, model))
            check_derives(self.view, optimizer, "torch.optim.Optimizer")
        self.prepared_after = last
        check_apart(self.view, list(self.optimizers.values()))
        self._find_regions()
        for each in self.models.values():
            self._look_at_model(each)
        if self.scaler.scope is self.view.globals:
            for name in (self.scaler.name, *self.optimizers, *self.models):
                if exported & {name, "*"}:
                    raise Undecided(self.made, f"another script may import {name!r} from this one")

    def _line(self, node: cst.CSTNode) -> cst.SimpleStatementLine:
        """The statement of an assignment, in the scaler's block."""
        line = self.view.statement(node)
        if not isinstance(line, cst.SimpleStatementLine) or self.view.suite(line) is not self.suite:
            raise Undecided(node, "the scaler and the optimizers are made in different blocks")
        return line

    def _look_at_scaler(self) -> None:
        view, line = self.view, self.view.statement(self.made)
        targets = view.targets(view.parent(self.made))
        if (
            not isinstance(line, cst.SimpleStatementLine)
            or len(line.body) != 1
            or len(targets) != 1
            or not isinstance(targets[0], cst.Name)
        ):
            raise Undecided(self.made, "the scaler is not assigned to one variable in a separate statement")
        suite = view.suite(line)
        if suite is None:
            raise Undecided(self.made, "the scaler is made on the same line as its if")
        self.home, self.suite = line, suite
        self.scaler = thing(view, targets[0])
        if view.scope(self.made) is not self.scaler.scope:
            raise Undecided(
                self.made,
                f"{self.scaler.name!r} is a global or nonlocal variable of the function that makes it",
            )
        if len(self.scaler.assignments) > 1:
            raise Undecided(
                self.scaler.assignments[1].node, f"{self.scaler.name!r} is assigned more than once"
            )
        if self.arguments.unseen:
            raise Undecided(self.made, self.arguments.unseen)
        where = self.arguments.device
        if isinstance(where, cst.BaseExpression) and not view.is_fixed(where):
            raise Undecided(where, "the device may change later")
        self.device = _device(self.arguments)
        self.enabled = _condition(self.arguments)
        items = []
        for name, value in self.arguments.given.items():
            if name not in _SCALE_FIELDS:
                continue
            number = view.number(value)
            if number is None:
                raise Undecided(value, f"{name} is not a literal number")
            if name == "init_scale" and number < _FLOOR:
                raise Undecided(value, "init_scale is below 2**-14, the smallest loss scale of a session")
            items.append(
                f"+loss_scale.{_SCALE_FIELDS[name]}={str(number).replace('e+', 'e').removesuffix('.0')}"
            )
        self.plan = "".join(["fp16-mixed+output=as_is", *items])

    def _look_at_use(self, name: cst.Name) -> None:
        view = self.view
        attribute = view.parent(name)
        call = None if attribute is None else view.parent(attribute)
        if not isinstance(attribute, cst.Attribute) or attribute.value is not name:
            raise Undecided(name, f"{name.value!r} is passed to other code here")
        what = attribute.attr.value
        if not isinstance(call, cst.Call) or call.func is not attribute:
            raise Undecided(name, f"{name.value}.{what} is used here without being called")
        is_statement = isinstance(view.parent(call), cst.Expr)
        if what == "scale":
            outer = view.parent(call)
            backward = None if outer is None else view.parent(outer)
            if (
                not isinstance(outer, cst.Attribute)
                or outer.attr.value != "backward"
                or not isinstance(backward, cst.Call)
                or not isinstance(view.parent(backward), cst.Expr)
                or len(call.args) != 1
                or any(
                    argument.keyword is None or argument.keyword.value not in _BACKWARD
                    for argument in backward.args
                )
            ):
                raise Undecided(
                    call,
                    f"{name.value}.scale(...) is used for something other than .backward(); with castwise use amp.scale and "
                    f"amp.grad",
                )
            self._note(Event("backward", backward))
        elif what in ("step", "unscale_"):
            target = call.args[0].value if len(call.args) == 1 and not call.args[0].star else None
            if not is_statement or not isinstance(target, cst.Name) or call.args[0].keyword:
                raise Undecided(
                    call,
                    f"{name.value}.{what}(...) has an argument other than an optimizer's name, or its result is used",
                )
            self.optimizers.setdefault(target.value, thing(view, target))
            self._note(Event("step" if what == "step" else "unscale", call, target.value))
        elif what == "update" and not call.args and is_statement:
            self._note(Event("update", call))
        elif what == "get_scale":
            self.events.append(Event("look", call))
        elif what in ("state_dict", "load_state_dict"):
            self.states.append(name)
        else:
            raise Undecided(
                call, f"{name.value}.{what}({'...' if call.args else ''}) has no counterpart in a session"
            )

    def _note(self, event: Event) -> None:
        if not self.view.is_alone(event.node):
            raise Undecided(event.node, f"{self.view.code(event.node)} shares its line with other code")
        self.events.append(event)

    def _look_for_plain_steps(self) -> None:
        """Check that all gradients come from the scaler, and all steps go through it, unless it may be disabled."""
        view = self.view
        for name in (name for each in self.optimizers.values() for name in references(view, each)):
            attribute = view.parent(name)
            outer = None if attribute is None else view.parent(attribute)
            if isinstance(attribute, cst.Attribute) and attribute.attr.value == "step":
                called = isinstance(outer, cst.Call) and outer.func is attribute
                if self.enabled is None or not called:
                    what = "called without the scaler" if called else "used without being called"
                    raise Undecided(name, f"{name.value}.step is {what} here")
        own = {event.node for event in self.events}
        for call, _ in view.calls:
            if (
                self.enabled is None
                and call not in own
                and isinstance(call.func, cst.Attribute)
                and call.func.attr.value == "backward"
                and view.is_within(view.scope(call), self.scaler.scope)
            ):
                raise Undecided(call, "this backward starts from a loss that the scaler has not scaled")

    def _find_regions(self) -> None:
        view = self.view
        for each in amp_calls(view, AUTOCAST):
            call = each.node
            if (
                isinstance(view.parent(call), cst.WithItem)
                and view.is_within(view.scope(call), self.scaler.scope)
                and not self._is_in_class(call)
                and self._is_own(each)
            ):
                if not self._is_after(call, frozenset()):
                    raise Undecided(call, "this autocast may be entered before the session exists")
                self.regions.append(call)
        if not self.regions:
            raise Undecided(
                self.made, "no fp16 autocast on the scaler's device is in the scope of the scaler"
            )

    def _is_in_class(self, node: cst.CSTNode) -> bool:
        """Whether code is a method of a class that is instantiated where the scaler is visible: a model with its own autocast."""
        classes = (outer for outer in self.view.around(node) if isinstance(outer, cst.ClassDef))
        return any(self.view.is_within(self.view.scope(each), self.scaler.scope) for each in classes)

    def _is_after(self, node: cst.CSTNode, seen: frozenset[cst.CSTNode]) -> bool:
        """Whether code certainly runs only after the session exists; ``seen``: functions that were already checked."""
        view = self.view
        function = view.function(node)
        if function is view.function(self.home):
            return view.position(node) > view.position(self.prepared_after)
        if any(view.function(event.node) is function for event in self.events):
            return True  # it uses the scaler
        scope = view.scope(function)
        if not isinstance(function, cst.FunctionDef) or scope is None or function in seen:
            return False
        if scope is self.scaler.scope and view.position(function) > view.position(self.prepared_after):
            return True
        calls = [access.node for item in scope[function.name.value] for access in item.references]
        return bool(calls) and all(self._is_after(call, seen | {function}) for call in calls)

    def _is_own(self, call: AmpCall) -> bool:
        """Whether an autocast does the same as the session's plan: fp16 on the scaler's device, enabled together with the scaler."""
        try:
            enabled = _condition(call)
        except Undecided:
            return False
        is_plain = not call.unseen and "cache_enabled" not in call.given
        return is_plain and call.format == "fp16" and _device(call) == self.device and enabled == self.enabled

    def _look_at_model(self, model: Thing) -> None:
        view = self.view
        if model.scope is not self.scaler.scope:
            raise Undecided(
                model.assignments[0].node, f"{model.name!r} is not created in the same scope as the scaler"
            )
        at = view.end(self.prepared_after)  # and the other statements on its line
        only_wrapped_later(view, model, at, self.suite)
        check_derives(view, model, "torch.nn.Module")
        check_weights(view, model, at)
        runs: dict[cst.With, list[cst.Call]] = {}
        for name in references(view, model):
            parent = view.parent(name)
            if isinstance(parent, cst.Call) and parent.func is name:
                region = self._region(name)
                if region is not None:
                    runs.setdefault(region, []).append(parent)
                    continue
                raise Undecided(
                    name,
                    f"{name.value!r} runs outside of autocast here, and a prepared model always runs by the plan",
                )
            small = view.small(name)
            if is_harmless(view, name) or any(view.small(item.node) is small for item in model.assignments):
                continue  # model = wrap(model) and similar statements
            early = view.scope(name) is model.scope and view.position(name) < at
            if not (early and self._passes(small, model)):
                raise Undecided(
                    name, f"{name.value!r} is passed here to code that may run it outside of autocast"
                )
        for region, calls in runs.items():
            run_once(view, model.name, region, calls, self._losses())

    def _losses(self) -> set[str]:
        """Names on which backward is called."""
        scaled = [event.node.func for event in self.events if event.kind == "backward"]
        calls = [each.value for each in scaled if isinstance(each, cst.Attribute)]
        return {self.view.code(call.args[0].value) for call in calls if isinstance(call, cst.Call)}

    def _passes(self, small: cst.CSTNode, model: Thing) -> bool:
        """Whether a statement is a call that stores nothing: ``model.cuda()``, but not ``list.append(model)``."""
        call = small.value if isinstance(small, cst.Expr) else None
        receiver = call.func if isinstance(call, cst.Call) else None
        while isinstance(receiver, (cst.Attribute, cst.Subscript, cst.Call)):
            receiver = receiver.func if isinstance(receiver, cst.Call) else receiver.value
        if not isinstance(call, cst.Call) or not isinstance(receiver, cst.Name) or wraps(self.view, call):
            return False
        if receiver is call.func and keeps(self.view, receiver):
            return False
        return receiver is call.func or receiver.value == model.name or bool(self.view.origin(receiver))

    def _region(self, node: cst.CSTNode) -> cst.With | None:
        """The outermost autocast around code, if the nearest one is a region of the session."""
        view = self.view
        found: cst.With | None = None
        for outer in view.around(node):
            if isinstance(outer, cst.With):
                if casts := autocasts(view, outer):
                    if found is None and casts[-1] not in self.regions:
                        return None
                    found = outer
            elif isinstance(outer, (cst.FunctionDef, cst.Lambda, cst.ClassDef, cst.GeneratorExp)):
                break
        return found


def _device(call: AmpCall) -> str:
    """The device type as code."""
    at = call.device
    return call.view.code(at).replace("'", '"') if isinstance(at, cst.BaseExpression) else f'"{at or "cuda"}"'


def _condition(call: AmpCall) -> str | None:
    """The condition in ``enabled=``; None if there is none."""
    view, value = call.view, call.given.get("enabled")
    if value is None or view.code(value) == "True":
        return None
    if not isinstance(value, (cst.Name, cst.Attribute)) or view.code(value) == "False":
        raise Undecided(value, "enabled= is neither True nor a plain name")
    if not view.is_fixed(value):
        raise Undecided(value, f"{view.code(value)} may be assigned more than once")
    return view.code(value)
