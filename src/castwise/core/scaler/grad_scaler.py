"""Define ``castwise.GradScaler``, which extends torch's GradScaler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.plans.formats import LOW_DTYPES
from castwise.core.plans.plan import LossScale
from castwise.core.scaler import gradients
from castwise.core.scaler.closure import step_or_restore
from castwise.core.scaler.flags import Flags
from castwise.core.scaler.losses import DEFAULT, Losses
from castwise.core.scaler.outcomes import Outcomes, stuck_error
from castwise.core.scaler.result import StepResult, peek, read_on_host
from castwise.core.scaler.state import ScalePolicy, ScaleState, next_state
from castwise.core.scaler.unscaling import Unscaling
from castwise.errors import PlanError, StateError

STEPPED = StepResult(None)
"""The result of every step of which the host knows at once that it was made, not skipped."""
_Outputs = TypeVar("_Outputs", bound=torch.Tensor | Iterable[torch.Tensor])
_TINY = torch.finfo(torch.float32).tiny


class GradScaler(_torch.grad_scaler.OpenGradScaler):
    """A loss scaler that behaves like ``torch.amp.GradScaler`` by default and has more options.

    It adds to torch's scaler:

    - hysteresis, a floor and a ceiling of the scale
    - a separate scale for each named loss
    - agreement between ranks on non-finite gradients
    - steps of optimizers that take a closure
    - the outcome of a step (:meth:`result_of`, :attr:`previous_skipped`) without waiting for the device
    - an error that names parameters when the scale is at its floor and gradients still overflow

    A bf16 or fp16 loss is scaled in fp32 whatever its shape (torch scales a 1-d fp16 loss in fp16, to infinity).

    Two defaults differ from torch. After ``patience`` skips in a row it raises, where torch skips for ever. If
    gradients are DTensors, the ranks of all their meshes skip together, where torch reduces over the mesh of the first
    gradient only.

    Args:
        device: Device type of the gradients.
        init_scale: The first scale.
        growth_factor: Factor by which the scale grows after ``growth_interval`` updates with finite gradients, > 1.
        backoff_factor: Factor by which the scale shrinks after an update with non-finite gradients, < 1.
        growth_interval: Number of updates in a row with finite gradients before the scale grows.
        enabled: Whether to scale at all. False passes everything through.
        hysteresis: Number of updates with non-finite gradients before the scale shrinks. They are counted until the
            scale grows.
        floor: Smallest scale, or None as in torch.
        ceiling: Largest scale, or None as in torch.
        dynamic: False keeps the scale constant; steps with non-finite gradients are still skipped.
        reduce: A function that makes ranks agree on non-finite gradients. It is called with each flag, a 0-dim fp32
            tensor, and replaces it by the maximum over all ranks that act together: in place, or by returning it.
        process_group: A process group whose ranks agree by an all-reduce, to give instead of ``reduce``. With neither,
            the ranks of DTensor gradients' meshes agree.
        allow_fp16_grads: Unscale fp16 gradients too, for parameters that are stored in fp16 without masters.
        patience: Number of updates in a row with non-finite gradients, the last with the scale at its floor, at which
            :class:`~castwise.errors.LossScaleError` is raised. Without a floor, the smallest normal fp32 number counts
            as the floor. A scale that is not dynamic is always at its floor.

    Raises:
        PlanError: The limits contradict each other or ``init_scale``.
        LossScaleError: From :meth:`step`, if gradients still overflow with the scale at its floor.
        StateError: From :meth:`scale`, if gradients of losses with different scales would be added.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        hysteresis: int = 1,
        floor: float | None = None,
        ceiling: float | None = None,
        dynamic: bool = True,
        reduce: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
        process_group: Any = None,
        allow_fp16_grads: bool = False,
        patience: int = 10,
    ) -> None:
        limits = ScalePolicy(hysteresis=hysteresis, floor=floor, ceiling=ceiling, dynamic=dynamic)
        if limits.bounded(init_scale) != init_scale:
            raise PlanError(
                f"GradScaler(init_scale={init_scale!r}, floor={floor!r}, ceiling={ceiling!r}) is not allowed: the first scale "
                "must lie between floor and ceiling"
            )
        if patience < 1:
            raise PlanError(
                f"GradScaler(patience={patience!r}) is not allowed. Allowed: a whole number >= 1."
            )
        if reduce is not None and process_group is not None:
            raise PlanError("GradScaler: give reduce or process_group, not both; each makes ranks agree")
        self._losses: Losses = Losses(init_scale, device)
        self._flags: Flags = Flags()
        self._unscaling: Unscaling = Unscaling(reduce, process_group, allow_fp16_grads)
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        # Whether losses are multiplied by the scale.
        self.scales = self.works
        self._limits = limits
        # Torch's kernel updates the scale (except for floor and ceiling), unless there is hysteresis or the scale is constant.
        self._by_torch = dynamic and hysteresis == 1
        self._overridden = type(self).unscale_ is not torch.amp.GradScaler.unscale_
        self.param_names: Callable[[], Mapping[int, str]] | None = None
        # Given by a Window, which calls update() only when the next backward begins: whether that update is due, so that
        # users who ask for the scale get the one after it.
        self.is_over: Callable[[], bool] | None = None
        # Whether get_scale() was called since the last step. The caller may divide gradients by the scale.
        self.asked = False
        # Given by a Window: the flags of gradients that were unscaled and then cleared without a step.
        self.left_out: Callable[[], list[torch.Tensor]] = list
        # Given by a Window: losses whose unscaled gradients were returned to the user, and their flags.
        self.returned: Callable[[], list[tuple[str, torch.Tensor]]] = list
        # The scale whose inverse was computed last, if the host knows it, and that inverse.
        self._inverse: tuple[float | None, torch.Tensor | None] = (None, None)
        self._outcomes = Outcomes(eager=floor is not None)
        self._patience = patience

    @classmethod
    def from_loss_scale(cls, loss_scale: LossScale, device: str = "cuda", **extras: Any) -> GradScaler:
        """Create a scaler from a plan's :class:`~castwise.LossScale`.

        ``extras`` are further arguments of the constructor.
        """
        return cls(
            device,
            loss_scale.init,
            loss_scale.growth,
            loss_scale.backoff,
            loss_scale.interval,
            hysteresis=loss_scale.hysteresis,
            floor=loss_scale.floor,
            ceiling=loss_scale.ceiling,
            dynamic=loss_scale.dynamic,
            **extras,
        )

    def is_enabled(self) -> bool:
        """Whether losses are multiplied by the scale."""
        return self.scales

    # --- scales -------------------------------------------------------------------------------------------

    @property
    def policy(self) -> ScalePolicy:
        """The constants by which the scale is updated."""
        return dataclasses.replace(
            self._limits,
            growth=self.get_growth_factor(),
            backoff=self.get_backoff_factor(),
            interval=self.get_growth_interval(),
        )

    def get_scale(self, name: str = DEFAULT) -> float:
        """Return the scale of a loss as a number, or 1.0 when disabled. Synchronises with the device."""
        self.asked = True
        return self._state_now()(name).scale if self.scales else 1.0

    def _state_now(self) -> Callable[[str], ScaleState]:
        over = self.is_over is not None and (self.is_over() or self.left_out() or self.returned())
        return self.state_after_update if over else self._losses.state_of

    def scale_tensor(self, name: str | None = None) -> torch.Tensor:
        """Return the scale of a loss as a 0-dim fp32 tensor on the device, without waiting for the device.

        Without a name, the loss is the one that was scaled last.
        """
        return self._losses.scale_tensor(name)

    def next_state(self, found_inf: bool, name: str = DEFAULT) -> ScaleState:
        """Return the state that the scale of a loss would have after one more update, and change nothing.

        ``found_inf`` says whether gradients are not finite in that update. Synchronises with the device.
        """
        return next_state(self._losses.state_of(name), found_inf, self.policy)

    def state_after_update(self, name: str = DEFAULT) -> ScaleState:
        """Return the state that the scale of a loss would have if :meth:`update` were called now, and change nothing.

        Synchronises with the device.
        """
        state = self._losses.state_of(name)
        if any(bool(flag > 0) for of, flag in self.returned() if of == name):
            state = next_state(state, True, self.policy)
        flag = self._outcome(self.left_out()).get(name)
        if flag is None or (self.is_over is not None and not self.is_over() and not bool(flag > 0)):
            return state
        return next_state(state, bool(flag > 0), self.policy)

    def _outcome(self, left_out: Iterable[torch.Tensor] = ()) -> dict[str, torch.Tensor]:
        """Return the losses whose scales :meth:`update` will update, by name.

        Each comes with a 0-dim tensor that is above zero if a gradient of it was not finite.
        """
        found = [*self._flags.of(), *left_out]
        if not found:
            return {}
        name, flags = self._losses.current.name, self._losses.flags
        flag = gradients.largest(found, self._losses.scale_tensor().device)
        if not flags:
            return {name: flag}
        # If the flags of single losses do not explain an overflow, it arose when gradients were rescaled or added. That
        # happened at the scale of the loss that was scaled first, so the overflow counts for this loss.
        known = gradients.largest([*flags.values()], flag.device)
        return {**flags, name: torch.maximum(flags[name].to(flag.device), (flag > known).float())}

    def scale(self, outputs: _Outputs, name: str = DEFAULT) -> _Outputs:
        """Multiply a loss, or several, by the scale of ``name``.

        Args:
            outputs: Tensor of any shape, or an iterable of them; bf16 and fp16 tensors are scaled in fp32.
            name: Name of the loss. Gradients of losses with different names must not be added: use :meth:`backward` for
                them.

        Returns:
            The same structure, scaled.

        Raises:
            StateError: Another loss has been scaled since the last update.
        """
        if not self.scales:
            return outputs
        losses = self._losses
        if losses.opened_by != name:
            if losses.opened_by is None and name == losses.current.name:
                losses.opened_by = name
            else:
                self._open_window(name, outputs)
        scale = losses.current.scale
        if scale is not None and isinstance(outputs, torch.Tensor):
            wide: Any = outputs.float() if outputs.dim() and outputs.dtype in LOW_DTYPES else outputs
            return wide * scale.to(wide.device, non_blocking=True)  # type: ignore[no-any-return]
        return super().scale(gradients.lift_low(outputs))  # type: ignore[no-any-return]

    def _open_window(self, name: str, outputs: Any) -> None:
        if self._losses.opened_by is not None:
            way = (
                "scaler.backward(loss, name, params=...) or Amp.backward(loss, name), which keep the two apart, or call "
                "update()"
                if self.is_over is None
                else "amp.backward(loss, name), which keeps the two apart, or call amp.step(optimizer)"
            )
            raise StateError(
                f"scale(loss, {name!r}): the loss {self._losses.opened_by!r} was scaled in this window, and gradients of losses with "
                f"different scales must not be added up. Use {way} in between."
            )
        self._losses.open(name, outputs.device if isinstance(outputs, torch.Tensor) else None)

    def backward(
        self,
        loss: torch.Tensor,
        name: str = DEFAULT,
        *,
        params: Callable[[], Iterable[torch.Tensor]] | Iterable[torch.Tensor],
        **kwargs: Any,
    ) -> None:
        """Scale a loss by the scale of ``name`` and compute its gradients, so that losses with other scales can follow.

        The first loss after an update costs nothing extra. For any further loss, the existing gradients are set aside.
        The new gradients are checked, rescaled to the scale of the first loss in their dtype, and added to the existing
        ones.

        Args:
            loss: Scalar.
            name: Name of the loss, which selects the scale.
            params: The parameters that this loss, or an earlier loss since the last update, reaches. Or a function that
                returns them.
            kwargs: As in ``Tensor.backward``.
        """
        losses, base = self._losses, self._losses.opened_by
        if base is None or losses.is_first(name):
            scaled = self.scale(loss, name)
            if kwargs:
                scaled.backward(**kwargs)
            else:
                torch.autograd.backward(scaled)  # which takes a list of losses, as scale does
            return
        everything = list(params() if callable(params) else params)
        aside = gradients.set_aside(everything)
        try:
            flags = losses.flags
            if base not in flags:
                flags[base] = self._flag_of_base([grad for _, grad in aside])
            losses.get(name, loss.device)
            base_scale, own_scale = losses.scale_tensor(base), losses.scale_tensor(name)
            (gradients.lift_low(loss) * own_scale.to(loss.device, non_blocking=True)).backward(**kwargs)
            fresh = [parameter.grad for parameter in everything if parameter.grad is not None]
            factor = None if name == base else (base_scale.double() / own_scale.double()).float()
            flag = self._unscaling.agreed(gradients.check_and_multiply(fresh, factor, own_scale.device))
            flags[name] = torch.maximum(flags[name], flag) if name in flags else flag
        finally:
            gradients.add_up(aside)

    def _flag_of_base(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """Return whether gradients of the loss that was scaled first since the last update were not finite, as a flag.

        The flag is a 0-dim fp32 tensor. ``grads`` are the gradients of this loss. Steps that were made since then count
        too.
        """
        home = self._losses.scale_tensor().device
        now = self._unscaling.agreed(gradients.check_and_multiply(grads, None, home))
        return gradients.largest([now, *self._flags.of()], home)

    # --- steps --------------------------------------------------------------------------------------------

    def step_or_skip(self, optimizer: Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Call the optimizer's step unless a flag says that a gradient is not finite, and record the outcome.

        ``state`` is the optimizer's record (:class:`~castwise.core.scaler.flags.Flags`), which holds its flags.
        """
        skip = False
        for flag in state["found_inf_per_device"].values():
            skip = skip or flag.item() != 0.0
        self._outcomes.skips[id(optimizer)] = skip
        return None if skip else optimizer.step(*args, **kwargs)

    def step(
        self, optimizer: Optimizer, *args: Any, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Unscale the gradients unless they are unscaled already, then step, or skip if a gradient is not finite.

        Args:
            optimizer: An optimizer whose gradients were computed since the last update.
            args: Arguments for ``optimizer.step``. If the first is a function, it is taken as ``closure``.
            closure: A function that clears gradients, computes the loss, calls ``scaler.scale(loss).backward()`` and
                returns the loss. Gradients are unscaled and checked each time it is called. At the first non-finite
                gradient, parameters and optimizer state are restored, and the step counts as skipped. Gradients that
                were computed before the step (as SAM does) are unscaled first.
            kwargs: Arguments for ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returned, or None if it was skipped.

        Raises:
            LossScaleError: Gradients have been non-finite ``patience`` times in a row with the scale at its floor.
        """
        if closure is None and args and callable(args[0]):
            closure, args = args[0], args[1:]
        if not self.scales:
            return optimizer.step(*(() if closure is None else (closure,)), *args, **kwargs)
        if closure is not None:
            value = self._step_with_closure(optimizer, closure, args, kwargs)
        elif args or kwargs or self._overridden or _torch.optimizers.takes_flag(optimizer):
            first = not optimizer.state
            value = super().step(optimizer, *args, **kwargs)
            if first:
                gradients.forget_unwritten(optimizer, self._flags.of((optimizer,)))
        else:
            value = self._plain_step(optimizer)
        key, outcomes = id(optimizer), self._outcomes
        outcomes.last_stepped = key
        skipped = outcomes.skips.get(key)
        if skipped is None:  # a fused kernel decided
            skipped = read_on_host(self._flags.states[key]["found_inf_per_device"].values())
        self.note_outcome(optimizer, skipped)
        return value

    def note_outcome(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """Record whether a step of an optimizer was skipped.

        ``skipped`` is None if a fused kernel decides on the device, so that the host does not know.

        Raises:
            LossScaleError: Gradients have been non-finite ``patience`` times in a row with the scale at its floor.
        """
        if skipped is not None:
            self._outcomes.skips[id(optimizer)] = skipped
        if skipped is not False:
            streak = self._outcomes.streak(
                id(optimizer), *(self._losses.flags or (self._losses.current.name,))
            )
            if streak + bool(skipped) >= self._patience:
                self._refuse_to_go_on(optimizer)

    def take(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        """Step or skip as :meth:`step` does, and return the outcome."""
        self.step(optimizer, closure=closure)
        if not self.works or self._outcomes.skips.get(id(optimizer)) is False:
            return STEPPED
        return self.result_of(optimizer)

    def _plain_step(self, optimizer: Optimizer) -> Any:
        """Step or skip as torch's GradScaler does, for an optimizer that does not unscale by itself.

        Unlike torch's method, it leaves out checks that cannot apply here.
        """
        self.check_scaled("step")
        state = self._flags.states[id(optimizer)]
        if state["stage"] is OptState.READY:
            state["found_inf_per_device"] = self._unscaled(optimizer)
            state["stage"] = OptState.UNSCALED
        elif state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if not state["found_inf_per_device"]:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        value = self.step_or_skip(optimizer, state)
        state["stage"] = OptState.STEPPED
        return value

    def _unscaled(self, optimizer: Optimizer) -> dict[torch.device, torch.Tensor]:
        """Divide an optimizer's gradients by the scale, and return whether one was not finite, as a tensor per device."""
        scale = self.check_scaled("step")
        value = peek(scale)
        of, inverse = self._inverse
        if value is None or value != of or inverse is None:
            inverse = gradients.inverse(scale)
            self._inverse = value, inverse
        found = gradients.number(0.0, scale.device)
        return self._unscaling.unscale(optimizer, inverse, found, allow_fp16=False)

    def note_unscaled(self, optimizer: Optimizer) -> None:
        """Record an optimizer's gradients as unscaled, wherever they come from, and check whether they are finite."""
        one = gradients.number(1.0, self._losses.scale_tensor().device)
        found = self._unscaling.unscale(optimizer, one, torch.zeros_like(one), allow_fp16=True)
        self._flags.add(id(optimizer), found)

    def _step_with_closure(
        self, optimizer: Optimizer, closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        state = self._flags.states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if self._losses.opened_by is not None and state["stage"] is OptState.READY:
            self._unscaled(optimizer)

        def look() -> Iterable[torch.Tensor]:
            state["found_inf_per_device"] = self._unscaled(optimizer)
            return self._flags.of((optimizer,))

        value, skipped = step_or_restore(optimizer, closure, look, args, kwargs)
        self._outcomes.skips[id(optimizer)] = skipped
        state["stage"] = OptState.STEPPED
        return value

    def _refuse_to_go_on(self, optimizer: Optimizer) -> None:
        """Raise if the scale of a loss whose gradients overflow again and again cannot shrink any more."""
        found = self._flags.joint((optimizer,), self._losses.scale_tensor().device)
        limits = self._limits
        floor = _TINY if limits.floor is None else limits.bounded(limits.floor)
        stuck = [
            name
            for name, flag in (self._losses.flags or {self._losses.current.name: found}).items()
            if bool(flag > 0) and (not limits.dynamic or self._losses.state_of(name).scale <= floor)
        ]
        if not stuck:
            return
        raise stuck_error(
            optimizer,
            self._outcomes.streak(id(optimizer), *stuck) + 1,
            self.non_finite_params(optimizer),
            self.non_finite_weights(optimizer),
            loss=stuck[0],
            scale=self._losses.state_of(stuck[0]).scale,
            floor=floor if limits.dynamic else None,
        )

    def non_finite_params(self, optimizer: Optimizer) -> list[str]:
        """Return the names of an optimizer's parameters whose gradients now contain an infinity or a NaN.

        Synchronises with the device.
        """
        names = self.param_names() if self.param_names is not None else {}
        return gradients.non_finite_params(optimizer, names)

    def non_finite_weights(self, optimizer: Optimizer) -> list[str]:
        """Return the names of an optimizer's parameters that hold an infinity or a NaN themselves.

        Synchronises with the device.
        """
        names = self.param_names() if self.param_names is not None else {}
        return gradients.non_finite_weights(optimizer, names)

    # --- outcomes -----------------------------------------------------------------------------------------

    def result_of(self, *optimizers: Optimizer, grad_norm: torch.Tensor | None = None) -> StepResult:
        """Return the joint outcome of the last steps of these optimizers.

        Each must have stepped since the last :meth:`update`, or between the last two.

        Raises:
            StateError: An optimizer has not stepped since then.
        """
        if not self.works:
            return StepResult(None, grad_norm=grad_norm)
        results = [self._outcomes.result(self._flags.states, id(optimizer)) for optimizer in optimizers]
        return StepResult.join(results, grad_norm)

    @property
    def last_result(self) -> StepResult | None:
        """The outcome of the last step of any optimizer; None before the first step or when disabled."""
        key = self._outcomes.last_stepped
        return None if key is None else self._outcomes.result(self._flags.states, key)

    @property
    def previous_skipped(self) -> bool | None:
        """Whether a step was skipped between the last two calls of :meth:`update`; None before the first call.

        Reading this does not synchronise while the device is at most one step behind, because outcomes are copied to
        the host in the background after the first read.
        """
        return self._outcomes.previous_skipped

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale of every loss that was scaled since the last update: grow, shrink or keep it.

        Args:
            new_scale: A scale to set instead, for the loss that was scaled first since the last update, or for the
                default loss if none was.
        """
        if not self.scales:
            return
        states, flags = self._flags.states, self._losses.flags
        losses: Mapping[str, torch.Tensor | None] = {self._losses.current.name: None}
        if new_scale is not None:
            if self._losses.opened_by is None:
                self._losses.open(DEFAULT)
            super().update(new_scale)
            self._clamp()
            others = {name: flag for name, flag in flags.items() if name != self._losses.opened_by}
            self._losses.move(others, self.policy)
        elif self._by_torch and not flags and len(states) < 2:
            self._update_alone(states)
            if self._limits.ceiling is not None or [*self._outcomes.skips.values()] != [False]:
                self._clamp()  # torch's kernel knows no floor and ceiling
        else:
            # Torch's update() is not used here: it adds the flags of several optimizers in place to the first flag, which
            # a StepResult may still hold.
            self.check_scaled("update")
            outcome = self._outcome()
            if not outcome:
                raise AssertionError("No inf checks were recorded prior to update.")
            self._losses.move(outcome, self.policy)
            self._flags.restart()
            losses = outcome if flags else losses
        self._losses.opened_by = None
        if flags:
            self._losses.flags = {}
        self._outcomes.close(states, losses, restart=new_scale is not None)

    def note_dropped(self, dropped: Mapping[int, Mapping[torch.device, torch.Tensor]], stepped: bool) -> None:
        """Record gradients that were unscaled and then cleared without a step, and shrink the scale if they overflowed.

        Finite gradients change nothing.

        Args:
            dropped: By the ``id`` of each optimizer and by device, a tensor that is above zero if one of its gradients
                there was not finite.
            stepped: Whether steps were made since the last update, so that :meth:`update` will be called in any case.
        """
        for key, flags in dropped.items():
            bad = read_on_host(flags.values())
            if bad is not None:
                self._outcomes.skips.setdefault(key, bad)
            self._flags.add(key, flags)
        if not stepped:
            if self._limits.dynamic:
                self._losses.hold_back(self._outcome())
            self.update()

    def note_left(self, returned: dict[str, torch.Tensor]) -> None:
        """Shrink the scales of losses whose gradients were returned to the user and were not finite.

        These gradients were never set on parameters. ``returned`` holds for each loss, by name, a tensor that is above
        zero if they were not finite.
        """
        if self._limits.dynamic:
            self._losses.hold_back(returned)
            self._losses.move(returned, self.policy)

    def _update_alone(self, states: dict[int, dict[str, Any]]) -> None:
        """Update the scale with torch's kernel after steps of at most one optimizer, without checks that cannot apply."""
        scale, tracker = self._losses.current.scale, self._losses.current.growth_tracker
        for state in states.values():
            flags = state["found_inf_per_device"]
            if len(flags) == 1 and scale is not None and tracker is not None and scale.device in flags:
                rule = self.get_growth_factor(), self.get_backoff_factor(), self.get_growth_interval()
                _torch.grad_scaler.update_scale(scale, tracker, flags[scale.device], *rule)
                self._flags.restart()
                return
        super().update()

    def _clamp(self) -> None:
        floor, ceiling = self._limits.floor, self._limits.ceiling
        if floor is not None or ceiling is not None:
            assert self._losses.current.scale is not None
            self._losses.current.scale.clamp_(floor, ceiling)

    # --- state --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's GradScaler does, with further keys if hysteresis or further losses are used.

        Synchronises with the device.
        """
        if not self.scales:
            return {}
        state_of = self._state_now()
        losses = {name: state_of(name).saved() for name in self._losses.by_name}
        first = losses.pop(DEFAULT)
        if self._limits.hysteresis == 1:
            del first["hysteresis_tracker"]
        return {**super().state_dict(), **first, **({"losses": losses} if losses else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch's GradScaler, and clamp scales to floor and ceiling."""
        if self.scales:
            super().load_state_dict(state_dict)
            self._losses.load(state_dict, self._limits)
            self._outcomes.streaks.clear()
            if self.is_over is not None:
                self._flags.restart()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {
            "_losses": self._losses.without_tensors(), "_flags": Flags(), "_unscaling": self._unscaling.outside_session(),
            "param_names": None, "is_over": None, "left_out": list, "returned": list,
            "_inverse": (None, None), "_outcomes": Outcomes(eager=self._limits.floor is not None),
        }  # fmt: skip


# Only scale() may be traced into a graph; everything else runs between graphs.
for _name in ("backward", "step", "update", "result_of", "step_or_skip", "_open_window"):
    _torch.tensors.never_trace(getattr(GradScaler, _name))
