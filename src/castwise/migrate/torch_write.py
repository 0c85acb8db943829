"""A session of ``castwise.Amp`` in the place of a loss scaler and its regions."""

from __future__ import annotations

import libcst as cst

from castwise.migrate.edits import FLOOR, Edits, statement
from castwise.migrate.loop import Event, clip_before
from castwise.migrate.objects import session_name
from castwise.migrate.torch_names import scaler_calls
from castwise.migrate.torch_session import Session
from castwise.migrate.view import Undecided

__all__ = ["rewrite_session"]


def rewrite_session(edits: Edits) -> set[cst.CSTNode]:
    """Make a session of a scaler and what goes with it, where that is certain; else list why it is not.

    Args:
        edits: Where the changes go.

    Returns:
        The calls that were rewritten.
    """
    calls = scaler_calls(edits.view)
    if not calls:
        return set()
    try:
        if len(calls) > 1:
            raise Undecided(calls[1], "there is more than one scaler")
        session = Session(edits.view, calls[0])
        session.look()
    except Undecided as why:
        edits.left(why.node, f"not made a castwise.Amp: {why.reason}")
        return set()
    return _Writer(edits, session).write()


class _Writer:
    """Writes a session into a script."""

    def __init__(self, edits: Edits, session: Session) -> None:
        self.edits = edits
        self.view = edits.view
        self.session = session
        self.amp = session_name(edits.view)

    def write(self) -> set[cst.CSTNode]:
        """Write it; returns the calls that are dealt with."""
        edits, session, amp = self.edits, self.session, self.amp
        edits.use("Amp")
        plan, device = f'"{session.plan}"', session.device.code
        if session.enabled is not None:
            plan = f'{plan} if {session.enabled} else "fp32"'
            if session.device.is_literal:  # where it is off, there may be no such device
                device = f"{device} if {session.enabled} else None"
        home = session.home
        edits.replace(home, statement(f"{amp} = castwise.Amp({plan}, device={device})", like=home))
        names = [", ".join([model, *optimizers]) for model, optimizers in session.updated.items()]
        lines = [statement(f"{each} = {amp}.prepare({each})") for each in names]
        edits.insert_after(session.prepared_after, *lines)
        regions = [call for call in session.regions if self._is_after(call)]
        for call in regions:
            edits.replace(call, cst.parse_expression(f"{amp}.autocast()"))
        for event in session.events:
            self._rewrite(event)
        for attribute in session.states:
            edits.replace(attribute, lambda updated: updated.with_changes(value=cst.Name(amp)))
        self._say()
        return {session.made, *regions}

    def _is_after(self, region: cst.Call) -> bool:
        """Whether the session is sure to be there when a region is entered; another keeps a form of its own."""
        view, session = self.view, self.session
        if view.scope(region) is session.scaler.scope:
            return view.position(region) > view.position(session.prepared_after)
        function = view.function(region)
        return any(view.function(event.node) is function for event in session.events)

    def _rewrite(self, event: Event) -> None:
        edits, amp = self.edits, self.amp
        if event.kind == "update":
            edits.drop(self.view.statement(event.node))
        elif event.kind == "look":
            edits.replace(event.node, cst.parse_expression(f"{amp}.get_scale()"))
        elif event.kind == "unscale":
            edits.replace(event.node, cst.parse_expression(f"{amp}.unscale_({event.optimizer})"))
        elif event.kind == "backward":
            edits.replace(event.node, lambda updated: _backward(updated, amp))
        else:
            limit = self._merge_clip(event)
            maximum = "" if limit is None else f", max_norm={self.view.code(limit)}"
            edits.replace(event.node, cst.parse_expression(f"{amp}.step({event.optimizer}{maximum})"))

    def _merge_clip(self, step: Event) -> cst.BaseExpression | None:
        """``unscale_``, ``clip_grad_norm_`` and ``step`` in a row are one ``step``; returns the largest norm."""
        model = self.session.whole.get(step.optimizer)
        found = None if model is None else clip_before(self.view, step.node, f"{model}.parameters()")
        unscale = self.view.beside(step.node, -2)
        for event in self.session.events:
            mine = event.kind == "unscale" and event.optimizer == step.optimizer
            if (
                found is not None
                and unscale is not None
                and mine
                and self.view.statement(event.node) is unscale
            ):
                line, limit = found
                self.edits.drop(unscale)
                self.edits.drop(line)
                return limit
        return None

    def _say(self) -> None:
        edits, session, amp = self.edits, self.session, self.amp
        device = session.device.code
        if session.device.is_literal and device.strip("\"'") == "cuda":
            edits.differs(
                session.made,
                "where there is no CUDA, torch.amp turned itself off with a warning; "
                f"castwise.Amp(device={device}) raises a DeviceError",
            )
        edits.differs(session.made, FLOOR)
        for model in session.models.values():
            edits.differs(
                session.prepared_after,
                f"{model.name!r} returns fp32 where its outputs were fp16, and every call of it runs by the plan",
            )
        for attribute in session.states:
            what = f"{amp}.{attribute.attr.value}()"
            edits.differs(
                attribute,
                f"{what} is of the whole session and has another form than torch's; {amp}.scaler.load_state_dict() reads the "
                "scaler's part of an earlier checkpoint",
            )


def _backward(updated: cst.Call, amp: str) -> cst.Call:
    """``scaler.scale(loss).backward(...)`` as ``amp.backward(loss, ...)``."""
    assert isinstance(updated.func, cst.Attribute)
    scale = updated.func.value
    assert isinstance(scale, cst.Call)
    loss = scale.args[0].with_changes(
        keyword=None, equal=cst.MaybeSentinel.DEFAULT, comma=cst.MaybeSentinel.DEFAULT
    )
    return updated.with_changes(func=cst.parse_expression(f"{amp}.backward"), args=[loss, *updated.args])
