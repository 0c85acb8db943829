"""Define ``castwise.GradScaler``, which extends torch's GradScaler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.devices import has_fp64, widest_dtype
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
    """Scales losses so that fp16 gradients do not underflow, as ``torch.amp.GradScaler`` does, with further options.

    Use it in a training loop that calls autocast and the scaler itself. An :class:`~castwise.Amp` has a scaler of its
    own and needs no other. With default arguments, this class computes the same scales and steps as torch's scaler,
    except for the differences below.

    It adds to torch's scaler:

    - options for when the scale shrinks (``hysteresis``) and for its limits (``floor``, ``ceiling``)
    - a separate scale for each named loss
    - agreement between ranks on infinite or NaN gradients
    - steps of optimizers that take a closure
    - the outcome of a step without waiting for the device (:meth:`result_of`, :attr:`previous_skipped`)
    - an error that names parameters if gradients still overflow although the scale has reached ``floor``

    It differs from torch's scaler in three ways. A bf16 or fp16 loss of any shape is scaled in fp32, where torch scales
    a 1-d fp16 loss in fp16, which overflows. After ``patience`` skipped steps in a row it raises an error if the scale
    cannot shrink any more, where torch skips every further step. If gradients are DTensors, the ranks of all their
    meshes skip a step together, where torch considers only the mesh of the first gradient.

    Args:
        device: The device type of the gradients.
        init_scale: The first scale.
        growth_factor: The factor by which the scale grows after ``growth_interval`` updates in a row with finite
            gradients. It must be above 1.
        backoff_factor: The factor by which the scale shrinks after an update with infinite or NaN gradients. It must be
            below 1.
        growth_interval: The number of updates in a row with finite gradients before the scale grows.
        enabled: Whether to scale losses. With False, losses are returned unscaled and no step is skipped.
        hysteresis: The number of updates with infinite or NaN gradients before the scale shrinks. They need not follow
            each other. The count starts again only when the scale grows.
        floor: The smallest scale. None sets no limit, as in torch.
        ceiling: The largest scale. None sets no limit, as in torch.
        dynamic: Whether the scale changes. With False it stays the same, and steps with infinite or NaN gradients are
            still skipped.
        reduce: A function that makes ranks agree on infinite or NaN gradients. It takes a flag, which is a 0-dim fp32
            tensor, and computes the maximum of the flag over all ranks that train together. It writes the maximum into
            the flag or returns it.
        process_group: A process group whose ranks agree by an all-reduce, in place of ``reduce``. If neither is given,
            the ranks in the meshes of DTensor gradients agree.
        allow_fp16_grads: Whether to unscale fp16 gradients too. Pass True if parameters are stored in fp16 without fp32
            master weights.
        patience: The number of updates in a row with infinite or NaN gradients after which an error is raised. It is
            raised only if the scale is also at ``floor``. If ``floor`` is None, the smallest normal fp32 number counts
            as the floor. If ``dynamic`` is False, the scale always counts as being at its floor.

    Raises:
        PlanError: ``floor``, ``ceiling`` and ``init_scale`` contradict each other, or another argument has a value that
            is not allowed.
        LossScaleError: From :meth:`step`, if gradients still overflow although the scale is at its floor.
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
        self._overridden = type(self).unscale_ is not GradScaler.unscale_
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
        """Create a scaler from a :class:`~castwise.LossScale`, the part of a plan that describes loss scaling.

        Args:
            loss_scale: The settings.
            device: The device type of the gradients.
            extras: Further arguments of the constructor.
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
        """Return whether losses are multiplied by the scale."""
        return self.scales

    # --- scales -------------------------------------------------------------------------------------------

    @property
    def policy(self) -> ScalePolicy:
        """The settings by which the scale grows and shrinks, such as the growth factor and the growth interval."""
        return dataclasses.replace(
            self._limits,
            growth=self.get_growth_factor(),
            backoff=self.get_backoff_factor(),
            interval=self.get_growth_interval(),
        )

    def get_scale(self, name: str = DEFAULT) -> float:
        """Return the scale of a loss as a Python number, or 1.0 if the scaler is disabled.

        The host waits for the device. In the scaler of an :class:`~castwise.Amp`, the result is the scale that the next
        backward pass will use.

        Args:
            name: The name of the loss.
        """
        self.asked = True
        return self._state_now()(name).scale if self.scales else 1.0

    def _state_now(self) -> Callable[[str], ScaleState]:
        over = self.is_over is not None and (self.is_over() or self.left_out() or self.returned())
        return self.state_after_update if over else self._losses.state_of

    def scale_tensor(self, name: str | None = None) -> torch.Tensor:
        """Return the scale of a loss as a 0-dim fp32 tensor on the device, without waiting for the device.

        Args:
            name: The name of the loss. With None, it is the loss by whose scale the current gradients are multiplied.
        """
        return self._losses.scale_tensor(name)

    def next_state(self, found_inf: bool, name: str = DEFAULT) -> ScaleState:
        """Return the scale and the counters that a loss would have after one more update, without changing them.

        The host waits for the device.

        Args:
            found_inf: Whether to assume infinite or NaN gradients in that update.
            name: The name of the loss.
        """
        return next_state(self._losses.state_of(name), found_inf, self.policy)

    def state_after_update(self, name: str = DEFAULT) -> ScaleState:
        """Return the scale and the counters that a loss would have after a call of :meth:`update`, and change neither.

        The call is assumed to be made now, so the result depends on the gradients of the steps since the last call of
        :meth:`update`. The host waits for the device.

        Args:
            name: The name of the loss.
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
        """Return a loss, or several losses, multiplied by the loss scale.

        Args:
            outputs: A tensor of any shape, or an iterable of tensors. bf16 and fp16 tensors are multiplied in fp32.
            name: The name of the loss. Losses with different names have separate scales, so their scaled gradients must
                not be added. To add them in the same parameters, use :meth:`backward`.

        Returns:
            The scaled tensor, or the scaled tensors in a container of the same type.

        Raises:
            StateError: A loss with another name has been scaled since the last call of :meth:`update`.
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
        """Scale a loss and add its gradients to ``.grad``, which may hold gradients of losses with other scales.

        The first loss after a call of :meth:`update` is scaled as by :meth:`scale`, at no additional cost. The
        gradients of a further loss with another name are computed separately and checked. They are converted to the
        scale of the first loss, in their own dtype, and then added to the existing gradients.

        Args:
            loss: A tensor with one element.
            name: The name of the loss. Losses with different names have separate scales.
            params: The parameters that get gradients from this loss, or from another loss since the last call of
                :meth:`update`. It can also be a function that returns them.
            kwargs: Further arguments of ``torch.Tensor.backward``.
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
            wide = widest_dtype(base_scale.device)
            factor = None if name == base else (base_scale.to(wide) / own_scale.to(wide)).float()
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
        """Make the step of an optimizer unless its gradients are infinite or NaN, and record which of the two happened.

        :meth:`step` calls this after the gradients were unscaled.

        Args:
            optimizer: The optimizer.
            state: What the scaler has recorded about the optimizer, in the form of torch's scaler. It contains the
                flags that tell whether gradients are infinite or NaN.
            args: Arguments for ``optimizer.step``.
            kwargs: Keyword arguments for ``optimizer.step``.
        """
        skip = False
        for flag in state["found_inf_per_device"].values():
            skip = skip or flag.item() != 0.0
        self._outcomes.skips[id(optimizer)] = skip
        return None if skip else optimizer.step(*args, **kwargs)

    def step(
        self, optimizer: Optimizer, *args: Any, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Unscale the gradients, then make the optimizer step, or skip it if a gradient is infinite or NaN.

        Gradients that ``unscale_`` has divided already are not divided again.

        Args:
            optimizer: An optimizer whose gradients were computed since the last call of :meth:`update`.
            args: Arguments for ``optimizer.step``. If the first one is a function, it is used as ``closure``.
            closure: A function that clears the gradients, computes the loss, calls ``scaler.scale(loss).backward()``
                and returns the loss. After each call of it, the gradients are unscaled and checked. If a gradient is
                infinite or NaN, parameters and optimizer state are restored, and the step counts as skipped. Gradients
                that were computed before this call, as SAM does, are unscaled first.
            kwargs: Keyword arguments for ``optimizer.step``.

        Returns:
            The return value of ``optimizer.step``, or None if the step was skipped.

        Raises:
            LossScaleError: Gradients were infinite or NaN ``patience`` times in a row, and the scale is at its floor.
            RuntimeError: The optimizer has already stepped since the last call of :meth:`update`.
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

        Args:
            optimizer: The optimizer.
            skipped: Whether the step was skipped. None if a fused kernel decides this on the device, so that the host
                does not know it.

        Raises:
            LossScaleError: Gradients were infinite or NaN ``patience`` times in a row, and the scale is at its floor.
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
        """Make or skip a step as :meth:`step` does, and return a :class:`~castwise.StepResult`.

        Args:
            optimizer: The optimizer.
            closure: A function that computes the loss and its gradients, as in :meth:`step`.
        """
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

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, as :meth:`torch.amp.GradScaler.unscale_` does.

        It also works on a device without fp64.

        Args:
            optimizer: An optimizer whose gradients were computed since the last call of :meth:`update`.

        Raises:
            RuntimeError: The gradients were already unscaled, or the optimizer has stepped, since then.
        """
        scale = self._losses.current.scale
        if scale is None or has_fp64(scale.device):
            super().unscale_(optimizer)
            return
        state = self._flags.states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            super().unscale_(optimizer)  # which raises
        state["found_inf_per_device"], state["stage"] = self._unscaled(optimizer), OptState.UNSCALED

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
        """Record that the gradients of an optimizer are not multiplied by the scale, and check whether they are finite.

        Call this for gradients that your code has computed without :meth:`scale` or has unscaled itself.

        Args:
            optimizer: The optimizer.
        """
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
        """Return the names of an optimizer's parameters whose current gradients contain an infinity or a NaN.

        The host waits for the device.
        """
        names = self.param_names() if self.param_names is not None else {}
        return gradients.non_finite_params(optimizer, names)

    def non_finite_weights(self, optimizer: Optimizer) -> list[str]:
        """Return the names of an optimizer's parameters whose own values contain an infinity or a NaN.

        The host waits for the device.
        """
        names = self.param_names() if self.param_names is not None else {}
        return gradients.non_finite_weights(optimizer, names)

    # --- outcomes -----------------------------------------------------------------------------------------

    def result_of(self, *optimizers: Optimizer, grad_norm: torch.Tensor | None = None) -> StepResult:
        """Return the joint outcome of the last steps of one or several optimizers.

        The joint step counts as skipped if any of the steps was skipped.

        Args:
            optimizers: The optimizers. Each must have stepped since the last call of :meth:`update` or between the last
                two calls.
            grad_norm: The norm of the gradients before clipping, which is stored in the result.

        Returns:
            A :class:`~castwise.StepResult`. Creating it does not wait for the device.

        Raises:
            StateError: An optimizer stepped neither since the last call of :meth:`update` nor between the last two
                calls.
        """
        if not self.works:
            return StepResult(None, grad_norm=grad_norm)
        results = [self._outcomes.result(self._flags.states, id(optimizer)) for optimizer in optimizers]
        return StepResult.join(results, grad_norm)

    @property
    def last_result(self) -> StepResult | None:
        """The outcome of the last step of any optimizer, or None before the first step or if the scaler is disabled."""
        key = self._outcomes.last_stepped
        return None if key is None else self._outcomes.result(self._flags.states, key)

    @property
    def previous_skipped(self) -> bool | None:
        """Whether a step was skipped between the last two calls of :meth:`update`, or None before the first call.

        After this was read once, outcomes are copied to the host in the background. Reading it then does not wait as
        long as the device is at most one step behind the host.
        """
        return self._outcomes.previous_skipped

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale of every loss that was scaled since the last call of this method.

        A scale shrinks if the gradients of its loss were infinite or NaN. It grows if they were finite for
        ``growth_interval`` updates in a row, and stays the same otherwise. Call this once after the steps of all
        optimizers.

        Args:
            new_scale: A value to which the scale is set instead. It applies to the first loss that was scaled since the
                last call. If none was scaled, it applies to the loss named ``"loss"``.
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

        If the gradients were finite, the scale does not change.

        Args:
            dropped: A tensor for each optimizer, by its ``id``, and each device. It is above zero if a gradient of the
                optimizer on the device was infinite or NaN.
            stepped: Whether steps were made since the last update. :meth:`update` will then be called in any case.
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
        """Shrink the scales of losses whose gradients were returned to the user and were infinite or NaN.

        This concerns gradients that were returned, as by :meth:`castwise.Amp.grad`, and never written to ``.grad``.

        Args:
            returned: For each loss, by name, a tensor that is above zero if its gradients were infinite or NaN.
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
        """Return the scale and its counters as a dictionary, which ``torch.amp.GradScaler`` can also load.

        If ``hysteresis`` is above 1 or further losses are used, the dictionary has additional keys. It is empty if the
        scaler is disabled. The host waits for the device.
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
        """Load a state that this class or ``torch.amp.GradScaler`` has saved.

        Loaded scales are limited to the range from ``floor`` to ``ceiling``. A disabled scaler ignores the state.

        Args:
            state_dict: The dictionary that ``state_dict()`` returned.
        """
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
