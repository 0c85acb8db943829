"""``colossalai.amp.amp_type``: the modes."""

from __future__ import annotations

from enum import Enum

__all__ = ["AMP_TYPE"]


class AMP_TYPE(Enum):  # noqa: N801 - the name is the contract
    """The three modes."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"
