"""Replace torch's loss scaler and its regions by a session of ``castwise.Amp``."""

from __future__ import annotations

import libcst as cst
from libcst import metadata as meta

from castwise.bridges.scripts.migrate.edits import Edits, statement
from castwise.bridges.scripts.migrate.torch_loop import Event, Undecided
from castwise.bridges.scripts.migrate.torch_session import Session
from castwise.bridges.scripts.reading.torch_amp import AUTOCAST, SCALER, amp_calls
from castwise.bridges.scripts.reading.view import View, root

_MODULES = {"torch.amp", "torch.cpu.amp", "torch.cuda.amp"}


def rewrite_session(edits: Edits, exported: frozenset[str]) -> None:
    """Replace a scaler and its regions by a session if the script shows all of them; otherwise note why they stay.

    ``exported``: names that other scripts import from this one; ``*`` if that may be any.
    """
    view = edits.view
    found = [node for node in view.nodes if _is_use(view, node)]
    if not found:
        return
    try:
        made = amp_calls(view, SCALER)
        if not made:
            raise Undecided(
                found[0], "this script makes no GradScaler, so it does not show the training loop"
            )
        if len(made) > 1:
            raise Undecided(made[1].node, "the script has more than one scaler")
        if edits.findings:  # of Apex or Colossal-AI
            raise Undecided(made[0].node, "the script uses another kind of mixed precision too")
        session = Session(view, made[0])
        session.look(exported)
    except Undecided as why:
        edits.say(why.node, "left", f"torch.amp stays as it is, and works beside castwise: {why.reason}")
    else:
        _Writer(edits, session, exported).write()


def _is_use(view: View, node: cst.CSTNode) -> bool:
    """Whether a name is torch's autocast or scaler, or an import hides such names."""
    if isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
        return node.module is not None and view.code(node.module) in _MODULES
    names = view.origins(node) if isinstance(node, (cst.Name, cst.Attribute)) else ()
    return any(name in AUTOCAST or name in SCALER for name in names)


