"""Hooks of modules and tensors, and replacement of torch functions."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch


def before_calls(look: Callable[[torch.nn.Module], object]) -> Callable[[], None]:
    """Call ``look`` with each module at the start of each of its calls, except in compiled code.

    torch's global module hooks run too late for this: the called module's own hooks have been read by then, so hooks
    that ``look`` adds to the module would not be called.

    Returns:
        A function that undoes the change.
    """

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def see(module: torch.nn.Module) -> None:  # Dynamo must not compile this after a graph break
        look(module)

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                see(self)
            return call(self, *args, **kwargs)

        return called

    return _instead_of_call(around)


def around_calls(run: Callable[..., Any]) -> Callable[[], None]:
    """Call ``run(call, module, *args, **kwargs)`` instead of each call of any module, except in compiled code.

    Returns:
        A function that undoes the change.
    """

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def run_uncompiled(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return call(self, *args, **kwargs)
            return run_uncompiled(call, self, *args, **kwargs)

        return called

    return _instead_of_call(around)


def _instead_of_call(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    home: Any = torch.nn.Module
    original = home.__call__
    home.__call__ = called = around(original)

    def undo() -> None:
        if home.__call__ is called:
            home.__call__ = original

    return undo


class Forwards:
    """Calls ``run(forward, module, args, kwargs)`` instead of the ``forward`` of each module's class; not in compiled code.

    So a direct call, ``model.forward(x)``, which runs no hooks, is seen too. A class is changed when a module of it
    is created or unpickled: ``forward`` is replaced where it is defined, and the modules themselves stay unchanged.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._changed: weakref.WeakSet[type] = weakref.WeakSet()
        """The classes whose ``forward`` is ours; its ``__wrapped__`` is their own."""
        self._ours: weakref.WeakSet[Any] = weakref.WeakSet()
        """Our functions."""
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Start with the classes of modules that are created from now on."""
        for name in ("__init__", "__setstate__"):
            self._undo.append(around_function(torch.nn.Module, name, self._noting))

    def end(self) -> None:
        """Restore all classes."""
        while self._undo:
            self._undo.pop()()
        self._restore()
        self._changed.clear()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Restore all classes inside a block, for code that reads the source of ``forward``."""
        restored = self._restore()
        try:
            yield
        finally:
            for home, ours in restored:
                if vars(home).get("forward") is ours.__wrapped__:
                    home.forward = ours

    def _restore(self) -> list[tuple[Any, Any]]:
        """Give the classes back their own ``forward``; returns the classes and the functions that were there."""
        restored = []
        for home in list(self._changed):
            ours: Any = vars(home).get("forward")
            if isinstance(ours, types.FunctionType) and ours in self._ours:
                home.forward = ours.__wrapped__  # type: ignore[attr-defined]
                restored.append((home, ours))
        return restored

    def _noting(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            home = next((kind for kind in type(module).__mro__ if "forward" in vars(kind)), torch.nn.Module)
            if home is not torch.nn.Module and home not in self._changed:
                self._change(home)
            return make(module, *args, **kwargs)

        return made

    def _change(self, home: Any) -> None:
        forward, run = vars(home)["forward"], self._run
        if not isinstance(forward, types.FunctionType):  # scripted code, for example
            return

        def called(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(self, *args, **kwargs)
            return run(forward, self, args, kwargs)

        # Dynamo keeps compiled code per code object, and stops compiling one after eight compilations
        code = called.__code__.replace(co_name=f"forward_of_{home.__name__}")
        ours: Any = types.FunctionType(code, called.__globals__, code.co_name, None, called.__closure__)
        functools.update_wrapper(ours, forward)
        with contextlib.suppress(ValueError, TypeError):  # for tools that ignore __wrapped__
            ours.__signature__ = inspect.signature(forward)
        self._ours.add(ours)
        self._changed.add(home)
        home.forward = ours


def around_function(
    home: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replace a function by ``around(function)``.

    Args:
        home: The class or the Python module that has the function.
        name: The name of the function.
        around: Takes the function and returns its replacement.

    Returns:
        A function that undoes the change.
    """
    original, is_own = getattr(home, name), name in vars(home)
    called = functools.wraps(original)(around(original))
    setattr(home, name, called)

    def undo() -> None:
        if getattr(home, name) is called:
            setattr(home, name, original) if is_own else delattr(home, name)

    return undo


class Replacement:
    """Replaces a method of a torch class by a wrapper from :meth:`begin` to :meth:`end`.

    Even if an interrupt comes between two lines, :meth:`end` restores the method. A method that other code has replaced
    stays as it is.
    """

    def __init__(
        self, home: type, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._home, self._name, self._own = home, name, vars(home)[name]
        self._ours = functools.wraps(self._own)(around(self._own))

    def begin(self) -> None:
        """Install the wrapper if it is not installed."""
        if vars(self._home).get(self._name) is self._own:
            setattr(self._home, self._name, self._ours)

    def end(self) -> None:
        """Restore the method if the wrapper is installed."""
        if vars(self._home).get(self._name) is self._ours:
            setattr(self._home, self._name, self._own)


def hook_first(module: torch.nn.Module, hook: Callable[..., Any], *, with_kwargs: bool = False) -> None:
    """Register a forward pre-hook that runs before all existing pre-hooks of a module.

    It does the same as ``module.register_forward_pre_hook(hook, prepend=True)``, but torch 2.11 can compile the
    result. torch's own function moves the hook to the front with ``move_to_end``. The guards of torch 2.11's Dynamo
    do not notice this, because they read the keys of an OrderedDict in insertion order.

    Args:
        module: The module whose forward the hook precedes.
        hook: The hook, in the form that ``register_forward_pre_hook`` accepts.
        with_kwargs: Whether the hook gets keyword arguments too.
    """
    module.register_forward_pre_hook(hook, prepend=True, with_kwargs=with_kwargs)
    table = module._forward_pre_hooks
    if list(table) != list(dict.keys(table)):
        hooks = list(table.items())
        try:
            table.clear()
        finally:  # the hooks stay even after an interrupt
            table.update(hooks)


def registered(hook: Any) -> Any:
    """Return the function that was registered as a hook. torch wraps hooks of ``state_dict`` and ``load_state_dict``."""
    return hook.hook if isinstance(hook, torch.nn.modules.module._WrappedHook) else hook


def remove_hooks(owner: Any, *hooks: Callable[..., Any]) -> None:
    """Remove hooks by their functions instead of their handles, since an interrupt can lose a handle.

    Args:
        owner: A module or an optimizer. None stands for the global hooks, which run for all optimizers.
        hooks: Functions. Every hook that equals one of these functions is removed.
    """
    owner = sys.modules[torch.optim.Optimizer.__module__] if owner is None else owner
    tables = [table for name, table in vars(owner).items() if "_hooks" in name and isinstance(table, dict)]
    keys = [
        key
        for table in tables
        for key, hook in list(table.items())
        if any(own == registered(hook) for own in hooks)
    ]
    for table in reversed(
        tables
    ):  # torch has more tables with entries for a hook, such as which take keywords
        for key in keys:
            table.pop(key, None)


def takes_hooks(module: torch.nn.Module) -> bool:
    """Whether a scripted or traced module calls hooks. Only a module that ``torch.jit.trace`` itself returned does."""
    return type(module).__name__ == "TopLevelTracedModule"


def hook_tables(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the dictionaries in which a module stores its hooks, for reading and writing.

    They are those of forward pre-hooks, forward hooks, post-hooks of ``load_state_dict`` and pre-hooks of
    ``state_dict``.
    """
    return (
        module._forward_pre_hooks, module._forward_hooks, module._load_state_dict_post_hooks, module._state_dict_pre_hooks,
    )  # fmt: skip


def before_scripting(look: Callable[[torch.nn.Module], object]) -> None:
    """Call ``look`` with each module before ``torch.jit.script`` compiles the module. This change cannot be undone."""

    def prepare(module: torch.nn.Module) -> torch.nn.Module:
        look(module)
        return module

    if not hasattr(torch.nn.Module, "__prepare_scriptable__"):
        torch.nn.Module.__prepare_scriptable__ = prepare  # type: ignore[attr-defined]


def around_scripting(
    around: Callable[[Any], contextlib.AbstractContextManager[object]],
) -> Callable[[], None]:
    """Make every call ``torch.jit.script(what)`` compile inside the context manager ``around(what)``.

    ``torch.jit.script`` looks up the names that a class uses in the frame of its caller. So it is told that there is
    one more frame in between.

    Returns:
        A function that undoes the change.
    """

    def outside(compile_: Callable[..., Any]) -> Callable[..., Any]:
        def script(what: Any, *args: Any, _frames_up: int = 0, **options: Any) -> Any:
            with around(what):
                return compile_(what, *args, _frames_up=_frames_up + 1, **options)

        return script

    return around_function(torch.jit, "script", outside)


def buffer_tables(model: torch.nn.Module) -> Iterator[tuple[str, dict[str, torch.Tensor | None]]]:
    """Yield the path of each module of a model and the dictionary of the module's buffers, for reading and writing."""
    for path, module in model.named_modules():
        table: Any = module._buffers
        # scripted code returns a view of its buffers, in which no tensor can be replaced
        yield path, table if isinstance(table, dict) else dict(table.items())


def gradient_hooks(parameter: torch.Tensor) -> list[Any]:
    """Return the hooks that a backward pass calls for a parameter's gradient, before and after accumulating it."""
    tables = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    return [hook for table in tables for hook in (table or {}).values()]
