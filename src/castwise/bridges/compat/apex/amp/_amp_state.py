"""The state of the drop-in: one per process, as in Apex, because scripts read it and write to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["AmpState", "master_params", "maybe_print", "warn_or_err"]


class AmpState:
    """The decisions of :func:`~castwise.compat.apex.amp.initialize`.

    Attributes:
        opt_properties: The active options; missing until the first ``initialize``, which scripts test with hasattr.
        loss_scalers: One per ``loss_id``.
        handle: The handle of O1's casts; None if there are none.
        verbosity: 0 prints nothing.
        hard_override: Print contradictions in the arguments as warnings instead of raising.
        allow_incoming_model_not_fp32: Accept models that are stored in half already.
        min_loss_scale: Floor of dynamic scales, or None.
        max_loss_scale: Ceiling of dynamic scales.
    """

    opt_properties: Any

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.loss_scalers: list[Any] = []
        self.handle: Any = None
        self.min_loss_scale: float | None = None
        self.max_loss_scale: float | None = 2.0**24


_amp_state = AmpState()


def warn_or_err(msg: str) -> None:
    """Raise RuntimeError, or print if ``_amp_state.hard_override`` is set."""
    if not _amp_state.hard_override:
        raise RuntimeError(msg)
    print("Warning:  " + msg)


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print unless verbosity is 0; with ``rank0``, only on the first rank."""
    if _amp_state.verbosity <= 0:
        return
    dist = torch.distributed
    if rank0 and dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return
    print(msg)


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """The parameters that an optimizer updates, group by group: the fp32 masters if there are any."""
    for group in optimizer.param_groups:
        yield from group["params"]
