"""Pickle prepared models and optimizers without castwise's objects, as they would pickle after ``Amp.close``.

Such a pickle loads where castwise is not installed. It also loads by ``torch.load(weights_only=True)`` if the model's
classes are allowed. castwise's hooks are left out. Tensors are in the formats that they had without the plan, with the
values of their fp32 masters. An optimizer in the same pickle refers to the same parameters as the model.

``copy.deepcopy`` does keep the hooks that cast at the borders of modules, since averages of weights are made by it.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from castwise.core import _torch
from castwise.core.masters.attachment import refresh_master
from castwise.core.masters.copies import is_being_copied
from castwise.core.masters.originals import former_dtype
from castwise.core.masters.parameter import master_of, model_param_of
from castwise.core.masters.state import move_state
from castwise.core.masters.weights import in_fp32
from castwise.core.model.borders import Method


class OfThisProcess:
    """A base class for objects that observe a session.

    If another object that holds such an object is copied or pickled, the copy holds None instead.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


_made: Any = WeakTensorKeyDictionary()
"""The tensors that replace a model's tensors in a pickle, with the version counters from when they were made.

They are referenced weakly, so they exist only as long as the pickle that is being written holds them."""


@functools.cache
def make_pickles_plain() -> None:
    """Make all models and optimizers of the process pickle without castwise's objects.

    The pickles can then be loaded without castwise. This is never undone, since copies of prepared models may outlive
    the :class:`castwise.Amp` that prepared them. Objects to which castwise has added nothing are pickled as before,
    by the method of their class.
    """
    for kind, plain in ((nn.Module, _plain_module), (Optimizer, _plain_optimizer)):
        _torch.hooks.around_function(kind, "__reduce_ex__", functools.partial(_around, kind, plain))
    copyreg.pickle(types.MethodType, lambda method: _plain_call(method, method))
    copyreg.pickle(functools.partial, lambda partial: _plain_call(partial, partial.func))


def _plain_call(call: Any, function: Any) -> Any:
    """Return what ``__reduce__`` should return for a method or a ``functools.partial``.

    In a pickle, a method of an :class:`OfThisProcess` object becomes None. Anything else is pickled and copied as usual.

    Args:
        call: The method or the partial.
        function: The method itself, or the function of the partial.
    """
    owner = getattr(function, "__self__", None)
    ours = isinstance(owner, OfThisProcess) and not is_being_copied()
    return owner.__reduce__() if ours else call.__reduce__()


def _around(kind: Any, plain: Callable[[Any, Any], Any], _: Callable[..., Any]) -> Callable[..., Any]:
    def of(thing: Any, part: Any) -> Any:
        if type(part) is tuple:  # arguments, which may contain attributes, or a pair of attributes and slots
            return tuple(plain(thing, each) if isinstance(each, dict) else each for each in part)
        return plain(thing, part) if isinstance(part, dict) else part

    def reduce(thing: Any, protocol: Any) -> Any:
        reduced = super(kind, thing).__reduce_ex__(
            protocol
        )  # a base class that inherits torch's may override it
        if not isinstance(reduced, tuple) or is_being_copied():
            return reduced
        return reduced[0], *(of(thing, part) for part in reduced[1:3]), *reduced[3:]

    return reduce


def _without_hooks(state: dict[str, Any]) -> dict[str, Any]:
    """Return those hook tables of a module or optimizer that contain castwise's hooks, without these hooks.

    If castwise has wrapped a hook of the user, the user's hook takes its place.
    """
    changed: dict[str, Any] = {}
    dropped: set[Any] = set()
    for name, table in state.items():
        if isinstance(table, dict) and table and str(name).endswith("_hooks"):
            ours = {key: _theirs(hook) for key, hook in table.items() if _is_ours(hook)}
            gone = {key for key, hook in ours.items() if hook is None}
            if ours:
                changed[name] = _with(table, ours, gone)
                dropped |= gone
    for name, table in state.items() if dropped else ():
        if isinstance(table, dict) and str(name).endswith(("_with_kwargs", "_always_called")):
            changed[name] = _with(table, {}, dropped)
    return changed


def _with(table: Any, others: Mapping[Any, Any], gone: Iterable[Any] = ()) -> Any:
    """Return a copy of a mapping, of the same class, with some values replaced and some keys removed."""
    found = copy.copy(table)
    found.update(others)
    for key in gone:
        found.pop(key, None)
    return found


def _theirs(hook: Any) -> Any:
    """Return the user's hook inside a wrapper of castwise, or None for a hook of castwise itself.

    Any other hook is returned unchanged.
    """
    if not _is_ours(hook):
        return hook
    inner = getattr(hook, "__wrapped__", None)
    return None if inner is None else _theirs(inner)


def _is_ours(hook: Any) -> bool:
    hook = _torch.hooks.registered(hook)
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(getattr(hook, "__self__", hook), "__module__", None)
    return isinstance(home, str) and home.partition(".")[0] == "castwise"


def _plain_module(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    changed = _without_hooks(state)
    for name in ("_parameters", "_buffers"):
        tensors = state.get(name)
        if isinstance(tensors, dict):
            others = {
                key: plain for key, tensor in tensors.items() if (plain := _plain(tensor)) is not tensor
            }
            if others:
                changed[name] = _with(tensors, others)
    call = state.get(
        "_compiled_call_impl"
    )  # torch's method of pickling leaves this out, but a class may have its own method
    if (before := _torch.calls.without_guard(call)) is not call:
        changed["_compiled_call_impl"] = before
    methods = [name for name, value in state.items() if isinstance(value, Method)]
    return _with(state, changed, methods) if changed or methods else state


def _plain(tensor: Any) -> Any:
    """Return a model's tensor in the dtype that it had before the plan changed it, with its fp32 values.

    A tensor whose dtype the plan did not change is returned unchanged.
    """
    if not isinstance(tensor, Tensor) or (dtype := former_dtype(tensor)) is tensor.dtype:
        return tensor
    if isinstance(tensor, nn.Parameter):
        refresh_master(tensor)
    master = master_of(tensor)
    versions = _torch.tensors.versions([tensor] if master is None else [tensor, master])
    known, was = _made.get(tensor, (None, None))
    made = None if known is None else known()
    if made is None or was != versions:
        values = in_fp32(tensor).to(dtype)
        if hasattr(values, "device_mesh"):
            made = nn.Parameter(values, tensor.requires_grad)
        else:
            made = (
                values
                .detach()
                .as_subclass(Tensor)
                .as_subclass(type(tensor))
                .requires_grad_(tensor.requires_grad)
            )
        vars(made).update(vars(tensor))
        _made[tensor] = weakref.ref(made), versions
    return made


def _plain_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    changed = _without_hooks(state)
    plain: dict[Tensor, nn.Parameter] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        stored = model_param_of(parameter)
        if stored is not parameter or former_dtype(stored) is not stored.dtype:
            plain[parameter] = _plain(stored)
    for name, value in state.items() if plain else ():
        if value is optimizer.state:
            kept = SimpleNamespace(state=copy.copy(value))
            move_state(kept, plain)  # type: ignore[arg-type]
            changed[name] = kept.state
        elif value is optimizer.param_groups:
            changed[name] = [
                {**group, "params": [plain.get(p, p) for p in group["params"]]} for group in value
            ]
    return _with(state, changed, ["__reduce_ex__"]) if changed or "__reduce_ex__" in state else state
