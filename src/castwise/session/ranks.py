"""What the ranks of a session agree on, and what parallel wrappers ask of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from castwise import _torch, masters
from castwise.errors import StateError
from castwise.parallel import pipeline, wrappers
from castwise.parallel.agreement import Agreement, clip_by_norm
from castwise.parallel.pieces import is_dtensor, world_group
from castwise.parallel.plans import check_patterns
from castwise.plans.plan import Plan
from castwise.scaler import GradScaler, Window
from castwise.session.members import Members

__all__ = ["Ranks"]


class Ranks:
    """The ranks that act together in one session; this process alone where there are no others.

    Args:
        members: What the session has prepared.
        group: The ranks; None for all.
    """

    def __init__(self, members: Members, group: Any) -> None:
        self.agreement = Agreement(group)
        self._members = members
        self._flags_wait = False
        self._patterns: set[str] = set()
        self._narrows: list[masters.Attachment] = []
        self.unchecked: list[tuple[weakref.ref[nn.Module], frozenset[str]]] = []
        """Models whose order of wrapping is still to be checked, and which of their parameters were DTensors."""

    # --- order of wrapping ----------------------------------------------------------------------------------

    def note(self, model: nn.Module, plan: Plan) -> None:
        """Take note of a model that was prepared, and of the regions that matched in it."""
        cut = frozenset(name for name, parameter in model.named_parameters() if is_dtensor(parameter))
        self.unchecked.append((weakref.ref(model), cut))
        self._patterns |= {region.pattern for region in plan.regions}
        self.agreement.forget()

    def forget(self) -> None:
        """The session is closed."""
        self._narrows.clear()
        self.unchecked.clear()
        self._patterns.clear()
        self.agreement.forget()

    def check_order(self) -> None:
        """At the first step after ``prepare``: what had to be done before it was not done since."""
        unchecked, self.unchecked = self.unchecked, []
        for reference, known in unchecked:
            model = reference()
            for name, parameter in [] if model is None else model.named_parameters():
                if is_dtensor(parameter) and name not in known:
                    raise StateError(
                        f"step: {name} of the prepared {type(model).__name__} became a DTensor after prepare, so that its optimizer "
                        "updates a tensor that the model no longer has. Call fully_shard or parallelize_module first, then make "
                        "the optimizer, then prepare both."
                    )

    # --- agreement ------------------------------------------------------------------------------------------

    def agree(self, flag: torch.Tensor) -> torch.Tensor:
        """A flag as all ranks see it, unless it travels with the norm, or they must see the same anyway."""
        if self.agreement.joined is False or self._flags_wait or not self.can_differ():
            return flag
        return self.agreement.agree(flag)

    def can_differ(self) -> bool:
        """Whether ranks can find different gradients."""
        return self.agreement.can_differ(self._members.parameters)

    def clip(self, params: list[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip by the norm over all ranks; returns it."""
        if self._is_cut(params):
            norm = self.agreement.norm(params, norm_type, joined=self.agreement.world_size > 1)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], norm_type)
        clip_by_norm(params, max_norm, norm.nan_to_num(0.0, 0.0))  # what is not finite stays to be seen
        return norm

    def _is_cut(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether norms need more than this rank's gradients."""
        if self.agreement.world_size == 1:
            return any(is_dtensor(masters.model_param_of(parameter)) for parameter in params)
        return self.can_differ()

    def decide_and_clip(
        self, scaler: GradScaler, window: Window, optimizers: Sequence[Optimizer], max_norm: float
    ) -> torch.Tensor:
        """Unscale, agree on the flag and on the norm, in one message, and clip."""
        params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        if not scaler.is_enabled():
            norm = self.clip(params, max_norm)
            window.note_norm(optimizers, norm)
            return norm
        late = any(scaler.is_unscaled(optimizer) for optimizer in optimizers)
        apart = self._flags_wait = self.can_differ()
        try:
            for optimizer in optimizers:
                window.unscale_(optimizer)
        finally:
            self._flags_wait = False
        params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        if apart:
            flag = scaler.joint_flag(optimizers)
            norm = self.agreement.norm(params, joined=True, flag=flag)
            scaler.set_flag(optimizers, flag)
            clip_by_norm(params, max_norm, norm.nan_to_num(0.0, 0.0))
            return norm
        scaler.decide_together(optimizers)
        norm = self.clip(params, max_norm)
        if late:  # gradients may have changed since they were looked at
            window.note_norm(optimizers, norm)
        return norm

    # --- wrappers -------------------------------------------------------------------------------------------

    def adapt(self, schedule: Any, plan: Plan, scaler: GradScaler, window: Window) -> Any:
        """Let a pipeline schedule train by a plan; see :meth:`castwise.Amp.pipeline`."""
        stages = pipeline.stages_of(schedule)
        for stage in stages:
            inner = wrappers.unwrap(stage.submod)
            root = self._members.roots.get(inner)
            if root is None:
                raise StateError(
                    f"pipeline({type(schedule).__name__}): the module of stage {stage.stage_index} was not prepared by this Amp; "
                    "call amp.prepare(module, optimizer) before PipelineStage(module, ...)"
                )
            if not stage.is_last:
                root.cast_outputs = None
            self.agreement.pieces.mark_stage(inner, stage.group or world_group("pipeline"))
        if self.agreement.world_size > 1:
            check_patterns(plan, self._patterns, self.agreement.group)

        def scale() -> torch.Tensor | None:
            return scaler.scale_tensor() if scaler.is_enabled() else None

        def enter() -> None:
            """On each rank, also on those whose stage computes no loss: the window of the last step is over."""
            window.open(lend=True)
            scale()

        pipeline.adapt(schedule, scale, enter)
        self.agreement.forget()
        return schedule

    def join_ddp(self, ddp: nn.parallel.DistributedDataParallel, module: nn.Module) -> None:
        """DistributedDataParallel takes in a prepared model, on all ranks at once, and will share rank 0's weights."""
        averaged = wrappers.averaged_params(ddp, module)
        group, covered = ddp.process_group, set(averaged)
        for optimizer in self._members.optimizers:
            attachment = masters.attachment_of(optimizer)
            if attachment is not None and any(stored in covered for stored in attachment.stored):
                attachment.accept_low_gradients()
                attachment.rewrite(
                    lambda master: torch.distributed.broadcast(master, group=group, group_src=0), covered
                )
                self._narrows.append(attachment)
        self.agreement.note_averaged(averaged, group)
        if self._narrows:
            module.register_forward_pre_hook(self._before_forward)

    def leave_ddp(self, module: nn.Module) -> None:
        """Undo :meth:`join_ddp`, or nothing."""
        _torch.remove_hooks(module, self._before_forward)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.narrow()

    def narrow(self) -> None:
        """Before a backward: DistributedDataParallel adds to gradients in the parameters' format alone."""
        for attachment in self._narrows:
            attachment.narrow_gradients()
