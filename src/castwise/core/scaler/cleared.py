"""Notice gradients that the user's code computed from copies of scaled gradients, made before these were cleared.

Gradient surgery (PCGrad, CAGrad) computes the gradients of one task after the other, keeps copies of them, clears them,
and then sets a combination of the copies. If the copies are multiplied by the loss scale, so is the combination. But it
is legal as well to call ``zero_grad()`` and set gradients of one's own (Reptile, DiLoCo, evolution strategies). A
tensor does not record where its values come from. So a sample of the cleared gradients is kept. Gradients that are set
later are taken to be multiplied by the scale if they have about the same size and direction as the cleared ones.
Differences of weights, which Reptile and DiLoCo set as gradients, are smaller by orders of magnitude, since the updates
that produced them were unscaled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from castwise.core.scaler import gradients

PARAMETERS, ELEMENTS = 16, 64
"""The number of gradients in a sample, and the number of evenly spaced elements that are taken from each."""
_KEPT = 16
"""The number of samples that are kept: one for each of the last calls that cleared gradients."""
_SMALLEST = 64.0
"""The smallest loss scale at which scaled and unscaled gradients can be told apart by their size."""
_SIZE, _DIRECTION = 0.02, 0.5
"""The thresholds above which gradients count as computed from cleared ones.

The first is for their norm relative to the largest norm of the cleared ones. The second is for the share of their norm
that lies in the space spanned by the cleared ones.
"""


class Cleared:
    """Holds samples of an optimizer's gradients that were cleared since its last step while multiplied by the loss scale."""

    def __init__(self) -> None:
        self._samples: list[Mapping[int, Tensor]] = []

    def note(self, params: Sequence[Tensor], scale: float | None) -> None:
        """Take a sample of the gradients of some parameters, which are multiplied by the loss scale and are cleared next.

        ``scale`` is the loss scale, or None if the host does not know it.
        """
        if params and (scale is None or scale >= _SMALLEST):
            some = params[:: -(-len(params) // PARAMETERS)]
            sampled = {id(p): _sample(p.grad) for p in some if p.grad is not None}
            self._samples = [*self._samples[1 - _KEPT :], sampled]

    def were_used_for(self, params: Sequence[Tensor]) -> bool:
        """Whether the gradients of these parameters seem to be computed from the cleared ones, by norm and direction.

        Waits for the device.
        """
        now = [(id(p), p.grad) for p in params if p.grad is not None]
        common = [(key, grad) for key, grad in now if all(key in sample for sample in self._samples)]
        if not self._samples or not common:
            return False
        new = torch.cat([_sample(grad).cpu().double() for _, grad in common])
        old = torch.stack([torch.cat([s[key].cpu().double() for key, _ in common]) for s in self._samples])
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
