"""Observers of a pass: each sees the operators that run and the modules that are called, and may run something else instead.

All observers of a pass share one mode and one set of hooks. Operators are seen below autograd and autocast, those of backward
too; an operator that an observer runs on its own account is seen by none. Functions of torch are seen by
``torch.overrides.TorchFunctionMode`` alone, which an observer that needs them enters in :meth:`Observer.around`.
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
"""Runs an operator, through the observers that have not seen it yet."""


class Call(NamedTuple):
    """A call of a module: its path (empty for the whole model) and which call it is, from 0."""

    path: str
    number: int


class Observer:
    """Does nothing; a subclass defines what it needs.

    Attributes:
        running: Calls that are running, the innermost last, of modules that some observer of the pass sees.
    """

    running: Sequence[Call] = ()

    def around(self, model: nn.Module) -> contextlib.AbstractContextManager[object]:
        """What the pass runs inside of."""
        return contextlib.nullcontext()

    def modules(self, model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        """Modules to see, by path; by default none, since hooks keep torch from some of its fused code."""
        return ()

    def enter(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        """Hear that ``forward`` is about to run, after the hooks that were there before."""

    def leave(self, call: Call, output: Any) -> None:
        """Hear that ``forward`` has run, after the hooks that were there before; ``output`` is None after an exception."""

    def operator(self, run: Run, op: _torch.operators.OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator, or something in its place."""
        return run(op, args, kwargs)


class Operators(Observer):
    """Notes the operators that run, in their order."""

    def __init__(self) -> None:
        self.ran: list[_torch.operators.OpOverload] = []

    def operator(self, run: Run, op: _torch.operators.OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Note an operator and run it."""
        self.ran.append(op)
        return run(op, args, kwargs)


@contextlib.contextmanager
def observed(model: nn.Module, *observers: Observer) -> Iterator[None]:
    """Show observers what runs inside; the last of them sees an operator first."""
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
            while running and running[-1].path != path:  # an exception skipped the hook of these
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
