"""Colossal-AI AMP: ``convert_to_amp`` and its loop become those of ``castwise.Amp``; the engine gets the drop-in."""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst
from libcst import metadata as meta

from castwise.migrate.dropins import rewrite_imports, uses
from castwise.migrate.edits import FLOOR, Edits, statement
from castwise.migrate.objects import session_name, wraps
from castwise.migrate.view import Undecided, View, only_call

__all__ = ["rewrite_colossalai"]

_PLANS: Mapping[str, str] = {"TORCH": "fp16-mixed", "NAIVE": "naive"}
"""Plans of the modes. The Apex mode unscales gradients at every backward, which a session does at the step."""
_CONVERT = {"colossalai.amp.convert_to_amp", "colossalai.legacy.amp.convert_to_amp"}
_TYPE = {"colossalai.amp.AMP_TYPE", "colossalai.amp.amp_type.AMP_TYPE", "colossalai.legacy.amp.AMP_TYPE"}


def rewrite_colossalai(edits: Edits, *, alone: bool) -> None:
    """Rewrite what a script does with Colossal-AI.

    Args:
        edits: Where the changes go.
        alone: Whether the script uses no other kind of mixed precision.
    """
    view = edits.view
    if not uses(view, "colossalai"):
        return
    calls = [node for node in view.nodes if isinstance(node, cst.Call) and view.origin(node.func) in _CONVERT]
    if calls:
        try:
            if not alone:
                raise Undecided(calls[0], "the script uses another kind of mixed precision too")
            if len(calls) > 1:
                raise Undecided(calls[1], "convert_to_amp is called more than once")
            loop = _Loop(view, calls[0])
            loop.look()
            loop.rewrite(edits)
        except Undecided as why:
            edits.left(
                why.node, f"not made a castwise.Amp, but run by castwise.compat.colossalai: {why.reason}"
            )
    for node in view.nodes:
        if isinstance(node, cst.Call) and view.origin(node.func) in (
            "colossalai.initialize",
            "colossalai.initialize.initialize",
        ):
            edits.left(
                node,
                "the engine stays, on castwise.compat.colossalai: its mode, clipping and accumulation come from the configuration "
                "when it runs",
            )
    rewrite_imports(edits, "colossalai", _gone(edits))


def _gone(edits: Edits) -> frozenset[str]:
    """Imported names that nothing uses any more."""
    view = edits.view
    used: dict[str, bool] = {}
    for node in view.nodes:
        origin = view.origin(node) if isinstance(node, (cst.Name, cst.Attribute)) else None
        if origin is not None and origin.startswith("colossalai."):
            rewritten = node in edits.rewritten
            used[origin] = used.get(origin, True) and rewritten
    return frozenset(name for name, rewritten in used.items() if rewritten)


