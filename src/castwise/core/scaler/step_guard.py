"""Define the scaler of plans without a loss scale, which only skips steps with non-finite gradients."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.plans.text import some
from castwise.core.scaler import gradients
from castwise.core.scaler.closure import step_or_restore
from castwise.core.scaler.grad_scaler import STEPPED, GradScaler
from castwise.core.scaler.outcomes import damaged_words
from castwise.core.scaler.result import StepResult, read_on_host, view_on_host
from castwise.core.scaler.unscaling import Unscaling, unscale_others
from castwise.errors import NonFiniteError


def hand_over(optimizer: Any, flag: torch.Tensor) -> None:
    """Give a flag for non-finite gradients to an optimizer's fused kernels, as torch's GradScaler does.

    The kernels then skip the next step if the flag is set.
    """
    optimizer.grad_scale, optimizer.found_inf = None, flag


def take_back(optimizer: Any) -> None:
    """Remove the flag for non-finite gradients that :func:`hand_over` gave to an optimizer."""
    vars(optimizer).pop("grad_scale", None)
    vars(optimizer).pop("found_inf", None)


def _look_at_others(
    optimizer: Optimizer, one: torch.Tensor, flag: torch.Tensor, allow_fp16: bool
) -> dict[torch.device, torch.Tensor]:
    """Check whether an optimizer's gradients are finite if some are sparse, complex or on another device.

    Nothing is written to them if possible. The arguments and the result are those of :func:`unscale_others`, with the
    number one in place of the inverse scale.
    """
    grads = gradients.held(optimizer)
    if any(hasattr(grad, "placements") for grad in grads):  # torch reduces partial sums in DTensors
        return unscale_others(optimizer, one, flag, allow_fp16)
    return {flag.device: gradients.are_finite(grads, flag.device)}


_Found = tuple[dict[torch.device, torch.Tensor], ctypes.c_float | None]
"""A flag for each device, above zero if a gradient there is not finite, and a view of the flag's memory on the CPU."""


