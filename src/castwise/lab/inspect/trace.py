"""Every operator of a forward and backward, with the module, the call and the line of code that it belongs to.

What runs in forward belongs to the innermost module that is being called. What a node of autograd runs in backward belongs
to where its forward operator ran: autograd numbers nodes as they are made, and the trace notes which operator ran at which
number. What checkpointing computes again is recomputation, and belongs to the modules that are called again.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from torch import nn

from castwise.core import _torch
from castwise.core.model.complaints.source import Line, is_shown
from castwise.lab.passes.observers import Call, Observer

Phase = Literal["forward", "backward", "recomputation"]

_NEAREST = 16
"""A node without an operator of its own, such as the one that wraps a write into a view, is that many numbers behind at most."""


@dataclass(frozen=True)
class OperatorRun:
    """Where an operator ran.

    Attributes:
        index: How many operators ran before it.
        operator: Its base name, such as ``exp`` or ``mylib::op``.
        module: Path of the module; "" is the model itself, or what lies outside of it.
        call: Number of the module's call in this pass, from 0 on.
        inside: Whether it ran in a call of the model, or of a part of it.
        phase: Whether in forward, in backward, or in what backward computes again.
        line: The innermost line that is neither torch's nor castwise's; in backward that of the forward operator, unless code in
            Python runs.
        node: In backward the name of the autograd node, such as ``LogBackward0``.
        forward: In backward the base name of the forward operator.
    """

    index: int
    operator: str
    module: str
    call: int
    inside: bool
    phase: Phase
    line: Line | None
    node: str = ""
    forward: str = ""


def base_name(op: _torch.operators.OpOverload) -> str:
    """An operator as plans name it: ``exp`` for ``aten::exp.out``, ``mylib::op`` for others than ATen's."""
    space, _, name = op.name().partition("::")
    name = name.partition(".")[0]
    return name if space == "aten" else f"{space}::{name}"


class Trace(Observer):
    """Tells where each operator runs; a subclass asks :meth:`place` of every one.

    It follows calls by itself, from before their first hook to after their last: what a plan casts at a module's border belongs
    to that module.
    """

    def __init__(self) -> None:
        self.count = 0
        self._paths: dict[nn.Module, str] = {}
        self._running: list[Call] = []
        self._calls: Counter[str] = Counter()
        self._made: dict[int, list[OperatorRun]] = {}
        self._own: dict[CodeType, bool] = {}

    @contextlib.contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """Tell the modules of a model apart."""
        self._paths = {module: path for path, module in model.named_modules()}
        undo = _torch.hooks.around_calls(self._call)
        try:
            yield
        finally:
            undo()

    def _call(self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = self._paths.get(module)
        if path is None:
            return call(module, *args, **kwargs)
        again = _torch.autograd.graph_task_id() != -1
        self._running.append(Call(path, max(0, self._calls[path] - again)))
        self._calls[path] += not again
        try:
            return call(module, *args, **kwargs)
        finally:
            self._running.pop()

    def place(self, op: _torch.operators.OpOverload) -> OperatorRun:
        """Where an operator runs that is about to."""
        index, self.count = self.count, self.count + 1
        name, node = base_name(op), _torch.autograd.running_node()
        line = self._line(sys._getframe(1), node is not None)
        made = None if node is None else self._maker(*node)
        module, call, inside = ("", 0, False) if made is None else (made.module, made.call, made.inside)
        if node is not None and (line is None or not torch.is_grad_enabled()):
            line, forward = (line, "") if made is None else (line or made.line, made.operator)
            return OperatorRun(index, name, module, call, inside, "backward", line, node[0], forward)
        if self._running:  # what is computed again need not be in a module
            module, call, inside = *self._running[-1], True
        phase: Phase = "forward" if node is None else "recomputation"
        place = OperatorRun(index, name, module, call, inside, phase, line)
        # the node of an operator is made before it runs, if there is one at all
        self._made.setdefault(_torch.autograd.sequence_number() - 1, []).append(place)
        return place

    def _maker(self, name: str, number: int) -> OperatorRun | None:
        """The forward operator that made a node; of several that ran at its number, the one that it is named for."""
        for at in range(number, number - _NEAREST, -1):
            if found := self._made.get(at):
                wanted = _letters(re.sub(r"Backward\d*$", "", name))
                return next((place for place in found if _letters(place.operator) == wanted), found[0])
        return None

    def _line(self, frame: FrameType | None, in_backward: bool) -> Line | None:
        """The innermost line outside of torch and castwise; in backward of what runs inside of it."""
        while frame is not None:
            code = frame.f_code
            if in_backward and code is _torch.autograd.ENGINE_CODE:
                return None
            if (own := self._own.get(code)) is None:
                own = self._own[code] = is_shown(code.co_filename)
            if own:
                return Line(code.co_filename, frame.f_lineno, code.co_name)
            frame = frame.f_back
        return None


def _letters(name: str) -> str:
    return name.replace("_", "").lower()