class _Loop:
    """What a script shows about ``convert_to_amp`` and what follows it."""

    def __init__(self, view: View, call: cst.Call) -> None:
        self.view = view
        self.call = call
        self.backwards: list[cst.Call] = []
        self.steps: list[tuple[cst.Call, cst.BaseStatement | None, cst.BaseExpression | None]] = []

    def look(self) -> None:
        """Find everything.

        Raises:
            Undecided: Something is not as a session needs it.
        """
        view, call = self.view, self.call
        line, assign = view.statement(call), view.parent(call)
        target = (
            assign.targets[0].target if isinstance(assign, cst.Assign) and len(assign.targets) == 1 else None
        )
        targets = (
            [view.code(element.value) for element in target.elements] if isinstance(target, cst.Tuple) else []
        )
        order = ["model", "optimizer", "criterion", "mode", "amp_config"]
        if any(argument.star for argument in call.args) or len(call.args) > len(order):
            raise Undecided(call, "its arguments cannot be seen")
        given = {a.keyword.value if a.keyword else order[i]: a.value for i, a in enumerate(call.args)}
        names = [given.get(name) for name in order[:3]]
        if (
            not isinstance(line, cst.SimpleStatementLine)
            or len(line.body) != 1
            or not all(isinstance(name, cst.Name) for name in names)
            or [view.code(name) for name in names if name is not None] != targets
        ):
            raise Undecided(
                call,
                "it is not of the form model, optimizer, criterion = convert_to_amp(model, optimizer, criterion, ...)",
            )
        self.line = line
        self.model, self.optimizer, self.criterion = targets
        mode = given.get("mode")
        if (
            not isinstance(mode, cst.Attribute)
            or view.origin(mode.value) not in _TYPE
            or mode.attr.value not in _PLANS
        ):
            raise Undecided(
                call,
                "the mode is APEX, which unscales gradients at every backward, or known only when it runs",
            )
        self.mode, self.mode_node = mode.attr.value, mode
        config = given.get("amp_config")
        if config is not None and view.code(config) not in ("None", "{}", "dict()"):
            raise Undecided(
                config, f"amp_config={view.code(config)} has no preset that is sure to mean the same"
            )
        model, optimizer = names[:2]
        assert isinstance(optimizer, cst.Name)
        assert isinstance(model, cst.Name)
        for item in view.bindings(model):
            value = view.assigned_value(item)
            if value is not None and wraps(value):
                raise Undecided(value, f"{model.value!r} is wrapped, and amp.prepare goes before wrapping")
        self._look_at_optimizer(optimizer)

    def _look_at_optimizer(self, optimizer: cst.Name) -> None:
        view = self.view
        items = [item for item in view.bindings(optimizer) if isinstance(item, meta.Assignment)]
        places = {access.node for item in items for access in item.references}
        for name in sorted((node for node in places if isinstance(node, cst.Name)), key=view.position):
            attribute = view.parent(name)
            if not isinstance(attribute, cst.Attribute) or attribute.value is not name:
                if view.position(name) > view.position(self.line) and view.statement(name) is not self.line:
                    raise Undecided(
                        name, f"{name.value!r} is handed on here, and may be asked for backward() there"
                    )
                continue
            call = view.parent(attribute)
            what = attribute.attr.value
            if what in ("backward", "step", "clip_grad_norm"):
                whole = isinstance(call, cst.Call) and view.whole_statement(call) is not None
                if not whole:
                    raise Undecided(name, f"the result of {name.value}.{what}() is used")
                assert isinstance(call, cst.Call)
                self._take(what, call)
        if not self.backwards or not self.steps:
            raise Undecided(
                self.call,
                f"{optimizer.value}.backward(loss) and {optimizer.value}.step() are not in this script",
            )

    def _take(self, what: str, call: cst.Call) -> None:
        view = self.view
        if what == "backward":
            if len(call.args) != 1 or call.args[0].star:
                raise Undecided(call, "backward is given more than a loss")
            self.backwards.append(call)
        elif what == "step":
            if call.args:
                raise Undecided(call, "step is given a closure")
            before = view.beside(call, -1)
            limit = self._limit(before)
            self.steps.append((call, None if limit is None else before, limit))
        else:
            after = only_call(view.beside(call, 1))
            right_before = after is not None and view.code(after) == f"{self.optimizer}.step()"
            if not right_before or self._limit(view.statement(call)) is None:
                raise Undecided(call, "gradients are clipped, but not right before the step")

    def _limit(self, line: cst.CSTNode | None) -> cst.BaseExpression | None:
        """The norm in ``optimizer.clip_grad_norm(model, norm)``."""
        call = only_call(line)
        if call is None or self.view.code(call.func) != f"{self.optimizer}.clip_grad_norm":
            return None
        if len(call.args) != 2 or self.view.code(call.args[0].value) != self.model:
            return None
        return call.args[1].value

    def rewrite(self, edits: Edits) -> None:
        """Write the session."""
        view, amp = self.view, session_name(self.view)
        edits.use("Amp")
        both = f"{self.model}, {self.optimizer}"
        edits.replace(self.line, statement(f"{both} = {amp}.prepare({both})", like=self.line))
        edits.insert_before(
            self.line, statement(f'{amp} = castwise.Amp("{_PLANS[self.mode]}", device="cuda")')
        )
        for call in self.backwards:
            edits.replace(call.func, cst.parse_expression(f"{amp}.backward"))
        for call, clip, limit in self.steps:
            maximum = "" if limit is None else f", max_norm={view.code(limit)}"
            edits.replace(call, cst.parse_expression(f"{amp}.step({self.optimizer}{maximum})"))
            if clip is not None:
                edits.drop(clip)
        for node in (self.call.func, self.mode_node.value, self.mode_node):
            edits.mark(node)
        edits.differs(
            self.line,
            f"{self.criterion!r} runs in fp32 on the model's fp32 outputs; under `with {amp}.autocast():` it runs by the plan",
        )
        edits.differs(self.line, FLOOR)
        edits.differs(
            self.line,
            'the plan is for CUDA, as Colossal-AI was: name another device in castwise.Amp(..., device="cuda") to run there',
        )
