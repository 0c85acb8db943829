"""Keep the outcomes of steps (made or skipped) and count skips in a row, without making the host wait for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from castwise.core.plans.text import some
from castwise.core.scaler.result import StepResult
from castwise.errors import LossScaleError, StateError

_SAMPLE_PERIOD = 17
"""How often outcomes are copied to the host if nobody reads them: once in this many updates of the loss scale.

The number is prime, so that each of several optimizers or losses that take turns is sampled.
"""


@dataclass(slots=True, eq=False)
class WindowOutcomes:
    """The outcomes of all steps between two updates of the loss scale, by the optimizers' ``id``.

    Attributes:
        states: The record of each optimizer as in torch's GradScaler. It says for each device whether a gradient is not
            finite.
        skips: Whether the step was skipped, for each optimizer of which the host knows it.
        results: The result objects that were requested so far.
    """

    states: dict[int, dict[str, Any]]
    skips: dict[int, bool]
    results: dict[int, StepResult]

    def flags(self, key: int) -> list[torch.Tensor]:
        """Return an optimizer's flags, one for each device: a 0-dim fp32 tensor, above zero if a gradient was not finite.

        ``key`` is the ``id`` of the optimizer.
        """
        return list(self.states[key]["found_inf_per_device"].values())


class Outcomes:
    """Keeps the outcomes of steps since the last update of the loss scale and of those before it, and counts skips in a row.

    Skips in a row are counted for each optimizer, by its ``id``, and for each loss, by its name. So an optimizer whose
    gradients are finite does not hide another that is skipped every time.

    On a CPU, and if an optimizer's step has to wait for the flag anyway, the host knows an outcome at once. For a fused
    optimizer on an accelerator, the outcome is copied in the background and read when it has arrived, so that nothing
    waits. A copy costs some microseconds. So outcomes are copied after every update only if they are needed, and once
    in 17 updates otherwise. They are needed if ``eager`` is true, because the scale has a floor to check, or once
    :attr:`previous_skipped` has been read.
    """

    def __init__(self, eager: bool) -> None:
        self.skips: dict[int, bool] = {}
        self.results: dict[int, StepResult] = {}
        self.last_stepped: int | None = None
        self.streaks: dict[int | str, int] = {}
        self._last = WindowOutcomes({}, {}, {})
        self._previous: StepResult | bool | None = None
        self._on_their_way: deque[tuple[tuple[int | str, ...], StepResult]] = deque(maxlen=64)
        self._eager = eager
        self._windows = 0

    def close(
        self,
        states: dict[int, dict[str, Any]],
        losses: Mapping[str, torch.Tensor | None],
        *,
        restart: bool,
    ) -> None:
        """Record the outcomes of all steps since the last update of the loss scale, because the scale is updated now.

        Args:
            states: The record of each optimizer that has stepped, as in torch's GradScaler.
            losses: For each loss that was scaled, a tensor that is above zero if its gradients were not finite. None
                for a loss that was the only one, since its gradients are those of the optimizers.
            restart: Whether the scale was set by hand, so that the counts of skips in a row restart.
        """
        last = self._last = WindowOutcomes(states, self.skips, self.results)
        self.skips, self.results = {}, {}
        if len(last.skips) == len(states):
            self._previous = skipped = True in last.skips.values()
            if skipped or self.streaks:
                for key, outcome in last.skips.items():
                    self._count(key, outcome)
                for name, flag in losses.items():
                    self._count(name, skipped if flag is None else bool(flag > 0))
        else:
            self._follow(last, losses)
        if restart:
            self.streaks.clear()

    def streak(self, *keys: int | str) -> int:
        """Return how often in a row one of these optimizers was skipped or one of these losses overflowed, at most.

        ``keys`` are the optimizers' ``id`` and the losses' names.
        """
        return max(self.streaks.get(key, 0) for key in keys) if self.streaks else 0

    def _count(self, key: int | str, skipped: bool) -> None:
        if skipped:
            self.streaks[key] = self.streaks.get(key, 0) + 1
        else:
            self.streaks.pop(key, None)

    def _follow(self, last: WindowOutcomes, losses: Mapping[str, torch.Tensor | None]) -> None:
        """Read the outcomes that have arrived from the device, and start copying those of the latest steps."""
        arriving = self._on_their_way
        while arriving and arriving[0][1].known:
            keys, result = arriving.popleft()
            for key in keys:
                self._count(key, result.skipped)
        self._windows += 1
        alone = len(last.states) == len(losses) == 1
        if alone and last.results:
            (result,) = last.results.values()  # its flag was copied to the host when the result was requested
            send = True
        else:
            send = self._eager or self._windows % _SAMPLE_PERIOD == 0
            result = StepResult([flag for key in last.states for flag in last.flags(key)] or None, send=send)
        self._previous = result
        if not send:
            return
        if alone:
            arriving.append(((*last.states, *losses), result))
            return
        arriving.extend(((key,), StepResult(last.flags(key) or None)) for key in last.states)
        arriving.extend(
            ((name,), result if flag is None else StepResult([flag])) for name, flag in losses.items()
        )

    @property
    def previous_skipped(self) -> bool | None:
        """Whether a step was skipped between the last two updates of the loss scale; None before the first update."""
        self._eager = True
        previous = self._previous
        return previous.skipped if isinstance(previous, StepResult) else previous

    def result(self, states: dict[int, dict[str, Any]], key: int) -> StepResult:
        """Return the outcome of an optimizer's last step.

        Args:
            states: The records of the optimizers that have stepped since the last update of the loss scale.
            key: The ``id`` of the optimizer.

        Raises:
            StateError: The optimizer has stepped neither since the last update nor between the two updates before.
        """
        window = WindowOutcomes(states, self.skips, self.results) if key in states else self._last
        if key not in window.states:
            raise StateError(
                "result_of(optimizer): this optimizer was not stepped in this window or the one before"
            )
        if key not in window.results:
            flags = window.flags(key) or None
            window.results[key] = StepResult(flags, skipped=window.skips.get(key))
        return window.results[key]


def damaged_words(names: list[str]) -> str:
    """Return the part of an error message that names the weights that are not finite, and the remedy."""
    return (
        f"{some(names)}. An earlier update wrote them. Resume from a checkpoint made before it, and lower the learning rate, clip "
        "(amp.step(optimizer, max_norm=...)), or use a plan with fp32 masters if parameters are stored low."
    )


def stuck_error(
    optimizer: Optimizer,
    times: int,
    names: list[str],
    damaged: list[str],
    *,
    loss: str,
    scale: float,
    floor: float | None,
) -> LossScaleError:
    """Return the error for gradients that overflow again and again although the loss scale cannot shrink any more.

    Args:
        optimizer: The optimizer whose steps were skipped.
        times: How many steps in a row were skipped.
        names: The parameters whose gradients were not finite at the last step.
        damaged: The parameters that are not finite themselves.
        loss: The name of the loss.
        scale: Its scale.
        floor: The smallest scale, or None if the scale is static.
    """
    if damaged:
        return LossScaleError(
            f"step({type(optimizer).__name__}): gradients were not finite {times} times in a row, because weights are not: "
            f"{damaged_words(damaged)}"
        )
    whose = "the loss scale is" if loss == "loss" else f"the loss scale of {loss!r} is"
    if floor is None:
        where, cure = f"static, {scale:g}", "Use a dynamic or smaller loss scale. If that does not help"
    else:
        where, cure = f"at its floor, {floor:g}", "A smaller loss scale would not help"
    return LossScaleError(
        f"step({type(optimizer).__name__}): gradients were not finite {times} times in a row, and {whose} {where}; "
        f"first affected: {some(names) or 'unknown, since the gradients are finite now'}. {cure}: look for NaN or huge values in the "
        "data and the loss, lower the learning rate, use a bf16 plan, or keep these modules in fp32 with "
        "Region(path, compute='fp32')."
    )
