"""Patch ``nn.Parameter`` to notice writes through ``data``, which autograd does not count, and copies of parameters.

``nn.Parameter.data``, ``clone`` and ``__deepcopy__`` are patched while an optimizer has fp32 masters. They return
what torch's own return. Copies are noticed because they may become averages of weights. Where a device has kernels that write
and do not count it, they count while an optimizer has masters there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.masters import sync
from castwise.core.masters.copies import is_watched, note_replaced, watch, watch_clone
from castwise.core.masters.originals import is_low
from castwise.core.masters.parameter import master_of

_own_data: Any = torch.Tensor.data
_own_deepcopy: Any = nn.Parameter.__deepcopy__
_lock = threading.RLock()
"""A lock that is reentrant, because a thread that holds it may garbage-collect an :class:`Attachment`."""


def follow_parameters(device_types: Collection[str]) -> None:
    """Patch ``nn.Parameter``, and kernels of devices that do not count their writes, unless they are patched already."""
    with _lock:
        for device_type in device_types:
            if device_type not in _counted:
                _counted[device_type] = _torch.dispatcher.count_foreach_writes(device_type)
        for name, ours in _OURS.items():
            if name not in _in_force:
                _in_force.add(name)
                setattr(nn.Parameter, name, ours)


def leave_parameters() -> None:
    """Remove the patches if no :class:`Attachment` is alive.

    A patch that other code has replaced since is left alone.
    """
    with _lock:
        if any(reference() is not None for reference in sync.live.valuerefs()):
            return
        while _counted:
            _counted.popitem()[1]()
        for name in sorted(_in_force):
            if vars(nn.Parameter).get(name) is _OURS[name]:
                if name in _THEIRS:
                    setattr(nn.Parameter, name, _THEIRS[name])
                else:
                    delattr(nn.Parameter, name)
                _in_force.discard(name)


def _data(parameter: Any) -> Tensor:
    """Return the parameter's memory without autograd history.

    This is ``parameter.data`` while ``nn.Parameter`` is patched.

    If the parameter has an fp32 master, writes to the result are counted in ``master.data_writes``.
    """
    if (
        torch.compiler.is_compiling()
    ):  # Dynamo traces this property if the user has defined a subclass of Parameter
        return parameter.detach()  # type: ignore[no-any-return]
    own: Tensor = _own_data.__get__(parameter)
    if not is_low(own):
        return own
    master: Any = master_of(parameter)
    if master is not None:
        return master.data_writes.alias(own)  # type: ignore[no-any-return]
    return parameter.detach() if is_watched(parameter) else own


def _set_data(parameter: Any, value: Tensor) -> None:
    _own_data.__set__(parameter, value)
    if is_watched(parameter):
        note_replaced(parameter)


def _clone(parameter: Any, **options: Any) -> Tensor:
    clone = Tensor.clone(parameter, **options)
    if not torch.compiler.is_compiling() and is_low(clone) and master_of(parameter) is not None:
        watch_clone(clone, parameter)
    return clone


def _deepcopy(parameter: Any, memo: dict[int, Any]) -> Any:
    known = id(parameter) in memo
    copied = _own_deepcopy(parameter, memo)
    if not known and master_of(parameter) is not None:
        watch(copied, parameter)
    return copied


_OURS: dict[str, Any] = {
    "data": property(_data, _set_data, _own_data.__delete__),
    "clone": _clone,
    "__deepcopy__": _deepcopy,
}
_THEIRS = {name: vars(nn.Parameter)[name] for name in _OURS if name in vars(nn.Parameter)}
_in_force: set[str] = set()
_counted: dict[str, Callable[[], None]] = {}
"""By the type of a device, the function that undoes the patches of its kernels."""
