"""Observe the operators and module calls of a forward and backward pass; an observer may also replace an operator.

All observers of a pass share one dispatch mode and one set of hooks. Operators are observed below autograd and autocast, in
the backward pass too. Operators that an observer runs itself are not observed. Calls of torch's Python functions are visible
only to ``torch.overrides.TorchFunctionMode``; an observer that needs such a mode enters it in :meth:`Observer.around`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from castwise.core import _torch

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Run = Callable[[_torch.operators.OpOverload, Args, Kwargs], Any]
"""Runs an operator through the remaining observers."""


class Call(NamedTuple):
    """One call of a module: the module's path (empty for the whole model), and which of its calls this is, counted from 0."""

    path: str
    number: int


class Observer:
    """The base class of observers. It observes nothing; a subclass overrides the methods that it needs.

    Attributes:
        running: Calls in progress of the modules that are observed in this pass, the innermost last.
    """

    running: Sequence[Call] = ()

    def around(self, model: nn.Module) -> contextlib.AbstractContextManager[object]:
        """Return a context manager; the model's forward and backward pass runs inside it."""
        return contextlib.nullcontext()

    def modules(self, model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        """Return the modules whose calls are observed, with their paths.

        By default there are none, since hooks disable some of torch's fused code.
        """
        return ()

    def enter(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        """Handle the start of a module call; runs before ``forward``, after the hooks that the module already had."""

    def leave(self, call: Call, output: Any) -> None:
        """Handle the end of a module call; runs after ``forward`` and the hooks that the module already had.

        ``output`` is None after an exception.
        """

    def operator(self, run: Run, op: _torch.operators.OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator, or a replacement for it, and return the result."""
        return run(op, args, kwargs)


class Operators(Observer):
    """Records the operators that run, in order."""

    def __init__(self) -> None:
        self.ran: list[_torch.operators.OpOverload] = []

    def operator(self, run: Run, op: _torch.operators.OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Record an operator and run it."""
        self.ran.append(op)
        return run(op, args, kwargs)


@contextlib.contextmanager
def observed(model: nn.Module, *observers: Observer) -> Iterator[None]:
    """Observe the code inside the block with the given observers; the last observer gets each operator first."""
    running: list[Call] = []
    numbers: Counter[str] = Counter()
    modules: dict[str, nn.Module] = {}
    run: Run = _run
    for observer in observers:
        observer.running = running
        modules |= observer.modules(model)
        if type(observer).operator is not Observer.operator:
            run = partial(observer.operator, run)

    def hook(path: str, module: nn.Module) -> None:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            call = Call(path, numbers[path])
            numbers[path] += 1
            for observer in observers:
                observer.enter(call, args, kwargs)
            running.append(call)

        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            while running and running[-1].path != path:  # calls whose hook was skipped by an exception
                running.pop()
            if running:
                for observer in observers:
                    observer.leave(running[-1], output)
                running.pop()

        stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
        stack.enter_context(module.register_forward_hook(leave, always_call=True))

    with contextlib.ExitStack() as stack:
        for path, module in modules.items():
            if not isinstance(module, torch.jit.ScriptModule) or _torch.hooks.takes_hooks(module):
                hook(path, module)
        for observer in observers:
            stack.enter_context(observer.around(model))
        if run is not _run:
            stack.enter_context(_torch.tensors.OperatorMode(run))
        yield


def _run(op: _torch.operators.OpOverload, args: Args, kwargs: Kwargs) -> Any:
    return op(*args, **kwargs)
