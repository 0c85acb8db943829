"""Apex amp: a loop of the plain kind becomes one of ``castwise.Amp``; any other gets the drop-in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import libcst as cst
from libcst import metadata as meta

from castwise.migrate.dropins import rewrite_imports, uses
from castwise.migrate.edits import FLOOR, Edits, statement
from castwise.migrate.loop import CLIP
from castwise.migrate.objects import Thing, references, session_name
from castwise.migrate.view import Undecided, View, inside, only_call

__all__ = ["rewrite_apex"]

_LEVELS: Mapping[str, str] = {"O0": "O0", "O1": "O1", "O2": "O2", "O3": "O3"}
_AS_BY_DEFAULT: Mapping[str, Mapping[str, set[str]]] = {
    "O0": {"loss_scale": {"1.0", "1"}},
    "O1": {"loss_scale": {'"dynamic"', "'dynamic'"}, "patch_torch_functions": {"True"}},
    "O2": {"loss_scale": {'"dynamic"', "'dynamic'"}, "keep_batchnorm_fp32": {"True", '"True"', "'True'"}},
    "O3": {"loss_scale": {"1.0", "1"}, "keep_batchnorm_fp32": {"False", '"False"', "'False'"}},
}
"""Values of overrides that change nothing at a level."""


def rewrite_apex(edits: Edits, *, alone: bool) -> None:
    """Rewrite what a script does with Apex.

    Args:
        edits: Where the changes go.
        alone: Whether the script uses no other kind of mixed precision.
    """
    view = edits.view
    if not uses(view, "apex"):
        return
    gone: frozenset[str] = frozenset()
    used = [node for node in view.nodes if _amp_name(view, node)]
    if used:
        try:
            if not alone:
                raise Undecided(used[0], "the script uses another kind of mixed precision too")
            loop = _Loop(view, used)
            loop.look()
            loop.rewrite(edits)
            gone = frozenset({"apex.amp"})
        except Undecided as why:
            edits.left(why.node, f"not made a castwise.Amp, but run by castwise.compat.apex: {why.reason}")
    rewrite_imports(edits, "apex", gone)


def _amp_name(view: View, node: cst.CSTNode) -> str:
    """``initialize`` for a use of ``apex.amp.initialize`` under whatever name; empty for anything else."""
    if not isinstance(node, (cst.Name, cst.Attribute)):
        return ""
    found = next((name for name in view.origins(node) if name.startswith("apex.amp.")), "")
    return found.removeprefix("apex.amp.")


@dataclasses.dataclass(frozen=True)
class _Step:
    """One ``scale_loss`` block and the step after it.

    ``looked_at``: other statements stand between them, which may look at gradients: those were unscaled there.
    """

    block: cst.With
    loss: cst.BaseExpression
    backward: cst.Call
    step: cst.Call
    optimizer: str
    clip: cst.SimpleStatementLine | None
    limit: cst.BaseExpression | None
    looked_at: bool


class _Loop:
    """What a script shows about its use of Apex."""

    def __init__(self, view: View, used: list[cst.CSTNode]) -> None:
        self.view = view
        self.used = used
        self.steps: list[_Step] = []

    def _calls(self, name: str) -> list[cst.Call]:
        found = []
        for node in self.used:
            call = self.view.parent(node)
            if _amp_name(self.view, node) == name:
                if not isinstance(call, cst.Call) or call.func is not node or self.view.origin(node) is None:
                    raise Undecided(node, f"amp.{name} is not called here, or amp may be something else")
                found.append(call)
        return found

    def look(self) -> None:
        """Find everything.

        Raises:
            Undecided: Something is not as a session needs it.
        """
        for node in self.used:
            name = _amp_name(self.view, node)
            if name not in ("initialize", "scale_loss", "master_params"):
                raise Undecided(node, f"amp.{name} is used")
        made = self._calls("initialize")
        if len(made) != 1:
            raise Undecided(self.used[0], f"amp.initialize is called {len(made)} times in this script")
        self._look_at_initialize(made[0])
        clipped = {id(call) for call in self._calls("master_params")}
        for call in self._calls("scale_loss"):
            step = self._look_at_block(call)
            if step.clip is not None:
                clipped -= {id(node) for node in inside(step.clip)}
            self.steps.append(step)
        for call in self._calls("master_params"):
            if id(call) in clipped:
                raise Undecided(
                    call, "amp.master_params is used for something else than clipping right before the step"
                )
        self._look_at_optimizer()
        self._look_at_model()
        self._look_at_scaled_losses()

    def _look_at_scaled_losses(self) -> None:
        """Nothing may read ``scaled_loss`` outside of its block: it is not there any more."""
        names = {
            self.view.code(step.block.items[0].asname.name)
            for step in self.steps
            if step.block.items[0].asname
        }
        known = {id(node) for step in self.steps for node in inside(step.block)}
        for node in self.view.nodes:
            if isinstance(node, cst.Name) and node.value in names and id(node) not in known:
                raise Undecided(node, f"{node.value!r} is used outside of its block")

    def _look_at_initialize(self, call: cst.Call) -> None:
        view = self.view
        assign = view.parent(call)
        line = view.statement(call)
        names = [
            argument.value for argument in call.args[:2] if argument.keyword is None and not argument.star
        ]
        target = (
            assign.targets[0].target if isinstance(assign, cst.Assign) and len(assign.targets) == 1 else None
        )
        targets = [element.value for element in target.elements] if isinstance(target, cst.Tuple) else []
        if (
            len(names) != 2
            or not all(isinstance(name, cst.Name) for name in names)
            or [view.code(name) for name in names] != [view.code(name) for name in targets]
            or not isinstance(line, cst.SimpleStatementLine)
            or len(line.body) != 1
        ):
            raise Undecided(
                call, "it is not of the form model, optimizer = amp.initialize(model, optimizer, ...)"
            )
        self.line, (self.model, self.optimizer) = line, names
        options = {argument.keyword.value: argument.value for argument in call.args[2:] if argument.keyword}
        if len(options) != len(call.args) - 2:
            raise Undecided(call, "its options are not given by name")
        level = options.pop("opt_level", None)
        written = '"O1"' if level is None else view.code(level)
        self.level = written.strip("\"'")
        if written[0] not in "\"'" or self.level not in _LEVELS:
            raise Undecided(call, f"the level is known only when it runs (opt_level={written})")
        options.pop("verbosity", None)
        for name, value in options.items():
            if view.code(value) != "None" and view.code(value) not in _AS_BY_DEFAULT[self.level].get(
                name, ()
            ):
                raise Undecided(
                    call, f"{name}={view.code(value)} has no preset that is sure to mean the same"
                )

    def _look_at_block(self, call: cst.Call) -> _Step:
        """``with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()``, and the step."""
        view, block = self.view, self.view.statement(call)
        if (
            not isinstance(block, cst.With)
            or len(block.items) != 1
            or block.items[0].item is not call
            or block.items[0].asname is None
            or not isinstance(block.body, cst.IndentedBlock)
            or len(call.args) != 2
            or any(argument.keyword or argument.star for argument in call.args)
            or view.code(call.args[1].value) != view.code(self.optimizer)
        ):
            raise Undecided(
                call, "amp.scale_loss is not of the form with amp.scale_loss(loss, optimizer) as scaled_loss:"
            )
        scaled = view.code(block.items[0].asname.name)
        lines = block.body.body
        small = lines[0].body[0] if isinstance(lines[0], cst.SimpleStatementLine) else None
        backward = small.value if isinstance(small, cst.Expr) else None
        if (
            len(lines) != 1
            or not isinstance(backward, cst.Call)
            or view.code(backward.func) != f"{scaled}.backward"
            or any(argument.keyword is None for argument in backward.args)
        ):
            raise Undecided(block, "the block of amp.scale_loss does more than call backward()")
        return self._look_after(block, call.args[0].value, backward)

    def _look_after(self, block: cst.With, loss: cst.BaseExpression, backward: cst.Call) -> _Step:
        view, suite = self.view, self.view.suite(block)
        name = view.code(self.optimizer)
        clip, limit, looked_at = None, None, False
        for line in [] if suite is None else suite.body[view.index(block) + 1 :]:
            call = only_call(line)
            if call is not None and view.code(call.func) == f"{name}.step" and not call.args:
                return _Step(block, loss, backward, call, name, clip, limit, looked_at)
            if call is not None and view.origin(call.func) in CLIP and clip is None:
                limit = self._limit(call)
                if limit is not None:
                    assert isinstance(line, cst.SimpleStatementLine)
                    clip = line
                    continue
            if clip is not None or any(
                isinstance(node, (cst.Continue, cst.Break, cst.Return)) for node in inside(line)
            ):
                break
            if any(_amp_name(view, node) for node in inside(line)):
                break
            if self.level == "O2":
                raise Undecided(
                    line,
                    "it stands between backward and step, and Apex's O2 has the model's gradients scaled there",
                )
            looked_at = True
        raise Undecided(
            block,
            f"{name}.step() does not follow this block: Apex moves the scale at every backward, castwise at every step",
        )

    def _limit(self, call: cst.Call) -> cst.BaseExpression | None:
        """The norm in ``clip_grad_norm_(amp.master_params(optimizer), norm)``."""
        if len(call.args) != 2 or any(argument.star for argument in call.args):
            return None
        of, limit = call.args
        wanted = isinstance(of.value, cst.Call) and _amp_name(self.view, of.value.func) == "master_params"
        named = limit.keyword is None or limit.keyword.value == "max_norm"
        return limit.value if wanted and named and of.keyword is None else None

    def _look_at_optimizer(self) -> None:
        view = self.view
        optimizer = self._variable(self.optimizer)
        for step in self.steps:
            func = step.step.func
            assert isinstance(func, cst.Attribute)
            if not isinstance(func.value, cst.Name) or set(view.bindings(func.value)) != set(
                optimizer.assignments
            ):
                raise Undecided(
                    step.step, f"{step.optimizer!r} is another variable here than at amp.initialize"
                )
        known = {id(step.step) for step in self.steps}
        for name in references(view, optimizer):
            attribute = view.parent(name)
            steps = isinstance(attribute, cst.Attribute) and attribute.attr.value == "step"
            if steps and attribute is not None and id(view.parent(attribute)) not in known:
                raise Undecided(
                    name, f"{name.value}.step is used without a block of amp.scale_loss before it"
                )

    def _variable(self, name: cst.BaseExpression) -> Thing:
        """A variable that ``initialize`` binds again."""
        view = self.view
        assert isinstance(name, cst.Name)
        found = [
            item for item in view.bindings(name) if not _is_in(view, getattr(item, "node", None), self.line)
        ]
        plain = [item for item in found if view.assigned_value(item) is not None]
        if not plain or len(plain) < len(found):
            raise Undecided(name, f"where {name.value!r} comes from cannot be seen")
        everything = tuple(item for item in view.bindings(name) if hasattr(item, "node"))
        scope = view.scope(self.line)
        if any(item.scope is not plain[0].scope for item in everything) or scope is None:
            raise Undecided(name, f"{name.value!r} is not made where amp.initialize is called")
        return Thing(name.value, plain[0].scope, everything)  # type: ignore[arg-type]

    def _look_at_model(self) -> None:
        """Parameters stored in fp16 make other state dicts than Apex's, which are fp32."""
        view = self.view
        model = self._variable(self.model)
        for step in self.steps:
            if not view.is_within(view.scope(step.block), model.scope):
                raise Undecided(step.block, "amp.initialize is called in another function")
        at = view.position(self.line)
        for item in model.assignments:
            if view.position(item.node) > at and view.statement(item.node) is not self.line:
                value = view.assigned_value(item)
                if value is None or (
                    "DataParallel" not in view.code(value) and "DDP(" not in view.code(value)
                ):
                    raise Undecided(item.node, f"{model.name!r} becomes something else after amp.initialize")
        for name in references(view, model):
            outer = view.parent(name)
            stored = isinstance(outer, cst.Attribute) and outer.attr.value in (
                "state_dict",
                "load_state_dict",
                "module",
            )
            if stored and self.level in ("O2", "O3") and view.position(name) > at:
                raise Undecided(
                    name,
                    f"under {self.level} Apex's state dicts are fp32, and castwise has amp.model_state_dict(model) for that",
                )

    def rewrite(self, edits: Edits) -> None:
        """Write the session."""
        view = self.view
        amp = session_name(view, frozenset({"amp"}) if self._is_free("amp") else frozenset())
        model, optimizer = view.code(self.model), view.code(self.optimizer)
        edits.use("Amp")
        edits.replace(
            self.line,
            statement(f"{model}, {optimizer} = {amp}.prepare({model}, {optimizer})", like=self.line),
        )
        edits.insert_before(self.line, statement(f'{amp} = castwise.Amp("{self.level}", device="cuda")'))
        for step in self.steps:
            edits.replace(step.block, _backward_line(step, amp))
            if step.looked_at and self.level == "O1":
                edits.insert_after(step.block, statement(f"{amp}.unscale_({optimizer})"))
            maximum = "" if step.limit is None else f", max_norm={view.code(step.limit)}"
            edits.replace(step.step, cst.parse_expression(f"{amp}.step({step.optimizer}{maximum})"))
            if step.clip is not None:
                edits.drop(step.clip)
        for node in self.used:
            edits.mark(node)
        if self.level == "O1":
            edits.differs(
                self.line,
                f"Apex's O1 patched torch for the whole process; now only {model!r} runs by the plan, and its outputs come back in "
                "fp32. Put other code that should run in fp16 under `with amp.autocast():`",
            )
        if self.level in ("O1", "O2"):
            edits.differs(self.line, FLOOR)
        edits.differs(
            self.line,
            'the plan is for CUDA, as Apex was: name another device in castwise.Amp(..., device="cuda") to run there',
        )

    def _is_free(self, name: str) -> bool:
        """Whether a name is Apex's wherever it stands, so that it can become the session's."""
        view = self.view
        scopes = {id(scope): scope for node in view.nodes if (scope := view.scope(node)) is not None}
        bound = [item for scope in scopes.values() for item in scope.assignments if item.name == name]
        return all(isinstance(item, meta.ImportAssignment) for item in bound) and all(
            _amp_name(view, outer)
            for item in bound
            for access in item.references
            if (outer := view.parent(access.node)) is not None
        )


def _backward_line(step: _Step, amp: str) -> cst.SimpleStatementLine:
    """``amp.backward(loss)`` for the block, with all its comments."""
    inner = step.block.body.body[0]
    assert isinstance(inner, cst.SimpleStatementLine)
    assert isinstance(step.block.body, cst.IndentedBlock)
    call = cst.parse_expression(f"{amp}.backward(loss)")
    assert isinstance(call, cst.Call)
    call = call.with_changes(args=[cst.Arg(step.loss), *step.backward.args])
    lines = [*step.block.leading_lines]
    if step.block.body.header.comment is not None:
        lines.append(cst.EmptyLine(comment=step.block.body.header.comment))
    lines += [*inner.leading_lines, *(empty for empty in step.block.body.footer if empty.comment is not None)]
    return cst.SimpleStatementLine(
        [cst.Expr(call)], leading_lines=lines, trailing_whitespace=inner.trailing_whitespace
    )


def _is_in(view: View, node: cst.CSTNode | None, line: cst.CSTNode) -> bool:
    return node is not None and (node is line or any(outer is line for outer in view.around(node)))
