"""What a pickle of a prepared model, and of an optimizer, holds: what ``Amp.close`` would leave, and nothing of castwise's.

It loads where castwise is not, by ``torch.load(weights_only=True)`` too where the model's own classes are allowed. Borders and
other hooks are left out, and tensors are in the formats that they had without the plan, with the values of their masters; an
optimizer in the same pickle holds the same parameters. ``copy.deepcopy`` keeps borders, since averages of weights are made by it.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from castwise import _torch
from castwise.borders import Method
from castwise.masters.attachment import refresh_master
from castwise.masters.copies import is_being_copied
from castwise.masters.originals import former_dtype
from castwise.masters.parameter import master_of, model_param_of
from castwise.masters.state import move_state
from castwise.masters.weights import in_fp32


class OfThisProcess:
    """What watches a session: copies and pickles of what holds it have None in its place."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


_made: Any = WeakTensorKeyDictionary()
"""What stands for a tensor in the pickle that is being made, held by that alone, and the versions that it was made from."""


@functools.cache
def make_pickles_plain() -> None:
    """Have models and optimizers pickle so, for good: copies of prepared models outlive their session."""
    for kind, plain in ((nn.Module, _plain_module), (Optimizer, _plain_optimizer)):
        _torch.around_function(kind, "__reduce_ex__", functools.partial(_around, plain))


def _around(plain: Callable[[Any, Any], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(thing: Any, protocol: Any) -> Any:
        reduced = original(thing, protocol)
        if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced  # a class that pickles in its own way
        if is_being_copied():
            return reduced
        return (*reduced[:2], plain(thing, _without_hooks(reduced[2])), *reduced[3:])

    return reduce


def _without_hooks(state: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes without castwise's hooks; one that castwise has put around a hook of the user's gives that back."""
    found, dropped = dict(state), set()
    for name, table in state.items():
        if isinstance(table, dict) and name.endswith("_hooks"):
            theirs = {key: hook for key, each in table.items() if (hook := _theirs(each)) is not None}
            dropped |= table.keys() - theirs.keys()
            if any(hook is not table[key] for key, hook in theirs.items()) or len(theirs) < len(table):
                found[name] = type(table)(theirs)
    for name, table in state.items() if dropped else ():
        if isinstance(table, dict) and name.endswith(("_with_kwargs", "_always_called")):
            found[name] = type(table)({key: value for key, value in table.items() if key not in dropped})
    return found


def _theirs(hook: Any) -> Any:
    """A hook as the user knows it; None for one that is castwise's."""
    if not _is_ours(hook):
        return hook
    inner = getattr(hook, "__wrapped__", None)
    return None if inner is None else _theirs(inner)


def _is_ours(hook: Any) -> bool:
    hook = _torch.registered(hook)
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(getattr(hook, "__self__", hook), "__module__", None)
    return isinstance(home, str) and home.partition(".")[0] == "castwise"


def _plain_module(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    for name in ("_parameters", "_buffers"):
        tensors = state.get(name)
        if isinstance(tensors, dict):
            state[name] = type(tensors)((key, _plain(tensor)) for key, tensor in tensors.items())
    if "_compiled_call_impl" in state:  # of a class with a __getstate__ of its own: torch's leaves it out
        state["_compiled_call_impl"] = _torch.without_guard(state["_compiled_call_impl"])
    return {name: value for name, value in state.items() if not isinstance(value, Method)}


def _plain(tensor: Any) -> Any:
    """A tensor of a model as it is without the plan: itself where the plan stores it as it came."""
    if not isinstance(tensor, Tensor) or (dtype := former_dtype(tensor)) is tensor.dtype:
        return tensor
    if isinstance(tensor, nn.Parameter):
        refresh_master(tensor)
    master = master_of(tensor)
    versions = _torch.versions([tensor] if master is None else [tensor, master])
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
    state.pop("__reduce_ex__", None)
    groups = state.get("param_groups", ())
    plain: dict[Tensor, nn.Parameter] = {}
    for parameter in (p for group in groups for p in group["params"]):
        stored = model_param_of(parameter)
        if stored is not parameter or former_dtype(stored) is not stored.dtype:
            plain[parameter] = _plain(stored)
    if plain:
        kept = SimpleNamespace(state=copy.copy(state["state"]))
        move_state(kept, plain)  # type: ignore[arg-type]
        state["state"] = kept.state
        state["param_groups"] = [
            {**group, "params": [plain.get(p, p) for p in group["params"]]} for group in groups
        ]
    return state
