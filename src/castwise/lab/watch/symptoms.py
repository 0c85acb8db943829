"""Detect at each step whether a training has diverged, from its losses and skipped steps, with one result for all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from castwise.core.devices import widest_dtype
from castwise.core.ranks import Ranks
from castwise.core.scaler import StepResult
from castwise.core.session.amp import Amp, SessionView
from castwise.errors import StateError
from castwise.lab.watch.following import follow
from castwise.lab.watch.losses import LossLine
from castwise.lab.watch.passes import mean_loss

STREAK = 3
"""Number of skipped steps in a row that mean divergence, if no loss scale would have saved them."""


def summed(amp: Amp, ranks: Ranks, *numbers: float) -> list[float]:
    """Return each number summed over all ranks. The host waits for the device."""
    if ranks.size == 1:
        return list(numbers)
    kind = amp.device_type
    told = torch.tensor(numbers, dtype=widest_dtype(torch.device(kind)), device=kind)
    torch.distributed.all_reduce(told, group=ranks.group)
    return [float(one) for one in told.tolist()]


class Symptoms:
    """Listens to a session, and checks after each step whether the training has diverged.

    Args:
        amp: The session.
        ranks: The ranks that train together.
        spikes: Whether high finite losses count as divergence.

    Attributes:
        spikes: Whether high finite losses count as divergence; may be changed.
        high: Whether the last divergence was found by a high finite loss.
        unmoved: Whether the last step had a non-finite loss, and no optimizer stepped on any rank.
    """

    def __init__(self, amp: Amp, ranks: Ranks, spikes: bool) -> None:
        self._amp, self._ranks, self.spikes = amp, ranks, spikes
        self._line = LossLine()
        self._losses: list[tuple[str, Tensor]] = []
        self._results: list[StepResult] = []
        self._skips: list[int] = []
        """The last steps in a row that were skipped although no smaller loss scale would help."""
        self._skipping: int | None = None
        """The first of the last steps in a row that were skipped, at whichever loss scale."""
        self.high = self.unmoved = False
        self._made = True
        """Whether the last step was not skipped. Only such a step shows that the weights are good."""
        self._heard = False
        """Whether any step had a loss."""
        self.end = follow(amp, self._on_loss, self._on_step)

    def _on_loss(self, loss: Tensor, name: str) -> None:
        SessionView(self._amp).agreement.check_even("Recovery")
        self._losses.append((name, loss.detach().clone()))

    def _on_step(self, _: Sequence[Optimizer], result: StepResult) -> None:
        self._results.append(result)

    @property
    def between_steps(self) -> bool:
        """Whether no step is unfinished: no loss was computed since the last step."""
        return not self._losses

    @property
    def stepped(self) -> bool:
        """Whether an optimizer step was made or skipped since the last check."""
        return bool(self._results)

    @property
    def quiet(self) -> bool:
        """Whether the last steps show no sign of divergence."""
        return self._made and not self._line.suspects and not self._skips

    @property
    def limit(self) -> float:
        """The largest normal loss of a step; infinity while there are too few losses."""
        return self._line.limit

    def check(self, step: int) -> tuple[str, int]:
        """Say in a clause why the training has diverged; empty if it has not. Also return the step at which that began.

        All ranks must call this together. The host waits for the device.

        Raises:
            StateError: Steps are made without a loss.
        """
        skips_here = [result.skipped for result in self._results]
        total, skips, moves, silent = summed(
            self._amp, self._ranks, mean_loss(self._losses), float(any(skips_here)), float(not all(skips_here)),
            float(not self._losses),
        )  # fmt: skip
        value, skipped, known = total / self._ranks.size, skips > 0, not silent
        if not known and not self._heard:
            raise StateError(
                "Recovery: the loss of a step was not recorded, so it is unknown whether training has diverged. Call "
                "amp.backward(loss), or amp.scale(loss).backward(), instead of loss.backward()"
            )
        self._heard, self._made = True, not skipped
        self._skips = (
            [*(one for one in self._skips if one != step), step] if skipped and self._is_final() else []
        )
        # The first of the steps skipped in a row; states saved after it may contain the cause of the skips.
        began = step if self._skipping is None else self._skipping
        self._skipping = began if skipped else None
        self.high = False
        self.unmoved = known and not math.isfinite(value) and not moves
        if known and not math.isfinite(value):
            return f"the loss is {value}", began
        if len(self._skips) >= STREAK:
            return f"{STREAK} steps in a row were skipped because gradients are not finite", began
        if not known:
            return "", step
        said = self._line.check(step, value, not skipped)
        if not self.spikes:
            self._line.suspects, said = [], ""
        self.high = bool(said)
        return said, self._line.suspects[0][0] if said else step

    def _is_final(self) -> bool:
        """Whether no smaller loss scale can prevent that the present step is skipped."""
        scale = self._amp.plan.loss_scale
        return scale is None or not scale.dynamic or self._amp.get_scale() <= 1.0

    def last_normal(self, since: int, step: int) -> int | None:
        """Return the last step from ``since`` to before ``step`` that was made with a normal loss; None if there is none."""
        return self._line.last(since, step)

    def back_to(self, step: int) -> None:
        """Discard the observations of this step and all later steps."""
        self._line.back_to(step)
        self._skips, self._skipping, self._made = [], None, True
        self.clear()

    def clear(self) -> None:
        """Discard the observations of the current step."""
        self._losses, self._results = [], []
