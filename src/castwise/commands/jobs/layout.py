"""Parallel layouts, which combine data, sharded, tensor and pipeline parallelism over a number of processes.

A layout is written as ``dp2``, ``fsdp2``, ``tp2`` or ``pp2``, as a product of these such as ``dp2xtp2``, or as ``single``.
This module only computes positions and sizes. :mod:`castwise.commands.jobs.processes` starts the process group.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from castwise.core.casting.trees import map_tensors, tensors_in
from castwise.errors import PlanError, WorkloadError, check_count

SCHEDULES = ("gpipe", "1f1b", "interleaved")
"""The schedules, which are the orders in which a pipeline runs its microbatches."""
_ALLOWED = "single, dp2, fsdp2, tp2, pp2 and products of them such as dp2xtp2"
_MESH_ORDER = ("pp", "dp", "fsdp", "tp")
"""The dimensions of the device mesh, outermost first.

Tensor-parallel ranks communicate most, so they are neighbours.
"""


@dataclass(frozen=True)
class Coordinate:
    """The position of a process in a layout: its pipeline rank, replica, shard and tensor-parallel rank, counted from 0."""

    pp: int = 0
    dp: int = 0
    fsdp: int = 0
    tp: int = 0


@dataclass(frozen=True)
class Layout:
    """A parallel layout: the sizes of its dimensions. A dimension that is not used has size 1.

    Attributes:
        dp: The number of replicas of the model. Each replica gets a slice of the batch, and their gradients are averaged.
        fsdp: The number of processes over which FSDP2 shards parameters, gradients and optimizer state. Each of them also gets
            a slice of the batch. Together with ``dp``, the shards are replicated (hybrid sharding).
        tp: The number of pieces into which tensor parallelism splits layers.
        pp: The number of pipeline processes, each of which has a part of the model.
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            check_count("Layout", field.name, getattr(self, field.name), 1)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the layout that a text such as ``dp2xtp2`` describes. The order of the parts does not matter.

        Raises:
            PlanError: The text is not a layout.
        """
        sizes: dict[str, int] = {}
        if not text.strip("x"):
            raise PlanError(
                f"layout {text!r}: no dimension is given. Allowed: {_ALLOWED}; write e.g. --layout dp2"
            )
        for part in text.split("x") if text != "single" else ():
            match = re.fullmatch(r"(dp|fsdp|tp|pp)([1-9]\d*)", part)
            if match is None:
                raise PlanError(
                    f"layout {text!r}: {part!r} is not a dimension with its size. Allowed: {_ALLOWED}; write e.g. --layout dp2"
                )
            kind, size = match.groups()
            if kind in sizes:
                raise PlanError(
                    f"layout {text!r}: {kind} is given twice; write {kind}{sizes[kind] * int(size)} instead. "
                    f"Allowed: {_ALLOWED}"
                )
            sizes[kind] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        parts = [f"{f.name}{getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) > 1]
        return "x".join(parts) or "single"

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.dp * self.fsdp * self.tp * self.pp

    @property
    def data_ranks(self) -> int:
        """The number of slices into which a batch is split."""
        return self.dp * self.fsdp

    @property
    def shards(self) -> bool:
        """Whether FSDP2's ``fully_shard`` averages gradients over data-parallel ranks, instead of DistributedDataParallel.

        DistributedDataParallel rejects tensor-parallel parameters, and cannot provide the shapes that a pipeline needs. In
        these cases ``fully_shard`` is used without sharding, only to replicate the model.
        """
        return self.fsdp > 1 or (self.dp > 1 and self.tp * self.pp > 1)

    def check(self, world_size: int) -> None:
        """Raise if the number of started processes is not the number that the layout needs.

        Raises:
            PlanError: The numbers differ. The message gives the command that starts the right number.
        """
        if world_size != self.world_size:
            needs = self.world_size
            start = f"torchrun --nproc-per-node {needs} -m castwise train" if needs > 1 else "castwise train"
            raise PlanError(
                f"layout {self}: needs {needs} process{'es' if needs > 1 else ''}, but {world_size} "
                f"{'were' if world_size > 1 else 'was'} started; use {start} ... --layout {self}, or a layout "
                f"whose sizes multiply to {world_size}"
            )

    def mesh_dims(self) -> dict[str, int]:
        """Return the names and sizes of the device mesh's dimensions, outermost first."""
        sizes = {name: getattr(self, name) for name in _MESH_ORDER}
        needed = {"dp", "fsdp"} if self.shards and self.dp > 1 else set()
        return {name: size for name, size in sizes.items() if size > 1 or name in needed}

    def place(self, rank: int) -> Coordinate:
        """Return the position of a rank in the layout."""
        found = {}
        for name in reversed(_MESH_ORDER):
            rank, found[name] = divmod(rank, getattr(self, name))
        return Coordinate(**found)

    def slice_of(self, rank: int) -> int:
        """Return the index of a rank's slice of the batch, from 0 to ``data_ranks - 1``."""
        place = self.place(rank)
        return place.dp * self.fsdp + place.fsdp


def slice_batch(batch: Any, index: int, parts: int, layout: Layout) -> Any:
    """Return the ``index``-th of ``parts`` equal slices of a batch.

    Tensors are split along their first dimension, into views. 0-dim tensors are not split.

    Raises:
        WorkloadError: The first dimension of a tensor is not divisible by ``parts``.
    """
    if parts == 1:
        return batch

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:
            return tensor
        rows = tensor.shape[0]
        if rows % parts:
            raise WorkloadError(
                f"layout {layout}: a tensor of shape {list(tensor.shape)} in the batch cannot be split equally among "
                f"{parts} data-parallel ranks; make its first dimension ({rows}) a multiple of {parts}, or use another layout"
            )
        return tensor.narrow(0, index * (rows // parts), rows // parts)

    return map_tensors(cut, batch)


def check_microbatches(microbatches: int, schedule: str, layout: Layout) -> None:
    """Raise if a pipeline schedule cannot run this number of microbatches per step.

    Raises:
        PlanError: The schedule cannot run this number. The message gives the allowed numbers.
    """
    said = f"microbatches={microbatches} with schedule {schedule!r} and layout {layout}"
    if microbatches < 1:
        raise PlanError(f"{said}: needs a whole number >= 1")
    if schedule == "1f1b" and microbatches < layout.pp:
        raise PlanError(
            f"{said}: 1f1b needs at least {layout.pp} microbatches, one per stage; or use --schedule gpipe"
        )
    if schedule == "interleaved" and microbatches % max(1, microbatches // layout.pp):
        raise PlanError(f"{said}: interleaved needs a multiple of {layout.pp}")


def check_splits(value: Any, microbatches: int, layout: Layout) -> None:
    """Raise if a pipeline's inputs and targets cannot be split into microbatches of equal size.

    The losses of microbatches of different sizes would be weighted unequally.

    Raises:
        WorkloadError: A tensor cannot be split evenly. The message names its shape.
    """
    for tensor in tensors_in(value):
        if tensor.dim() and tensor.shape[0] % microbatches:
            rows = tensor.shape[0]
            divisors = [n for n in range(1, rows + 1) if rows % n == 0]
            near = min(divisors, key=lambda n: (abs(math.log(n / microbatches)), n))
            raise WorkloadError(
                f"layout {layout}: a tensor of shape {list(tensor.shape)}, this rank's share of the batch, cannot be cut into "
                f"{microbatches} equal microbatches; use --microbatches {near} or another batch size"
            )
