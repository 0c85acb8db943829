"""Compute a digest of a workload's code and settings. It does not depend on where the code lies or when it was read."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from castwise.errors import is_users

_TORCHS = frozenset(name for name in vars(nn.Module()) if not name.endswith("_hooks"))
_LARGEST = 1 << 20
"""Largest number of elements of a tensor, besides parameters, whose values are read."""
_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device, types.NoneType)


def code_digest(model: nn.Module, functions: Iterable[Any]) -> str:
    """Return a digest of the code that a workload runs.

    It covers the classes of the model's modules outside torch, the values that modules hold besides tensors and modules, the given
    functions, and the user's code to which they refer.
    """
    reader = _Reader()
    for kind in sorted({type(module) for module in model.modules()}, key=lambda kind: kind.__qualname__):
        reader.methods(kind)
    for path, module in model.named_modules():
        reader.held(path, module)
    for function in functions:
        reader.read(function)
    return reader.digest.hexdigest()[:16]


def values_digest(value: Any) -> str:
    """Return a digest of what a value holds besides tensors: numbers, texts, arrays, and objects with their attributes."""
    reader = _Reader()
    reader.read(value)
    return reader.digest.hexdigest()[:16]


class _Reader:
    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._seen: dict[
            int, tuple[int, Any]
        ] = {}  # numbers, and keeps, each object: Python cannot reuse its address

    def _say(self, *words: object) -> None:
        self.digest.update(repr(words).encode())

    def methods(self, kind: type) -> None:
        """Add a module class to the digest. Classes of installed libraries are read too: no version is recorded for them."""
        for cls in kind.__mro__:
            if cls is not object and not cls.__module__.startswith("torch."):
                self._say(cls.__qualname__)
                for name, value in sorted(vars(cls).items()):
                    if not name.startswith("__") or isinstance(value, types.FunctionType):
                        self.read(value, inside=True)

    def held(self, name: str, thing: Any) -> None:
        """Add the attributes of an object to the digest, without those of a module that torch itself sets."""
        own = dict(getattr(thing, "__dict__", {}))
        for cls in type(thing).__mro__:
            names = vars(cls).get("__slots__", ())
            own |= {
                name: getattr(thing, name)
                for name in ((names,) if isinstance(names, str) else names)
                if hasattr(thing, name)
            }
        if isinstance(thing, nn.Module):
            own = {key: value for key, value in own.items() if key not in _TORCHS}
        for key, value in sorted(own.items()):
            self._say(name, key)
            # hooks are stored by numbers that differ each time
            hooks = isinstance(thing, nn.Module) and key.endswith("_hooks")
            self.read(list(value.values()) if hooks else value)

    def read(self, thing: Any, inside: bool = False) -> None:
        """Add an object to the digest, and the user's code to which it refers.

        With ``inside``, code of the object itself is added even if it is not the user's.
        """
        if isinstance(thing, _PLAIN):
            self._say(thing)
            return
        if id(thing) in self._seen:
            self._say(self._seen[id(thing)][0])  # what it is was said at its first place
            return
        self._seen[id(thing)] = len(self._seen), thing
        if isinstance(thing, Tensor):
            self._tensor(thing)
            return
        if isinstance(thing, nn.Module):
            self.methods(type(thing))
            return
        if isinstance(thing, (np.ndarray, np.generic)):
            self._say(thing.shape, thing.dtype.str, thing.tobytes())
            return
        if isinstance(thing, (tuple, list, set, frozenset, dict)):
            items = thing.items() if isinstance(thing, dict) else thing
            for item in sorted(items, key=repr) if isinstance(thing, (set, frozenset)) else items:
                self.read(item)
        elif isinstance(thing, types.FunctionType):
            self._function(thing, inside)
        elif isinstance(thing, type):
            if _is_own(thing):
                self.methods(thing)
        elif not isinstance(thing, types.ModuleType):
            parts = list(_parts(thing))
            for part in parts:
                self.read(part, inside)
            if not parts:
                self.read(type(thing))
                # a configuration, for example
                if hasattr(thing, "__dict__") or hasattr(type(thing), "__slots__"):
                    self.held(type(thing).__qualname__, thing)

    def _tensor(self, tensor: Tensor) -> None:
        """Add shape and dtype of a tensor, and, if it is small and plain, the bytes of its values."""
        self._say(None if tensor.is_nested else tuple(tensor.shape), str(tensor.dtype))
        plain = (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and not (tensor.is_meta or tensor.is_nested)
        )
        if plain and tensor.numel() <= _LARGEST:
            flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            self._say(flat.view(torch.uint8).numpy().tobytes())

    def _function(self, function: types.FunctionType, inside: bool) -> None:
        code = function.__code__
        own = is_users(code.co_filename)
        self._say(function.__qualname__)
        if inside or own:
            self._code(code)
        for held in (function.__defaults__, function.__kwdefaults__, _cells(function)):
            if own or function.__module__.startswith(
                "castwise."
            ):  # these functions of castwise have closures that hold objects of the user
                self.read(held)
        if own:
            self._globals(function)
        wrapped = getattr(function, "__wrapped__", None)  # by a decorator, often of a library
        if wrapped is not None:
            self.read(wrapped, inside)

    def _code(self, code: types.CodeType) -> None:
        self._say(code.co_code, code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:  # by value: object identity depends on whether the file has just been compiled
                self._say(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)

    def _globals(self, function: types.FunctionType) -> None:
        names = list(_names(function.__code__))
        for name in names:
            value = function.__globals__.get(name)
            if isinstance(value, types.ModuleType):
                if is_users(getattr(value, "__file__", None) or "<frozen"):
                    for other in names:
                        self.read(vars(value).get(other))
            else:
                self.read(value)


def _is_own(kind: type) -> bool:
    # static and class methods hold a function
    values = (getattr(value, "__func__", value) for value in vars(kind).values())
    return any(is_users(value.__code__.co_filename) for value in values if isinstance(value, types.FunctionType))  # fmt: skip


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _cells(function: types.FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    return found


def _parts(thing: Any) -> Iterator[Any]:
    """Yield the functions and arguments that a wrapper such as ``functools.partial`` holds."""
    if isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, types.MethodType):
        yield from (thing.__func__, thing.__self__)
    elif isinstance(thing, (staticmethod, classmethod)):
        yield thing.__func__
    elif isinstance(thing, property):
        yield from (thing.fget, thing.fset)
