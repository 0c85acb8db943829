"""Make prepared models work in DistributedDataParallel and in pipelines, and check the order of wrapping."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from castwise.core import _torch, masters
from castwise.core.parallel import pipeline, wrappers
from castwise.core.plans.plan import Plan
from castwise.core.ranks import Agreement
from castwise.core.ranks.pieces import is_dtensor
from castwise.core.ranks.plans import check_patterns
from castwise.core.scaler import GradScaler, Window
from castwise.core.session.members import Members
from castwise.errors import StateError


class Wrapping:
    """Handles the parallel wrappers around the models of one :class:`~castwise.Amp`."""

    def __init__(self, members: Members, agreement: Agreement) -> None:
        self._members, self._agreement = members, agreement
        self._patterns: set[str] = set()
        self._narrows: list[masters.Attachment] = []
        self.unchecked: list[tuple[weakref.ref[nn.Module], frozenset[str]]] = []
        """Models whose order of wrapping is still to be checked, each with the names of parameters that were DTensors."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> Wrapping:
        """Return an empty object, which does nothing, because a copied model carries hooks that refer to this object."""
        return Wrapping(self._members, self._agreement)

    def note(self, model: nn.Module, plan: Plan) -> None:
        """Record a model that was prepared, and the regions of the plan that matched modules in it."""
        cut = frozenset(name for name, parameter in model.named_parameters() if is_dtensor(parameter))
        self.unchecked.append((weakref.ref(model), cut))
        self._patterns |= {region.pattern for region in plan.regions}
        self._agreement.look_again()

    def forget(self) -> None:
        """Forget all models, because the Amp is closed."""
        self._narrows.clear()
        self.unchecked.clear()
        self._patterns.clear()
        self._agreement.forget()

    def check_order(self) -> None:
        """Raise if a model was sharded after ``prepare`` instead of before. This is checked at the first step."""
        unchecked, self.unchecked = self.unchecked, []
        for reference, known in unchecked:
            model = reference()
            for name, parameter in [] if model is None else model.named_parameters():
                if is_dtensor(parameter) and name not in known:
                    raise StateError(
                        f"step: {name} of the prepared {type(model).__name__} became a DTensor after prepare, so its "
                        f"optimizer updates a tensor that is no longer in the model. Call fully_shard or parallelize_module "
                        f"first, then "
                        "make "
                        "the optimizer, then prepare both."
                    )

    def adapt(self, schedule: Any, plan: Plan, scaler: GradScaler, window: Window) -> Any:
        """Make a pipeline schedule train under a plan; see :meth:`castwise.Amp.pipeline`."""
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
            self._agreement.pieces.mark_stage(inner, stage.group or torch.distributed.group.WORLD)
        if self._agreement.ranks.size > 1:
            check_patterns(plan, self._patterns, self._agreement.ranks)
            self._agreement.settle_who_steps(bool(self._members.optimizers))

        def scale() -> torch.Tensor | None:
            return scaler.scale_tensor() if scaler.is_enabled() else None

        def enter() -> None:
            """Update the loss scale on each rank if a step was made, even if the stage of this rank computes no loss."""
            window.open(lend=True)
            scale()

        pipeline.adapt(schedule, scale, enter)
        return schedule

    def join_ddp(self, ddp: nn.parallel.DistributedDataParallel, module: nn.Module, model: nn.Module) -> None:
        """Adapt a prepared model to the DistributedDataParallel that is being built on it, or on a part of it.

        DistributedDataParallel gives all ranks the weights of rank 0, so the fp32 masters of rank 0 are sent too. All
        ranks of its process group run this together.

        Args:
            ddp: The DistributedDataParallel.
            module: The module that it wraps.
            model: The prepared model that has parameters of the module.

        Raises:
            StateError: ``delay_all_reduce_named_params`` was given and the model has masters. Nothing was changed.
        """
        averaged = wrappers.averaged_params(ddp, module)
        own = set(module.parameters())
        found = [
            attachment
            for attachment in map(masters.attachment_of, self._members.optimizers)
            if attachment is not None and any(stored in own for stored in attachment.stored)
        ]
        if found and _torch.distributed.delays_reductions(ddp):
            raise StateError(
                f"DistributedDataParallel({type(module).__name__}, delay_all_reduce_named_params=...): parameters with fp32 "
                f"masters can only be reduced in the ordinary way. Leave that argument out, or prepare with a plan that keeps "
                f"parameters in "
                "fp32, such as 'bf16-mixed'."
            )
        for attachment in found:
            attachment.accept_low_gradients()
            if attachment not in self._narrows:
                self._narrows.append(attachment)
        self.share_masters(ddp, module, 0)
        self._agreement.note_averaged(averaged, ddp)
        if self._narrows:
            _torch.hooks.remove_hooks(model, self._before_forward)
            model.register_forward_pre_hook(self._before_forward)

    def share_masters(self, ddp: nn.parallel.DistributedDataParallel, module: nn.Module, rank: int) -> None:
        """Send the fp32 masters of one rank to all ranks, as DistributedDataParallel sends parameters.

        ``rank`` is the number of the rank in the process group of ``ddp``.
        """
        covered, group = set(wrappers.averaged_params(ddp, module)), ddp.process_group
        for attachment in self._narrows:
            attachment.settle()
            attachment.rewrite(
                lambda master: torch.distributed.broadcast(master, group=group, group_src=rank), covered
            )

    def leave_ddp(self, model: nn.Module) -> None:
        """Undo what :meth:`join_ddp` changed for a prepared model, if it was called for the model."""
        _torch.hooks.remove_hooks(model, self._before_forward)
        self._agreement.forget_averaged(model.parameters())

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.narrow()

    def narrow(self) -> None:
        """Convert accumulated fp32 gradients to the dtype of their parameters before a backward pass.

        DistributedDataParallel can add only to gradients of that dtype.
        """
        for attachment in self._narrows:
            attachment.narrow_gradients()
