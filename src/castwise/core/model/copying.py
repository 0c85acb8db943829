"""Copy models."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

_M = TypeVar("_M", bound=nn.Module)


def copy_of(model: _M) -> _M:
    """Return a deep copy of a model that can be trained, which torch's copy of a scripted part cannot: it has no leaves."""
    out = copy.deepcopy(model)
    for parameter in out.parameters():
        if not parameter.is_leaf:
            parameter.detach_().requires_grad_()
    return out
