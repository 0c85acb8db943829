"""What a session is among other processes: how models are sharded by its plan, and what its ranks agree on."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from castwise import borders, masters
from castwise.errors import StateError
from castwise.parallel import fsdp, pipeline, wrappers
from castwise.parallel.agreement import Agreement, clip_by_norm
from castwise.parallel.pieces import is_dtensor, world_group
from castwise.parallel.plans import check_patterns
from castwise.plan import Plan
from castwise.resolve import resolve
from castwise.scaler import GradScaler

__all__ = ["AmongRanks"]


class AmongRanks:
    """The part of :class:`castwise.Amp` that is about other processes.

    Args:
        group: The ranks that act together; None for all.
    """

    plan: Plan
    scaler: GradScaler
    _undo: contextlib.ExitStack

    def __init__(self, group: Any) -> None:
        self._agreement = Agreement(group)
        self._flags_wait = False
        self._patterns: set[str] = set()
        self._unchecked: list[tuple[weakref.ref[nn.Module], frozenset[str]]] = []
        self._narrows: list[masters.Attachment] = []
        self._roots: weakref.WeakKeyDictionary[nn.Module, borders.Border] = weakref.WeakKeyDictionary()
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._models: list[weakref.ref[nn.Module]] = []

    @staticmethod
    def _live(refs: Iterable[weakref.ref[Any]]) -> list[Any]:
        return [found for ref in refs if (found := ref()) is not None]

    def _parameters(self) -> Iterator[torch.Tensor]:
        seen: set[int] = set()
        for model in self._live(self._models):
            for parameter in model.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def _open_window(self) -> None:
        raise NotImplementedError

    def _note_order(self, model: nn.Module) -> None:
        """Remember which parameters are DTensors when a model is prepared."""
        cut = frozenset(name for name, parameter in model.named_parameters() if is_dtensor(parameter))
        self._unchecked.append((weakref.ref(model), cut))

    def mp_policy(self, module: nn.Module | None = None, model: nn.Module | None = None) -> Any:
        """The plan as a ``MixedPrecisionPolicy`` for FSDP2's ``fully_shard``.

        Args:
            module: The module to be sharded. Without ``model``, only regions by ``type:`` can decide for it.
            model: The whole model that it is in, so that regions by path decide too.

        Returns:
            A policy whose parameters are gathered in the format that the plan stores them in and whose gradients are
            reduced in fp32.
        """
        return fsdp.mp_policy(self.plan, module, model)

    def fully_shard(
        self, model: nn.Module, *, blocks: Iterable[nn.Module] = (), part: bool = False, **options: Any
    ) -> Any:
        """FSDP2's ``fully_shard`` by the plan: each region that needs a group of its own, each block, then the model.

        Call it before the optimizer is made and before :meth:`prepare`.

        Args:
            model: The model, on its device.
            blocks: Modules of it that are gathered and freed one at a time, such as its layers.
            part: The model is one stage of a pipeline, as for :meth:`prepare`.
            options: For ``fully_shard``: ``mesh``, ``reshard_after_forward`` and others.

        Returns:
            The model.
        """
        fsdp.shard(resolve(self.plan, model, part=part), model, blocks, options)
        return model

    def mark_sharded(self, parameter: torch.Tensor, group: Any = None, dim: int | None = None) -> None:
        """Declare a parameter that was cut by hand: each rank of ``group`` holds a piece of its own.

        Steps are then skipped by all ranks or none, and norms are those of the whole parameter. DTensors need no
        declaration.

        Args:
            parameter: The model's parameter.
            group: The ranks that hold the pieces; None for all.
            dim: Along which dimension the whole was cut, in the order of ranks. Given, a checkpoint holds the whole
                parameter and resumes under another layout.

        Raises:
            StateError: torch.distributed is not initialised.
        """
        self._agreement.pieces.mark(parameter, group, dim)
        self._agreement.forget()

    def pipeline(self, schedule: Any) -> Any:
        """Let a schedule of ``torch.distributed.pipelining`` train by the plan.

        The schedule starts its backward passes from the scaled loss and reports the loss itself; norms and skipped
        steps are those of all stages together; stages in low formats hand their outputs on as they are, and only the
        last one's come out in fp32.

        Args:
            schedule: Made from stages whose modules were prepared, on every rank.

        Returns:
            The same schedule.

        Raises:
            StateError: Not a schedule, or a stage whose module was not prepared.
            PatternError: A region of the plan that matches nothing in any stage.
        """
        stages = pipeline.stages_of(schedule)
        for stage in stages:
            inner = wrappers.unwrap(stage.submod)
            root = self._roots.get(inner)
            if root is None:
                raise StateError(
                    f"pipeline({type(schedule).__name__}): the module of stage {stage.stage_index} was not prepared by this Amp; "
                    "call amp.prepare(module, optimizer) before PipelineStage(module, ...)"
                )
            if not stage.is_last:
                root.cast_outputs = None
            self._agreement.pieces.mark_stage(inner, stage.group or world_group("pipeline"))
        if self._agreement.world_size > 1:
            check_patterns(self.plan, self._patterns, self._agreement.group)
        pipeline.adapt(schedule, self._scale_on_device, self._enter_schedule)
        self._agreement.forget()
        return schedule

    def _scale_on_device(self) -> torch.Tensor | None:
        return self.scaler.scale_tensor() if self.scaler.is_enabled() else None

    def _enter_schedule(self) -> None:
        """On each rank, also on those whose stage computes no loss: the window of the last step is over."""
        self._open_window()
        self._scale_on_device()

    def _join_ddp(self, ddp: nn.parallel.DistributedDataParallel, module: nn.Module) -> None:
        """DistributedDataParallel takes in a prepared model, on all ranks at once, and will share rank 0's weights."""
        averaged = wrappers.averaged_params(ddp, module)
        group, covered = ddp.process_group, set(averaged)
        for optimizer in self._live(self._optimizers):
            attachment = masters.attachment_of(optimizer)
            if attachment is not None and any(stored in covered for stored in attachment.stored):
                attachment.accept_low_gradients()
                attachment.rewrite(
                    lambda master: torch.distributed.broadcast(master, group=group, group_src=0), covered
                )
                self._narrows.append(attachment)
        if self._narrows:
            self._undo.callback(module.register_forward_pre_hook(self._before_forward).remove)
        self._agreement.note_averaged(averaged, group)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._narrow()

    def _narrow(self) -> None:
        """DistributedDataParallel adds to gradients in the parameters' format alone."""
        for attachment in self._narrows:
            attachment.narrow_gradients()

    def piece_of(self, parameter: torch.Tensor) -> tuple[int, int] | None:
        """Which piece of how many this rank holds of a parameter that :meth:`mark_sharded` was given without ``dim``."""
        return self._agreement.pieces.piece(parameter)

    def as_whole(self, parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Values of a parameter that :meth:`mark_sharded` was given with ``dim`` as a DTensor of the whole; others as they are."""
        return self._agreement.pieces.as_whole(parameter, values)

    def _agree(self, flag: torch.Tensor) -> torch.Tensor:
        """A flag as all ranks see it, unless it travels with the norm, or they must see the same anyway."""
        if self._flags_wait or not self._agreement.can_differ(self._parameters()):
            return flag
        return self._agreement.agree(flag)

    def _clip(self, params: list[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        if self._is_cut(params):
            norm = self._agreement.norm(params, norm_type, joined=self._agreement.world_size > 1)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], norm_type)
        clip_by_norm(params, max_norm, norm.nan_to_num(0.0, 0.0))  # what is not finite stays to be seen
        return norm

    def _is_cut(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether norms need more than this rank's gradients."""
        if self._agreement.world_size == 1:
            return any(is_dtensor(masters.model_param_of(parameter)) for parameter in params)
        return self._agreement.can_differ(self._parameters())

    def _check_order(self) -> None:
        """At the first step after ``prepare``: what had to be done before it was not done since."""
        unchecked, self._unchecked = self._unchecked, []
        for reference, known in unchecked:
            model = reference()
            for name, parameter in [] if model is None else model.named_parameters():
                if is_dtensor(parameter) and name not in known:
                    raise StateError(
                        f"step: {name} of the prepared {type(model).__name__} became a DTensor after prepare, so that its optimizer "
                        "updates a tensor that the model no longer has. Call fully_shard or parallelize_module first, then make "
                        "the optimizer, then prepare both."
                    )
