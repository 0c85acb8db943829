"""What autograd does not count: writes through ``data`` of parameters that have masters, and averages that begin as copies of them.

``nn.Parameter.data``, ``clone`` and ``__deepcopy__`` are followed, from the first master on and for good, since other threads may
be in them at any time. What they return is what torch returns.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from castwise import _torch
from castwise.masters.copies import is_watched, watch, watch_clone
from castwise.masters.originals import is_low
from castwise.masters.parameter import master_of

_own_data: Any = torch.Tensor.data
_own_deepcopy: Any = nn.Parameter.__deepcopy__


@functools.cache
def follow_parameters() -> None:
    """Begin, once in a process."""
    kind: Any = nn.Parameter
    kind.data = property(_data, _own_data.__set__, _own_data.__delete__)
    kind.clone = _clone
    kind.__deepcopy__ = _deepcopy


def _data(parameter: Any) -> Tensor:
    """The parameter's memory without history. Writes to it raise a version of the master's, not the parameter's."""
    if torch.compiler.is_compiling():  # of a class of a user's: Dynamo follows properties of those
        return parameter.detach()  # type: ignore[no-any-return]
    own: Tensor = _own_data.__get__(parameter)
    if not is_low(own):
        return own
    master: Any = master_of(parameter)
    if master is not None:
        return _torch.counted_alias(own, master.data_writes)
    return parameter.detach() if is_watched(parameter) else own


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
