"""``apex.optimizers.FusedAdam``, implemented with ``torch.optim.Adam``."""

from __future__ import annotations

from typing import Any

import torch

from castwise.bridges.compat.apex.optimizers.base import ClearsAsSaid, refuse

__all__ = ["FusedAdam"]


class FusedAdam(ClearsAsSaid, torch.optim.Adam):
    """Works as ``torch.optim.AdamW``, or as ``torch.optim.Adam`` with ``adam_w_mode=False``, with Apex's arguments.

    The optimizer can load states that Apex has saved. With ``set_grad_none=False``, ``zero_grad`` sets gradients to
    zeros instead of None.

    Raises:
        RuntimeError: ``bias_correction`` is False, or ``master_weights`` or ``amsgrad`` is True. Apex does not allow
            ``amsgrad`` either.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if not bias_correction:
            refuse("FusedAdam(bias_correction=False)", "leave it out and use learning-rate warmup")
        if master_weights:
            refuse("FusedAdam(master_weights=True)", "leave it out: amp.initialize with O2 keeps masters")
        self.set_grad_none = set_grad_none
        super().__init__(
            params, lr, betas, eps, weight_decay, capturable=capturable, decoupled_weight_decay=adam_w_mode
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state of this class or of Apex's FusedAdam.

        Apex counts steps in the parameter group. Such a count is moved to the state of each parameter, as torch keeps it.
        """
        state = {index: dict(entry) for index, entry in state_dict["state"].items()}
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group, mine in zip(groups, self.param_groups, strict=False):
            step = group.pop("step", None)
            group.pop("bias_correction", None)
            for index in group["params"]:
                if step is not None and index in state:
                    state[index].setdefault("step", torch.tensor(float(step), device="cpu"))
            for name, value in mine.items():
                group.setdefault(name, value)
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})
