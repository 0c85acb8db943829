"""Raise errors for models and optimizers that ``Amp.prepare`` cannot prepare, before anything is changed."""

from __future__ import annotations

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
from castwise.core.model.arrival import more_bytes
from castwise.core.model.resolve import Resolution
from castwise.core.model.stored import is_cast, say_cast, stored_format
from castwise.core.parallel import wrappers
from castwise.core.plans.formats import LOW_DTYPES
from castwise.core.plans.plan import Plan
from castwise.core.plans.text import shown, some
from castwise.core.ranks import ALONE
from castwise.core.scaler import inside
from castwise.core.session.fused import check_fused
from castwise.core.session.inventory import Holding, Inventory
from castwise.core.session.members import Members
from castwise.errors import PlanError, StateError

_DTYPE = operator.attrgetter("dtype")


def check_group(group: Any) -> None:
    """Raise if the argument ``group`` of :class:`~castwise.Amp` is not a process group.

    Raises:
        StateError: ``group`` is not a process group.
    """
    kinds = (torch.distributed.ProcessGroup,) if torch.distributed.is_available() else ()
    if group is not None and group is not ALONE and not isinstance(group, kinds):
        raise StateError(
            f"Amp(group={shown(group)}) is not allowed. Allowed: a process group that this rank is in, as "
            f"torch.distributed.new_group(...) returns it, castwise.ranks.ALONE for this process by itself, or None for all "
            f"ranks."
        )


