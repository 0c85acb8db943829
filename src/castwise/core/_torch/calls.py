"""Calls of modules: guards around them, and their Python frames."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.nn.utils import parametrizations

NORM_PARAMETRIZATIONS = (parametrizations._WeightNorm, parametrizations._SpectralNorm)
"""torch's parametrizations for which low kernels are accurate."""


def guard_calls(
    module: torch.nn.Module,
    owner: object,
    depth: Callable[[], int],
    unwind: Callable[[int], None],
    mode: str | None = None,
) -> None:
    """Restore this thread's state after a call of a module that ended with any exception, and compile its calls.

    torch runs forward hooks after an ``Exception``, but not after KeyboardInterrupt, SystemExit or CancelledError. The
    guard is stored where ``module.compile()`` stores its code: torch calls it instead of the module's call, and leaves
    it out of copies and pickles; a module that other code has compiled this way gets no guard. Replicas of DataParallel
    share the module's attributes, so the called module is taken from the frame of the call; they run unchanged.

    Args:
        module: The module whose calls to guard.
        owner: Owner of the guard; :func:`unguard_calls` removes it, and another call with the same owner replaces it.
        depth: Returns the state before a call.
        unwind: Restores the state that ``depth`` returned.
        mode: Mode of ``torch.compile``; None does not compile.
    """
    alive = weakref.ref(module)
    compiled = None if mode is None else torch.compile(_own_frame(module), mode=mode)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            own: Any = alive()
            return own._call_impl(*args, **kwargs)
        called = sys._getframe(1).f_locals["self"]
        before = depth()
        try:
            if compiled is not None and called is alive():
                return compiled(*args, **kwargs)
            return called._call_impl(*args, **kwargs)
        except BaseException:
            unwind(before)
            raise

    present = module._compiled_call_impl
    call.__castwise_guard__, call.__castwise_before__ = owner, present  # type: ignore[attr-defined]
    if present is None or getattr(present, "__castwise_guard__", None) is owner:
        module._compiled_call_impl = call


def _own_frame(module: torch.nn.Module) -> FunctionType:
    """A function that calls a module with its hooks, with a separate code object.

    Dynamo keeps compiled code per code object, and stops compiling one after eight compilations. ``module.compile()``
    compiles ``Module._call_impl``, which all modules share.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    code = call.__code__.replace(co_name=f"call_{next(_numbers)}")
    _own_frames[code] = weakref.ref(module)
    return FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


_numbers = itertools.count()
"""A dictionary treats equal code objects as one key."""
_own_frames: weakref.WeakKeyDictionary[CodeType, weakref.ref[torch.nn.Module]] = weakref.WeakKeyDictionary()


def unguard_calls(module: torch.nn.Module, owner: object) -> None:
    """Remove the guard that :func:`guard_calls` put on a module for this owner, if any."""
    if getattr(module._compiled_call_impl, "__castwise_guard__", None) is owner:
        del module._compiled_call_impl


def without_guard(call: Any) -> Any:
    """The call that a module had before :func:`guard_calls`."""
    return getattr(call, "__castwise_before__", None) if hasattr(call, "__castwise_guard__") else call


def leave_uncompiled(module: torch.nn.Module, owner: object) -> None:
    """Undo compiling by :func:`guard_calls` for this owner, if any; the guard stays."""
    call = module._compiled_call_impl
    if getattr(call, "__castwise_guard__", None) is owner and call.__castwise_before__ is not None:  # type: ignore[union-attr]
        module._compiled_call_impl = call.__castwise_before__  # type: ignore[union-attr]


def without_compiler(module: torch.nn.Module) -> torch.nn.Module:
    """The module that ``torch.compile`` wrapped; other modules are returned unchanged."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else module


def autocast_within(function: Any) -> str | None:
    """The device type of an enabled ``torch.autocast`` that decorates a function, or a function that it wraps.

    Relies on the decorator of ``torch.autocast``: a function defined in its module, with the autocast in its closure.
    """
    while function is not None:
        function = getattr(function, "__func__", function)
        if getattr(function, "__globals__", {}).get("__name__") == torch.autocast.__module__:
            for cell in function.__closure__ or ():
                block = cell.cell_contents
                if isinstance(block, torch.autocast) and block._enabled:
                    return str(block.device)
        function = getattr(function, "__wrapped__", None)
    return None


def called_by_a_scaler() -> bool:
    """Whether a ``torch.amp.GradScaler`` is among the callers, as when it steps an optimizer."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
            return True
        frame = frame.f_back
    return False
