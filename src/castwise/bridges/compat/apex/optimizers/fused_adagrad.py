"""``apex.optimizers.FusedAdagrad`` on ``torch.optim.Adagrad``."""

from __future__ import annotations

from typing import Any

import torch

from castwise.bridges.compat.apex.optimizers.base import ClearsAsSaid, refuse

__all__ = ["FusedAdagrad"]


class FusedAdagrad(ClearsAsSaid, torch.optim.Adagrad):
    """``torch.optim.Adagrad``; ``set_grad_none=False`` makes ``zero_grad`` set gradients to zeros.

    Raises:
        RuntimeError: ``adagrad_w_mode=True``.
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
