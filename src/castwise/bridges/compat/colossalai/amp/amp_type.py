"""``colossalai.amp.amp_type``: the enum ``AMP_TYPE`` of AMP modes."""

from __future__ import annotations

from enum import Enum

__all__ = ["AMP_TYPE"]


class AMP_TYPE(Enum):  # noqa: N801 - the name is the contract
    """The AMP modes of Colossal-AI."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"
