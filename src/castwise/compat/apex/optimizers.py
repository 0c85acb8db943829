"""``apex.optimizers`` on ``torch.optim``: the same arguments, torch's arithmetic."""

from __future__ import annotations

from typing import Any

import torch

from castwise.compat.coverage import missing_attribute

__all__ = ["FusedAdagrad", "FusedAdam", "FusedSGD"]


def _refuse(what: str, instead: str) -> None:
    raise RuntimeError(f"{what} has no equivalent in torch; {instead}")


class _ClearsAsSaid(torch.optim.Optimizer):
    """An optimizer that was told once how ``zero_grad`` clears."""

    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients, by default as ``set_grad_none`` said."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class FusedAdam(_ClearsAsSaid, torch.optim.Adam):
    """``torch.optim.AdamW``, or ``Adam`` with ``adam_w_mode=False``. States that Apex saved load.

    ``set_grad_none=False`` has ``zero_grad`` fill with zeros.

    Raises:
        RuntimeError: ``bias_correction=False``, ``amsgrad=True`` (as in Apex) or ``master_weights=True``.
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
            _refuse("FusedAdam(bias_correction=False)", "leave it out and warm the learning rate up")
        if master_weights:
            _refuse("FusedAdam(master_weights=True)", "leave it out: amp.initialize with O2 keeps masters")
        self.set_grad_none = set_grad_none
        super().__init__(
            params, lr, betas, eps, weight_decay, capturable=capturable, decoupled_weight_decay=adam_w_mode
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state of this class or of Apex's, which counts steps by group."""
        state = {index: dict(entry) for index, entry in state_dict["state"].items()}
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group, mine in zip(groups, self.param_groups, strict=False):
            step = group.pop("step", None)
            group.pop("bias_correction", None)
            for index in group["params"]:
                if step is not None and index in state:
                    state[index].setdefault("step", torch.tensor(float(step)))
            for name, value in mine.items():
                group.setdefault(name, value)
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})


class FusedSGD(_ClearsAsSaid, torch.optim.SGD):
    """``torch.optim.SGD``.

    ``set_grad_none=True`` has ``zero_grad`` drop gradients; ``materialize_master_grads`` is ignored, as masters share the
    model's gradients.

    Raises:
        RuntimeError: ``wd_after_momentum=True``.
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
            _refuse("FusedSGD(wd_after_momentum=True)", "leave it out, or decay the weights by hand")
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


class FusedAdagrad(_ClearsAsSaid, torch.optim.Adagrad):
    """``torch.optim.Adagrad``; ``set_grad_none=False`` has ``zero_grad`` fill with zeros.

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
            _refuse("FusedAdagrad(adagrad_w_mode=True)", "leave it out, or decay the weights by hand")
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, weight_decay=weight_decay, eps=eps)


__getattr__ = missing_attribute("apex.optimizers")
