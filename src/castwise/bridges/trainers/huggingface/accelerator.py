"""An ``accelerate.Accelerator`` that trains under a castwise plan."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from castwise import Amp, Plan
from castwise.bridges.trainers.huggingface.adapters import (
    CastwiseOptimizer,
    SessionScaler,
    as_plain,
    inner,
    updates_in_backward,
)
from castwise.bridges.trainers.huggingface.versions import check_version
from castwise.errors import PlanError, StateError

_WITHOUT = {"DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"}
"""Accelerate's distribution types that set their own precision."""

_made: weakref.WeakSet[Amp] = weakref.WeakSet()
"""The sessions that an accelerator created. When another accelerator prepares the same model, it may close them."""


class CastwiseAccelerator(Accelerator):
    """An ``accelerate.Accelerator`` that prepares models and optimizers to train under a castwise plan.

    A plan decides the formats in which a model computes and stores its weights. A script that uses Accelerate changes
    only the line that creates the accelerator::

        accelerator = CastwiseAccelerator("bf16-mixed")

    Plans that compute in fp16 scale the loss on every device, including the CPU. ``optimizer.step_was_skipped`` is
    correct for every optimizer, so schedulers pause at every skipped step. ``save_state`` saves the loss scales. If
    the plan keeps fp32 master weights, ``save_state`` saves the weights in fp32.

    Args:
        plan: A :class:`~castwise.Plan`, the name of a preset, the path of a plan file, or an :class:`~castwise.Amp`
            for the accelerator's device. The :class:`~castwise.Amp` may have prepared models already.
        prepare_options: Options of :meth:`castwise.Amp.prepare` for every model, such as ``{"methods":
            ("encode",)}``.
        kwargs: The arguments of ``accelerate.Accelerator``, without ``mixed_precision``.

    Raises:
        PlanError: ``mixed_precision`` or another precision setting is given in addition to the plan.
        StateError: Accelerate is configured for a sharding method that sets its own precision.
    """

    amp: Amp
    """The :class:`castwise.Amp` that prepares the models."""
    _plain: type[Accelerator] = Accelerator
    """The class that an unpickled accelerator has. An accelerator of a subclass keeps the subclass, unless the subclass sets
    ``_plain`` itself."""

    def __init__(
        self,
        plan: Amp | Plan | str | os.PathLike[str],
        *,
        prepare_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        asked = kwargs.get("mixed_precision")
        _refuse_two(plan, {"mixed_precision": asked} if asked not in (None, "no") else {})
        super().__init__(**kwargs)
        self._follow(plan, prepare_options)

    @classmethod
    def adopt(
        cls,
        accelerator: Any,
        plan: Amp | Plan | str | os.PathLike[str],
        prepare_options: Mapping[str, Any] | None = None,
    ) -> CastwiseAccelerator:
        """Make an existing accelerator train under a plan, by changing its class in place.

        Args:
            accelerator: An accelerator without ``mixed_precision`` that has prepared nothing yet. An instance of a
                subclass keeps the behaviour of the subclass.
            plan: The plan, as for the constructor.
            prepare_options: Options of :meth:`castwise.Amp.prepare`, as for the constructor.

        Returns:
            The same object.

        Raises:
            PlanError: A precision setting is given in addition to the plan.
            StateError: The accelerator has already prepared a model or an optimizer, or is configured for a sharding
                method that sets its own precision.
        """
        if accelerator._models or accelerator._optimizers:
            raise StateError(
                f"CastwiseAccelerator.adopt: this {type(accelerator).__name__} has prepared models or optimizers already; call "
                "adopt before the accelerator's first prepare"
            )
        kind = type(accelerator)
        accelerator.__class__ = (
            cls if kind is Accelerator else type(f"Castwise{kind.__name__}", (cls, kind), {"_plain": kind})
        )
        try:
            accelerator._follow(plan, prepare_options)
        except BaseException:
            accelerator.__class__ = kind
            raise
        adopted: CastwiseAccelerator = accelerator
        return adopted

    def _follow(
        self, plan: Amp | Plan | str | os.PathLike[str], prepare_options: Mapping[str, Any] | None
    ) -> None:
        check_version("accelerate")
        settings = {} if self.mixed_precision == "no" else {"mixed_precision": self.mixed_precision}
        if self.scaler_handler is not None:
            settings["kwargs_handlers"] = type(self.scaler_handler).__name__
        _refuse_two(plan, settings)
        if self.distributed_type.name in _WITHOUT:
            raise StateError(
                f"CastwiseAccelerator(plan={_shown(plan)}): Accelerate runs {self.distributed_type.name} here, which sets its "
                f"own precision. Allowed: one process, or DistributedDataParallel on several. To shard by FSDP2 under a plan, "
                "use castwise.Amp in a loop of your own: amp.fully_shard(model), then amp.prepare(model, optimizer)"
            )
        if isinstance(plan, Amp):
            if plan.device_type != self.device.type:
                raise StateError(
                    f"CastwiseAccelerator({plan!r}): this accelerator is for {self.device.type!r}. Make the session for this device, "
                    f"castwise.Amp({str(plan.plan)!r}, device={self.device.type!r}), or give the plan instead of a session"
                )
            self.amp = plan
        else:
            self.amp = Amp(plan, device=self.device)
            _made.add(self.amp)
        compiler = self.state.dynamo_plugin.backend.value
        if self.amp.plan.compile != "as_given" and compiler != "NO":
            raise PlanError(
                f"CastwiseAccelerator(plan={_shown(plan)}): the plan compiles the model, and so does Accelerate by {compiler!r}. Leave "
                "dynamo_backend= (torch_compile=True of TrainingArguments) out, or use a plan with compile='as_given'"
            )
        self._options = {} if prepare_options is None else dict(prepare_options)
        self.scaler = SessionScaler(self.amp)
        self._taken: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the accelerator as an instance of Accelerate's own class, without the castwise session."""
        _, _, state, *_ = super().__reduce_ex__(protocol)
        kept = {name: value for name, value in state.items() if name not in ("amp", "_options", "_taken")}
        return as_plain(vars(type(self)).get("_plain", type(self)), kept | {"scaler": None})

    # --- preparing --------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare models and their optimizers for the plan, and prepare everything else as Accelerate does.

        Args:
            args: The objects to prepare, as in Accelerate. If the plan keeps fp32 master weights, pass a model and
                its optimizers in the same call.
            device_placement: For each object, whether to move it to the device, as in Accelerate.

        Returns:
            The prepared objects, as Accelerate returns them, in the same order.

        Raises:
            StateError: :meth:`castwise.Amp.prepare` refuses the model, an optimizer is given without its model, or
                the model was already prepared by a :class:`castwise.Amp` that your own code has made.
        """
        optimizers = [inner(each) for each in args if isinstance(each, Optimizer)]
        places: Sequence[bool | None] = device_placement or [None] * len(args)
        for model, place in zip(args, places, strict=False):
            if isinstance(model, nn.Module):
                self._take_in(model, optimizers, place)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model for the plan, then as Accelerate does, and return the prepared model.

        Args:
            model: The model, as for :meth:`castwise.Amp.prepare`.
            device_placement: Whether to move the model to the device, as in Accelerate.
            evaluation_mode: Whether the model is only evaluated, as in Accelerate.
        """
        self._take_in(model, [], device_placement)
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> CastwiseOptimizer:
        """Prepare an optimizer whose models this accelerator has prepared already.

        Args:
            optimizer: A torch optimizer.
            device_placement: Whether to move the optimizer's state to the device, as in Accelerate.

        Returns:
            A :class:`CastwiseOptimizer` around the optimizer. It steps through the accelerator's
            :class:`castwise.Amp`.

        Raises:
            StateError: The optimizer updates no model that this accelerator prepared.
        """
        if isinstance(optimizer, CastwiseOptimizer) and optimizer.amp is self.amp:
            if optimizer not in self._optimizers:
                self._optimizers.append(optimizer)
            return optimizer
        raw = inner(optimizer)
        self.has_lomo_optimizer |= updates_in_backward(raw)
        for model in list(self._taken):
            self._take_in(model, [raw], False)
        if not self.amp.holds(raw):
            raise StateError(
                f"prepare({type(raw).__name__}): this optimizer updates no model that this accelerator has prepared; give model and optimizer to one call: "
                "accelerator.prepare(model, optimizer)"
            )
        placed = self.device_placement if device_placement is None else device_placement
        wrapped = CastwiseOptimizer(raw, self.amp, placed)
        self._optimizers.append(wrapped)
        return wrapped

    def take_in(self, model: nn.Module, *optimizers: Optimizer) -> None:
        """Prepare a model and its optimizers for the plan, without wrapping them as Accelerate does.

        Args:
            model: The model, with or without a wrapper. It is moved to the accelerator's device.
            optimizers: The optimizers that update the model.

        Raises:
            StateError: The model cannot be prepared, for the same reasons as in :meth:`prepare`.
        """
        self._take_in(model, [inner(each) for each in optimizers], None)

    def _take_in(self, model: nn.Module, optimizers: Sequence[Optimizer], place: bool | None) -> None:
        model = self.unwrap_model(model, keep_torch_compile=False)
        if (self.device_placement if place is None else place) and not _is_placed(model):
            model.to(self.device)
        amp, owner = self.amp, Amp.of(model)
        if owner is not None and owner is not amp:
            if owner not in _made:
                raise StateError(
                    f"prepare({type(model).__name__}): {owner!r} has prepared this model already, but this accelerator has "
                    f"{amp!r}. Give the accelerator that session instead of a plan, or close() it first"
                )
            owner.close()
        self._taken.add(model)
        updating = [each for each in optimizers if _updates(each, model)]
        if Amp.of(model) is None:
            amp.prepare(model, *updating, **self._options)
        elif late := [each for each in updating if not amp.holds(each)]:
            if amp.plan.stores_low or amp.plan.keeps_masters:
                self._begin_again(late[0], optimizers)
            else:
                amp.prepare(model, *late)

    def _begin_again(self, late: Optimizer, optimizers: Sequence[Optimizer]) -> None:
        """Prepare the models again, together with their optimizers.

        This is needed if models were first prepared without their optimizers, as for evaluation, under a plan that stores
        parameters in low precision or keeps master weights.
        """
        if self._optimizers or self.amp not in _made:
            raise StateError(
                f"prepare({type(late).__name__}): the plan {self.amp.plan} has already stored parameters of its model low, "
                f"and the optimizer has to be prepared at the same time; give a model and all of its optimizers to one call: "
                "accelerator.prepare(model, optimizer)"
            )
        self.amp.close()
        for model in list(self._taken):
            updating = [each for each in optimizers if _updates(each, model)]
            self.amp.prepare(model, *updating, **self._options)

    # --- losses and gradients ---------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Multiply a loss by the loss scale and compute its gradients.

        As in Accelerate, the loss is divided by the number of accumulated batches.

        Args:
            loss: A scalar of any floating dtype.
            kwargs: The same options as for :meth:`castwise.Amp.backward`. One of them is ``name``, which gives the
                loss a separate loss scale. ``learning_rate`` is for LOMO optimizers, which update weights inside the
                backward pass.

        Raises:
            StateError: ``learning_rate`` is given without a LOMO optimizer.
        """
        learning_rate = kwargs.pop("learning_rate", None)
        loss = loss / self.gradient_accumulation_steps
        if learning_rate is None:
            self.amp.backward(loss, **kwargs)
        elif self.has_lomo_optimizer:
            for each in self._optimizers:
                optimizer: Any = inner(each)
                if updates_in_backward(optimizer):
                    optimizer.fused_backward(loss, learning_rate)
        else:
            raise StateError(
                f"backward(learning_rate={learning_rate!r}): none of the optimizers that were prepared updates weights inside "
                f"the backward, as LOMO does, so this argument has no effect. Leave it out, and set the learning rate in the "
                f"optimizer's param_groups"
            )

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Divide gradients by the loss scale, in place.

        Gradients that are not scaled are left unchanged.

        Args:
            optimizer: The optimizer, or several optimizers, whose gradients are unscaled. By default these are all
                prepared optimizers.
        """
        given = self._optimizers if optimizer is None else optimizer
        for each in [given] if isinstance(given, Optimizer) else given:
            self.amp.unscale_(inner(each))

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Divide gradients by the loss scale, and clip them so that their global norm is at most ``max_norm``.

        Args:
            parameters: Parameters of prepared models.
            max_norm: The largest norm. With ``inf``, the norm is computed and nothing is clipped.
            norm_type: The order of the norm, as in ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            The norm before clipping, as a 0-dim tensor on the gradients' device. It is not finite if the step will be
            skipped.

        Raises:
            PlanError: ``max_norm`` is not a valid norm.
        """
        return self.amp.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Divide gradients by the loss scale, and clip each of their elements to ``[-clip_value, clip_value]``.

        Args:
            parameters: Parameters of prepared models.
            clip_value: The largest magnitude of an element.
        """
        self.amp.clip_grad_value_(parameters, clip_value)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Return a context manager in which operators are cast by the plan, for code outside prepared models.

        Args:
            autocast_handler: An ``AutocastKwargs`` of Accelerate. With ``enabled=False``, the block runs in fp32.
                ``cache_enabled`` works as in torch.
        """
        handler = self.autocast_handler if autocast_handler is None else autocast_handler
        enabled, cache = (True, None) if handler is None else (handler.enabled, handler.cache_enabled)
        with self.amp.autocast(enabled=enabled, cache_enabled=cache):
            yield

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release all prepared objects, as Accelerate does.

        If the accelerator made its :class:`castwise.Amp` itself, the :class:`castwise.Amp` is closed.

        Args:
            objects: The objects to release, as in Accelerate.

        Returns:
            A list with a None for each object.
        """
        if self.amp in _made:
            self.amp.close()
            self._taken.clear()
        released: list[Any] = super().free_memory(*objects)
        return released

    # --- state ------------------------------------------------------------------------------------------------

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps, including those that a loaded checkpoint has counted."""
        return self.scaler.skipped_steps

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a model's state dict, with the contents that ``save_state`` and ``save_model`` save.

        If the plan keeps fp32 master weights, the weights in the state dict are in fp32.

        Args:
            model: The prepared model.
            unwrap: Whether to leave out the prefix that a wrapper such as DistributedDataParallel adds to the keys.
        """
        module = self.unwrap_model(model, keep_torch_compile=False)
        if self.amp.plan.keeps_masters and Amp.of(module) is self.amp:
            return self.amp.model_state_dict(module if unwrap else model)
        state: dict[str, Any] = super().get_state_dict(model, unwrap)
        return state


def _updates(optimizer: Optimizer, model: nn.Module) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def _is_placed(model: nn.Module) -> bool:
    """Whether the model was placed when it was loaded: spread over devices, sharded or quantised. It must not be moved then."""
    chosen = ("hf_device_map", "is_loaded_in_8bit", "is_loaded_in_4bit")
    return any(getattr(model, name, None) for name in chosen) or any(
        hasattr(parameter, "device_mesh") for parameter in model.parameters()
    )


def _shown(plan: Amp | Plan | str | os.PathLike[str]) -> str:
    return repr(str(plan.plan if isinstance(plan, Amp) else plan))


def _refuse_two(plan: Amp | Plan | str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
    """Raise if ``settings`` holds a precision setting of Accelerate, which would contradict the plan.

    Raises:
        PlanError: ``settings`` is not empty.
    """
    if settings:
        given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise PlanError(
            f"CastwiseAccelerator(plan={_shown(plan)}) together with {given}: two settings of precision at once. Allowed: the plan "
            "alone, whose loss_scale= sets the initial scale. Remove the other setting, also from "
            "`accelerate launch --mixed_precision`, from its configuration file and from ACCELERATE_MIXED_PRECISION"
        )
