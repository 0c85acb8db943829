"""What ``prepare`` refuses before it changes anything."""

from __future__ import annotations

import contextlib
import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from castwise.core import _torch, masters
from castwise.core.amounts import size
from castwise.core.model import borders
from castwise.core.model.arrival import low_tensors, more_bytes
from castwise.core.model.resolve import Resolution
from castwise.core.model.stored import is_cast, say_cast, stored_format
from castwise.core.parallel import wrappers
from castwise.core.plans.formats import LOW_DTYPES
from castwise.core.plans.plan import Plan
from castwise.core.plans.text import shown, some
from castwise.core.ranks import ALONE
from castwise.core.session.fused import check_fused
from castwise.core.session.members import Members
from castwise.errors import PlanError, StateError

_DTYPE = operator.attrgetter("dtype")


def check_group(group: Any) -> None:
    """See that what a session is given as its ranks is a process group.

    Raises:
        StateError: It is none.
    """
    kinds = (torch.distributed.ProcessGroup,) if torch.distributed.is_available() else ()
    if group is not None and group is not ALONE and not isinstance(group, kinds):
        raise StateError(
            f"Amp(group={shown(group)}) is not allowed. Allowed: a process group that this rank is in, as "
            "torch.distributed.new_group(...) gives it, castwise.ranks.ALONE for this process by itself, or None for all ranks."
        )


