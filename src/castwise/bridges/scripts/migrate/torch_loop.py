"""Check that the order in which a script uses torch's scaler is that of a castwise session."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Literal

import libcst as cst

from castwise.bridges.scripts.reading.torch_amp import PARAMETERS
from castwise.bridges.scripts.reading.view import View, inside

_JUMPS = (cst.Continue, cst.Break, cst.Return, cst.Raise)
_ON_GRADIENTS = re.compile(r"clip|grad(ient)?s|grad_norm")
"""Matches names of functions that work on gradients, or on parameters because of their gradients."""


class Undecided(Exception):
    """Why a rewrite is not certain, and where.

    Attributes:
        node: The place.
        reason: A clause.
    """

    def __init__(self, node: cst.CSTNode, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Event:
    """One use of a scaler.

    Attributes:
        kind: The method that is called.
        node: The outermost call that contains it.
        optimizer: The name of the optimizer in the call; empty if there is none.
    """

    kind: Literal["backward", "unscale", "step", "update", "look"]
    node: cst.Call
    optimizer: str = ""


def check_windows(view: View, events: Iterable[Event]) -> None:
    """Check that every update immediately follows its steps, as in a session.

    A session updates the scale when the next backward begins after a step. A script that updates it elsewhere, or not
    after each step, has other scales.

    Raises:
        Undecided: An update does not follow its steps immediately.
    """
    for each in _by_function(view, events):
        stepped: list[Event] = []
        for event in each:
            if event.kind == "step":
                stepped.append(event)
            elif event.kind == "update":
                _check_update(view, event, stepped)
                stepped = []
            elif stepped and event.kind != "unscale":
                what = "a loss is scaled" if event.kind == "backward" else "the scale is read"
                raise Undecided(event.node, f"{what} between step() and update()")
        if stepped:
            raise Undecided(stepped[0].node, "no update() comes after this step() in the same function")


def _check_update(view: View, update: Event, stepped: list[Event]) -> None:
    suite = view.suite(update.node)
    if not stepped:
        raise Undecided(update.node, "no step() comes before this update() in the same function")
    if suite is None or any(view.suite(event.node) is not suite for event in stepped):
        raise Undecided(update.node, "step() and update() are in different blocks")
    for statement in suite.body[view.index(stepped[0].node) : view.index(update.node)]:
        if any(isinstance(node, _JUMPS) for node in inside(statement)):
            raise Undecided(statement, "the loop may end between step() and update()")


def check_gradients(view: View, events: Iterable[Event]) -> None:
    """Check that nothing uses gradients while the scale is in them: a session refuses gradients changed then.

    Raises:
        Undecided: Gradients are used while the scale is in them.
    """
    suspects = [node for node in view.nodes if isinstance(node, (cst.Attribute, cst.Call))]
    for each in _by_function(view, events):
        scaled: cst.CSTNode | None = None
        early = True
        for event in each:
            if event.kind == "backward":
                scaled, early = scaled or event.node, False
            elif event.kind in ("unscale", "step") and (scaled is not None or early):
                # if the backward is below or elsewhere: everything before it, except the optimizer's creation
                begin = view.position(view.function(event.node)) if scaled is None else view.end(scaled)
                for node in suspects:
                    if _takes_gradients(view, node, narrow=scaled is None) and (
                        begin < view.position(node) < view.position(event.node)
                    ):
                        raise Undecided(
                            node,
                            f"gradients are used while they still contain the loss scale: {_shown(event)} comes later",
                        )
                scaled, early = None, False


def _shown(event: Event) -> str:
    return f"{'unscale_' if event.kind == 'unscale' else event.kind}({event.optimizer})"


def _takes_gradients(view: View, node: cst.CSTNode, *, narrow: bool) -> bool:
    """Whether code reads or writes gradients, judged by names; ``narrow``: a use of parameters alone does not count."""
    if isinstance(node, cst.Attribute):
        outer = view.parent(node)
        return node.attr.value == "grad" and not (isinstance(outer, cst.Call) and outer.func is node)
    assert isinstance(node, cst.Call)
    name = view.called(node)
    return bool(_ON_GRADIENTS.search(name)) or (not narrow and name in PARAMETERS)


def _by_function(view: View, events: Iterable[Event]) -> Iterable[list[Event]]:
    """The events of each function, in the order of lines."""
    functions: dict[cst.CSTNode, list[Event]] = {}
    for event in sorted(events, key=lambda event: view.position(event.node)):
        functions.setdefault(view.function(event.node), []).append(event)
    return functions.values()
