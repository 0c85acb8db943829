"""Observers of a pass: each observes operators and module calls, and may replace their execution.

All observers of a pass share one mode and one set of hooks. Operators are observed below autograd and autocast, in backward
too; operators that an observer runs itself are not observed. Functions of torch are visible only to
``torch.overrides.TorchFunctionMode``, which an observer that needs it enters in :meth:`Observer.around`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from castwise.core import _torch

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Run = Callable[[_torch.operators.OpOverload, Args, Kwargs], Any]
"""Runs an operator through the remaining observers."""


class Call(NamedTuple):
    """A call of a module: its path (empty for the whole model) and the number of the call, from 0."""

    path: str
    number: int


class Observer:
    """Base class whose methods do nothing; a subclass overrides what it needs.

    Attributes:
        running: Calls in progress of the modules observed in this pass, the innermost last.
    """

    running: Sequence[Call] = ()

    def around(self, model: nn.Module) -> contextlib.AbstractContextManager[object]:
        """A context manager in which the pass runs."""
        return contextlib.nullcontext()

    def modules(self, model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        """Modules to observe, by path; by default none, since hooks disable some of torch's fused code."""
        return ()

    def enter(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        """Called before ``forward``, after the hooks that existed before."""

    def leave(self, call: Call, output: Any) -> None:
        """Called after ``forward`` and the hooks that existed before; ``output`` is None after an exception."""

    def operator(self, run: Run, op: _torch.operators.OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator or a replacement."""
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
    """Observe the code inside; the last observer gets an operator first."""
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
            hook(path, module)
        for observer in observers:
            stack.enter_context(observer.around(model))
        if run is not _run:
            stack.enter_context(_torch.tensors.OperatorMode(run))
        yield


def _run(op: _torch.operators.OpOverload, args: Args, kwargs: Kwargs) -> Any:
    return op(*args, **kwargs)
