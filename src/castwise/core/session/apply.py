"""Change a model and its optimizers as a plan says, so that every change can be undone.

Every change has an entry in an undo log (:class:`~castwise.core.session.undo.UndoLog`), which is made before the change
or with it. If anything fails, Ctrl-C included, the entries undo what was changed. ``Amp.close`` does the same. The log
holds only weak references to models and optimizers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from castwise.core import _torch, masters
from castwise.core.casting import frames, tracing
from castwise.core.masters.sync import sync
from castwise.core.model import borders, caches
from castwise.core.model.borders import Border
from castwise.core.model.resolve import Resolution
from castwise.core.parallel import fsdp
from castwise.core.plans.formats import LOW_DTYPES
from castwise.core.plans.plan import Plan
from castwise.core.scaler import inside
from castwise.core.session import bypass, storage
from castwise.core.session.fused import check_updates, fuse
from castwise.core.session.undo import UndoLog
from castwise.errors import StateError

_kept: weakref.WeakKeyDictionary[nn.Module, list[masters.Attachment]] = weakref.WeakKeyDictionary()
"""The masters of each model. They are kept here so that a model gets their values even if its optimizer is gone."""
_late: weakref.WeakKeyDictionary[
    nn.Module, tuple[list[weakref.ref[Optimizer]], list[weakref.ref[nn.Parameter]]]
] = weakref.WeakKeyDictionary()
"""The optimizers that were prepared after their model, and the model's parameters that are stored in another format.