class _Writer:
    """Writes a session into a script."""

    def __init__(self, edits: Edits, session: Session, exported: frozenset[str]) -> None:
        self.edits = edits
        self.view = edits.view
        self.session = session
        self.exported = exported
        names = ("amp", "amp_session", "castwise_amp", "castwise_amp_session")
        self.amp = next(name for name in names if name not in edits.view.words)
        self.replaced: set[cst.CSTNode] = set()  # names whose former uses are gone

    def write(self) -> None:
        """Write the session."""
        edits, session, amp = self.edits, self.session, self.amp
        plan, device = f'"{session.plan}"', session.device
        if session.enabled is not None:
            plan = f'{plan} if {session.enabled} else "fp32+output=as_is"'
            if device == '"cuda"':  # if disabled, there may be no such device, or the model may be elsewhere
                device = f"{device} if {session.enabled} else {self._device_when_off()}"
        home = session.home
        edits.replace(home, statement(f"{amp} = castwise.Amp({plan}, device={device})", like=home))
        names = [", ".join([model, *optimizers]) for model, optimizers in session.updated.items()]
        lines = [statement(f"{each} = {amp}.prepare({each})") for each in names]
        edits.insert_after(session.prepared_after, *lines)
        self._forget(session.made)
        for call in session.regions:
            edits.replace(call, cst.parse_expression(f"{amp}.autocast()"))
            self._forget(call)
        for event in session.events:
            self._rewrite(event)
        for name in session.states:
            edits.replace(name, cst.parse_expression(f"{amp}.scaler"))
        self._import()
        self._say()

    def _device_when_off(self) -> str:
        """The model's device, if there is a model when the session is created; else the default."""
        position, session = self.view.position, self.session
        for model in session.models.values():
            made = [position(item.node) for item in model.assignments]
            before = [at for at in made if at < self.view.end(session.prepared_after)]
            if before and max(before) < position(session.home):
                return f"next({model.name}.parameters()).device"
        return "None"

    def _forget(self, call: cst.Call) -> None:
        self.replaced.update(filter(None, (call.func, root(call.func))))

    def _rewrite(self, event: Event) -> None:
        edits, amp, node = self.edits, self.amp, event.node
        if event.kind == "update":
            edits.drop(self.view.statement(node))
        elif event.kind == "look":
            edits.replace(node, cst.parse_expression(f"{amp}.get_scale()"))
        elif event.kind == "backward":
            edits.replace(node, lambda updated: _backward(updated, amp))
        else:
            what = "unscale_" if event.kind == "unscale" else "step"
            edits.replace(node, cst.parse_expression(f"{amp}.{what}({event.optimizer})"))

    def _say(self) -> None:
        session = self.session
        if session.device == '"cuda"':
            self.edits.say(
                session.made,
                "differs",
                "without CUDA, torch.amp was disabled with a warning; "
                f"castwise.Amp(device={session.device}) raises a DeviceError",
            )
        self.edits.say(
            session.made,
            "differs",
            "the loss scale does not fall below 2**-14, where repeated overflow raises a LossScaleError; with torch.amp it could "
            "fall to zero",
        )
        if session.enabled is not None:
            self.edits.say(
                session.made,
                "differs",
                f"steps with non-finite gradients are skipped even if {session.enabled} is false; "
                'castwise.Amp(..., nonfinite="allow") does not skip them',
            )

    # --- imports ------------------------------------------------------------------------------------------

    def _import(self) -> None:
        """Import castwise after the imports at the top of the script, and drop unused imports."""
        view, edits = self.view, self.edits
        for node in view.nodes:
            if isinstance(node, (cst.Import, cst.ImportFrom)) and not isinstance(node.names, cst.ImportStar):
                self._drop_unused(node)
        if any(isinstance(item, meta.ImportAssignment) for item in view.globals["castwise"]):
            return
        new = statement("import castwise")
        last = _head(view.module)
        if last is not None:
            edits.insert_after(last, new)
        else:
            edits.replace(view.module, lambda module: module.with_changes(body=[new, *module.body]))

    def _drop_unused(self, node: cst.Import | cst.ImportFrom) -> None:
        assert not isinstance(node.names, cst.ImportStar)
        left = [alias for alias in node.names if not self._is_unused(node, alias)]
        line = self.view.parent(node)
        if left and len(left) < len(node.names):
            left[-1] = left[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            self.edits.replace(node, lambda updated: updated.with_changes(names=left))
        elif not left and isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
            suite = self.view.suite(line)
            if suite is not None and len(suite.body) > 1:
                self.edits.drop(line)

    def _is_unused(self, node: cst.Import | cst.ImportFrom, alias: cst.ImportAlias) -> bool:
        bound = alias.evaluated_alias or alias.evaluated_name
        scope = self.view.scope(node)
        if (
            scope is None
            or bound == "torch"
            or "." in bound
            or bound in self.view.strings
            or self.exported & {bound, "*"}
        ):
            return False
        uses = [
            access.node
            for item in scope[bound]
            if isinstance(item, meta.Assignment) and item.node is node
            for access in item.references
        ]
        return bool(uses) and self.replaced.issuperset(uses)


def _head(module: cst.Module) -> cst.BaseStatement | None:
    """The last import at the top of a script, or its docstring."""
    last: cst.BaseStatement | None = None
    for line in module.body:
        small = line.body[0] if isinstance(line, cst.SimpleStatementLine) else None
        docstring = last is None and isinstance(small, cst.Expr) and isinstance(small.value, cst.BaseString)
        if not docstring and not isinstance(small, (cst.Import, cst.ImportFrom)):
            break
        assert isinstance(line, cst.BaseStatement)
        last = line
    return last


def _backward(updated: cst.Call, amp: str) -> cst.Call:
    """``scaler.scale(loss).backward(...)`` as ``amp.backward(loss, ...)``."""
    assert isinstance(updated.func, cst.Attribute)
    scale = updated.func.value
    assert isinstance(scale, cst.Call)
    loss = scale.args[0].with_changes(
        keyword=None, equal=cst.MaybeSentinel.DEFAULT, comma=cst.MaybeSentinel.DEFAULT
    )
    return updated.with_changes(func=cst.parse_expression(f"{amp}.backward"), args=[loss, *updated.args])
