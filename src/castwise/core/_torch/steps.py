"""The only module that hooks optimizer steps, those of all optimizers or those of a given one.

torch calls its global hooks, which apply to all optimizers, around the hooks of a single optimizer. castwise registers
one global hook before and one after a step, and never removes them, because another thread's step may be iterating over
torch's table of global hooks at any time.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from castwise.core._torch.hooks import remove_hooks
from castwise.core._torch.tensors import never_trace

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of an optimizer's step. The first positional argument is the optimizer."""
Before: TypeAlias = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Call | None]
After: TypeAlias = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]

_subscribers: tuple[tuple[Before | None, After | None], ...] = ()
_lock = threading.Lock()


def subscribe(
    before: Before | None = None,
    after: After | None = None,
    *,
    of: torch.optim.Optimizer | None = None,
    log: Callable[[Callable[[], None]], object] | None = None,
) -> Callable[[], None]:
    """Register functions that are called around each step, like torch's hooks.

    Args:
        before: Called with the optimizer and the arguments of its step. It may return other arguments to use instead.
        after: Called with the same arguments when the step has returned.
        of: The optimizer. None stands for every optimizer.
        log: Called with the function that removes the hooks, before the hooks are registered. So the caller can remove
            them even if an interrupt comes before this function returns.

    Returns:
        A function that removes the hooks. It does not keep the optimizer alive, and may be called twice.
    """
    global _subscribers
    end = functools.partial(_end, None if of is None else weakref.ref(of), before, after)
    if log is not None:
        log(end)
    if of is None:
        _register()
        with _lock:
            _subscribers = (*_subscribers, (before, after))
        return end
    if before is not None:
        of.register_step_pre_hook(before)
    if after is not None:
        of.register_step_post_hook(after)
    return end


def _end(of: weakref.ref[torch.optim.Optimizer] | None, before: Before | None, after: After | None) -> None:
    global _subscribers
    if of is None:
        with _lock:
            _subscribers = tuple(other for other in _subscribers if other != (before, after))
    elif (optimizer := of()) is not None:
        remove_hooks(optimizer, *(hook for hook in (before, after) if hook is not None))


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure among the arguments of an optimizer's step, or None if there is none."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]) -> Call:
    """Return the arguments of an optimizer's step with another closure."""
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


def _tell_before(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call | None:
    call = None
    for before, _ in _subscribers:
        if before is not None and (changed := before(optimizer, args, kwargs)) is not None:
            call = args, kwargs = changed
    return call


def _tell_after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for _, after in _subscribers:
        if after is not None:
            after(optimizer, args, kwargs)


@functools.cache
def _register() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    never_trace(_tell_before, "castwise follows optimizer steps outside of compiled graphs")
    never_trace(_tell_after, "castwise follows optimizer steps outside of compiled graphs")
    register_optimizer_step_pre_hook(_tell_before)
    register_optimizer_step_post_hook(_tell_after)