class StepGuard(GradScaler):
    """A scaler that does not scale losses, and skips steps whose gradients are not finite.

    It has the interface of :class:`GradScaler`, so that an :class:`~castwise.Amp` can use either. Gradients are checked
    once, by torch's kernel for unscaling, which writes nothing if the factor is one. On a CPU, the host reads the
    result. On an accelerator, a fused optimizer reads it on the device. Any other optimizer on an accelerator makes the
    host wait for the result, as it does under a loss scale.

    Args:
        device: Device type of the gradients.
        refuse: Whether to raise at the first gradient that is not finite, instead of skipping the step.
        patience: Number of skipped steps in a row of one optimizer at which :class:`NonFiniteError` is raised.
        reduce: Makes ranks agree on non-finite gradients, as in :class:`GradScaler`.
    """

    def __init__(
        self,
        device: str,
        *,
        refuse: bool,
        patience: int,
        reduce: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
    ) -> None:
        super().__init__(device, 1.0, dynamic=False, patience=patience)
        self.scales = False
        self._unscaling = Unscaling(reduce, None, True, _look_at_others)
        self._refuse = refuse
        self._clean: _Found | None = None  # flags that are zero and not shared, for reuse
        self._start()

    def _start(self) -> None:
        self._streaks: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._on_their_way: deque[tuple[weakref.ref[Optimizer], StepResult]] = deque(maxlen=64)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_clean": None, "_streaks": None, "_on_their_way": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start()

    def unscale_(self, optimizer: Optimizer) -> None:
        """Check whether an optimizer's gradients are finite, before they are clipped, which may hide an infinity."""
        state = self._flags.states[id(optimizer)]
        state["found_inf_per_device"], state["stage"] = self.look(optimizer), OptState.UNSCALED

    def look(self, optimizer: Optimizer) -> dict[torch.device, torch.Tensor]:
        """Return a flag for each device of an optimizer's gradients, above zero if one is not finite on any rank."""
        return self._look(optimizer)[0]

    def _look(self, optimizer: Optimizer) -> _Found:
        one = self._losses.current.scale
        if one is None:  # create it on the gradients' device, which may not be the current one
            grads = (p.grad for group in optimizer.param_groups for p in group["params"])
            home = next((grad.device for grad in grads if grad is not None), None)
            self._losses.get(self._losses.current.name, home)
            one = self._losses.scale_tensor()
        found, self._clean = self._clean, None
        if found is None:
            flag = gradients.number(0.0, one.device)
            found = {one.device: flag}, view_on_host(flag)
        (flag,) = found[0].values()
        try:
            plain = gradients.unscale_plain(optimizer, one, flag, allow_fp16=True)
        except (
            RuntimeError
        ):  # the kernel writes, even if it multiplies by one, and an expanded gradient cannot be written
            flag, plain = gradients.are_finite(gradients.held(optimizer), one.device), True
            found = {one.device: flag}, None
        if not plain:
            return self._unscaling.unscale(optimizer, one, flag, allow_fp16=False), None
        agreed = self._unscaling.agreed(flag)
        return found if agreed is flag else ({one.device: agreed}, None)

    def take(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        """Step, or skip if a gradient is not finite, and return the outcome.

        Raises:
            NonFiniteError: A gradient was not finite for the ``patience``-th time in a row, or if ``refuse`` is true
                for the first time. Parameters and optimizer state have not changed.
        """
        if closure is not None:
            return self._take_with_closure(optimizer, closure)
        state = self._flags.states.pop(id(optimizer), None)
        found = flags, value = (
            self._look(optimizer) if state is None else (state["found_inf_per_device"], None)
        )
        skipped = read_on_host(flags.values()) if value is None else value.value != 0.0
        if skipped is None:
            if _torch.optimizers.takes_flag(optimizer) and not self._refuse:
                return self._take_on_device(optimizer, flags)
            skipped = any(flag.item() for flag in flags.values())
        if skipped:
            self.note_outcome(optimizer, True)
            return StepResult(list(flags.values()), skipped=True)
        if state is None and len(flags) == 1:
            self._clean = found
        if self._streaks:
            self.note_outcome(optimizer, False)
        optimizer.step()
        return STEPPED

    def _take_on_device(self, optimizer: Optimizer, flags: dict[torch.device, torch.Tensor]) -> StepResult:
        """Step with a fused optimizer, whose kernel decides on the device whether to skip.

        The host reads the outcome later, when it is available without waiting.
        """
        self._hear()
        (flag,) = flags.values() or (gradients.number(0.0, self._losses.scale_tensor().device),)
        hand_over(optimizer, flag)
        first = not optimizer.state
        try:
            optimizer.step()
        finally:
            take_back(optimizer)
        if first:
            gradients.forget_unwritten(optimizer, flags.values())
        result = StepResult(list(flags.values()))
        self._on_their_way.append((weakref.ref(optimizer), result))
        return result

    def note_on_its_way(self, optimizer: Optimizer, result: StepResult) -> None:
        """Record a step that other code makes with a fused optimizer, whose kernel decides whether to skip.

        Raises:
            NonFiniteError: Too many earlier steps in a row were skipped.
        """
        self._hear()
        self._on_their_way.append((weakref.ref(optimizer), result))

    def _hear(self) -> None:
        """Count the outcomes of steps on the device that can be read without waiting."""
        while self._on_their_way and self._on_their_way[0][1].known:
            reference, result = self._on_their_way.popleft()
            earlier = reference()
            if earlier is not None and (result.skipped or self._streaks):
                self.note_outcome(earlier, result.skipped)

    def _take_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> StepResult:
        flags: dict[torch.device, torch.Tensor] = {}

        def look() -> Iterable[torch.Tensor]:
            flags.update(self.look(optimizer))
            return flags.values()

        _, skipped = step_or_restore(optimizer, closure, look, (), {})
        self._flags.states.pop(id(optimizer), None)
        self.note_outcome(optimizer, skipped)
        return StepResult(list(flags.values()), skipped=skipped)

    def note_given_up(self, optimizer: Optimizer) -> None:
        """Count a skipped step of an optimizer whose gradients were not finite and were cleared without a step."""
        self._streaks[optimizer] = self._streaks.get(optimizer, 0) + 1

    def note_outcome(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """Record whether a step of an optimizer was skipped, or None if that is not known yet.

        Raises:
            NonFiniteError: Too many steps in a row were skipped, or a step was skipped and ``refuse`` is true.
        """
        if skipped is False:
            self._streaks.pop(optimizer, None)
        if not skipped:
            return
        times = self._streaks[optimizer] = self._streaks.get(optimizer, 0) + 1
        if not self._refuse and times < self._patience:
            return
        names = self.non_finite_params(optimizer)
        whose = (
            f"those of {some(names)}"
            if names
            else "unknown: they are on another rank, were cleared since, or are finite while their norm overflows"
        )
        cause = (
            "nonfinite='raise' does not allow this"
            if self._refuse
            else f"{times} steps in a row were skipped for that reason, the limit set by patience={self._patience}"
        )
        if damaged := self.non_finite_weights(optimizer):
            raise NonFiniteError(
                f"step({type(optimizer).__name__}): gradients are not finite because weights are not; {cause}. Weights that are "
                f"not finite: {damaged_words(damaged)}"
            )
        raise NonFiniteError(
            f"step({type(optimizer).__name__}): gradients are not finite: {whose}; {cause}. Weights and optimizer are "
            "unchanged. Look for NaN or huge values in the data and the loss, lower the learning rate, clip "
            "(amp.step(optimizer, max_norm=...)), or keep these modules in fp32 with Region(path, compute='fp32')."
        )