def check_given(model: object, optimizers: Iterable[object]) -> None:
    """Raise if ``prepare`` was given something other than a module and optimizers.

    Raises:
        StateError: Something else was given, or the module is scripted.
    """
    if not isinstance(model, nn.Module):
        raise StateError(
            f"prepare({type(model).__name__}): not an nn.Module; prepare each model in its own call"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise StateError(
            f"prepare({type(model).__name__}): a scripted or traced model runs compiled code, which a plan cannot cast; "
            f"prepare the module that it was made from"
        )
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise StateError(
                f"prepare: {type(optimizer).__name__} is not a torch.optim.Optimizer; create it before prepare"
            )


def check_model(found: Inventory, plan: Plan, device_type: str, *, wrapped: bool = False) -> None:
    """Raise if a model cannot be prepared.

    Args:
        found: The facts about the model.
        plan: The plan.
        device_type: The device type for which the :class:`~castwise.Amp` was created.
        wrapped: Whether the model may be inside a DistributedDataParallel already, because it was prepared before that.

    Raises:
        StateError: The model was wrapped, autocast or compiled before it is prepared, has parameters without a shape,
            or is on another device.
    """
    if found.is_wrapped:
        raise StateError(
            f"prepare({found.kind}): prepare the module first and wrap it after: {found.kind}(amp.prepare(module))"
        )
    if found.is_in_fsdp1:
        wrappers.refuse_fsdp1("prepare", found.model)
    if not wrapped and found.is_in_ddp:
        raise StateError(
            f"prepare({found.kind}): this module is inside a DistributedDataParallel already; prepare it first and "
            "wrap it after: DistributedDataParallel(amp.prepare(module))"
        )
    if found.ran_compiled:
        raise StateError(
            "prepare: this compiled module, or another of its class, has already run compiled, and hooks added now would be "
            "ignored; prepare the module first, then torch.compile it"
        )
    borders.check_forward(found.model)
    if found.without_shape:
        raise StateError(
            f"prepare: {', '.join(found.without_shape[:3])} of this {found.kind} have no shape yet; run one forward first, make the "
            "optimizer, then prepare"
        )
    devices = sorted(found.device_types - {"meta", device_type})
    if devices:
        raise StateError(
            f"prepare: this Amp is for {device_type!r}, but the model has parameters on {', '.join(devices)}; "
            f"move the model there first, or create the session with Amp(..., device={devices[0]!r})"
        )
    if plan.compile != "as_given" and found.is_compiled:
        raise StateError(
            f"prepare: the plan {plan} compiles the model, and this {found.kind} is compiled "
            "already; prepare it before torch.compile, or use a plan with compile='as_given', which leaves compiling to you"
        )


def check_optimizers(found: Inventory, plan: Plan) -> None:
    """Raise if optimizers cannot be prepared with a model.

    Raises:
        StateError: An optimizer holds no parameter of the model, does not call hooks that the plan needs, or would
            bypass the fp32 masters.
        DeviceError: The plan requires a fused kernel, and the optimizer has none.
    """
    touched = plan.loss_scale or plan.stores_low or plan.memory_format != "as_is" or plan.optimizer == "fused"
    for holding in found.holdings:
        kind, own = holding.kind, found.names.keys()
        if (
            own and holding.params and own.isdisjoint(holding.params)
        ):  # the optimizer of a rank that trains nothing may hold nothing
            raise StateError(
                f"prepare: this {kind} holds no parameter of this {found.kind}; give each model with the optimizer that "
                "updates it, and make the optimizer after the last call that replaces parameters"
            )
        if touched and not holding.takes_hooks:
            raise StateError(
                f"prepare: {kind} does not call Optimizer.__init__, so its steps cannot be followed as the plan {plan} needs; prepare "
                "the optimizer inside it"
            )
        if plan.keeps_masters and holding.is_zero:
            raise StateError(
                f"prepare: {kind} steps a separate optimizer on this rank's share of the parameters, which would bypass "
                f"the fp32 masters of the plan {plan}. Shard with FSDP2 instead (amp.fully_shard), or use a plan that keeps "
                f"parameters "
                f"in fp32, such "
                "as 'bf16-mixed'."
            )
        if plan.keeps_masters:
            check_groups(holding, plan)
        if plan.optimizer == "fused":
            check_fused(holding.optimizer)


def check_groups(holding: Holding, plan: Plan) -> None:
    """Check that an optimizer around others shares its groups with them, so that they get its masters.

    Raises:
        StateError: One inside updates the same parameters in groups of its own.
    """
    groups = set(map(id, holding.optimizer.param_groups))
    for inner in inside(holding.optimizer):
        if groups.isdisjoint(map(id, inner.param_groups)):
            kind = type(inner).__name__
            raise StateError(
                f"prepare: {holding.kind} holds its parameters in groups of its own, not in those of the {kind} inside it, which "
                f"would not get the fp32 masters of the plan {plan}. Prepare the {kind} instead, and step by {holding.kind} as before: "
                "amp.unscale_(inner), then outer.step(); or use a plan that keeps parameters in fp32, such as 'bf16-mixed'."
            )


def check_in_backward(found: Inventory, plan: Plan) -> None:
    """Raise for optimizers that update weights during the backward pass (LOMO), or warn if the plan can support them.

    Raises:
        StateError: The plan scales the loss or keeps fp32 masters.
    """
    if not found.steps_in_backward:
        return
    kind = type(found.steps_in_backward[0]).__name__
    task = "unscale the gradients" if plan.loss_scale else "update fp32 masters"
    if plan.loss_scale or plan.keeps_masters:
        raise StateError(
            f"prepare({found.kind}): {kind} updates weights inside the backward, where the plan {plan} cannot {task}. "
            "Use a plan with no loss scale and no masters, such as 'bf16-mixed' or 'bf16-true', or an "
            "optimizer that updates in step()"
        )
    warnings.warn(
        f"prepare({found.kind}): {kind} updates weights inside the backward, so gradients that are not finite reach the "
        "weights, and no step is skipped or counted",
        stacklevel=5,
    )


def check_masters(found: Inventory, members: Members) -> None:
    """Raise if another :class:`~castwise.Amp` keeps fp32 masters of these parameters, since the two would conflict.

    Raises:
        StateError: Another Amp keeps masters of some of them.
    """
    cure = "prepare both models with one Amp, or close() the other first"
    for holding in found.holdings:
        if holding.has_masters and not members.holds(holding.optimizer):
            raise StateError(f"prepare: this {holding.kind} already has fp32 masters of another Amp; {cure}")
    own = {id(parameter) for parameter in members.parameters()}
    known = {name for key, name in found.names.items() if key in own}
    for name in found.with_masters:
        if name not in known:
            raise StateError(
                f"prepare: {name} of this {found.kind} already has an fp32 master of another Amp, whose model shares it; "
                f"{cure}"
            )


def check_apart(found: Inventory, others: Iterable[Optimizer]) -> None:
    """Raise if a parameter is in two optimizers, which would unscale its gradient twice under a loss scale.

    ``others`` are the optimizers that are prepared already.

    Raises:
        StateError: A parameter is in two optimizers.
    """
    holders: dict[int, Holding] = {}
    for holding in (*map(Holding.of, others), *found.holdings):
        for key in holding.params & found.names.keys():
            first = holders.setdefault(key, holding)
            if first.optimizer is not holding.optimizer:
                raise StateError(
                    f"prepare: {found.names[key]} of this {found.kind} is in two optimizers, {first.kind} and "
                    f"{holding.kind}, and with a loss scale its gradient would be unscaled twice. Give each parameter to one "
                    "optimizer, or use a plan without a loss scale, such as 'bf16-mixed'"
                )


def check_arrival(
    low: Mapping[str, Tensor],
    resolution: Resolution,
    widen: bool | str,
    *,
    inference: bool,
    again: bool = False,
) -> None:
    """Raise if trained parameters are bf16 or fp16 under a plan that keeps them in fp32, unless ``widen`` is given.

    Args:
        low: The model's tensors that are stored in bf16 or fp16, by path.
        resolution: What the plan means for the model.
        widen: The argument of ``prepare``.
        inference: Whether the model is only evaluated.
        again: Whether ``widen`` was given under an earlier plan, which :meth:`castwise.Amp.change` replaces now.

    Raises:
        PlanError: There are such parameters. The message names them and the memory needed to store them in fp32. Or
            ``widen`` was given, and the plan stores all of these tensors in bf16 or fp16 anyway.
    """
    plan = resolution.plan
    stay = all(resolution.storage.get(name, tensor.dtype) in LOW_DTYPES for name, tensor in low.items())
    if widen and not again and plan.stores_low and low and stay:
        raise PlanError(
            f"prepare(widen={widen!r}): the plan {plan} stores all low-precision tensors of the model in "
            f"{plan.compute}, so there is nothing to widen to fp32. Leave widen out, or use a plan that keeps parameters in fp32, such as "
            f"{plan.compute + '-mixed'!r}."
        )
    if plan.params != "fp32" or not resolution.left_low:
        return
    dtype = low[resolution.left_low[0]].dtype
    names = [name for name in resolution.left_low if low[name].dtype is dtype]
    short = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    cost = size(more_bytes(low[name] for name in resolution.left_low))
    found = f"the plan {plan} keeps parameters in fp32, but {some(names, 3)} are stored in {short}"
    if inference:
        raise PlanError(
            f"prepare(inference=True): {found}. prepare(..., widen='all') stores them in fp32, which takes {cost} more; or use the "
            f"plan '{short}-true', which leaves all in {short}."
        )
    instead = f"{short}-master" if dtype is torch.bfloat16 or plan.compute == "fp16" else "bf16-master"
    raise PlanError(
        f"prepare: {found}: their updates and gradients would be {short}. prepare(..., widen=True) stores them in fp32, which takes "
        f"{cost} more for the weights, and as much again for their gradients and for each state tensor of the "
        f"optimizer; or use the plan {instead!r} (fp32 masters in the optimizer)."
    )


def check_change(model: nn.Module, before: Plan, after: Plan) -> None:
    """Raise if the plan of a prepared model cannot be changed to another.

    Raises:
        StateError: The plan cannot be changed; the message gives the reason.
    """
    low = before.stores_low or after.stores_low
    why = (
        "has already run compiled, so hooks added now would be ignored"
        if _torch.dynamo.ran_compiled(model)
        else "is sharded in groups that follow the formats of its parameters"
        if low and any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
        else "is in DistributedDataParallel, which was built for the parameters' current format"
        if low and wrappers.ddp_around(model) is not None
        else ""
    )
    if why:
        raise StateError(
            f"change({str(after)!r}): this {type(model).__name__} {why}. Save a checkpoint, and load it into a model "
            "that is prepared under the new plan."
        )


def check_late(found: Inventory, resolution: Resolution) -> None:
    """Raise if an optimizer that is prepared after its model trains bf16 or fp16 parameters that the plan keeps in fp32.

    Such parameters were added or unfrozen after the model was prepared.

    Raises:
        StateError: The optimizer has such parameters. When the model was prepared, they would have raised an error or
            been stored in fp32, but this is checked only once.
    """
    if resolution.plan.params != "fp32":
        return
    held = frozenset[int]().union(*(holding.params for holding in found.holdings))
    left = set(resolution.left_low)
    late = [name for key, name in found.names.items() if key in held and name in left]
    if late:
        dtype = str(found.low[late[0]].dtype).removeprefix("torch.")
        raise StateError(
            f"prepare: {some(late, 3)} of this {found.kind} were added or unfrozen after it was prepared, and are stored in "
            f"{dtype}: the plan {resolution.plan} keeps parameters in fp32, and their updates would be rounded away. Store them in fp32 "
            "first (.float()), or amp.close() and prepare model and optimizers with widen=True."
        )


def watch_formats(
    optimizer: Optimizer,
    plan: Plan,
    names: Callable[[], Mapping[int, str]],
    log: Callable[[Callable[[], None]], object],
) -> None:
    """Make each step of an optimizer raise if its parameters no longer have the dtypes that the plan gave them.

    A step raises if a parameter was cast since its model was prepared. It also raises if a bf16 or fp16 parameter was
    added to the optimizer that the plan would keep in fp32 or give an fp32 master.

    Args:
        optimizer: The optimizer.
        plan: The plan.
        names: A function that returns the names of parameters by ``id``.
        log: A function that is called before anything is changed, with a function that ends the checks.
    """
    known: Any = WeakTensorKeyDictionary()
    held: list[weakref.ref[Tensor]] = []
    dtypes: list[torch.dtype] = []

    def look(optimizer: Optimizer, *_: object) -> None:
        nonlocal held, dtypes
        # read anew at each step, since the user may have replaced or extended the list of a group
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
        # Without masters, the plan itself has converted a bf16 or fp16 parameter if its former values are remembered.
        # With masters, such a parameter would have a master.
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
                "gives low parameters fp32 masters, which these do not have",
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
    """Raise if a bound for clipping is invalid.

    The value of a tensor is not checked, since reading it would wait for its device.

    Raises:
        PlanError: The bound is not a number, is NaN, or is below zero.
    """
    if isinstance(bound, Tensor):
        return
    what = "norm" if name == "max_norm" else "bound"
    try:
        if not isinstance(bound, str) and float(bound) >= 0.0:  # type: ignore[arg-type]
            return
        why = (
            f"a {type(bound).__name__} is not a {what}"
            if isinstance(bound, str)
            else "it must be a number >= 0"
        )
    except (TypeError, ValueError):
        why = f"a {type(bound).__name__} is not a {what}"
    rest = (
        "math.inf to compute only the norm; step(max_norm=None) does not clip"
        if what == "norm"
        else "math.inf for no clipping"
    )
    raise PlanError(f"{call}({name}={bound!r}): {why}. Allowed: a number such as 1.0, or {rest}.")