def check_model(model: nn.Module, device_type: str, *, wrapped: bool = False) -> nn.Module:
    """The module that a session is to prepare: that inside ``torch.compile``'s.

    ``wrapped``: DistributedDataParallel holds it already, rightly.

    Raises:
        StateError: No module, a scripted one, wrapped, autocast or compiled too early, or on another device.
    """
    if not isinstance(model, nn.Module):
        raise StateError(
            f"prepare({type(model).__name__}): not an nn.Module; prepare each model by a call of its own"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise StateError(
            f"prepare({type(model).__name__}): a scripted or traced model runs code of its own, which a plan's casts do not reach; "
            "prepare the module that it was made from"
        )
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise StateError(
            f"prepare({type(model).__name__}): prepare the module first and wrap it after: "
            f"{type(model).__name__}(amp.prepare(module))"
        )
    if _torch.distributed.has_fsdp1(model):
        wrappers.refuse_fsdp1("prepare", model)
    if not wrapped and wrappers.ddp_around(model) is not None:
        raise StateError(
            f"prepare({type(model).__name__}): this module is inside a DistributedDataParallel already; prepare it first and "
            "wrap it after: DistributedDataParallel(amp.prepare(module))"
        )
    target = _torch.calls.without_compiler(model)
    if _torch.dynamo.ran_compiled(target):
        raise StateError(
            "prepare: this compiled module, or another of its class, has already run compiled, and hooks added now would be "
            "ignored; prepare the module first, then torch.compile it"
        )
    borders.check_forward(target)
    lazy = [name for name, p in target.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise StateError(
            f"prepare: {', '.join(lazy[:3])} of this {type(target).__name__} have no shape yet; run one forward first, make the "
            "optimizer, then prepare"
        )
    devices = {p.device.type for p in target.parameters()} - {"meta", device_type}
    if devices:
        raise StateError(
            f"prepare: this Amp is for {device_type!r}, but the model has parameters on {', '.join(sorted(devices))}; "
            f"move the model there first, or make the session with Amp(..., device={sorted(devices)[0]!r})"
        )
    return target


def check_uncompiled(model: nn.Module, plan: Plan) -> None:
    """See that a model which the plan compiles is not compiled already: one of the two would mean nothing.

    Raises:
        StateError: It is.
    """
    if plan.compile != "as_given" and _torch.dynamo.is_compiled(model):
        raise StateError(
            f"prepare: the plan {plan} compiles the model, and this {type(_torch.calls.without_compiler(model)).__name__} is compiled "
            "already; prepare it before torch.compile, or use a plan with compile='as_given', which leaves compiling to you"
        )


def check_optimizer(optimizer: Optimizer, model: nn.Module, plan: Plan) -> None:
    """See that an optimizer can be prepared with a model.

    Raises:
        StateError: It is none, holds nothing of the model, or calls no hooks where the plan needs them.
        DeviceError: The plan wants a fused kernel and there is none.
    """
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise StateError(f"prepare: {kind} is not a torch.optim.Optimizer; create it before prepare")
    held = {id(masters.model_param_of(p)) for group in optimizer.param_groups for p in group["params"]}
    own = {id(parameter) for parameter in model.parameters()}
    if own and held and own.isdisjoint(held):  # a rank that trains nothing may have none
        raise StateError(
            f"prepare: this {kind} holds no parameter of this {type(model).__name__}; give each model with the optimizer that "
            "updates it, made from model.parameters() after the last change that replaces them"
        )
    touched = plan.loss_scale or plan.stores_low or plan.memory_format != "as_is" or plan.optimizer == "fused"
    if touched and not _torch.optimizers.has_step_hooks(optimizer):
        raise StateError(
            f"prepare: {kind} does not call Optimizer.__init__, so its steps cannot be followed as the plan {plan} needs; prepare "
            "the optimizer inside it"
        )
    if plan.keeps_masters and _torch.distributed.is_zero(optimizer):
        raise StateError(
            f"prepare: {kind} steps an optimizer of its own on this rank's share of the parameters, which would pass by the fp32 "
            f"masters of the plan {plan}. Shard by FSDP2 instead (amp.fully_shard), or use a plan that keeps parameters in fp32, such "
            "as 'bf16-mixed'."
        )
    if plan.optimizer == "fused":
        check_fused(optimizer)


def check_in_backward(model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> None:
    """Refuse optimizers that update weights inside of a backward (LOMO) where that cannot be right; warn elsewhere.

    They are known by their ``fused_backward``, whether they are given or have put hooks on the model's gradients.

    Raises:
        StateError: The plan scales the loss, or the weights are rounded masters.
    """
    found: list[Any] = [each for each in optimizers if hasattr(each, "fused_backward")]
    found += [
        each
        for p in model.parameters()
        for hook in _torch.hooks.gradient_hooks(p)
        for each in _fused_within(hook)
    ]
    if not found:
        return
    kind = type(found[0]).__name__
    why = "multiplies the loss by a scale" if plan.loss_scale else "rounds the weights from fp32 masters"
    if plan.loss_scale or plan.keeps_masters:
        raise StateError(
            f"prepare({type(model).__name__}): {kind} updates weights inside of the backward, and the plan {plan} {why}, which is not "
            "undone before the update. Use a plan with neither, such as 'bf16-mixed' or 'bf16-true', or an optimizer that updates in step()"
        )
    warnings.warn(
        f"prepare({type(model).__name__}): {kind} updates weights inside of the backward, so gradients that are not finite reach the "
        "weights, and no step is skipped or counted",
        stacklevel=4,
    )


def _fused_within(function: Any, depth: int = 3) -> list[Any]:
    """Optimizers with a ``fused_backward`` that a hook refers to."""
    cells = [getattr(function, "__self__", None)]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty one
            cells.append(cell.cell_contents)
    found = [each for each in cells if isinstance(each, Optimizer) and hasattr(each, "fused_backward")]
    return found or [
        other for each in cells if depth and callable(each) for other in _fused_within(each, depth - 1)
    ]


def check_masters(model: nn.Module, optimizers: Sequence[Optimizer], members: Members) -> None:
    """See that nobody else keeps masters of what is to be prepared; two sessions would take them from one another.

    Raises:
        StateError: Another session does.
    """
    cure = "prepare both models by one Amp, or close() the other first"
    for optimizer in optimizers:
        if masters.attachment_of(optimizer) is not None and not members.holds(optimizer):
            raise StateError(
                f"prepare: this {type(optimizer).__name__} already holds fp32 masters of another Amp; {cure}"
            )
    own = {id(parameter) for parameter in members.parameters()}
    for name, parameter in model.named_parameters():
        if masters.master_of(parameter) is not None and id(parameter) not in own:
            raise StateError(
                f"prepare: {name} of this {type(model).__name__} already has an fp32 master by another Amp, whose model shares it; "
                f"{cure}"
            )


def check_apart(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """See that each parameter is in one optimizer: under a loss scale its gradient would be unscaled once for each.

    Raises:
        StateError: One is in two.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    holders: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            key = id(masters.model_param_of(parameter))
            first = holders.setdefault(key, optimizer)
            if first is not optimizer and key in names:
                raise StateError(
                    f"prepare: {names[key]} of this {type(model).__name__} is in two optimizers, {type(first).__name__} and "
                    f"{type(optimizer).__name__}, and under a loss scale each would unscale its gradient. Give each parameter to one "
                    "optimizer, or use a plan without a loss scale, such as 'bf16-mixed'"
                )


def check_arrival(
    model: nn.Module, resolution: Resolution, widen: bool | str, *, again: bool = False
) -> None:
    """Trained parameters stay low under a plan that stores them in fp32 only where that cannot be what anyone wants.

    Args:
        model: To be prepared.
        resolution: What the plan makes of it.
        widen: What was asked for.
        again: It was asked for under another plan, that the session has changed since.

    Raises:
        PlanError: There are such parameters: it names them, and what it takes to widen them. Or ``widen`` was asked for,
            and the plan stores low all that arrived so.
    """
    plan, low = resolution.plan, low_tensors(model)
    stay = all(resolution.storage.get(name, tensor.dtype) in LOW_DTYPES for name, tensor in low.items())
    if widen and not again and plan.stores_low and low and stay:
        raise PlanError(
            f"prepare(widen={widen!r}): the plan {plan} stores all that arrived low in {plan.compute}, so nothing is left to be "
            f"stored in fp32. Leave widen out, or use a plan that keeps parameters in fp32, such as {plan.compute + '-mixed'!r}."
        )
    if plan.params != "fp32" or not resolution.left_low:
        return
    dtype = low[resolution.left_low[0]].dtype
    names = [name for name in resolution.left_low if low[name].dtype is dtype]
    short = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    instead = f"{short}-master" if dtype is torch.bfloat16 or plan.compute == "fp16" else "bf16-master"
    cost = more_bytes(low[name] for name in resolution.left_low)
    raise PlanError(
        f"prepare: the plan {plan} keeps parameters in fp32, but {some(names, 3)} are stored in "
        f"{short}: their updates and gradients would be {short}. prepare(..., widen=True) stores them in fp32, which takes "
        f"{size(cost)} more for the weights, as much again for their gradients, and for each tensor of state that the optimizer keeps of "
        f"them; or use the plan {instead!r} (fp32 masters in the optimizer)."
    )


def check_change(model: nn.Module, before: Plan, after: Plan) -> None:
    """Refuse to change the plan of a model that would not go on with the weights that it has, or without the new plan.

    Raises:
        StateError: It says why.
    """
    low = before.stores_low or after.stores_low
    why = (
        "has run compiled, so that hooks put on now would be ignored"
        if _torch.dynamo.ran_compiled(model)
        else "is cut into shards, whose groups are by the formats that parameters are stored in"
        if low and any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
        else "is in DistributedDataParallel, which keeps parameters of the format that it has met"
        if low and wrappers.ddp_around(model) is not None
        else ""
    )
    if why:
        raise StateError(
            f"change({str(after)!r}): this {type(model).__name__} {why}. Save a checkpoint, and load it into a training "
            "that begins under the new plan."
        )


def check_late(model: nn.Module, optimizers: Iterable[Optimizer], resolution: Resolution) -> None:
    """See that an optimizer which joins a model that is prepared trains nothing low that came, or was unfrozen, since.

    Raises:
        StateError: It does: ``prepare`` looks at how a model arrives once, and would have widened or refused it.
    """
    if resolution.plan.params != "fp32":
        return
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    by_name = dict(model.named_parameters())
    late = [name for name in resolution.left_low if id(by_name[name]) in held]
    if late:
        dtype = str(by_name[late[0]].dtype).removeprefix("torch.")
        raise StateError(
            f"prepare: {some(late, 3)} of this {type(model).__name__} came or were unfrozen after it was prepared, and are stored in "
            f"{dtype}: the plan {resolution.plan} keeps parameters in fp32, and their updates would be rounded away. Store them in fp32 "
            "first (.float()), or amp.close() and prepare model and optimizers with widen=True."
        )


def watch_formats(
    optimizer: Optimizer,
    plan: Plan,
    names: Callable[[], Mapping[int, str]],
    log: Callable[[Callable[[], None]], object],
) -> None:
    """See at each step that no parameter was cast since its model was prepared, and that none which joined trains low unasked.

    ``names`` gives the names of parameters by ``id``; ``log`` gets what ends it, before it begins.
    """
    known: Any = WeakTensorKeyDictionary()
    held: list[weakref.ref[Tensor]] = []
    dtypes: list[torch.dtype] = []

    def look(optimizer: Optimizer, *_: object) -> None:
        nonlocal held, dtypes
        # a group may also be given another list, or its list more parameters
        now = list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))
        same = len(now) == len(held) and all(map(operator.is_, now, map(operator.call, held)))
        if same and [*map(_DTYPE, now)] == dtypes:
            return
        for parameter in now:
            if is_cast(parameter) and parameter.requires_grad:
                name = names().get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")
                raise StateError(f"{type(optimizer).__name__}.step(): {say_cast(name, parameter)}")
        dtypes = [stored_format(parameter) for parameter in now]
        if same:
            return
        low = [p for p in now if masters.is_low(p)]
        # without masters the plan itself stores low what has an original; with them it would have given it one
        added = [
            p
            for p in low
            if held
            and p.requires_grad
            and p not in known
            and (plan.keeps_masters or masters.original_of(p) is None)
        ]
        if added and (plan.params == "fp32" or plan.keeps_masters):
            refuse(optimizer, added)
        known.update(dict.fromkeys(low))
        held = list(map(weakref.ref, now))

    def refuse(optimizer: Optimizer, added: Sequence[Tensor]) -> None:
        dtype = str(added[0].dtype).removeprefix("torch.")
        why, cure = (
            ("keeps parameters in fp32", "Store them in fp32 before they are added (.float())")
            if not plan.keeps_masters
            else (
                "gives low parameters fp32 masters, which these have not",
                "Add them in fp32, before their model is prepared, and then prepare it with this optimizer: "
                "amp.prepare(model, optimizer)",
            )
        )
        raise StateError(
            f"{type(optimizer).__name__}.step(): parameters that were added to this optimizer after prepare, "
            f"{len(added)} of them, the first of shape {tuple(added[0].shape)}, are stored in {dtype}: the plan {plan} {why}, and their "
            f"updates would be rounded away. {cure}"
        )

    look(optimizer)
    _torch.steps.subscribe(look, of=optimizer, log=log)


def check_norm(call: str, bound: object, name: str = "max_norm") -> None:
    """Refuse what gradients cannot be held to; a tensor's value is not looked at, since that would wait for its device.

    Raises:
        PlanError: It is not a number, NaN or below zero.
    """
    if isinstance(bound, Tensor):
        return
    what = "norm" if name == "max_norm" else "bound"
    try:
        if not isinstance(bound, str) and float(bound) >= 0.0:  # type: ignore[arg-type]
            return
        why = (
            f"a {type(bound).__name__} is no {what}"
            if isinstance(bound, str)
            else f"no {what} is at most that"
        )
    except (TypeError, ValueError):
        why = f"a {type(bound).__name__} is no {what}"
    rest = (
        "math.inf for the norm alone; step takes None for no clipping"
        if what == "norm"
        else "math.inf for no clipping"
    )
    raise PlanError(f"{call}({name}={bound!r}): {why}. Allowed: a number such as 1.0, or {rest}.")
