"""Hooks of modules and tensors, and replacement of torch functions."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


def before_calls(look: Callable[[torch.nn.Module], object]) -> Callable[[], None]:
    """Call ``look`` with each module before its call does anything; not in compiled code.

    torch's global module hooks run after a module's hooks have been read, so hooks added by ``look`` would not be
    called.

    Returns:
        A function that undoes the change.
    """

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def see(module: torch.nn.Module) -> None:  # after a graph break it would be compiled
        look(module)

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                see(self)
            return call(self, *args, **kwargs)

        return called

    return _instead_of_call(around)


def around_calls(run: Callable[..., Any]) -> Callable[[], None]:
    """Call ``run(call, module, *args, **kwargs)`` instead of each call of a module; not in compiled code.

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


def around_function(
    home: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replace a torch function, in a class or a module, by ``around(function)``.

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
    """A method of a torch class that is replaced by a wrapper while needed.

    An interrupt between any two lines leaves a state that :meth:`end` undoes; replacements by other code stay.
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
        """Restore the method if it is replaced."""
        if vars(self._home).get(self._name) is self._ours:
            setattr(self._home, self._name, self._own)


def hook_first(module: torch.nn.Module, hook: Callable[..., Any], *, with_kwargs: bool = False) -> None:
    """``module.register_forward_pre_hook(hook, prepend=True)``, in a form that torch 2.11 can compile.

    Its guards count the keys of an OrderedDict in insertion order, not in the order after ``move_to_end``.

    Args:
        module: The module whose forward the hook precedes, before all existing hooks.
        hook: As for ``register_forward_pre_hook``.
        with_kwargs: Whether it gets keyword arguments too.
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
    """The function that was registered as a hook of ``state_dict`` or ``load_state_dict``, which torch wraps."""
    return hook.hook if isinstance(hook, torch.nn.modules.module._WrappedHook) else hook


def remove_hooks(owner: Any, *hooks: Callable[..., Any]) -> None:
    """Remove hooks by their functions, since an interrupt can lose the handle.

    Args:
        owner: A module or an optimizer; None for the hooks of all optimizers.
        hooks: Every hook that equals one of them is removed.
    """
    owner = sys.modules[torch.optim.Optimizer.__module__] if owner is None else owner
    tables = [table for name, table in vars(owner).items() if "_hooks" in name and isinstance(table, dict)]
    keys = [
        key
        for table in tables
        for key, hook in list(table.items())
        if any(own == registered(hook) for own in hooks)
    ]
    for table in reversed(tables):  # torch stores further tables about a hook
        for key in keys:
            table.pop(key, None)


def takes_hooks(module: torch.nn.Module) -> bool:
    """Whether a scripted or traced module calls hooks: it does if ``torch.jit.trace`` returned it."""
    return type(module).__name__ == "TopLevelTracedModule"


def hook_tables(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """The tables of a module's hooks around ``forward``, after loading and before saving, for reading and writing."""
    return (
        module._forward_pre_hooks, module._forward_hooks, module._load_state_dict_post_hooks, module._state_dict_pre_hooks,
    )  # fmt: skip


def before_scripting(look: Callable[[torch.nn.Module], object]) -> None:
    """Call a function with each module before ``torch.jit.script`` compiles it, permanently."""

    def prepare(module: torch.nn.Module) -> torch.nn.Module:
        look(module)
        return module

    if not hasattr(torch.nn.Module, "__prepare_scriptable__"):
        torch.nn.Module.__prepare_scriptable__ = prepare  # type: ignore[attr-defined]


def around_scripting(
    around: Callable[[Any], contextlib.AbstractContextManager[object]],
) -> Callable[[], None]:
    """Make ``torch.jit.script`` compile everything inside ``around(what)``.

    It looks up the names that a class uses in its caller's frame, so it is told of the one additional frame.

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
    """By path, the dictionaries that hold the buffers of a model's modules, for reading and writing."""
    for path, module in model.named_modules():
        table: Any = module._buffers
        # scripted code returns a view of its buffers, in which no tensor can be replaced
        yield path, table if isinstance(table, dict) else dict(table.items())


def gradient_hooks(parameter: torch.Tensor) -> list[Any]:
    """The hooks that a backward calls with a parameter's gradient, before and after accumulation."""
    tables = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    return [hook for table in tables for hook in (table or {}).values()]
