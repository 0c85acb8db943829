"""``apex.optimizers.FusedSGD``, implemented with ``torch.optim.SGD``."""

from __future__ import annotations

from typing import Any

import torch

from castwise.bridges.compat.apex.optimizers.base import ClearsAsSaid, refuse

__all__ = ["FusedSGD"]


class FusedSGD(ClearsAsSaid, torch.optim.SGD):
    """Works as ``torch.optim.SGD``, with Apex's arguments.

    With ``set_grad_none=True``, ``zero_grad`` sets gradients to None. ``materialize_master_grads`` is ignored, since
    fp32 master weights share the gradients of the model's parameters.

    Raises:
        RuntimeError: ``wd_after_momentum`` is True.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if wd_after_momentum:
            refuse("FusedSGD(wd_after_momentum=True)", "leave it out, or decay the weights by hand")
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
