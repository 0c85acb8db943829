"""``apex.optimizers.FusedAdagrad``, implemented with ``torch.optim.Adagrad``."""

from __future__ import annotations

from typing import Any

import torch

from castwise.bridges.compat.apex.optimizers.base import ClearsAsSaid, refuse

__all__ = ["FusedAdagrad"]


class FusedAdagrad(ClearsAsSaid, torch.optim.Adagrad):
    """Works as ``torch.optim.Adagrad``, with Apex's arguments.

    With ``set_grad_none=False``, ``zero_grad`` sets gradients to zeros instead of None.

    Raises:
        RuntimeError: ``adagrad_w_mode`` is True.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        if adagrad_w_mode:
            refuse("FusedAdagrad(adagrad_w_mode=True)", "leave it out, or decay the weights by hand")
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, weight_decay=weight_decay, eps=eps)
