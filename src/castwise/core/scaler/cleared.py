"""Notice updates computed from gradients that were cleared while they still held the loss scale.

Gradient surgery (PCGrad, CAGrad) computes the gradients of one task after the other, keeps copies, clears them, and
then sets a combination of the copies. If the copies held the loss scale, so does the combination. But ``zero_grad()``
followed by the user's own gradients is legal as well (Reptile, DiLoCo, evolution strategies), and a tensor does not
record where its values come from. So a sample of the cleared gradients is kept: gradients that are set later are taken
to hold the scale if they have about the same size and direction. Differences of weights are smaller by orders of
magnitude, since the updates that produced them were unscaled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from castwise.core.scaler import gradients

PARAMETERS, ELEMENTS = 16, 64
"""Number of gradients in a sample, and number of evenly spaced elements taken from each."""
_KEPT = 16
"""How many of the last clears are remembered."""
_SMALLEST = 64.0
"""Below this loss scale, sizes do not tell scaled from unscaled gradients."""
_SIZE, _DIRECTION = 0.02, 0.5
"""Thresholds above which gradients count as made from cleared ones: their size relative to the largest cleared
gradient, and the share of their length that lies in the space spanned by the cleared ones."""


class Cleared:
    """Samples of an optimizer's gradients that were cleared since its last step."""

    def __init__(self) -> None:
        self._samples: list[Mapping[int, Tensor]] = []

    def note(self, params: Sequence[Tensor], scale: float | None) -> None:
        """Record that gradients of some parameters hold a loss scale and are about to be cleared. ``scale``: None if unknown."""
        if params and (scale is None or scale >= _SMALLEST):
            some = params[:: -(-len(params) // PARAMETERS)]
            sampled = {id(p): _sample(p.grad) for p in some if p.grad is not None}
            self._samples = [*self._samples[1 - _KEPT :], sampled]

    def were_used_for(self, params: Sequence[Tensor]) -> bool:
        """Whether norm and direction show that the gradients were computed from cleared ones. Waits for the device."""
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
