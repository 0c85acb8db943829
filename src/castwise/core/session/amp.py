"""Define ``Amp``, which applies a precision plan to a training loop; see the package docstring for an example."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypedDict, TypeVar, Unpack, overload

import torch
from torch import nn
from torch.optim import Optimizer

from castwise.core import _torch, masters
from castwise.core.casting import autocast, default_device_type, frames
from castwise.core.casting.backward import mark_boundary
from castwise.core.model import borders
from castwise.core.model.arrival import check_widen
from castwise.core.model.resolve import Resolution, resolve
from castwise.core.model.stored import forget_formats, note_format, note_formats
from castwise.core.parallel import fsdp, wrappers
from castwise.core.plans.formats import LOW_DTYPES
from castwise.core.plans.plan import Plan, as_plan
from castwise.core.plans.text import shown, some
from castwise.core.ranks import Agreement, Ranks
from castwise.core.ranks.plans import check_same_plan
from castwise.core.scaler import Buffers, GradScaler, StepResult, Watch, Window, gradients
from castwise.core.session import process, scaled, storage
from castwise.core.session.apply import apply, apply_late
from castwise.core.session.canary import check_torch
from castwise.core.session.checks import (
    check_apart,
    check_arrival,
    check_change,
    check_given,
    check_group,
    check_in_backward,
    check_late,
    check_masters,
    check_model,
    check_norm,
    check_optimizers,
    watch_formats,
)
from castwise.core.session.dropped import DroppedUpdates
from castwise.core.session.guard import give_late_masters, scaler_for
from castwise.core.session.inventory import Inventory
from castwise.core.session.members import Members
from castwise.core.session.scaled import check_loss
from castwise.core.session.sharing import check_sharing
from castwise.core.session.summary import say_restored, summarise
from castwise.core.session.undo import UndoLog
from castwise.core.session.wrapping import Wrapping
from castwise.errors import CheckpointError, PlanError, StateError

_prepared: weakref.WeakKeyDictionary[nn.Module, Amp] = weakref.WeakKeyDictionary()
_M = TypeVar("_M", bound=nn.Module)
_O = TypeVar("_O", bound=Optimizer)


class _Prepare(NamedTuple):
    """The arguments of a call of :meth:`Amp.prepare`, with which it can be repeated, as weak references."""

    model: weakref.ref[nn.Module]
    optimizers: tuple[weakref.ref[Optimizer], ...]
    how: _HowPrepared
    rounded: Sequence[str] = ()
    """The names of tensors whose former values were dropped although rounding has changed them."""


class _HowPrepared(TypedDict, total=False):
    """The types of the keyword arguments of :meth:`Amp.prepare`."""

    methods: Sequence[str]
    inference: bool
    keep_originals: bool
    part: bool
    widen: bool | str


class Amp(masters.OfThisProcess):
    """Applies a precision plan to models and optimizers, so that any training loop runs in mixed precision.

    A plan says in which numeric format (fp32, bf16 or fp16) operators compute and parameters are stored, and whether
    the loss is scaled. Create one ``Amp`` for a training run, prepare each model with its optimizers, and replace
    ``loss.backward()`` and ``optimizer.step()`` by its methods::

        amp = castwise.Amp("bf16-mixed")
        model, optimizer = amp.prepare(model, optimizer)
        for inputs, targets in loader:
            loss = criterion(model(inputs), targets)
            amp.backward(loss)
            amp.step(optimizer, max_norm=1.0)
            optimizer.zero_grad()

    :meth:`close`, or the end of a ``with`` block, restores models, optimizers and process-wide settings.

    Args:
        plan: A :class:`~castwise.Plan`, the name of a preset, the one-line form that :meth:`castwise.Plan.parse` reads,
            the path of a plan file, or a dtype. A dtype stands for autocasting to that dtype.
        device: The device of the model, as torch accepts it. The default is the available accelerator, or else the CPU.
        group: The process group whose ranks train together. These ranks must use the same plan. If their gradients can
            differ, they skip a step together and compute gradient norms over all of them. The default is all ranks.
            ``castwise.ranks.ALONE`` means only this process.
        nonfinite: What a step does if a gradient is infinite or NaN. ``"skip"`` skips the step and counts it in
            :attr:`skipped_steps`. ``"raise"`` raises an error before the step changes anything. Under a plan with a
            loss scale, steps are skipped first and the scale is lowered. The error is raised once the scale cannot be
            lowered any more. ``"allow"`` does not check gradients. It is not allowed under a plan with a loss scale,
            which is adjusted by skipping steps.
        patience: The number of skipped steps in a row after which an error is raised that names the affected
            parameters. Under a dynamic loss scale, the error is raised only if the scale has also reached its smallest
            allowed value.

    Raises:
        PlanError: The plan does not exist or is invalid, or ``nonfinite`` or ``patience`` has a value that is not
            allowed.
        DeviceError: The device does not exist or does not support a format of the plan.
        StateError: ``group`` is not a process group.
    """

    scaler: GradScaler
    """The scaler that holds the loss scale.

    Under a plan without a loss scale, it only skips steps with non-finite gradients."""

    def __init__(
        self,
        plan: Plan | str | os.PathLike[str] | torch.dtype,
        *,
        device: torch.device | str | None = None,
        group: Any = None,
        nonfinite: str = "skip",
        patience: int = 10,
    ) -> None:
        check_torch()
        check_group(group)
        self._members = members = Members()
        self._agreement = Agreement(group, members.updated)
        self._wrapping = Wrapping(members, self._agreement)
        self._buffers = Buffers()
        chosen = as_plan(plan)
        self.device_type = process.device_type_of(device) if device is not None else default_device_type()
        process.check_device(chosen, self.device_type)
        self._guard = nonfinite, patience
        self._prepares: list[_Prepare] = []
        self._collected = weakref.finalize(self, int)
        self._begin(chosen)
        self._listeners: list[Callable[[Sequence[Optimizer], StepResult], object]] = []
        self._on_loss: list[Callable[[torch.Tensor, str], object]] = []
        self._undo = UndoLog()

    def _begin(self, plan: Plan) -> None:
        """Create all attributes that depend on the plan, before anything is prepared."""
        members = self._members
        self.plan = plan
        self.scaler = scaler_for(plan, self.device_type, self._agreement.agree, *self._guard)
        self.scaler.param_names = members.names
        self.scaler._unscaling.admit = functools.partial(give_late_masters, plan)
        # the objects below hold no reference to this Amp, so that it is freed without a garbage collection
        self._window = Window(self.scaler, lambda: members.optimizers, members.strays, self._buffers)
        self._window.sync = masters.copy_to_model
        self._window.ranks_differ, self._agreement.window = self._agreement.can_differ, self._window
        self._window.written.ranks_agree = self._agreement.is_settled_equal
        self._watch = Watch(self._window)
        self._claim = process.Claim(plan, self.device_type)
        self._collected.detach()  # the finalizer of the former claim
        self._collected = weakref.finalize(self, self._claim.close_collected)
        self._collected.atexit = False
        self._dropped = DroppedUpdates()
        self._met = False
        self._block: autocast | None = None
        self._root: borders.Border | None = None

    @staticmethod
    def of(model: nn.Module) -> Amp | None:
        """Return the :class:`Amp` that has prepared a model, or None if no ``Amp`` has.

        The model keeps its ``Amp`` alive: an ``Amp`` that has prepared a model exists at least as long as the model
        does.
        """
        return _prepared.get(_torch.calls.without_compiler(model))

    # --- preparing ----------------------------------------------------------------------------------------

    @overload
    def prepare(self, model: _M, **how: Unpack[_HowPrepared]) -> _M: ...
    @overload
    def prepare(self, model: _M, optimizer: _O, /, **how: Unpack[_HowPrepared]) -> tuple[_M, _O]: ...
    @overload
    def prepare(
        self, model: _M, first: _O, second: Optimizer, /, *others: Optimizer, **how: Unpack[_HowPrepared]
    ) -> tuple[Any, ...]: ...
    def prepare(
        self,
        model: nn.Module,
        *optimizers: Optimizer,
        methods: Sequence[str] = (),
        inference: bool = False,
        keep_originals: bool = False,
        part: bool = False,
        widen: bool | str = False,
    ) -> Any:
        """Make a model run under the plan and make its optimizers train it under the plan.

        This changes the given objects in place, by hooks, and returns the same objects. References to parameters stay
        valid. If the plan says so, the model is also compiled in place.

        Call this before ``torch.compile`` and before the model is wrapped in DistributedDataParallel. Call it after
        FSDP2's ``fully_shard`` and after tensor parallelism's ``parallelize_module``. If the model is a pipeline,
        prepare each stage. If torch.distributed is initialised, the ranks compare their plans in the first call with an
        optimizer or with ``part=True``. All ranks must make that call together.

        Args:
            model: The model, on its device. Training may have started already.
            optimizers: The optimizers that update the model. To train several models, call this once for each, with the
                optimizers that update it. An optimizer that updates several models is passed in each of these calls. An
                optimizer that is created later can be passed in another call with the same model. This is not possible
                if the plan stores parameters in bf16 or fp16.
            methods: The names of methods besides ``forward`` that your code calls and that must run under the plan too. In
                inference, ``generate`` is among them, if the model's class has such a method.
            inference: Whether the model is only evaluated and not trained any more. Weights are then cast once instead
                of at every call, except those of norm layers, and no fp32 master weights are kept. Pass no optimizer.
            keep_originals: Whether :meth:`close` can restore the values that the weights had before they were cast for
                inference. They are kept in host memory then. By default they are dropped one by one, so that preparing
                takes hardly more memory than the model. :meth:`close` then restores dtypes only, and warns if rounding
                has changed values. :meth:`model_state_dict` gives the rounded values.
            part: Whether the model is one stage of a pipeline. A region is a part of the model for which the plan sets
                a format of its own. With True, a region may match no module of this stage, since it may belong to
                another stage. :meth:`pipeline` checks that every region matches a module in some stage.
            widen: Which tensors to convert from bf16 or fp16 to fp32, if the model arrives with such tensors. Tensors
                that the plan stores in bf16 or fp16 are never converted to fp32. False converts none. True converts
                trained parameters, and the buffers of modules that have no frozen bf16 or fp16 parameters. ``"all"``
                also converts frozen parameters and all buffers. The conversion is exact and in place, so optimizers
                stay valid. Their state is converted too. :meth:`close` rounds the tensors back to their former dtypes.

        Returns:
            ``model`` if no optimizer was given, otherwise the tuple ``(model, *optimizers)``.

        Raises:
            PatternError: The pattern of a region in the plan matches no module, or only modules whose ``forward`` is
                never called.
            PlanError: Trained parameters are bf16 or fp16, the plan stores them in fp32, and ``widen`` is not given. Or
                ``widen`` is invalid or has no effect under the plan. Or the ranks have different plans.
            StateError: The model was already wrapped, compiled or prepared, or an optimizer does not belong to the
                model.
        """
        check_widen("prepare", widen)
        if keep_originals and not inference:
            raise PlanError(
                "prepare(keep_originals=True) is for models that are not trained any more: pass inference=True too. In "
                "training, the plan decides whether fp32 values are kept"
            )
        how: _HowPrepared = {
            "methods": methods, "inference": inference, "keep_originals": keep_originals, "part": part, "widen": widen,
        }  # fmt: skip
        self._prepare(model, optimizers, how, wrapped=False)
        return (model, *optimizers) if optimizers else model

    def _prepare(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        how: _HowPrepared,
        *,
        wrapped: bool,
        kept: storage.Kept | None = None,
    ) -> None:
        methods, inference, part, widen = how["methods"], how["inference"], how["part"], how["widen"]
        if kept is not None and not self.plan.stores_low:
            widen = widen or kept.trains(
                model
            )  # parameters that had fp32 masters under the former plan become fp32
        late = [optimizer for optimizer in optimizers if not self._members.holds(optimizer)]
        if late and not (inference or self.plan.stores_low) and self._has(model):
            self._join(_torch.calls.without_compiler(model), late, part)
            self._note_prepared(_torch.calls.without_compiler(model), late, how)
            return
        # A stage of a pipeline may have no optimizer.
        meets = not inference and bool(optimizers or part) and self._will_meet
        with self._together(meets):
            check_given(model, optimizers)
            found = Inventory.of(model, optimizers)
            target = found.model
            self._check(found, wrapped=wrapped, inference=inference)
            borders.check_methods(self.plan, target, methods)
            if inference and "generate" not in methods and borders.has_method(target, "generate"):
                methods = [*methods, "generate"]  # generate() calls encoder and decoder separately
            resolution = self.resolve(target, part=part, inference=inference, widen=widen)
            dtypes = storage.dtypes_of(resolution, target)
            prepared = ((other, repr(owner), owner is self) for other, owner in list(_prepared.items()))
            check_sharing(found, resolution, dtypes, prepared)
            check_arrival(found.low, resolution, widen, inference=inference, again=kept is not None)
            fsdp.check_groups(resolution, target)
            fsdp.check_shards(target, dtypes)
            storage.check_range(target, dtypes)
        arrived = storage.dtypes_now(found.low.values())
        with self._undo.transaction() as log, self._together(meets):
            if not self._claim.held:
                log.callback(self._claim.close)
                self._claim.take()
            drop = inference and not how["keep_originals"]
            root = apply(
                target, optimizers, resolution, dtypes, self.device_type, methods, inference, drop, log
            )
            self._enter(target, root, log, trains=not inference)
            self._take_in(optimizers, log)
            log.on(target, self._members.arrived.pop, None)
            self._members.arrived[target] = arrived
            self._wrapping.note(target, resolution.plan)
            if drop:  # last, since what rounding changes cannot be undone
                rounded = storage.store(target, resolution.plan, dtypes, log, inference=True, drop=True)
                for parameter in target.parameters():
                    note_format(parameter)
        if inference or not self.plan.keeps_masters:
            storage.forget_originals(dtypes, inference=inference)  # this cannot be undone
        trained = None if inference else next((p for p in target.parameters() if p.requires_grad), None)
        root.first = None if trained is None else (weakref.ref(trained), trained.dtype)
        self._met = self._met or meets
        self._note_prepared(target, optimizers, how, rounded if drop else ())

    def _check(self, found: Inventory, *, wrapped: bool, inference: bool) -> None:
        """Raise if this Amp cannot prepare the model and optimizers, before anything has changed."""
        check_model(found, self.plan, self.device_type, wrapped=wrapped)
        process.check_compiler(self.plan, self.device_type)
        owner = _prepared.get(found.model)
        if owner is not None:
            raise StateError(
                f"prepare: this {found.kind} is already prepared, by "
                f"{'this Amp' if owner is self else repr(owner)}; close() that Amp first (castwise.Amp.of(model) finds it)"
            )
        if inference and found.holdings:
            raise StateError(
                "prepare(inference=True) takes no optimizer: weights are cast once and have no masters"
            )
        if not inference:
            check_in_backward(found, self.plan)
        check_masters(found, self._members)
        self._check_optimizers(found)

    def _check_optimizers(self, found: Inventory) -> None:
        check_optimizers(found, self.plan)
        for holding in found.holdings:
            self._watch.check_alone(holding.optimizer)
        if self.scaler.is_enabled():
            check_apart(found, self._members.optimizers)

    def _enter(self, model: nn.Module, root: borders.Border, log: UndoLog, *, trains: bool) -> None:
        """Register a model on which the borders (:class:`~castwise.core.model.borders.Border`) are installed.

        ``trains`` says whether the model will be trained.
        """
        if self.scaler.works and trains:
            copies = self._buffers.follow(model)
            root.watch(model, copies.begin, copies.take, copies.forget_unused)
        if not self._members.models:
            if self.scaler.is_enabled():
                self._watch.refuse_strangers(log.callback)
            self._watch.see_clearing(log.callback)
            scaled.watch(log.callback)
        log.on(model, self._members.remove)
        self._members.add(model, root)
        log.on(model, _prepared.pop, None)
        _prepared[model] = self
        wrappers.on_ddp(_meet_ddp)
        wrappers.on_fsdp1(_meet_fsdp1)
        wrappers.on_join_end(_end_join)
        log.on(self, setattr, "_root", self._root)
        self._root = self._root or root
        log.on(model, forget_formats)
        note_formats(model)

    @property
    def _will_meet(self) -> bool:
        """Whether ranks must compare their plans, as they do when each rank prepares its first model to train."""
        return not self._met and self._agreement.ranks.size > 1

    @contextlib.contextmanager
    def _together(self, meets: bool) -> Iterator[None]:
        """Return a context manager that raises on all ranks if the block fails on one, or if the ranks' plans differ.

        So no rank waits for another that has failed. If ``meets`` is false, ranks do not communicate.
        """
        try:
            yield
        except Exception as error:
            if meets:
                check_same_plan(self.plan, self._agreement.ranks, error)
            raise
        if meets:
            check_same_plan(self.plan, self._agreement.ranks)

    def _note_prepared(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        how: _HowPrepared,
        rounded: Sequence[str] = (),
    ) -> None:
        self._prepares.append(_Prepare(weakref.ref(model), tuple(map(weakref.ref, optimizers)), how, rounded))

    def change(self, plan: Plan | str | os.PathLike[str] | torch.dtype) -> None:
        """Switch to another plan between two steps, by preparing the same models and optimizers again under that plan.

        Weights and optimizer state are kept. The loss scale is kept if both plans have equal
        :class:`~castwise.LossScale` settings. ``scaler`` becomes a new object. If the change fails, the former plan
        stays in force. It is better to clear the gradients first. All ranks must call this together.

        Args:
            plan: The new plan, in any form that the constructor accepts.

        Raises:
            PlanError: The plan does not exist, or it does not fit the model, as described in :meth:`prepare`.
            DeviceError: The device does not support the plan.
            StateError: A prepared model has already run compiled. Or the old or the new plan stores parameters in bf16
                or fp16, and a model is sharded or is in DistributedDataParallel.
        """
        chosen = as_plan(plan)
        process.check_device(chosen, self.device_type)
        for model in self._members.models:
            check_change(model, self.plan, chosen)
        for call in self._prepares:
            if call.rounded and call.model() is not None:
                raise StateError(
                    f"change({str(chosen)!r}): {some(call.rounded)} of {type(call.model()).__name__} were rounded for inference, and "
                    "their former values were not kept, so another plan would run on the rounded ones. Prepare with "
                    "keep_originals=True to change plans, or close this Amp and load the weights again."
                )
        before, state, skips = self.plan, self.state_dict(), self.skipped_steps
        calls = [*self._prepares]
        kept = storage.Kept.of(self._members.arrived.values(), self._members.optimizers)
        try:
            self._prepare_again(chosen, calls, kept)
        except BaseException as error:
            try:
                self._prepare_again(before, calls, kept)
            except BaseException as other:
                error.add_note(f"Going back to the plan {before} failed as well: {other!r}")
            raise
        finally:
            kept.settle()
            if self._members.models:
                if self.plan.loss_scale == before.loss_scale:
                    self.load_state_dict(state)
                self._window.skips = skips

    def _prepare_again(self, plan: Plan, calls: Sequence[_Prepare], kept: storage.Kept) -> None:
        self.close()
        self._begin(plan)
        kept.put_back()
        for call in calls:
            model, optimizers = (
                call.model(),
                [alive for ref in call.optimizers if (alive := ref()) is not None],
            )
            if model is not None:
                ddp = wrappers.ddp_around(model)
                self._prepare(model, optimizers, call.how, wrapped=ddp is not None, kept=kept)
                if ddp is not None:
                    _meet_ddp(ddp, ddp.get_submodule("module"))

    def holds(self, optimizer: Optimizer) -> bool:
        """Return whether this Amp has prepared this optimizer object and has not been closed since."""
        return self._members.holds(optimizer)

    def _has(self, model: Any) -> bool:
        return isinstance(model, nn.Module) and Amp.of(model) is self

    def _join(self, model: nn.Module, optimizers: Sequence[Optimizer], part: bool) -> None:
        """Register optimizers that were created after their model was prepared."""
        meets = self._will_meet
        with self._together(meets):
            check_given(model, optimizers)
            found = Inventory.of(model, optimizers)
            self._check_optimizers(found)
            check_late(found, self.resolve(model, part=part))
        with self._undo.transaction() as log, self._together(meets):
            apply_late(model, optimizers, self.plan, log)
            self._take_in(optimizers, log)
        self._met = self._met or meets

    def _take_in(self, optimizers: Sequence[Optimizer], log: UndoLog) -> None:
        for optimizer in optimizers:
            if not self._members.holds(optimizer):
                log.on(optimizer, self._members.remove_optimizer)
                self._members.add_optimizer(optimizer)
                self._watch.follow(optimizer, log.callback)
                if _torch.optimizers.has_step_hooks(optimizer):
                    watch_formats(optimizer, self.plan, self._members.names, log.callback)
                    if not self.plan.keeps_masters:
                        log.on(optimizer, _torch.hooks.remove_hooks, masters.forget_loaded)
                        optimizer.register_load_state_dict_post_hook(masters.forget_loaded)
                    if self.plan.master == "none":
                        self._dropped.follow(optimizer, log.callback)

    def resolve(
        self, model: nn.Module, *, part: bool = False, inference: bool = False, widen: bool | str = False
    ) -> Resolution:
        """Return what the plan would do to each module and tensor of a model, without changing the model.

        ``print(amp.resolve(model))`` prints the result as a table.

        Args:
            model: The model, whether it is prepared or not.
            part: Whether the model is one stage of a pipeline, as in :meth:`prepare`.
            inference: Whether the model is only evaluated, as in :meth:`prepare`.
            widen: Which bf16 and fp16 tensors would be converted to fp32, as in :meth:`prepare`.

        Returns:
            An object with the format in which each module computes and the new dtype of each tensor that would change.
            It also lists the modules whose inputs and outputs would be cast.

        Raises:
            PatternError: The pattern of a region in the plan matches no module, or only modules whose ``forward`` is
                never called.
        """
        check_widen("resolve", widen)
        return resolve(self.plan, model, self.device_type, part=part, inference=inference, widen=widen)

    def autocast(self, *, enabled: bool = True, cache_enabled: bool | None = None) -> autocast:
        """Return a context manager that casts operators as the plan says, for code outside a prepared model.

        A prepared model does this by itself in ``forward``. Use the context manager for other code, such as a loss
        function::

            with amp.autocast():
                loss = contrastive_loss(model(inputs), targets)

        Args:
            enabled: Whether operators are cast. Pass False for code inside such a block that must not be cast.
            cache_enabled: Whether bf16 or fp16 copies of fp32 weights are reused inside the block, as in
                :class:`castwise.autocast`.
        """
        if enabled and cache_enabled is None:
            if self._block is None:
                self._block = autocast(self.plan, device_type=self.device_type)
            return self._block
        return autocast(self.plan, enabled=enabled, cache_enabled=cache_enabled, device_type=self.device_type)

    # --- losses -------------------------------------------------------------------------------------------

    def scale(self, loss: torch.Tensor, name: str = "loss") -> torch.Tensor:
        """Return a loss multiplied by the loss scale, for code that calls ``backward()`` itself.

        Use this instead of :meth:`backward`, for example if another library runs the backward pass. The first call
        after a step also updates the loss scale according to the outcome of that step.

        Args:
            loss: A tensor of any floating dtype. A bf16 or fp16 loss is multiplied in fp32.
            name: The name of the loss. Losses with different names have separate loss scales.

        Returns:
            The scaled loss. Under a plan without a loss scale, the loss is returned unscaled.

        Raises:
            PlanError: The loss is not a tensor, or is complex.
            StateError: The loss has been scaled already, or another loss with a different name was scaled since the
                last step.
        """
        if not isinstance(loss, torch.Tensor):
            raise PlanError(
                f"scale: the loss is a {type(loss).__name__}; a tensor is needed. Add several losses, or scale each separately."
            )
        check_loss("scale", loss)
        self._window.buffers.backwards += 1
        self._agreement.note_backward()
        self._window.open(name)
        self._wrapping.narrow()
        for look in self._on_loss:
            look(loss, name)
        lent = self._window.lend(self.scaler.scale(loss, name))
        if self.scaler.is_enabled():
            scaled.note(lent)
        return lent

    def get_scale(self, name: str = "loss") -> float:
        """Return the loss scale that the next backward pass will use, or 1.0 if the plan has no loss scale.

        This does not change the scale. The host waits for the device.

        Args:
            name: The name of the loss, as passed to :meth:`backward`. Losses with different names have separate scales.
        """
        return self.scaler.get_scale(name)

    def backward(self, loss: torch.Tensor, name: str = "loss", **kwargs: Any) -> None:
        """Scale a loss, compute its gradients, and add them to the ``.grad`` of the parameters.

        The gradients stay multiplied by the loss scale until :meth:`step`, :meth:`unscale_` or a clipping method
        divides them. The first call after a step also updates the loss scale according to the outcome of that step.

        Args:
            loss: A tensor with one element, of any floating dtype.
            name: The name of the loss. Losses with different names have separate loss scales, and their gradients may
                be added in the same parameters.
            kwargs: The arguments ``retain_graph``, ``create_graph`` and ``inputs`` of ``torch.Tensor.backward``.

        Raises:
            PlanError: The loss is not a tensor, is complex, or has more than one element.
            StateError: The loss has been scaled already.
            RuntimeError: The loss has no autograd graph.
        """
        if not isinstance(loss, torch.Tensor):
            raise PlanError(
                f"backward: the loss is a {type(loss).__name__}; a scalar tensor is needed. "
                + (
                    "Add its losses, or pass each separately: amp.backward(losses['one'], name='one')."
                    if isinstance(loss, Mapping)
                    else "Leave .item() out."
                )
            )
        if loss.numel() != 1:
            raise PlanError(
                f"backward: the loss has shape {list(loss.shape)}; a scalar is needed. Reduce it with .mean() or .sum()."
            )
        if torch.is_autocast_enabled(
            self.device_type
        ):  # backward formulas run in the formats of the saved forward tensors
            with torch.autocast(self.device_type, enabled=False):
                return self.backward(loss, name, **kwargs)
        check_loss("backward", loss)
        window, scaler = self._window, self.scaler
        window.buffers.backwards += 1
        self._agreement.note_backward()
        scales = window.scales
        if scales or not window.settled:
            window.open(name)
        for look in self._on_loss:
            look(loss, name)
        root = self._root
        if root is not None and root.follow_backward:
            loss = mark_boundary(loss, root.frame)
        self._wrapping.narrow()
        window.in_backward = scales
        scaled.running += 1
        try:
            if kwargs or not scaler._losses.is_first(name):
                scaler.backward(loss, name, params=self._members.parameters, **kwargs)
            else:
                _torch.autograd.backward_of_scalar(scaler.scale(loss, name))
        except RuntimeError as error:
            borders.explain(error, self._members.models, loss)
            raise
        finally:
            scaled.running -= 1
            window.in_backward = False
            if scales:
                window.fed()

    def grad(
        self,
        loss: torch.Tensor,
        inputs: torch.Tensor | Sequence[torch.Tensor],
        create_graph: bool = False,
        *,
        name: str | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Return the unscaled gradients of a loss with respect to ``inputs``, for example for a gradient penalty.

        This replaces ``torch.autograd.grad`` under a plan. To prevent underflow, the loss is multiplied by the loss
        scale before the backward pass, and the gradients are divided by it afterwards.

        Args:
            loss: A tensor with one element.
            inputs: The tensors with respect to which gradients are computed.
            create_graph: Whether to build the graph of the gradients, so that a penalty on them can be differentiated.
            name: The name of the loss whose scale is used. For a penalty, give the name of the loss to which the
                penalty is added. An overflow then lowers the scale of that loss. With None, the smallest of all loss
                scales is used.
            kwargs: Further arguments of ``torch.autograd.grad``.

        Returns:
            One gradient per input. bf16 and fp16 gradients are converted to fp32.

        Raises:
            PlanError: The loss is complex.
            StateError: The loss has been scaled already.
        """
        if torch.is_autocast_enabled(self.device_type):
            with torch.autocast(self.device_type, enabled=False):
                return self.grad(loss, inputs, create_graph, name=name, **kwargs)
        check_loss("grad", loss)
        if self._root is not None and self._root.follow_backward:
            loss = mark_boundary(loss, self._root.frame)
        if not self.scaler.is_enabled():
            grads = torch.autograd.grad(loss, inputs, create_graph=create_graph, **kwargs)
            return tuple(map(_in_fp32, grads))
        self._window.open(name or self.scaler._losses.current.name, idle=True)
        self._window.differentiated = True
        scale = self.scaler._losses.scale_or_smallest(name)
        grads = torch.autograd.grad(loss.float() * scale, inputs, create_graph=create_graph, **kwargs)
        inverse = gradients.inverse(scale)
        unscaled = tuple(g if g is None else _in_fp32(g) * inverse for g in grads)
        if not create_graph:
            self._window.note_returned(inputs, unscaled, name)
        return unscaled

    # --- steps --------------------------------------------------------------------------------------------

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the loss scale, in place.

        Call this before your code reads or changes gradients between the backward pass and :meth:`step`. Otherwise it
        is optional, since :meth:`step` divides gradients that are still scaled. :meth:`step` also checks again whether
        the gradients are finite.

        Raises:
            StateError: The gradients were changed while they were still scaled.
        """
        self._window.unscale_(optimizer, by_hand=True)

    def clip_grad_norm_(
        self,
        optimizer_or_params: Optimizer | Iterable[torch.Tensor] | torch.Tensor,
        max_norm: float,
        norm_type: float = 2.0,
    ) -> torch.Tensor:
        """Divide gradients by the loss scale, and clip them in place so that their global norm is at most ``max_norm``.

        Args:
            optimizer_or_params: An optimizer, or parameters. If gradients are still multiplied by the loss scale, they
                are divided by it first. This covers all gradients of the optimizers that update the parameters.
            max_norm: The largest norm that the gradients may have together.
            norm_type: The order of the norm, as in ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            The norm before clipping, as a 0-dim tensor on the device of the gradients.

        Raises:
            PlanError: ``max_norm`` is not a number, is NaN, or is below zero.
        """
        check_norm("clip_grad_norm_", max_norm)
        params, optimizers = self._unscaled(optimizer_or_params, look=self.scaler.is_enabled())
        norm = self._agreement.clip(params, max_norm, norm_type)
        if optimizers:
            self._window.note_norm(optimizers, norm, by_hand=True)
        return norm

    def clip_grad_value_(
        self, optimizer_or_params: Optimizer | Iterable[torch.Tensor] | torch.Tensor, clip_value: float
    ) -> None:
        """Divide gradients by the loss scale, and clip every element in place to ``[-clip_value, clip_value]``.

        Args:
            optimizer_or_params: An optimizer, or parameters. If gradients are still multiplied by the loss scale, they
                are divided by it first. This covers all gradients of the optimizers that update the parameters.
            clip_value: The largest magnitude that an element may have.

        Raises:
            PlanError: ``clip_value`` is not a number, is NaN, or is below zero.
        """
        check_norm("clip_grad_value_", clip_value, "clip_value")
        params, _ = self._unscaled(optimizer_or_params, look=True)
        nn.utils.clip_grad_value_(params, clip_value)

    def _unscaled(
        self, of: Optimizer | Iterable[torch.Tensor] | torch.Tensor, look: bool
    ) -> tuple[list[torch.Tensor], list[Optimizer]]:
        """Return the parameters that an optimizer or an iterable holds, and the optimizers that update them.

        If ``look`` is true, their gradients are unscaled.
        """
        if isinstance(of, Optimizer):
            params, optimizers = [p for group in of.param_groups for p in group["params"]], [of]
        else:
            params = [of] if isinstance(of, torch.Tensor) else list(of)
            wanted = {id(masters.model_param_of(parameter)) for parameter in params}
            optimizers = [
                optimizer
                for optimizer in self._members.optimizers
                if not wanted.isdisjoint(map(id, gradients.stored(optimizer)))
            ]
        if look:
            for optimizer in optimizers:
                self._window.unscale_(optimizer, by_hand=True)
        return params, optimizers

    def step(
        self, *optimizers: Optimizer, max_norm: float | None = None, closure: Callable[[], Any] | None = None
    ) -> StepResult:
        """Unscale and clip the gradients, then make an optimizer step, or skip it if a gradient is infinite or NaN.

        If the gradients can differ between ranks, all ranks skip the step if a gradient on any of them is infinite or
        NaN.

        Args:
            optimizers: The optimizers to step. If several are given, they all step or all skip, and their gradients are
                clipped by one joint norm.
            max_norm: The global norm to which the gradients are clipped before the step. None does not clip.
            closure: A function for an optimizer that evaluates the loss itself, such as LBFGS. It clears the gradients,
                computes the loss, calls :meth:`backward` and returns the loss. The gradients are unscaled and checked
                after each call of it. It cannot be combined with ``max_norm`` or with several optimizers.

        Returns:
            A :class:`~castwise.StepResult`, which tells whether the step was skipped and what the norm was before
            clipping.

        Raises:
            StateError: An optimizer was not prepared, no optimizer has gradients, or an optimizer has already stepped
                with these gradients. Or its gradients were changed while they were still scaled.
            NonFiniteError: Under a plan without a loss scale, gradients are infinite or NaN with ``nonfinite="raise"``,
                or they were so ``patience`` times in a row.
            LossScaleError: Under a plan with a loss scale, gradients were infinite or NaN ``patience`` times in a row,
                and the scale cannot shrink any more. With ``nonfinite="raise"``, once is enough.
            PlanError: ``max_norm`` is not a number, is NaN, or is below zero.
        """
        if not optimizers:
            raise StateError("step() needs an optimizer; call amp.step(optimizer)")
        if max_norm is not None:
            check_norm("step", max_norm)
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise PlanError(
                    f"step({shown(optimizer)}): a {type(optimizer).__name__} is not an optimizer. Allowed: prepared optimizers, each as a "
                    "separate argument; give the norm to clip to by name: amp.step(optimizer, max_norm=1.0)"
                )
            if not self._members.holds(optimizer):
                raise StateError(
                    f"step({type(optimizer).__name__}): this optimizer was not prepared by this Amp, so this Amp keeps no "
                    f"masters and no loss scale for it; call amp.prepare(model, optimizer) with it before training, and pass "
                    f"the same object to step"
                )
        if frames.thread.state.saved:
            frames.leave_interrupted()
        if self._wrapping.unchecked:
            self._wrapping.check_order()
        window = self._window
        if closure is None:
            if self._agreement.undecided:  # all ranks decide together at their first step
                self._agreement.can_differ()
            window.check_step(optimizers, self._agreement.as_decided)
        if max_norm is None and closure is None and len(optimizers) == 1:
            result = window.step(optimizers[0])
            frames.clear_weight_cache()
            for listener in self._listeners:
                listener(optimizers, result)
            return result
        if len(set(map(id, optimizers))) < len(optimizers):
            names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            raise StateError(f"step({names}): an optimizer is given twice; give each once")
        if closure is not None and (len(optimizers) > 1 or max_norm is not None):
            raise StateError(
                "step(closure=...): takes one optimizer and no max_norm; clip inside the closure"
            )
        norm = None
        try:
            if max_norm is not None:
                norm = self._agreement.decide_and_clip(self.scaler, window, optimizers, max_norm)
            elif closure is None:
                self._agreement.decide(self.scaler, window, optimizers)
            results = [window.step(optimizer, closure) for optimizer in optimizers]
        except BaseException:
            window.give_up(optimizers)
            raise
        if closure is not None:
            attachment = masters.attachment_of(optimizers[0])
            if attachment is not None:
                attachment.copy_to_model()  # if the step was undone, only the masters have their former values so far
        frames.clear_weight_cache()
        result = StepResult.join(results, norm)
        for listener in self._listeners:
            listener(optimizers, result)
        return result

    def listen(
        self,
        losses: Callable[[torch.Tensor, str], object] | None = None,
        steps: Callable[[Sequence[Optimizer], StepResult], object] | None = None,
    ) -> Callable[[], None]:
        """Register functions that are called with every loss before its backward pass, and with each step's result.

        Args:
            losses: A function that takes the unscaled loss and the name of the loss. At the first loss after a step,
                the loss scale has already been updated when the function is called.
            steps: A function that takes the optimizers and the :class:`~castwise.StepResult` that :meth:`step` will
                return. It is not called if :meth:`step` raises an error.

        Returns:
            A function without arguments that removes both functions.
        """
        # wrapped, so that a function that is registered twice has two entries, each of which can be removed
        look = None if losses is None else functools.partial(losses)
        listener = None if steps is None else functools.partial(steps)
        self._on_loss += [look] if look else []
        self._listeners += [listener] if listener else []

        def end() -> None:
            if look in self._on_loss:
                self._on_loss.remove(look)
            if listener in self._listeners:
                self._listeners.remove(listener)

        return end

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped since this Amp was created.

        If several optimizers skip a step together, each of them counts as one step. Fused optimizers on an accelerator
        decide on the device whether to skip. Reading the number waits for the device only if such an optimizer has
        stepped.
        """
        return self._window.skipped_steps

    @property
    def restored_buffers(self) -> dict[str, int]:
        """The number of times that each buffer was reset to finite values after a skipped step, by the buffer's path.

        The forward pass of a skipped step may have written infinities or NaN into a buffer, such as a running mean of
        BatchNorm. The buffer is then reset to its last finite values. Buffers that were never reset are left out. If
        this Amp has prepared several models, each path begins with the class name of its model. Reading this may wait
        for the device, in the same cases as :attr:`skipped_steps`.
        """
        return self._buffers.restored

    @property
    def dropped_updates(self) -> float | None:
        """The fraction of the updates' squared norm that was lost because parameters are rounded to bf16 or fp16.

        An update is lost if it is so small that the rounded parameter stays the same. The fraction is measured only
        under a plan that stores parameters in bf16 or fp16 without fp32 master weights. It is None under any other
        plan, and before the first step. It is also None if a step of the optimizer cannot be repeated on a copy of the
        optimizer. This is the case if the step evaluates the loss itself, or if the optimizer has attributes besides
        options and state.

        The measurement is made at the steps 1, 2, 4, 8 and so on, and at every 64th step later. It uses slices of the
        parameters of this process. The host waits for the device at these steps. An update does not count as lost if
        the optimizer keeps the rounded-off part in its state (Kahan summation) or rounds stochastically.
        """
        return self._dropped.share

    def summary(self) -> str:
        """Return a text for a log that describes the plan, the weights and the steps that were skipped.

        The text gives the formats of each model's weights before and after :meth:`prepare`. Where this was measured, it
        also gives the fraction of the updates that was lost to rounding (:attr:`dropped_updates`).
        """
        said = summarise(self._members, self.plan, self._dropped)
        steps = [f"skipped steps: {self.skipped_steps}", *say_restored(self.restored_buffers)]
        return "\n".join([f"{self.plan} on {self.device_type}: {self.plan.summary()}", *said, *steps])

    # --- several processes --------------------------------------------------------------------------------

    def mp_policy(self, module: nn.Module | None = None, model: nn.Module | None = None) -> Any:
        """Return the ``MixedPrecisionPolicy`` that makes FSDP2's ``fully_shard`` follow the plan.

        :meth:`fully_shard` does this for a whole model. Use this method if your code calls FSDP2's ``fully_shard``
        itself.

        Args:
            module: The module that will be sharded. None returns the policy for parameters outside all regions of the
                plan, which are the parts of a model with formats of their own.
            model: The whole model that contains ``module``. Without it, regions that are given by module path are
                ignored, and only regions that are given by class name (``type:``) apply.

        Returns:
            A policy that gathers parameters in the format in which the plan stores them, and reduces gradients in fp32.
        """
        return fsdp.mp_policy(self.plan, module, model)

    def fully_shard(
        self, model: nn.Module, *, blocks: Iterable[nn.Module] = (), part: bool = False, **options: Any
    ) -> Any:
        """Shard a model with FSDP2, so that each group of parameters that is gathered together has one storage format.

        FSDP2's ``fully_shard`` is called on each of ``blocks`` and on the model. It is also called on each part of the
        model that the plan stores in another format than the module around it. Call this before the optimizer is
        created and before :meth:`prepare`.

        Args:
            model: The model, on its device.
            blocks: Submodules, such as the layers, whose parameters are gathered and freed separately for each
                submodule.
            part: Whether the model is one stage of a pipeline, as in :meth:`prepare`.
            options: Further arguments of FSDP2's ``fully_shard``, such as ``mesh`` and ``reshard_after_forward``.

        Returns:
            The model.
        """
        fsdp.shard(self.resolve(model, part=part), model, blocks, options)
        return model

    def mark_sharded(self, parameter: torch.Tensor, group: Any = None, dim: int | None = None) -> None:
        """Declare that a parameter is this rank's piece of a weight that your own code has split over several ranks.

        With this declaration, either all ranks skip a step or none does, and gradient norms are those of the whole
        weight. A DTensor describes its own sharding and needs no declaration.

        Args:
            parameter: The parameter of the model.
            group: The process group whose ranks hold the pieces. None means all ranks.
            dim: The dimension along which the weight was split, where the pieces are in the order of the ranks. If it
                is given, a checkpoint contains the whole weight and can be loaded with another number of ranks.

        Raises:
            StateError: torch.distributed is not initialised, or the parameter is a DTensor over the same ranks.
        """
        self._agreement.pieces.mark(parameter, group, dim)
        self._agreement.look_again()

    def pipeline(self, schedule: Any) -> Any:
        """Make a schedule of ``torch.distributed.pipelining`` train under the plan.

        The schedule then runs its backward passes from the scaled loss and reports the unscaled loss. Gradient norms
        and skipped steps cover all stages together. A stage passes bf16 or fp16 outputs to the next stage unchanged,
        and only the outputs of the last stage are cast to fp32.

        Args:
            schedule: A schedule whose stages have modules that were prepared with ``part=True``. Call this on every
                rank.

        Returns:
            The same schedule.

        Raises:
            StateError: The object is not a schedule, it was passed to this method before, or the module of a stage was
                not prepared.
            PatternError: A region of the plan matches no module in any stage.
        """
        return self._wrapping.adapt(schedule, self.plan, self.scaler, self._window)

    def piece_of(self, parameter: torch.Tensor) -> tuple[int, int] | None:
        """Return which piece of a split weight a parameter is: the index of this rank's piece and the number of pieces.

        The index is the rank of this process in the group that was given to :meth:`mark_sharded`. The result is None if
        the parameter was not declared by that method. It is also None if the parameter was declared with ``dim``, since
        :meth:`as_whole` then gives a DTensor of the whole weight. If FSDP2 has sharded such a parameter further,
        :meth:`as_whole` cannot do this, and the index and the number are returned.
        """
        return self._agreement.pieces.piece(parameter)

    def as_whole(self, parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's values of a split weight as a DTensor that represents the whole weight.

        This applies to parameters that were declared by :meth:`mark_sharded` with ``dim``. For any other parameter,
        ``values`` is returned unchanged.

        Args:
            parameter: The parameter of the model, or its fp32 master weight.
            values: A tensor of the shape of the parameter, for example the parameter, its gradient or a tensor of its
                optimizer state. The DTensor uses the same memory. The pieces on all ranks are assumed to have equal
                size.
        """
        return self._agreement.pieces.as_whole(parameter, values)

    # --- state --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the plan and the loss scales as a dictionary for a checkpoint.

        The plan is JSON text. The dictionary contains no tensors, so ``torch.load`` reads it with
        ``weights_only=True``. If steps were made since the last backward pass, the scales are those that the next
        backward pass will use. Calling this does not change the scales.
        """
        return {"version": 1, "plan": self.plan.to_json(), "scaler": self.scaler.state_dict() or None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the loss scales that :meth:`state_dict` returned, whether under this plan or another.

        The plan in the state is ignored. If the state contains no loss scale, the current scale is kept.

        Args:
            state: The dictionary that :meth:`state_dict` returned.

        Raises:
            CheckpointError: ``state`` was not returned by :meth:`state_dict`.
        """
        if not isinstance(state, Mapping) or state.get("version") != 1 or "scaler" not in state:
            keys = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise CheckpointError(
                f"Amp.load_state_dict: expected the keys version (1), plan and scaler of Amp.state_dict(), got: {keys}"
            )
        if state["scaler"]:
            self._window.load_state_dict(state["scaler"])

    def model_state_dict(self, model: nn.Module, *, as_given: bool = False) -> dict[str, torch.Tensor]:
        """Return the weights of a model in fp32, under the keys of the model's state dict.

        Under some plans, parameters are stored in bf16 or fp16, and the optimizer keeps fp32 copies of them, called
        master weights. The values of these copies are then returned. A checkpoint of these weights can be loaded into
        the model under any plan.

        Args:
            model: A prepared model, or a submodule of one.
            as_given: Whether to round weights that were bf16 or fp16 before :meth:`prepare` to that format again. The
                checkpoint then has the formats of the checkpoint that the model was loaded from. Resuming the training
                from it loses precision.
        """
        target = _torch.calls.without_compiler(model)
        weights = masters.fp32_state_dict(target)
        return storage.as_arrived(weights, target, self._members.arrived.values()) if as_given else weights

    def close(self) -> None:
        """Undo everything that :meth:`prepare` changed, and keep the values of the trained weights.

        Hooks are removed. The dtypes and memory formats of tensors, the kernels and state dtypes of optimizers, and
        process-wide settings are restored. fp32 master weights, which are the copies that the optimizer updates under
        some plans, are copied into the model and then removed. If one of these changes cannot be undone, the others are
        undone nevertheless.
        """
        narrowed = [*filter(None, map(storage.say_narrowed, self._members.models))]
        self._undo.close()
        self._prepares.clear()
        self._block = self._root = None
        self._wrapping.forget()
        for said in narrowed:
            warnings.warn(said, stacklevel=2)

    def __deepcopy__(self, memo: dict[int, Any]) -> Amp:
        """Return an Amp with the same plan and loss scales, in which nothing is prepared."""
        nonfinite, patience = self._guard
        group = self._agreement.group
        memo[id(self)] = other = Amp(
            self.plan, device=self.device_type, group=group, nonfinite=nonfinite, patience=patience
        )
        other.load_state_dict(self.state_dict())
        return other

    def __copy__(self) -> Amp:
        return self.__deepcopy__({})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            borders.explain(error, self._members.models)  # before any weight changes
        self.close()

    def __repr__(self) -> str:
        return f"Amp({str(self.plan)!r}, device={self.device_type!r})"


class SessionView:
    """Gives access to the internals of an :class:`Amp`, for tools that watch a training run.

    Args:
        amp: The Amp.

    Attributes:
        members: The prepared models and optimizers.
        agreement: The object that makes ranks agree.
        undo: The log of changes that :meth:`Amp.close` undoes.
    """

    def __init__(self, amp: Amp) -> None:
        self.members, self.agreement, self.undo = amp._members, amp._agreement, amp._undo
        self._amp = amp

    @property
    def ranks(self) -> Ranks:
        """The ranks that act together."""
        return self.agreement.ranks

    @property
    def window(self) -> Window:
        """The object that decides when the loss scale is updated. :meth:`Amp.change` replaces it."""
        return self._amp._window

    @property
    def dropped(self) -> DroppedUpdates:
        """The measurements of updates that rounding dropped since the last :meth:`Amp.change`."""
        return self._amp._dropped


def _in_fp32(grad: Any) -> Any:
    return grad.float() if isinstance(grad, torch.Tensor) and grad.dtype in LOW_DTYPES else grad


def _sessions_in(module: nn.Module) -> list[tuple[nn.Module, Amp]]:
    """Return the prepared models that share parameters with a module, each with the Amp that prepared it."""
    own = set(map(id, module.parameters()))
    return [
        (model, amp)
        for model, amp in list(_prepared.items())
        if any(id(p) in own for p in model.parameters())
    ]


def _meet_ddp(ddp: nn.parallel.DistributedDataParallel, module: nn.Module) -> None:
    """Tell the Amps concerned that DistributedDataParallel is being built on a module with parameters of their models.

    The module may be a prepared model, a part of it, or a holder of its parameters, as ``replicate`` passes them.
    """
    for model, amp in _sessions_in(module):
        amp._undo.on(model, amp._wrapping.leave_ddp)
        amp._wrapping.join_ddp(ddp, module, model)


def _meet_fsdp1(module: nn.Module) -> None:
    own = set(module.modules())  # its parameters have been replaced by now
    if any(inner in own for model in list(_prepared) for inner in model.modules()):
        wrappers.refuse_fsdp1("FullyShardedDataParallel", module)


def _end_join(ddp: nn.parallel.DistributedDataParallel, rank: int) -> None:
    """Give all ranks the masters and the loss scale of ``rank`` at the end of torch's ``Join``.

    Ranks that ended early have old ones, so that their gradients could not be averaged with those of other ranks.
    """
    for _, amp in _sessions_in(ddp):
        amp._wrapping.share_masters(ddp, ddp.get_submodule("module"), rank)
        state = [amp.scaler.state_dict()]
        if state[0]:
            torch.distributed.broadcast_object_list(state, group=ddp.process_group, group_src=rank)
            if torch.distributed.get_rank(ddp.process_group) != rank:
                amp._window.load_state_dict(state[0])
