"""``castwise.GradScaler``: torch's, and what its users ask for beyond it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from castwise import _torch
from castwise.errors import LossScaleError, StateError
from castwise.plan import LossScale
from castwise.scaler.closure import NonFiniteEvaluation, Snapshot
from castwise.scaler.result import StepResult
from castwise.scaler.state import ScalePolicy, ScaleState, next_state, update_on_device

__all__ = ["GradScaler"]

_LOW = (torch.bfloat16, torch.float16)
_ZERO_DIM = ()


@dataclass
class _Loss:
    """The device's record of one named loss."""

    scale: torch.Tensor
    growth_tracker: torch.Tensor
    hysteresis_tracker: torch.Tensor


class GradScaler(torch.amp.GradScaler):
    """A loss scaler that by default cannot be told from ``torch.amp.GradScaler``, and can do more.

    Beyond torch: hysteresis, a floor and a ceiling; a scale per named loss; agreement between ranks on non-finite
    gradients; closures; the outcome of a step (:meth:`result_of`) without waiting for the device; an error that
    names parameters when the scale is at its floor and gradients still overflow. A loss in a low format is scaled
    in fp32 whatever its shape (torch scales a 1-d fp16 loss in fp16, to infinity).

    Args:
        device: Device type of the gradients.
        init_scale: First scale.
        growth_factor: Factor after ``growth_interval`` updates with finite gradients, > 1.
        backoff_factor: Factor after an update with non-finite gradients, < 1.
        growth_interval: As said.
        enabled: False passes everything through.
        hysteresis: Overflows before the scale shrinks; counted until it grows.
        floor: Smallest scale, or None as in torch.
        ceiling: Largest scale, or None as in torch.
        dynamic: False keeps the scale; steps with non-finite gradients are still skipped.
        reduce: Called with each 0-dim fp32 flag, to make it the largest over all ranks that act together: in place,
            or by returning it.
        process_group: Instead of ``reduce``, a process group whose ranks agree by an all-reduce.
        allow_fp16_grads: Unscale fp16 gradients too, where parameters are stored in fp16 without masters.
        patience: Steps in a row with non-finite gradients at the floor before :class:`LossScaleError`.

    Raises:
        LossScaleError: From :meth:`step`, at the floor.
        StateError: From :meth:`scale`, when losses with different scales would meet in one gradient.
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
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._hysteresis = hysteresis
        self._floor = floor
        self._ceiling = ceiling
        self._dynamic = dynamic
        self._plain = dynamic and hysteresis == 1 and floor is None and ceiling is None
        self._reduce = reduce
        self._process_group = process_group
        self._allow_fp16_grads = allow_fp16_grads
        self._patience = patience
        self._streak = 0
        self._hysteresis_tracker: torch.Tensor | None = None
        self._init_hysteresis_tracker = 0
        self._others: dict[str, _Loss] = {}
        self._saved_others: dict[str, dict[str, Any]] = {}
        self._base: str | None = None  # the loss that opened the window
        self._slot = "loss"  # the loss whose record is in torch's own attributes
        self._flags: dict[str, torch.Tensor] = {}
        self._pending: StepResult | None = None
        self._host_skips: dict[int, bool] = {}
        self.param_names: Callable[[], Mapping[int, str]] | None = None

    @classmethod
    def from_loss_scale(cls, loss_scale: LossScale, device: str = "cuda", **extras: Any) -> GradScaler:
        """A scaler by a plan's :class:`~castwise.LossScale`; ``extras`` as in the constructor."""
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

    # --- scales -------------------------------------------------------------------------------------------

    @property
    def policy(self) -> ScalePolicy:
        """The constants by which the scale moves."""
        return ScalePolicy(
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
            self._hysteresis,
            self._floor,
            self._ceiling,
            self._dynamic,
        )

    def _loss(self, name: str, device: torch.device | None = None) -> _Loss:
        """The record of a named loss, made at its first use."""
        if name == self._slot:
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(device or torch.device(self._device))
            assert self._scale is not None
            assert self._growth_tracker is not None
            if self._hysteresis_tracker is None:
                self._hysteresis_tracker = torch.full(
                    _ZERO_DIM, self._init_hysteresis_tracker, dtype=torch.int32, device=self._scale.device
                )
            return _Loss(self._scale, self._growth_tracker, self._hysteresis_tracker)
        if name not in self._others:
            saved = self._saved_others.pop(name, {})
            where = device or (self._scale.device if self._scale is not None else torch.device(self._device))
            first = (self._init_scale, self._init_growth_tracker if name == "loss" else 0)
            self._others[name] = _Loss(
                torch.full(_ZERO_DIM, saved.get("scale", first[0]), dtype=torch.float32, device=where),
                torch.full(
                    _ZERO_DIM, saved.get("_growth_tracker", first[1]), dtype=torch.int32, device=where
                ),
                torch.full(_ZERO_DIM, saved.get("hysteresis_tracker", 0), dtype=torch.int32, device=where),
            )
        return self._others[name]

    def _occupy(self, name: str, device: torch.device | None = None) -> None:
        """Put a loss into the attributes that torch's own methods work on; the one there steps aside."""
        if name == self._slot:
            return
        mine = self._loss(name, device)
        if self._scale is not None:
            self._others[self._slot] = self._loss(self._slot)
        del self._others[name]
        self._slot = name
        self._scale, self._growth_tracker = mine.scale, mine.growth_tracker
        self._hysteresis_tracker = mine.hysteresis_tracker

    def scale_tensor(self, name: str | None = None) -> torch.Tensor:
        """The scale of a loss (by default the one that opened the window) as a 0-dim fp32 tensor on the device."""
        return self._loss(name or self._base or self._slot).scale

    def get_scale(self, name: str = "loss") -> float:
        """The scale of a loss; 1.0 when disabled. Synchronises with the device."""
        if not self._enabled:
            return 1.0
        if name == self._slot:
            return float(super().get_scale())
        return float(self._loss(name).scale)

    def next_state(self, found_inf: bool, name: str = "loss") -> ScaleState:
        """What the state of a loss would be after an update with this outcome. Changes nothing; synchronises."""
        loss = self._loss(name)
        state = ScaleState(float(loss.scale), int(loss.growth_tracker), int(loss.hysteresis_tracker))
        return next_state(state, found_inf, self.policy)

    @overload
    def scale(self, outputs: torch.Tensor, name: str = ...) -> torch.Tensor: ...

    @overload
    def scale(self, outputs: list[torch.Tensor], name: str = ...) -> list[torch.Tensor]: ...

    @overload
    def scale(self, outputs: tuple[torch.Tensor, ...], name: str = ...) -> tuple[torch.Tensor, ...]: ...

    @overload
    def scale(self, outputs: Iterable[torch.Tensor], name: str = ...) -> Iterable[torch.Tensor]: ...

    def scale(self, outputs: Any, name: str = "loss") -> Any:
        """Multiply a loss, or several, by the scale of ``name``.

        Args:
            outputs: Tensor of any shape, or an iterable of them; low formats are scaled in fp32.
            name: Whose scale. Gradients of losses with different names must not meet: use :meth:`backward` there.

        Returns:
            The same structure, scaled.

        Raises:
            StateError: Another loss has been scaled since the last update.
        """
        if not self._enabled:
            return outputs
        if self._base is None:
            self._base = name
            if name != self._slot:
                self._occupy(name, outputs.device if isinstance(outputs, torch.Tensor) else None)
        elif self._base != name:
            raise StateError(
                f"scale(loss, {name!r}): the loss {self._base!r} was scaled in this window, and gradients of losses with "
                "different scales must not be added up. Use scaler.backward(loss, name, params=...) or "
                "Amp.backward(loss, name), which keep them apart, or call update() in between."
            )
        if isinstance(outputs, torch.Tensor):
            if self._scale is not None and not outputs.dim():
                return outputs * self._scale.to(outputs.device, non_blocking=True)
            return self._scaled(outputs, name)
        return super().scale(outputs)

    def _scaled(self, outputs: torch.Tensor, name: str) -> torch.Tensor:
        if outputs.dim() and outputs.dtype in _LOW:
            outputs = outputs.float()
        if name == self._slot:
            return super().scale(outputs)
        return outputs * self._loss(name, outputs.device).scale.to(outputs.device, non_blocking=True)

    def is_first(self, name: str) -> bool:
        """Whether no other loss has been scaled in this window, so that gradients need not be kept apart."""
        return self._base is None or (self._base == name and not self._flags)

    def backward(
        self,
        loss: torch.Tensor,
        name: str = "loss",
        *,
        params: Callable[[], Iterable[torch.Tensor]] | Iterable[torch.Tensor],
        **kwargs: Any,
    ) -> None:
        """Scale a loss and compute its gradients, keeping those of differently scaled losses apart.

        The first loss of a window costs nothing extra. For any further one the gradients there are set aside, its
        own are checked, brought to the window's scale in their own dtype and added.

        Args:
            loss: Scalar.
            name: Whose scale.
            params: Parameters that this or an earlier loss of the window reaches, or a function that gives them.
            kwargs: As in ``Tensor.backward``.
        """
        if not self._enabled:
            loss.backward(**kwargs)
            return
        base = self._base
        if base is None or self.is_first(name):
            scaled = self.scale(loss, name)
            if kwargs:
                scaled.backward(**kwargs)
            else:
                torch.autograd.backward(scaled)
            return
        everything = list(params() if callable(params) else params)
        aside = [(p, p.grad) for p in everything if p.grad is not None]
        if base not in self._flags:
            self._flags[base] = self._check([grad for _, grad in aside], None)
        for parameter, _ in aside:
            parameter.grad = None
        own = self._loss(name, loss.device)
        self._scaled(loss, name).backward(**kwargs)
        fresh = [(p, p.grad) for p in everything if p.grad is not None]
        factor = self._loss(base).scale.double() / own.scale.double()
        flag = self._check([grad for _, grad in fresh], factor.float())
        self._flags[name] = torch.maximum(self._flags[name], flag) if name in self._flags else flag
        new = {id(parameter): grad for parameter, grad in fresh}
        with torch.no_grad():
            for parameter, grad in aside:
                added = new.get(id(parameter))
                if added is not None:
                    grad = grad + added if grad.is_sparse else grad.add_(added)
                parameter.grad = grad

    def _check(self, grads: Sequence[torch.Tensor], factor: torch.Tensor | None) -> torch.Tensor:
        """Multiply gradients in place by ``factor``; returns a flag of 1.0 where one is not finite."""
        device = grads[0].device if grads else self._loss(self._slot).scale.device
        found = torch.zeros(_ZERO_DIM, device=device)
        factor = torch.ones(_ZERO_DIM, device=device) if factor is None else factor.to(device)
        by_kind: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for grad in grads:
            values = grad._values() if grad.is_sparse else grad
            by_kind[values.device, values.dtype].append(values)
        with torch.no_grad():
            for (where, _), group in by_kind.items():
                flag = found if where == device else torch.zeros(_ZERO_DIM, device=where)
                torch._amp_foreach_non_finite_check_and_unscale_(group, flag, factor.to(where))
                if flag is not found:
                    found = torch.maximum(found, flag.to(device))
        return self._agreed(found)

    # --- unscaling ----------------------------------------------------------------------------------------

    def _agreed(self, flag: torch.Tensor) -> torch.Tensor:
        """The flag as all ranks that act together see it."""
        if self._reduce is not None:
            reduced = self._reduce(flag)
            return flag if reduced is None else reduced
        if self._process_group is not None:
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self._process_group)
        return flag

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        flags = self._unscale_plain(optimizer, inv_scale, found_inf)
        if flags is None:
            flags = super()._unscale_grads_(
                optimizer, inv_scale, found_inf, allow_fp16 or self._allow_fp16_grads
            )
        if self._reduce is None and self._process_group is None:
            return flags
        # A rank without gradients takes part all the same, and its flag is there for the others' sake.
        flags = flags or {found_inf.device: found_inf}
        return {device: self._agreed(flag) for device, flag in flags.items()}

    @staticmethod
    def _unscale_plain(
        optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor
    ) -> dict[torch.device, torch.Tensor] | None:
        """Torch's unscaling for the usual case, dense fp32 gradients on one device; None where it is another."""
        device = inv_scale.device
        grads = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is not None:
                    if type(grad) is not torch.Tensor or grad.dtype is not torch.float32:
                        return None
                    if grad.is_sparse or grad.device != device:
                        return None
                    grads.append(grad)
        if not grads:
            return None
        with torch.no_grad():
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        return {device: found_inf}

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's gradients have been unscaled in this window."""
        if not self._enabled:
            return True
        state = self._per_optimizer_states.get(id(optimizer))
        return state is not None and state["stage"] is OptState.UNSCALED

    def decide_together(self, optimizers: Iterable[Optimizer]) -> None:
        """Make optimizers whose gradients are unscaled step or skip together."""
        if not self._enabled:
            return
        states = [self._per_optimizer_states[id(optimizer)] for optimizer in optimizers]
        flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
        if flags:
            joint = torch.stack([flag.to(flags[0].device) for flag in flags]).amax(0)
            for state in states:
                if state["found_inf_per_device"]:
                    state["found_inf_per_device"] = {
                        device: joint.to(device, copy=True) for device in state["found_inf_per_device"]
                    }

    # --- steps --------------------------------------------------------------------------------------------

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        skip = False
        for flag in optimizer_state["found_inf_per_device"].values():
            skip = skip or flag.item() != 0.0
        self._host_skips[id(optimizer)] = skip
        return None if skip else optimizer.step(*args, **kwargs)

    def step(
        self, optimizer: Optimizer, *args: Any, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Unscale where that was not done, then step, or skip where a gradient is not finite.

        Args:
            optimizer: Its gradients belong to this window.
            args: For ``optimizer.step``; a function as the first is taken as ``closure``.
            closure: Evaluates the loss: clears gradients, computes the loss, calls ``scaler.scale(loss).backward()``
                and returns the loss. Gradients are unscaled and checked at each evaluation; at the first that is
                not finite, parameters and state go back to what they were, and the step counts as skipped.
            kwargs: For ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returned, None when it was skipped.

        Raises:
            LossScaleError: Gradients have been non-finite ``patience`` times in a row with the scale at its floor.
        """
        if closure is None and args and callable(args[0]):
            closure, args = args[0], args[1:]
        if closure is not None:
            if not self._enabled:
                return optimizer.step(closure, *args, **kwargs)
            value = self._step_with_closure(optimizer, closure)
        elif args or kwargs or not self._enabled or getattr(optimizer, "_step_supports_amp_scaling", False):
            value = super().step(optimizer, *args, **kwargs)
        else:
            value = self._plain_step(optimizer)
        if self._floor is not None and self._enabled:
            if self._host_skips.get(id(optimizer)) is False:
                self._streak = 0
            else:
                self._watch_floor(optimizer)
        return value

    def _plain_step(self, optimizer: Optimizer) -> Any:
        """Torch's step for an optimizer that does not unscale by itself, without the questions that do not arise."""
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        stage = state["stage"]
        if stage is OptState.READY:
            if scale.device.type == "mps":  # no fp64 there
                inverse = scale.reciprocal()
            else:
                inverse = scale.double().reciprocal().float()
            found = torch.zeros(_ZERO_DIM, dtype=torch.float32, device=scale.device)
            state["found_inf_per_device"] = self._unscale_grads_(optimizer, inverse, found, False)
        elif stage is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if not state["found_inf_per_device"]:
            state["stage"] = OptState.UNSCALED
            raise AssertionError("No inf checks were recorded for this optimizer.")
        value = self._maybe_opt_step(optimizer, state)
        state["stage"] = OptState.STEPPED
        return value

    def _step_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        snapshot = Snapshot(optimizer)

        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            scale, _ = self._check_scale_growth_tracker("step")
            inverse = scale.double().reciprocal().float()
            flag = torch.zeros(_ZERO_DIM, device=scale.device)
            flags = self._unscale_grads_(optimizer, inverse, flag, allow_fp16=False)
            state["found_inf_per_device"] = flags
            if any(flag.item() for flag in flags.values()):
                raise NonFiniteEvaluation
            return loss

        value = None
        try:
            value = optimizer.step(evaluate)
        except NonFiniteEvaluation:
            snapshot.restore()
        self._host_skips[id(optimizer)] = any(f.item() for f in state["found_inf_per_device"].values())
        state["stage"] = OptState.STEPPED
        return value

    def result_of(self, *optimizers: Optimizer, grad_norm: torch.Tensor | None = None) -> StepResult:
        """What became of the steps of these optimizers in this window; call it before :meth:`update`."""
        if not self._enabled:
            return StepResult(None, grad_norm=grad_norm)
        if len(optimizers) == 1 and (known := self._host_skips.get(id(optimizers[0]))) is not None:
            held = self._per_optimizer_states[id(optimizers[0])]["found_inf_per_device"]
            return StepResult(held.values(), skipped=known, grad_norm=grad_norm)
        flags: list[torch.Tensor] = []
        skipped: bool | None = False
        for optimizer in optimizers:
            flags.extend(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
            known = self._host_skips.get(id(optimizer))
            skipped = None if known is None or skipped is None else skipped or known
        if skipped is None and flags and all(flag.device.type == "cpu" for flag in flags):
            skipped = any(flag.item() for flag in flags)
        return StepResult(flags or None, skipped=skipped, grad_norm=grad_norm)

    def _watch_floor(self, optimizer: Optimizer) -> None:
        """Count steps in a row that the floor cannot help, without waiting for the device."""
        known = self._host_skips.get(id(optimizer))
        if known is None:
            # A fused kernel decided: on a CPU the flag can be read, elsewhere the step before has arrived by now.
            result = self.result_of(optimizer)
            earlier, self._pending = self._pending, result
            if result.known:
                known = result.skipped
            elif earlier is not None and earlier.known:
                known = earlier.skipped
        if not known:
            self._streak = 0 if known is False else self._streak
            return
        self._streak += 1
        if self._streak < self._patience or self._floor is None or self.get_scale(self._slot) > self._floor:
            return
        names = self.non_finite_params(optimizer)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise LossScaleError(
            f"step({type(optimizer).__name__}): gradients were not finite {self._streak} times in a row, the last with the "
            f"loss scale at its floor, {self._floor:g}; first affected: {', '.join(names[:5]) or 'none any more'}{more}. No "
            "smaller scale would cure this: look for NaN or huge values in the data and the loss, lower the learning "
            "rate, use a bf16 plan, or keep these modules in fp32 with Region(path, compute='fp32')."
        )

    def non_finite_params(self, optimizer: Optimizer) -> list[str]:
        """Names of the parameters whose gradients hold an infinity or a NaN now. Synchronises with the device."""
        names = dict(self.param_names()) if self.param_names is not None else {}
        found = []
        for number, group in enumerate(optimizer.param_groups):
            given = group.get("param_names")
            for index, parameter in enumerate(group["params"]):
                grad = parameter.grad
                if grad is None:
                    continue
                values = grad._values() if grad.is_sparse else grad
                if not bool(torch.isfinite(values).all()):
                    fallback = given[index] if given else f"param_groups[{number}]['params'][{index}]"
                    found.append(names.get(id(parameter), fallback))
        return found

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move every scale used in this window by its own outcome, and open the next window.

        Args:
            new_scale: Set the scale of the loss that opened the window instead.
        """
        if not self._enabled:
            return
        base, self._base = self._base, None
        flags, self._flags = self._flags, {}
        skips = self._host_skips
        unskipped = len(skips) == len(self._per_optimizer_states) and not any(skips.values())
        skips.clear()
        # torch adds the flags of several optimizers into the first of them, which a StepResult may still hold.
        simple = self._dynamic and self._hysteresis == 1 and len(self._per_optimizer_states) < 2
        if not flags and (simple or new_scale is not None):
            super().update(new_scale)
            if new_scale is None and not self._plain:
                floor = None if unskipped else self._floor  # finite gradients do not shrink a scale
                if floor is not None or self._ceiling is not None:
                    self.scale_tensor().clamp_(floor, self._ceiling)
            return
        self._check_scale_growth_tracker("update")
        name = base or self._slot
        loss = self._loss(name)
        found = [
            flag.to(loss.scale.device, non_blocking=True)
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        if not found:
            raise AssertionError("No inf checks were recorded prior to update.")
        flags = flags or {name: found[0] if len(found) == 1 else torch.stack(found).amax(0)}
        policy = self.policy
        for used, flag in flags.items():
            mine = self._loss(used)
            flag = flag.to(mine.scale.device)
            update_on_device(mine.scale, mine.growth_tracker, mine.hysteresis_tracker, flag, policy)
        self._per_optimizer_states.clear()

    # --- state --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Torch's state, with further keys where hysteresis or further losses are in use. Synchronises."""
        if not self._enabled:
            return super().state_dict()
        slot = self._slot
        self._occupy("loss")
        state = super().state_dict()
        if self._hysteresis > 1:
            tracker = self._hysteresis_tracker
            state["hysteresis_tracker"] = self._init_hysteresis_tracker if tracker is None else int(tracker)
        losses = dict(self._saved_others)
        for name, loss in self._others.items():
            losses[name] = {
                "scale": float(loss.scale),
                "_growth_tracker": int(loss.growth_tracker),
                "hysteresis_tracker": int(loss.hysteresis_tracker),
            }
        if losses:
            state["losses"] = losses
        self._occupy(slot)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of torch's scaler."""
        if self._enabled:
            self._occupy("loss")
        super().load_state_dict(state_dict)
        if not self._enabled:
            return
        self._init_hysteresis_tracker = int(state_dict.get("hysteresis_tracker", 0))
        self._hysteresis_tracker = None
        self._others.clear()
        self._saved_others = {name: dict(loss) for name, loss in state_dict.get("losses", {}).items()}
        self._streak = 0

    def __getstate__(self) -> dict[str, Any]:
        saved = self.state_dict() if self._enabled else {}
        if self._enabled:
            self._occupy("loss")
        state = super().__getstate__()
        if self._enabled:
            state["_saved_others"] = saved.get("losses", {})
            state["_init_hysteresis_tracker"] = saved.get("hysteresis_tracker", 0)
        state.update(_others={}, _hysteresis_tracker=None, _pending=None, _flags={}, param_names=None)
        return state


for _name in ("backward", "step", "update", "result_of", "decide_together", "_maybe_opt_step"):
    _torch.never_trace(getattr(GradScaler, _name))
