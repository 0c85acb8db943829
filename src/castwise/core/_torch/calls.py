"""Guards around the calls of modules, and questions about how modules and functions are called."""

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
"""The parametrizations of torch whose kernels for bf16 and fp16 are accurate."""


def guard_calls(
    module: torch.nn.Module,
    owner: object,
    depth: Callable[[], int],
    unwind: Callable[[int], None],
    mode: str | None = None,
) -> None:
    """Put a guard around the calls of a module. If a call ends with any exception, it restores a state of the thread.

    The guard is needed because torch runs forward hooks after an ``Exception``, but not after KeyboardInterrupt,
    SystemExit or CancelledError. With a ``mode``, the guard also compiles the module's calls.

    The guard is stored in the attribute where ``module.compile()`` stores its compiled code. torch then calls the
    guard instead of the module's own call, and leaves it out of copies and pickles. A module that other code has
    compiled with ``module.compile()`` gets no guard. Replicas of DataParallel share the module's attributes, so the
    guard looks up in the caller's frame which module was called. Replicas run uncompiled.

    Args:
        module: The module whose calls to guard.
        owner: An object that owns the guard. :func:`unguard_calls` removes the guard of an owner, and another call of
            this function with the same owner replaces the guard.
        depth: Returns the state before a call.
        unwind: Restores the state that ``depth`` returned.
        mode: Mode of ``torch.compile``. With None the calls are not compiled.
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
    """Return a function that calls a module with its hooks, and whose code object no other function has.

    Dynamo keeps compiled code per code object, and stops compiling a code object after eight compilations. All modules
    share the code object of ``Module._call_impl``, which ``module.compile()`` compiles.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    code = call.__code__.replace(co_name=f"call_{next(_numbers)}")
    _own_frames[code] = weakref.ref(module)
    return FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


_numbers = itertools.count()
"""Numbers for the names of code objects.

A dictionary treats equal code objects as one key, so each needs its own name.
"""
_own_frames: weakref.WeakKeyDictionary[CodeType, weakref.ref[torch.nn.Module]] = weakref.WeakKeyDictionary()


def unguard_calls(module: torch.nn.Module, owner: object) -> None:
    """Remove the guard that :func:`guard_calls` put around a module's calls for this owner, if there is one."""
    if getattr(module._compiled_call_impl, "__castwise_guard__", None) is owner:
        del module._compiled_call_impl


def without_guard(call: Any) -> Any:
    """Return the ``_compiled_call_impl`` that a module had before :func:`guard_calls`, or None if it had none.

    Args:
        call: The module's current ``_compiled_call_impl``. If it is no guard, it is returned unchanged.
    """
    return getattr(call, "__castwise_before__", None) if hasattr(call, "__castwise_guard__") else call


def leave_uncompiled(module: torch.nn.Module, owner: object) -> None:
    """Undo the compiling of a module's calls by this owner's last :func:`guard_calls`, if it compiled them.

    The owner's earlier guard, which does not compile, is put back.
    """
    call = module._compiled_call_impl
    if getattr(call, "__castwise_guard__", None) is owner and call.__castwise_before__ is not None:  # type: ignore[union-attr]
        module._compiled_call_impl = call.__castwise_before__  # type: ignore[union-attr]


def without_compiler(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside a wrapper that ``torch.compile`` made, or the given module if it is not a wrapper."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else module


def autocast_within(function: Any) -> str | None:
    """Return the device type of an enabled ``torch.autocast`` that decorates a function, or None without one.

    Functions that the given function wraps (``__wrapped__``) are searched too. This relies on how ``torch.autocast``
    decorates: the decorated function is defined in torch's autocast module and has the autocast object in its closure.
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
    """Whether a method of ``torch.amp.GradScaler`` is on the call stack, as when a GradScaler steps an optimizer."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
            return True
        frame = frame.f_back
    return False
