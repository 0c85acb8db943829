"""Find the module, the module call and the line of code of every operator in a forward and backward pass.

In forward, an operator belongs to the innermost module being called. In backward, an operator belongs to the place of the
forward operator that made the autograd node: autograd numbers nodes when they are made, and the trace records which operator ran at
which number. The forward that activation checkpointing repeats in backward is called recomputation, and its operators belong to
the modules that are called again.
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
"""Maximum distance in sequence numbers to a node without its own operator, such as the node of a write into a view."""


@dataclass(frozen=True)
class OperatorRun:
    """One run of an operator: which operator it was, and where it ran.

    Attributes:
        index: Number of operators that ran before this one.
        operator: Base name of the operator, such as ``exp`` or ``mylib::op``.
        module: Path of the module; "" is the model itself, or code outside it.
        call: Number of the module's call in this pass, from 0.
        inside: Whether the operator ran in a call of the model or of one of its modules.
        phase: ``forward``, ``backward``, or ``recomputation`` in backward.
        line: The innermost line outside torch and castwise; in backward the forward operator's line, unless Python code
            runs there.
        node: In backward, name of the autograd node, such as ``LogBackward0``.
        forward: In backward, base name of the forward operator.
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
    """Return an operator's name as plans spell it: ``exp`` for ``aten::exp.out``, ``mylib::op`` for other libraries' operators."""
    space, _, name = op.name().partition("::")
    name = name.partition(".")[0]
    return name if space == "aten" else f"{space}::{name}"


class Trace(Observer):
    """The base class of observers that find out where each operator runs; a subclass calls :meth:`place` for every operator.

    Module calls are wrapped from before their first hook to after their last hook. So the casts that a plan makes in hooks of a
    module belong to that module.
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
        """Record which modules a model has, and wrap their calls during the block."""
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
        """Return the module, call, phase and line of code of an operator that is about to run."""
        index, self.count = self.count, self.count + 1
        name, node = base_name(op), _torch.autograd.running_node()
        line = self._line(sys._getframe(1), node is not None)
        made = None if node is None else self._maker(*node)
        module, call, inside = ("", 0, False) if made is None else (made.module, made.call, made.inside)
        if node is not None and (line is None or not torch.is_grad_enabled()):
            line, forward = (line, "") if made is None else (line or made.line, made.operator)
            return OperatorRun(index, name, module, call, inside, "backward", line, node[0], forward)
        if self._running:  # recomputed code may be outside of all modules
            module, call, inside = *self._running[-1], True
        phase: Phase = "forward" if node is None else "recomputation"
        place = OperatorRun(index, name, module, call, inside, phase, line)
        # an operator's node, if any, is made before it runs
        self._made.setdefault(_torch.autograd.sequence_number() - 1, []).append(place)
        return place

    def _maker(self, name: str, number: int) -> OperatorRun | None:
        """Return the forward operator that made an autograd node, given the node's name and sequence number.

        If several operators ran at this number, it is the operator that the node is named for. None is returned if none is known.
        """
        for at in range(number, number - _NEAREST, -1):
            if found := self._made.get(at):
                wanted = _letters(re.sub(r"Backward\d*$", "", name))
                return next((place for place in found if _letters(place.operator) == wanted), found[0])
        return None

    def _line(self, frame: FrameType | None, in_backward: bool) -> Line | None:
        """Return the innermost line of code outside torch and castwise, starting from a frame.

        In backward, only frames inside the backward pass count, such as those of a custom autograd function; None if there are none.
        """
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
