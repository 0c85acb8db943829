"""The global state of ``apex.amp``. As in Apex there is one object per process, which scripts may read and change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["AmpState", "master_params", "maybe_print", "warn_or_err"]


class AmpState:
    """The options and loss scales that :func:`~castwise.compat.apex.amp.initialize` has set.

    Attributes:
        opt_properties: The active options. The attribute does not exist before the first ``initialize``; scripts test
            this with hasattr.
        loss_scalers: The loss scales; ``loss_id`` is an index of this list.
        handle: The handle that ends the casts of level ``O1``; None if there are no such casts.
        verbosity: 0 prints nothing.
        hard_override: Print contradictions in the arguments as warnings instead of raising.
        allow_incoming_model_not_fp32: Accept models that are stored in half already.
        min_loss_scale: The smallest value of dynamic loss scales, or None.
        max_loss_scale: The largest value of dynamic loss scales, or None.
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
    """Raise RuntimeError with a message. If ``_amp_state.hard_override`` is set, print the message instead."""
    if not _amp_state.hard_override:
        raise RuntimeError(msg)
    print("Warning:  " + msg)


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print a message unless the verbosity is 0. With ``rank0``, only rank 0 prints."""
    if _amp_state.verbosity <= 0:
        return
    dist = torch.distributed
    if rank0 and dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return
    print(msg)


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """Iterate over the parameters that an optimizer updates, group by group.

    If the optimizer keeps fp32 master weights of parameters in fp16 or bf16, the iterator returns the master weights.

    Args:
        optimizer: The optimizer.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
