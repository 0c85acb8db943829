"""Gradients that were cleared while they held the loss scale: what is made of copies of them is too large by it.

Gradient surgery (PCGrad, CAGrad) computes gradients of one task after the other, keeps copies, clears, and sets what it has made
of them. ``zero_grad()`` followed by gradients of one's own is legal as well (Reptile, DiLoCo, evolution strategies), and nothing
on a tensor says where its values are from. So a sample of what was cleared is kept: gradients that are set later hold the scale
where they are about as large as these were and point where these pointed. Differences of weights are smaller by orders of
magnitude, since they are made by gradients without the scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from castwise.core.scaler import gradients

PARAMETERS, ELEMENTS = 16, 64
"""A look at gradients takes this many of them, and this many evenly spaced elements of each."""
_KEPT = 16
"""Times that gradients were cleared, the last of them."""
_SMALLEST = 64.0
"""Below this loss scale sizes tell nothing."""
_SIZE, _DIRECTION = 0.02, 0.5
"""The share of the largest of those that were cleared, and that of its length in the space that they span, from which gradients are
taken to be made of them."""


class Cleared:
    """What of an optimizer's gradients was cleared since its last step."""

    def __init__(self) -> None:
        self._samples: list[Mapping[int, Tensor]] = []

    def note(self, params: Sequence[Tensor], scale: float | None) -> None:
        """The gradients of some parameters hold a loss scale, and are about to be cleared. ``scale``: None if unknown."""
        if params and (scale is None or scale >= _SMALLEST):
            some = params[:: -(-len(params) // PARAMETERS)]
            sampled = {id(p): _sample(p.grad) for p in some if p.grad is not None}
            self._samples = [*self._samples[1 - _KEPT :], sampled]

    def were_used_for(self, params: Sequence[Tensor]) -> bool:
        """Whether gradients are made of what was cleared, as far as size and direction tell. Waits for the device."""
        now = [(id(p), p.grad) for p in params if p.grad is not None]
        common = [(key, grad) for key, grad in now if all(key in sample for sample in self._samples)]
        if not self._samples or not common:
            return False
        new = torch.cat([_sample(grad).double().cpu() for _, grad in common])
        old = torch.stack([torch.cat([s[key].double().cpu() for key, _ in common]) for s in self._samples])
        if old.shape[1] != len(new) or not (new.isfinite().all() and old.isfinite().all()):
            return False
        size = new.norm()
        if not size > 0 or size < _SIZE * old.norm(dim=1).max():
            return False
        base = torch.linalg.svd(old, full_matrices=False)
        within = base.Vh[: int((base.S / base.S[0] > 1e-6).sum())] @ new
        return bool(within.norm() >= _DIRECTION * size)


def _sample(grad: Tensor) -> Tensor:
    flat = gradients.values(grad.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS].clone()