Both are kept by model. The state of these optimizers for these parameters is converted, and converted back when the
changes are undone.
"""


def apply(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    resolution: Resolution,
    dtypes: Mapping[torch.Tensor, torch.dtype],
    device_type: str,
    methods: Sequence[str],
    inference: bool,
    drop: bool,
    log: UndoLog,
) -> Border:
    """Change a model and its optimizers as a plan says.

    This installs the hooks that cast inputs and outputs, converts tensors, gives optimizers fp32 masters and fused
    kernels, and compiles the model, as far as the plan asks for it.

    Args:
        model: The model, which has been checked.
        optimizers: Its optimizers, which have been checked.
        resolution: What the plan means for the model.
        dtypes: The new dtype of each tensor whose dtype must change.
        device_type: Device of the model.
        methods: Names of methods besides ``forward`` that run under the plan, which have been checked.
        inference: Whether the model is not trained.
        drop: Whether the values that tensors have before they are converted are dropped. The tensors are then converted
            after all other changes.
        log: The undo log, which gets an entry for each change.

    Returns:
        The border around the model.
    """
    plan = resolution.plan
    alive = weakref.ref(model)
    masters.make_pickles_plain()
    _torch.hooks.before_scripting(borders.refuse_scripting)
    # a copy of a prepared model comes with the original's borders
    borders.strip(model, log.callback)
    tracing.get_ready_for_compile()
    _torch.dynamo.forget_compiled(model)
    root = borders.install(model, resolution, device_type, methods, sync, log.callback)
    if not inference:
        bypass.watch(model, resolution, log.callback)
    elif plan.autocasts:
        caches.begin(model, log.callback)
    restrided = optimizers if plan.memory_format == "channels_last" else ()
    for optimizer in restrided:
        log.on(optimizer, masters.restride_state)
    changed = [
        weakref.ref(parameter)
        for parameter in model.parameters()
        if parameter in dtypes
        and not (plan.keeps_masters and parameter.requires_grad and dtypes[parameter] in LOW_DTYPES)
    ]
    # with masters, optimizer state is fp32; undoing converts it back for parameters that arrived in bf16 or fp16
    arrived = [weakref.ref(p) for p in model.parameters() if plan.keeps_masters and masters.is_low(p)]
    log.callback(storage.put_back_state, log.kept)
    for optimizer in optimizers:
        log.kept += storage.state_of(optimizer, [*changed, *arrived])
        log.on(optimizer, storage.follow_state, [*changed, *arrived])
    _late[model] = [], changed
    log.callback(_follow_late, _late[model][0], [*changed, *arrived])
    newcomers = storage.Newcomers(model, dtypes)
    if not drop:
        storage.store(model, plan, dtypes, log, inference=inference)
    if dtypes:
        log.on(model, newcomers.restore, [weakref.ref(optimizer) for optimizer in optimizers])
    for optimizer in optimizers:
        storage.follow_state(optimizer, changed)
    for optimizer in restrided:
        masters.restride_state(optimizer)
    log.callback(_detach, alive, [weakref.ref(optimizer) for optimizer in optimizers])
    for optimizer in optimizers:
        if plan.keeps_masters:
            _kept.setdefault(model, []).append(masters.attach(optimizer, model))
        if plan.optimizer == "fused":
            fuse(optimizer, log.callback)
        check_updates(optimizer)
    if not inference:
        fsdp.follow_unfreezing(model, plan, log.callback)
    if dtypes and not (plan.keeps_masters and optimizers):
        # these hooks keep the remembered fp32 values up to date when a state is loaded; attaching masters installs them too
        masters.install_hooks(model, log.callback, inference=inference)
    if plan.keeps_masters and (dtypes or arrived):
        refuse = functools.partial(_refuse_stranger, alive)
        _torch.steps.subscribe(refuse, log=log.callback)
    if plan.params == "fp32" and not (plan.keeps_masters or inference):
        both = model.named_parameters()
        frozen = [(name, weakref.ref(p)) for name, p in both if masters.is_low(p) and not p.requires_grad]
        if frozen:
            refuse = functools.partial(_refuse_unfrozen, type(model).__name__, frozen)
            _torch.steps.subscribe(refuse, log=log.callback)
    if plan.compile != "as_given":
        log.on(model, _torch.calls.leave_uncompiled, root)
        _torch.calls.guard_calls(model, root, frames.depth, frames.unwind, plan.compile)
    return root


def apply_late(model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan, log: UndoLog) -> None:
    """Make optimizers follow the plan of a model that was prepared before them.

    The plan stores no parameter in bf16 or fp16.
    """
    late, changed = _late[model]
    log.callback(storage.put_back_state, log.kept)
    for optimizer in optimizers:
        log.kept += storage.state_of(optimizer, changed)
        late.append(weakref.ref(optimizer))
        storage.follow_state(optimizer, changed)
        if plan.memory_format == "channels_last":
            log.on(optimizer, masters.restride_state)
            masters.restride_state(optimizer)
        if plan.optimizer == "fused":
            fuse(optimizer, log.callback)
        check_updates(optimizer)


def _follow_late(
    optimizers: Iterable[weakref.ref[Optimizer]], params: Sequence[weakref.ref[nn.Parameter]]
) -> None:
    for optimizer in optimizers:
        alive = optimizer()
        if alive is not None:
            storage.follow_state(alive, params)


def _detach(reference: weakref.ref[nn.Module], optimizers: Iterable[weakref.ref[Optimizer]]) -> None:
    """Remove a model's masters and copy their values into the model, when its preparation is undone.

    Other models that the same optimizers update keep their masters.
    """
    model = reference()
    found = [] if model is None else list(_kept.get(model, ()))
    alive = [optimizer for ref in optimizers if (optimizer := ref()) is not None]
    for attachment in dict.fromkeys([*found, *map(masters.attachment_of, alive)]):
        if attachment is not None:
            attachment.leave(model)
    if model is not None:
        _kept.pop(model, None)


def _refuse_unfrozen(
    kind: str, frozen: Iterable[tuple[str, weakref.ref[nn.Parameter]]], optimizer: Optimizer, *_: object
) -> None:
    """Raise if an optimizer is about to update a bf16 or fp16 parameter that was frozen when its model was prepared."""
    trained = [(name, p) for name, ref in frozen if (p := ref()) is not None and p.requires_grad]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]} if trained else set()
    for name, parameter in trained:
        if masters.is_low(parameter) and parameter.grad is not None and id(parameter) in held:
            raise StateError(
                f"{type(optimizer).__name__}.step(): {name} of {kind} was frozen when it was prepared, is stored in "
                f"{str(parameter.dtype).removeprefix('torch.')} and is trained now: its updates would be rounded away. "
                "Unfreeze it before prepare(..., widen=True), or store frozen parameters in fp32 too: prepare(..., widen='all')."
            )


def _refuse_stranger(reference: weakref.ref[nn.Module], optimizer: Optimizer, *_: object) -> None:
    """Raise if an optimizer without masters is about to update bf16 or fp16 parameters whose plan requires masters."""
    model = reference()
    if model is None or masters.attachment_of(optimizer) is not None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if id(parameter) in held and masters.is_low(parameter) and parameter.grad is not None:
            if any(masters.attachment_of(inner) is not None for inner in inside(optimizer)):
                return
            raise StateError(
                f"{type(optimizer).__name__}.step(): {name} of {type(model).__name__} is stored in "
                f"{str(parameter.dtype).removeprefix('torch.')} by a plan whose fp32 masters live in the optimizer, and this optimizer "
                "has no masters: updates would be rounded away. Prepare both: amp.prepare(model, optimizer)."
            )
