"""Make the ranks of a training run agree on whether gradients are finite, and compute gradient norms over all ranks.

Each of the two costs one all-reduce of one number over the ranks of an :class:`~castwise.Amp` (``Amp(group=...)``, by
default all ranks). If gradients are clipped, both share one all-reduce. No process groups of a device mesh are needed.
A parameter's contribution to the norm is divided by the number of ranks that hold the same piece of it. So the plain
sum over all ranks counts each parameter once, whatever its mesh.

Gradients that DistributedDataParallel has averaged over all ranks are equal already, and nothing is sent for them.
After a backward pass inside its ``no_sync()``, each rank has gradients of its own, as in local SGD. Ranks that step
with these skip a step together, because their loss scales would otherwise differ, and each rank clips by its own norm.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from castwise.core import _torch, masters
from castwise.core.ranks.group import ALONE, Ranks, default_group
from castwise.core.ranks.pieces import Pieces, is_dtensor
from castwise.core.ranks.text import named
from castwise.core.ranks.waiting import Waiting
from castwise.core.scaler import GradScaler, Window
from castwise.core.scaler.result import peek
from castwise.errors import StateError

_SUMMED = 0.5
"""The number that a rank sends in a step if it has gradients that should be a sum over ranks.

It otherwise sends 0 if all its gradients are finite, and 1 if one is not.
"""
_FURTHER = 0.25
"""The number that a rank sends while it runs the backward of a further named loss, so that it does not step yet."""
_NOT = object()
"""A value that stands in place of the group of the ranks that step, if this rank is not one of them."""


def _no_world() -> None:
    """Return None, as a weak reference does whose target is gone."""


_requires_grad = operator.attrgetter("requires_grad")


class Agreement:
    """Makes the ranks of a group agree on the gradients of the parameters of one :class:`~castwise.Amp`.

    Args:
        group: The ranks, as for :class:`Ranks`.
        params: A function that returns the parameters.
    """

    def __init__(self, group: Any = None, params: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self.group = group
        self.pieces = Pieces()
        self.window: Window | None = None
        self._params = params
        self._averaged: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._can_differ: bool | None = None
        self._world: Callable[[], Any] = _no_world
        """A function that returns the default process group that existed when ``_can_differ`` was decided."""
        self._seen: list[bool] | None = None
        """Which parameters were trained when several ranks decided that their gradients cannot differ."""
        self._steps: Any = None
        """The group of the ranks that step an optimizer, or None if all ranks do.

        ALONE if only this rank steps, and _NOT if this rank does not step but others do.
        """
        self._flags_wait = False
        self._averaging: list[weakref.ref[Any]] = []
        """The DistributedDataParallel modules that average gradients."""
        self._is_local = False
        """Whether the last backward pass left gradients of this rank alone, which are not averaged over ranks yet."""

    @property
    def ranks(self) -> Ranks:
        """The ranks at present, read anew each time, since an Amp may be created before its process group."""
        return Ranks(self.group)

    def forget(self) -> None:
        """Forget what the ranks have decided together, because the Amp is closed or the process group has changed."""
        self._can_differ = self._steps = None

    def look_again(self) -> None:
        """Make the next step check again whether gradients can differ between ranks.

        Called after a model was prepared, or a parameter was declared as sharded, on one or more ranks. If the ranks
        have decided that gradients can differ, this decision stays. It holds whatever this rank trains, and the other
        ranks may not know of the change.
        """
        if self._can_differ is False:
            self._can_differ, self._seen = (None if self._seen is None else False), []

    def note_averaged(self, params: Iterable[Tensor], ddp: Any) -> None:
        """Record that a DistributedDataParallel under construction will average the gradients of these parameters."""
        members = frozenset(dist.get_process_group_ranks(ddp.process_group))
        for parameter in params:
            if parameter.requires_grad:  # DDP reduces only parameters that are trainable at its construction
                self._averaged[parameter] = weakref.ref(ddp), members, weakref.ref(dist.group.WORLD)
        self._averaging = [*(one for one in self._averaging if one() not in (None, ddp)), weakref.ref(ddp)]
        if self.group is not ALONE and members.issuperset(self._members()):
            self._can_differ = None  # all ranks of the session are here, and decide again at the next step

    def forget_averaged(self, params: Iterable[Tensor]) -> None:
        """Forget that a DistributedDataParallel averages the gradients of these parameters."""
        for parameter in params:
            self._averaged.pop(parameter, None)
        self._can_differ = None

    def note_backward(self) -> None:
        """Record at the start of a backward pass whether DistributedDataParallel will average its gradients."""
        if self._averaging:
            self._is_local = any(
                (ddp := one()) is not None and not ddp.require_backward_grad_sync for one in self._averaging
            )

    def _members(self) -> list[int]:
        """Return the global numbers of the ranks of the group."""
        return dist.get_process_group_ranks(dist.group.WORLD if self.group is None else self.group)

    def settle_who_steps(self, here: bool) -> None:
        """Exclude ranks that have no optimizer from the communication of each step. All ranks of the group must call this.

        ``here`` says whether this rank steps an optimizer. The rank of a pipeline stage without trained parameters may
        have none.
        """
        ranks = self.ranks
        steps = [at for at, steps_there in enumerate(ranks.meet(here)) if steps_there]
        self._can_differ = None
        self._note_world()
        if len(steps) in (0, ranks.size):
            self._steps = None
        else:
            some = ranks.some(steps, "steps").group
            self._steps = some if ranks.rank in steps else _NOT

    def check_even(self, call: str) -> None:
        """Raise if a DistributedDataParallel is in torch's ``Join``, where ranks may take different numbers of steps.

        A rank that has ended in ``Join`` no longer answers the messages of a step. ``call`` names the function in the
        error.

        Raises:
            StateError: A DistributedDataParallel is in torch's ``Join``. Every rank raises this in its first step.
        """
        by: Callable[[], Any] = next(iter(self._averaged.values()), (_no_world,))[0]
        if _torch.distributed.is_in_join(by()):
            raise StateError(
                f"{call}: DistributedDataParallel is in torch's Join, where ranks end at different steps, but {call} needs all "
                "ranks at each step. Remove Join, and give all ranks the same number of batches (DistributedSampler does)"
            )

    def _is_averaged(self, parameter: Tensor, members: Iterable[int]) -> bool:
        by, over, world = self._averaged.get(parameter, (_no_world, frozenset(), _no_world))
        # the reducer is created last, so it is missing if the construction failed
        return over.issuperset(members) and world() is dist.group.WORLD and hasattr(by(), "reducer")

    def is_settled_equal(self) -> bool:
        """Whether the ranks have decided that their gradients are equal. Unlike :meth:`can_differ`, this never communicates."""
        return self._can_differ is False and not self._is_local and self._is_same_world()

    def can_differ(self) -> bool:
        """Whether the ranks can have different gradients for some parameters, so that they must communicate in a step.

        Several ranks can, unless DistributedDataParallel averages the gradients of all trained parameters over all
        ranks. The ranks decide this together at the first step, and again at the first step after a change. A rank that
        trains nothing takes part.

        Raises:
            StateError: This rank had no optimizer when the ranks determined which of them step.
        """
        if not self._is_same_world():  # the process group was created, destroyed or replaced
            self.forget()
            self._note_world()
        known = self._can_differ
        if known is not None and self._is_local:
            return True
        if known or (known is False and (self._seen is None or self._seen == self._are_trained())):
            return known
        ranks = self._who_steps()
        if ranks.size == 1:
            self._can_differ, self._seen = False, None
            return False
        members = self._members()
        here = any(
            not self._is_averaged(p, members) or self.pieces.group_of(p) is not None
            for p in map(masters.model_param_of, self._params())
            if p.requires_grad
        )
        if known is None or here:
            self._can_differ = any(ranks.meet(here))
        self._seen = self._are_trained()
        return bool(self._can_differ)

    @property
    def undecided(self) -> bool:
        """Whether the ranks have yet to decide what :meth:`can_differ` returns, for the first time or again."""
        return self._can_differ is None

    def as_decided(self) -> bool:
        """Return the last result of :meth:`can_differ`, without checking which parameters are trained now."""
        decided = self._can_differ if self._is_same_world() else None
        return self.can_differ() if decided is None else decided or self._is_local

    def _is_same_world(self) -> bool:
        """Whether the default process group is the same as when the ranks decided whether their gradients can differ."""
        now = default_group()
        return self._world is _no_world if now is None else self._world() is now

    def _note_world(self) -> None:
        now = default_group()
        self._world = _no_world if now is None else weakref.ref(now)

    def _who_steps(self) -> Ranks:
        if self._steps is _NOT:
            raise StateError(
                "step: this rank had no optimizer when amp.pipeline(schedule) was called, so the other ranks step without it. "
                "Prepare the optimizers of all stages before amp.pipeline"
            )
        return self.ranks if self._steps is None else Ranks(self._steps)

    def _are_trained(self) -> list[bool]:
        """Return for each parameter whether it is trained now."""
        return [*map(_requires_grad, self._params())]

    def _reduce(self, number: Tensor, how: Any) -> None:
        """All-reduce the number that ranks exchange in a step, in place, over the ranks that step."""
        group = self.group if self._steps is None else self._steps
        with Waiting(group) as waiting:
            dist.all_reduce(number, how, group=group)
            waiting.on_device(number)

    def agree(self, flag: Tensor) -> Tensor:
        """Set a flag to its maximum over all ranks, in place, so that all ranks know of a non-finite gradient.

        The flag is a 0-dim fp32 tensor that is 1 if a gradient is not finite. Nothing is sent if all ranks must have
        the same flag, or if the flag is sent with the gradient norm later.
        """
        if not self._flags_wait and self.can_differ():
            summed, further = self._summed(), self.window is not None and self.window.in_backward
            if (summed or further) and flag.is_cpu:
                flag.clamp_(min=_FURTHER if further else _SUMMED)
            elif summed:
                flag.fill_(1.0)
            self._reduce(flag, dist.ReduceOp.MAX)
            value = peek(flag)
            if value == _SUMMED:
                self._compare(summed)
            elif value == _FURTHER and not further:
                raise StateError(
                    "step: another rank called backward in this step for a named loss for which this rank did not. Call "
                    "amp.backward(loss, name) for each named loss on all ranks; without a batch, multiply the loss by 0"
                )
            elif value is None and summed:
                raise self._unknown([self.ranks.rank])
            if value is not None and value < 1.0:
                flag.zero_()
        return flag

    def _summed(self) -> list[Optimizer]:
        """Return this rank's optimizers whose gradients should be a sum over ranks, and forget them."""
        if self.window is None or not self.window.summed:
            return []
        summed = [*self.window.summed]
        self.window.summed.clear()
        return summed

    def _compare(self, summed: Sequence[Optimizer]) -> None:
        """Raise if gradients that should be a sum over ranks do not come from a rank that ran a backward pass.

        All ranks that step must call this.

        Raises:
            StateError: The gradients have no such origin, so it is unknown whether they hold the loss scale. Or this
                rank counted its backward passes for other optimizers, so the loss scales would differ. All ranks raise
                this.
        """
        window = self.window
        held = window.optimizers if window is not None else []
        norms = [_norm_here(optimizer) for optimizer in held]
        supposed = {at for at, optimizer in enumerate(held) if any(optimizer is one for one in summed)}
        loss = None if window is None else window.scaler._losses.current
        scale = None if loss is None else (loss.name, loss.numbers())
        heard = self._who_steps().meet((norms, supposed, scale))
        alone = [
            place
            for place, (_, doubtful, own) in enumerate(heard)
            if doubtful and not any(own == other for _, known, other in heard if not known)
        ]
        if alone and not all(doubtful for _, doubtful, _ in heard):
            raise StateError(
                f"step: {named(alone)} called no backward since its last step and counted the backwards for other optimizers "
                f"instead, so the loss scales of the ranks would differ. If the order of the optimizers' steps varies, call "
                "amp.backward(loss) for each optimizer on every rank (without a batch, multiply the loss by 0), or give each "
                "optimizer an Amp of its own"
            )
        wrong = [
            place
            for place, (own, doubtful, _) in enumerate(heard)
            for at in doubtful
            if not any(
                at < len(other) and at not in known and math.isclose(own[at], other[at], rel_tol=1e-4)
                for other, known, _ in heard
            )
        ]
        if wrong:
            raise self._unknown(wrong)

    @staticmethod
    def _unknown(places: Sequence[int]) -> StateError:
        return StateError(
            f"step: {named(sorted({*places}))} had no backward since the last step, but has gradients that no other rank has, "
            f"so it is unknown whether they hold the loss scale. Call amp.backward(loss) on each rank (without a "
            "batch, multiply the loss by 0), or clear the gradients; if you set or sum gradients yourself, call "
            "amp.unscale_(optimizer) on all ranks first"
        )

    def clip(self, params: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients in place by their total norm, over all pieces of sharded parameters, and return the norm."""
        joined = self.ranks.size > 1 and not self._is_local
        if self.can_differ() if joined else any(is_dtensor(masters.model_param_of(p)) for p in params):
            norm = self.norm(params, norm_type, joined=joined)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], norm_type)
        _clip_by(norm, params, max_norm)
        return norm

    def decide(self, scaler: GradScaler, window: Window, optimizers: Sequence[Optimizer]) -> None:
        """Unscale gradients, and make all ranks agree on whether the optimizers step or skip, with at most one all-reduce."""
        flags = scaler._flags
        if self._unscale(window, optimizers):
            flags.set(optimizers, self.agree(flags.joint(optimizers, scaler.scale_tensor().device)))
        else:
            flags.join(optimizers)

    def decide_and_clip(
        self, scaler: GradScaler, window: Window, optimizers: Sequence[Optimizer], max_norm: float
    ) -> Tensor:
        """Unscale gradients, make all ranks agree on whether the optimizers step or skip, and clip; return the norm.

        If a loss scale is in use, the norm is sent in the same all-reduce as the flag for non-finite gradients.
        """
        if self._is_local and scaler.works and not scaler.is_enabled():
            self.decide(scaler, window, optimizers)
            return self.clip(_params_of(optimizers), max_norm)
        if not scaler.is_enabled():
            norm = self.clip(_params_of(optimizers), max_norm)
            window.note_norm(optimizers, norm)
            return norm
        late = any(scaler._flags.is_unscaled(optimizer) for optimizer in optimizers)
        differ, params = self._unscale(window, optimizers), _params_of(optimizers)
        flag = scaler._flags.joint(optimizers, scaler.scale_tensor().device) if differ else None
        if flag is not None and self._is_local:
            scaler._flags.set(optimizers, self.agree(flag))
        elif flag is not None:
            norm = self.norm(params, joined=True, flag=flag)
            scaler._flags.set(optimizers, flag)
            _clip_by(norm, params, max_norm)
            return norm
        else:
            scaler._flags.join(optimizers)
        norm = self.clip(params, max_norm)
        if late:  # gradients may have changed since they were checked
            window.note_norm(optimizers, norm)
        return norm

    def _unscale(self, window: Window, optimizers: Iterable[Optimizer]) -> bool:
        """Unscale gradients, and return whether ranks can differ, so that they must still agree on non-finite gradients."""
        differ = self._flags_wait = window.scaler.works and self.can_differ()
        try:
            for optimizer in optimizers:
                window.unscale_(optimizer)
        finally:
            self._flags_wait = False
        return differ

    def norm(
        self,
        params: Sequence[Tensor],
        norm_type: float = 2.0,
        *,
        joined: bool,
        flag: Tensor | None = None,
        compared: bool = False,
    ) -> Tensor:
        """Return the total norm of gradients, in which all pieces of a sharded parameter count, and each counts once.

        Args:
            params: The parameters whose gradients count, of a model or of its optimizer. Parameters without a gradient
                are skipped.
            norm_type: 2, any other positive power, or infinity.
            joined: Whether to include the gradients of all ranks, as :meth:`can_differ` says. All ranks must then call
                this.
            flag: A 0-dim fp32 tensor that is 1 if a gradient on this rank is not finite. It is sent with the norm, as
                one number. It is set to 1, in place, if a gradient on any rank is not finite or if the norm is not
                finite. The norm is then infinite or NaN.
            compared: Whether :meth:`_compare` has already checked the gradients that should be sums over ranks.

        Returns:
            A 0-dim fp32 tensor, equal on all ranks. If every rank holds a gradient whole, the mean over ranks of its
            norm, raised to the power ``norm_type``, counts.

        Raises:
            StateError: A flag is given, and it is unknown whether some gradients include the loss scale. All ranks
                raise this.
        """
        infinite = math.isinf(norm_type)
        world = self.ranks.size if joined else 1
        by_count: dict[int, list[Tensor]] = {}
        for parameter in params:
            grad = local_grad(parameter)
            if grad is not None and grad.numel():
                grad = grad if grad.dtype is torch.float32 else grad.float()
                by_count.setdefault(self.pieces.count(parameter) if joined else world, []).append(grad)
        parts = []
        for count, grads in by_count.items():
            size = nn.utils.get_total_norm(grads, norm_type)
            parts.append(size if infinite else size**norm_type * (count / world))
        home = parts[0].device if parts else (flag.device if flag is not None else torch.device("cpu"))
        part = torch.zeros((), device=home)
        if parts:
            each = torch.stack([one.to(home) for one in parts]) if len(parts) > 1 else parts[0]
            part = each.amax() if infinite else each.sum()
        if joined:
            summed = self._summed()
            if flag is not None:  # sent as an infinite norm: one reduction takes half the time of two
                found = flag.to(home) > 0
                if summed:
                    part = torch.full_like(part, -math.inf if home.type == "cpu" else math.inf)
                part = torch.where(found, math.inf, part)
            self._reduce(part, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM)
            if flag is not None and not compared:
                value = peek(part)
                if value is not None and not value >= 0.0:
                    self._compare(summed)
                    return self.norm(params, norm_type, joined=joined, flag=flag, compared=True)
                if value is None and summed:
                    raise self._unknown([self.ranks.rank])
        if flag is not None:
            flag.copy_(~torch.isfinite(part))  # fused kernels test for exactly 1
        return part if infinite else part ** (1.0 / norm_type)


def local_grad(parameter: Tensor) -> Tensor | None:
    """Return this rank's part of a parameter's gradient as a plain tensor in the same memory, or None.

    Of a sparse gradient, the values are returned. A DTensor gradient may be a partial sum, as tensor parallelism leaves
    for replicated parameters. It is then summed over ranks first, and ``.grad`` is set to the sum.
    """
    grad = parameter.grad
    if grad is None:
        return None
    if is_dtensor(grad):
        sharded: Any = grad
        if any(placement.is_partial() for placement in sharded.placements):
            owner: Any = masters.model_param_of(parameter)
            sharded = sharded.redistribute(sharded.device_mesh, owner.placements)
            parameter.grad = sharded
        return _torch.distributed.local_tensor(sharded)
    return _torch.tensors.dense_values(grad)


def _norm_here(optimizer: Optimizer) -> float:
    grads = [grad for p in _params_of((optimizer,)) if (grad := local_grad(p)) is not None]
    return float(nn.utils.get_total_norm([grad.float() for grad in grads]))


def _params_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _clip_by(norm: Tensor, params: Iterable[Tensor], max_norm: float) -> None:
    """Scale gradients in place, also those of sharded parameters, so that their norm is at most ``max_norm``."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in params:
        grad = local_grad(parameter)
        if grad is not None:
            by_device.setdefault(grad.device, []).append(grad)
    norm = norm.nan_to_num(
        0.0, 0.0
    )  # gradients with a non-finite norm are not scaled, so they stay non-finite
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for device, grads in by_device.items():
        _torch.tensors.multiply_each(grads, factor.to(device))
