"""The session; see the package."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from castwise import _torch, borders, masters, process
from castwise.casting import autocast, frames
from castwise.casting.context import DEVICE_TYPES, default_device_type
from castwise.casting.frames import mark_boundary
from castwise.errors import CheckpointError, DeviceError, PlanError, StateError
from castwise.fused import fuse
from castwise.masters.sync import sync as sync_masters
from castwise.parallel import fsdp, wrappers
from castwise.parallel.agreement import clip_by_norm
from castwise.parallel.plans import check_same_plan
from castwise.plan import Plan, as_plan
from castwise.resolve import Resolution, resolve
from castwise.scaler import GradScaler, StepResult, Window
from castwise.session import storage
from castwise.session.checks import check_model, check_optimizer, check_parameters
from castwise.session.guard import give_late_masters, scaler_for
from castwise.session.ranks import AmongRanks

__all__ = ["Amp"]

_LOW = (torch.bfloat16, torch.float16)
_prepared: weakref.WeakKeyDictionary[nn.Module, Amp] = weakref.WeakKeyDictionary()


class Amp(AmongRanks):
    """A precision plan, applied to models and optimizers of any training loop.

    Args:
        plan: A :class:`~castwise.Plan`, a preset name, or the path of a plan file.
        device: Where the model runs, as torch takes it; by default the accelerator at hand, else the CPU.
        group: Process group whose ranks act together: they have one plan, and agree on skipping a step and on norms
            where their gradients can differ. By default all ranks.
        nonfinite: What becomes of a step whose gradients hold an infinity or a NaN, under every plan. ``"skip"``: it is
            passed over, and counted. ``"raise"``: it is an error before anything has changed, at once under a plan
            without a loss scale, and under one with a scale when no smaller one is left to try. ``"allow"``: nobody
            looks; not for plans with a loss scale, which finds its size by skipping.
        patience: Skipped steps in a row before an error names the parameters; under a dynamic loss scale those count
            that its floor ends.

    Used as a context manager, or closed with :meth:`close`, it leaves models, operators and process-wide settings
    as it found them.

    Raises:
        PlanError: A plan that does not exist or cannot be.
        DeviceError: A device that is not there or lacks a format of the plan.
    """

    scaler: GradScaler
    """The plan's loss scale; under a plan without one a scaler that multiplies nothing and guards the steps."""

    def __init__(
        self,
        plan: Plan | str | os.PathLike[str] | torch.dtype,
        *,
        device: torch.device | str | None = None,
        group: Any = None,
        nonfinite: str = "skip",
        patience: int = 10,
    ) -> None:
        super().__init__(group)
        self.plan = as_plan(plan)
        self.device_type = torch.device(device).type if device is not None else default_device_type()
        if self.device_type not in DEVICE_TYPES:
            raise DeviceError(
                f"Amp(device={device!r}): not a device type; allowed: {', '.join(DEVICE_TYPES)}"
            )
        process.check_device(self.plan, self.device_type)
        self.scaler = scaler_for(self.plan, self.device_type, self._agree, nonfinite, patience)
        self.scaler.param_names = self._parameter_names
        self.scaler.admit = give_late_masters
        self._window = Window(self.scaler, lambda: self._live(self._optimizers))
        self._claim: process.Claim | None = None
        self._region: autocast | None = None
        self._root: borders.Border | None = None
        self._undo = contextlib.ExitStack()

    @staticmethod
    def of(model: nn.Module) -> Amp | None:
        """The session that has prepared a model, or None. It lives as long as the model does."""
        return _prepared.get(getattr(model, "_orig_mod", model))

    # --- preparing ----------------------------------------------------------------------------------------

    def prepare(
        self,
        model: nn.Module,
        *optimizers: Optimizer,
        methods: Sequence[str] = (),
        inference: bool = False,
        part: bool = False,
    ) -> Any:
        """Make a model run by the plan, and optimizers update it by the plan.

        Works in place, by hooks: the same objects come back, and references to parameters stay good. Prepare before
        ``torch.compile`` and before DistributedDataParallel, after FSDP2's ``fully_shard`` and tensor parallelism's
        ``parallelize_module``; of a pipeline prepare each stage. Where torch.distributed is initialised, all ranks make
        the first call together, and their plans are compared.

        Args:
            model: In any state of training, on its device.
            optimizers: Those that update it. Several models are prepared by several calls, each with the optimizers
                that update it; one that updates several models is given with each.
            methods: Methods other than ``forward`` that are called from outside, to run by the plan too.
            inference: Cast weights once instead of at every call, and keep no masters: for a model that is not
                trained any more. Norm layers keep their weights.
            part: The model is one stage of a pipeline: regions of the plan that match nothing in it are those of other
                stages. :meth:`pipeline` sees to it that each matches somewhere.

        Returns:
            ``model`` alone where no optimizer was given, else ``(model, *optimizers)``.

        Raises:
            PatternError: A region of the plan that does not fit the model.
            PlanError: Parameters already stored in a format that contradicts the plan, or ranks with different plans.
            StateError: A wrong order of wrapping, or something prepared twice.
        """
        target = check_model(model, self.device_type)
        owner = _prepared.get(target)
        if owner is not None:
            raise StateError(
                f"prepare: this {type(target).__name__} is already prepared, by "
                f"{'this Amp' if owner is self else repr(owner)}; close() that Amp first (castwise.Amp.of(model) finds it)"
            )
        if inference and optimizers:
            raise StateError(
                "prepare(inference=True) takes no optimizer: weights are cast once and have no masters"
            )
        for optimizer in optimizers:
            check_optimizer(optimizer, target, self.plan)
        check_parameters(target, self.plan)
        borders.check_methods(target, methods)
        resolution = self.resolve(target, part=part, inference=inference)
        fsdp.check_groups(resolution, target)
        dtypes = storage.dtypes_of(resolution, target)
        storage.check_range(target, dtypes)
        if optimizers and not self._models and self._agreement.world_size > 1:
            check_same_plan(self.plan, self._agreement.group)
        with contextlib.ExitStack() as log:
            self._apply(target, optimizers, resolution, dtypes, methods, log)
            if inference or not self.plan.keeps_masters:
                storage.forget_originals(dtypes, inference=inference)
            self._undo.push(log.pop_all())
        return (model, *optimizers) if optimizers else model

    def resolve(self, model: nn.Module, *, part: bool = False, inference: bool = False) -> Resolution:
        """What the plan makes of a model, without changing it: ``print(amp.resolve(model))``.

        Args:
            model: In any state.
            part: As for :meth:`prepare`.
            inference: As for :meth:`prepare`.

        Returns:
            The format of each module, the dtype of each tensor that changes, and the borders.

        Raises:
            PatternError: A region of the plan that does not fit the model.
        """
        return resolve(self.plan, model, self.device_type, part=part, inference=inference)

    def _apply(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        resolution: Resolution,
        dtypes: Mapping[torch.Tensor, torch.dtype],
        methods: Sequence[str],
        log: contextlib.ExitStack,
    ) -> None:
        """Carry a resolution out. Whatever is changed here is an entry of the log, made before the change or with it."""
        alive = weakref.ref(model)  # the log must not keep the model
        held = [weakref.ref(optimizer) for optimizer in optimizers]
        log.callback(self._agreement.forget)
        if self._claim is None or self._claim.closed:
            self._claim = process.Claim(self.plan, self.device_type)
            log.callback(self._claim.close)
            weakref.finalize(self, self._claim.close).atexit = False
        # a copy of a prepared model brings the original's borders along
        log.callback(borders.strip(model))
        frames.get_ready_for_compile()
        root, remove = borders.install(model, resolution, self.device_type, methods, sync_masters)
        log.callback(remove)
        restride = self.plan.memory_format == "channels_last"
        log.callback(_restride, held if restride else ())
        changed = [
            weakref.ref(parameter)
            for parameter in model.parameters()
            if parameter in dtypes and not (resolution.plan.keeps_masters and parameter.requires_grad)
        ]
        log.callback(storage.follow_state, held, changed)
        storage.store(model, self.plan, dtypes, log)
        storage.follow_state(held, changed)
        _restride(held if restride else ())
        for optimizer in optimizers:
            if self.plan.keeps_masters:
                attachment = masters.attach(optimizer, model)
                log.callback(functools.partial(attachment.detach, write_back=True))
            if self.plan.optimizer == "fused":
                log.callback(fuse(optimizer))
        if resolution.plan.keeps_masters and dtypes:
            log.callback(register_optimizer_step_pre_hook(functools.partial(_refuse_stranger, alive)).remove)
        for optimizer in optimizers:
            if all(known() is not optimizer for known in self._optimizers):
                reference = weakref.ref(optimizer)
                log.callback(_without, self._optimizers, reference)
                self._optimizers.append(reference)
                if _torch.has_step_hooks(optimizer):
                    log.callback(self._window.watch(optimizer))
        wrappers.on_ddp(_meet_ddp)
        self._agreement.forget()
        log.callback(_forget_model, alive)
        log.callback(_without, self._models, alive)
        self._models.append(alive)
        _prepared[model] = self
        self._patterns |= {region.pattern for region in resolution.plan.regions}
        self._note_order(model)
        self._roots[model] = root
        self._root = self._root or root

    def autocast(self, *, enabled: bool = True, cache_enabled: bool | None = None) -> autocast:
        """The plan's casting as a region, for code outside a prepared module: a loss, a function.

        Args:
            enabled: False for an fp32 island.
            cache_enabled: As in :class:`castwise.autocast`.
        """
        if enabled and cache_enabled is None:
            if self._region is None:
                self._region = autocast(self.plan, device_type=self.device_type)
            return self._region
        return autocast(self.plan, enabled=enabled, cache_enabled=cache_enabled, device_type=self.device_type)

    # --- losses -------------------------------------------------------------------------------------------

    def scale(self, loss: torch.Tensor, name: str = "loss") -> torch.Tensor:
        """Multiply a loss by its scale, for a ``backward()`` of one's own. Opens the next window after a step.

        Args:
            loss: Scalar, any floating dtype; low formats are scaled in fp32.
            name: Whose scale.

        Returns:
            The scaled loss; the loss itself under a plan without a loss scale.
        """
        self._window.open(name, lend=True)
        self._narrow()
        return self._window.note_backward_of(self.scaler.scale(loss, name))

    def get_scale(self, name: str = "loss") -> float:
        """The scale of the next loss of that name, 1.0 under a plan without one. Changes nothing; waits for the device."""
        return self._window.get_scale(name)

    def backward(self, loss: torch.Tensor, name: str = "loss", **kwargs: Any) -> None:
        """Compute scaled gradients of a loss and add them to ``.grad``.

        Args:
            loss: Scalar of any floating dtype.
            name: Losses with different names have scales of their own and may share parameters.
            kwargs: ``retain_graph``, ``create_graph``, ``inputs`` as in ``Tensor.backward``.

        Raises:
            ValueError: A loss that is not a scalar or has no graph.
        """
        if not isinstance(loss, torch.Tensor):
            raise PlanError(
                f"backward: the loss is a {type(loss).__name__}; a scalar tensor is needed. Leave .item() out."
            )
        if loss.numel() != 1:
            raise PlanError(
                f"backward: the loss has shape {list(loss.shape)}; a scalar is needed. Reduce it with .mean() or .sum()."
            )
        window, scaler = self._window, self.scaler
        if not window.settled:
            window.open(name)
        root = self._root
        if root is not None and root.follow_backward:
            loss = mark_boundary(loss, root.frame)
        self._narrow()
        try:
            if kwargs or not scaler.is_first(name):
                scaler.backward(loss, name, params=self._parameters, **kwargs)
            else:
                _torch.backward_of_scalar(scaler.scale(loss, name))
        finally:
            window.fed()

    def _parameter_names(self) -> dict[int, str]:
        names = {}
        for model in self._live(self._models):
            for name, parameter in model.named_parameters():
                names[id(parameter)] = name
                names[id(masters.master_of(parameter))] = name
        return names

    def grad(
        self,
        loss: torch.Tensor,
        inputs: torch.Tensor | Sequence[torch.Tensor],
        create_graph: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Unscaled gradients of a loss with respect to ``inputs``, computed through the scale: for penalties.

        Args:
            loss: Scalar.
            inputs: What to differentiate by.
            create_graph: Keep the graph of the gradients, for a penalty on them.
            kwargs: As in ``torch.autograd.grad``.

        Returns:
            One gradient per input, its dtype fp32 at least.
        """
        if self._root is not None and self._root.follow_backward:
            loss = mark_boundary(loss, self._root.frame)
        if not self.scaler.is_enabled():
            return torch.autograd.grad(loss, inputs, create_graph=create_graph, **kwargs)
        self._window.open()
        scale = self.scaler.scale_tensor()
        grads = torch.autograd.grad(loss.float() * scale, inputs, create_graph=create_graph, **kwargs)
        inverse = scale.double().reciprocal().float()
        return tuple(g if g is None else (g.float() if g.dtype in _LOW else g) * inverse for g in grads)

    # --- steps --------------------------------------------------------------------------------------------

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by their scale, in place; done by :meth:`step` where it was not before.

        Call it before anything changes gradients; the step looks once more whether they are finite.

        Raises:
            StateError: They were changed before.
        """
        self._window.unscale_(optimizer, by_hand=True)

    def clip_grad_norm_(
        self,
        optimizer_or_params: Optimizer | Iterable[torch.Tensor] | torch.Tensor,
        max_norm: float,
        norm_type: float = 2.0,
    ) -> torch.Tensor:
        """Clip by the global norm, after unscaling.

        Args:
            optimizer_or_params: An optimizer, or parameters whose gradients are unscaled already.
            max_norm: Largest norm.
            norm_type: As in ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            The norm before clipping, a 0-dim tensor on the gradients' device.
        """
        norm = self._clip(self._unscaled_params(optimizer_or_params), max_norm, norm_type)
        if isinstance(optimizer_or_params, Optimizer):
            self._window.note_norm((optimizer_or_params,), norm)
        return norm

    def clip_grad_value_(
        self, optimizer_or_params: Optimizer | Iterable[torch.Tensor] | torch.Tensor, clip_value: float
    ) -> None:
        """Clip every element to ``[-clip_value, clip_value]``, after unscaling."""
        nn.utils.clip_grad_value_(self._unscaled_params(optimizer_or_params, look=True), clip_value)

    def _unscaled_params(
        self, of: Optimizer | Iterable[torch.Tensor] | torch.Tensor, look: bool = False
    ) -> list[torch.Tensor]:
        look = look or self.scaler.is_enabled()
        if isinstance(of, Optimizer):
            if look:
                self._window.unscale_(of)
            return [parameter for group in of.param_groups for parameter in group["params"]]
        params = [of] if isinstance(of, torch.Tensor) else list(of)
        if look:
            wanted = {id(parameter) for parameter in params}
            for optimizer in self._live(self._optimizers):
                held = {id(p) for group in optimizer.param_groups for p in group["params"]}
                held |= {
                    id(masters.model_param_of(p)) for group in optimizer.param_groups for p in group["params"]
                }
                if wanted & held:
                    self._window.unscale_(optimizer)
        return params

    def step(
        self,
        *optimizers: Optimizer,
        max_norm: float | None = None,
        closure: Callable[[], Any] | None = None,
    ) -> StepResult:
        """Unscale, agree, clip, then step, or skip where a gradient is not finite.

        Args:
            optimizers: Those to step; several decide together, and clip by their joint norm.
            max_norm: Clip the gradients to this global norm first.
            closure: For optimizers that evaluate the loss themselves (LBFGS): clears gradients, computes the loss,
                calls :meth:`backward` and returns the loss. Gradients are unscaled and checked at each evaluation.

        Returns:
            What became of it; without a loss scale nothing is ever skipped.
        """
        if not optimizers:
            raise StateError("step() was given no optimizer; call amp.step(optimizer)")
        for optimizer in optimizers:
            if all(known() is not optimizer for known in self._optimizers):
                self._refuse_unknown(optimizer)
        if frames.thread.state.saved:
            frames.leave_interrupted()
        if self._unchecked:
            self._check_order()
        window = self._window
        if max_norm is None and closure is None and len(optimizers) == 1:
            result = window.step(optimizers[0])
            frames.clear_weight_cache()
            return result
        if closure is not None and (len(optimizers) > 1 or max_norm is not None):
            raise StateError(
                "step(closure=...): takes one optimizer and no max_norm; clip inside the closure"
            )
        norm = None
        if max_norm is not None:
            norm = self._decide_and_clip(optimizers, max_norm)
        elif closure is None:
            for optimizer in optimizers:
                window.unscale_(optimizer)
            self.scaler.decide_together(optimizers)
        results = [window.step(optimizer, closure) for optimizer in optimizers]
        if closure is not None:
            attachment = masters.attachment_of(optimizers[0])
            if attachment is not None:
                attachment.copy_to_model()  # a step taken back restores the masters alone
        frames.clear_weight_cache()
        return StepResult.join(results, norm)

    def _refuse_unknown(self, optimizer: Optimizer) -> NoReturn:
        raise StateError(
            f"step({type(optimizer).__name__}): this optimizer was not prepared by this Amp, so its parameters have neither masters "
            "nor a loss scale that it knows of; call amp.prepare(model, optimizer) with it before training, and give step the "
            "very object that was prepared"
        )

    def _decide_and_clip(self, optimizers: Sequence[Optimizer], max_norm: float) -> torch.Tensor:
        """Unscale, agree on the flag and on the norm, in one message, and clip."""
        scaler, window = self.scaler, self._window
        if not scaler.is_enabled():
            norm = self._clip_together(optimizers, max_norm)
            window.note_norm(optimizers, norm)
            return norm
        late = any(scaler.is_unscaled(optimizer) for optimizer in optimizers)
        apart = self._agreement.can_differ(self._parameters())
        self._flags_wait = apart
        try:
            for optimizer in optimizers:
                window.unscale_(optimizer)
        finally:
            self._flags_wait = False
        if apart:
            params = [
                p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
            ]
            flag = scaler.joint_flag(optimizers)
            norm = self._agreement.norm(params, joined=True, flag=flag)
            scaler.set_flag(optimizers, flag)
            clip_by_norm(params, max_norm, norm.nan_to_num(0.0, 0.0))
            return norm
        scaler.decide_together(optimizers)
        norm = self._clip_together(optimizers, max_norm)
        if late:  # gradients may have changed since they were looked at
            window.note_norm(optimizers, norm)
        return norm

    def _clip_together(self, optimizers: Sequence[Optimizer], max_norm: float) -> torch.Tensor:
        params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        return self._clip(params, max_norm)

    def _open_window(self) -> None:
        self._window.open(lend=True)

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped since the session was made; several optimizers that step together count one each.

        Reading it waits for the device only where a fused optimizer on an accelerator decided by itself.
        """
        return self._window.skipped_steps

    # --- state --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The session's state: the plan, as JSON, and the loss scales. Tensors none, so it loads with ``weights_only``.

        After a step the scales are those that the next loss will have; asking changes nothing.
        """
        return {"version": 1, "plan": self.plan.to_json(), "scaler": self._window.state_dict() or None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the loss scales of a saved session, of this plan or another.

        A scale saved under a plan with a loss scale is taken over; where there is none to take, the plan's own
        initial scale holds.

        Raises:
            CheckpointError: Not a state of :class:`Amp`.
        """
        if not isinstance(state, Mapping) or state.get("version") != 1 or "scaler" not in state:
            keys = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise CheckpointError(
                f"Amp.load_state_dict: expected the keys version (1), plan and scaler of Amp.state_dict(), got: {keys}"
            )
        if state["scaler"]:
            self._window.load_state_dict(state["scaler"])

    def model_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Weights of a model in fp32 under its own keys, from the masters where there are any.

        A checkpoint written so loads into the model under any other plan.
        """
        return masters.fp32_state_dict(getattr(model, "_orig_mod", model))

    def close(self) -> None:
        """Take the plan off again: all that :meth:`prepare` has changed is as it was, and weights are what they became.

        Hooks, dtypes and memory formats, masters (whose values go back into the model), fused flags, the optimizer's state
        and process-wide settings. What an entry of the undo log fails at does not keep the others from being undone.
        """
        self._undo.close()
        self._region = self._root = None
        self._narrows.clear()
        self._unchecked.clear()

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "Amp: a session holds hooks, masters and settings of this process, so it cannot be pickled or copied. Save "
            "amp.state_dict() and amp.model_state_dict(model), and make Amp(plan) anew where they are loaded."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Amp({str(self.plan)!r}, device={self.device_type!r})"


def _restride(optimizers: Iterable[weakref.ref[Optimizer]]) -> None:
    for reference in optimizers:
        optimizer = reference()
        if optimizer is not None:
            masters.restride_state(optimizer)


def _refuse_stranger(reference: weakref.ref[nn.Module], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """At any optimizer's step: one that never got masters must not update what is stored low to have them."""
    model = reference()
    if model is None or masters.attachment_of(optimizer) is not None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if id(parameter) in held and masters.is_low(parameter) and parameter.grad is not None:
            raise StateError(
                f"{type(optimizer).__name__}.step(): {name} of {type(model).__name__} is stored in "
                f"{str(parameter.dtype).removeprefix('torch.')} by a plan whose fp32 masters live in the optimizer, and this one has "
                "none: updates would be rounded away. Prepare both: amp.prepare(model, optimizer)."
            )


def _forget_model(reference: weakref.ref[nn.Module]) -> None:
    model = reference()
    if model is not None:
        _prepared.pop(model, None)


def _without(references: list[Any], gone: Any) -> None:
    references[:] = [reference for reference in references if reference is not gone]


def _meet_ddp(ddp: nn.parallel.DistributedDataParallel, module: nn.Module) -> None:
    for inner in module.modules():
        amp = _prepared.get(inner)
        if amp is not None:
            amp._join_ddp(ddp, module)
